# SPDX-License-Identifier: Apache-2.0
"""The primitives in which weights meet data, and what is known about each: one literal table."""

from __future__ import annotations

from typing import Any

from dualdp_jax.rules import conv, dot, lookup
from dualdp_jax.rules.kinds import Choice as Choice
from dualdp_jax.rules.kinds import Rule as Rule
from dualdp_jax.rules.kinds import Spec as Spec

#: Name of a primitive to what is known about it. Everything else is exact too, by the parameter's
#: own probe, at the cost of its per-sample gradient.
RULES: dict[str, Rule] = {
    "dot_general": dot.RULE,
    "conv_general_dilated": conv.RULE,
    "gather": lookup.RULE,
}


def register_rule(target: Any, rule: Rule, *, overwrite: bool = False) -> None:
    """Add a rule for a primitive of your own.

    Args:
        target: the primitive (`jax.extend.core.Primitive`) or its name.
        rule: what is known about it.
        overwrite: replace a rule that is there.

    Raises:
        TypeError: no primitive, or no rule.
        ValueError: there is a rule, and overwrite is False.
    """
    name = target if isinstance(target, str) else getattr(target, "name", None)
    if not isinstance(name, str) or not isinstance(rule, Rule):
        raise TypeError(
            f"register_rule got {target!r} and a {type(rule).__name__}. Expected a primitive (or "
            "its name) and a dualdp_jax.rules.Rule."
        )
    if name in RULES and not overwrite:
        raise ValueError(
            f"{name!r} has a rule already. Pass overwrite=True to replace it; there are rules for "
            f"{', '.join(sorted(RULES))}."
        )
    RULES[name] = rule

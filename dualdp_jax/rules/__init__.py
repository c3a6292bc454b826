# SPDX-License-Identifier: Apache-2.0
"""Table of the primitives in which weights meet data, with the rule of each."""

from __future__ import annotations

from typing import Any

from dualdp import _validate
from dualdp_jax.rules import conv, dot_general, gather
from dualdp_jax.rules.base import Choice as Choice
from dualdp_jax.rules.base import Rule as Rule
from dualdp_jax.rules.base import Spec as Spec

#: Mapping from primitive name to rule. Without a rule a use is exact too, through the parameter's
#: own probe, at the cost of its per-sample gradient.
RULES: dict[str, Rule] = {
    "dot_general": dot_general.RULE,
    "conv_general_dilated": conv.RULE,
    "gather": gather.RULE,
}


def register_rule(target: Any, rule: Rule, *, overwrite: bool = False) -> None:
    """Add a rule for a primitive of your own.

    Args:
        target: primitive (`jax.extend.core.Primitive`) or its name.
        rule: `Rule` for the primitive.
        overwrite: bool, True to replace an existing rule.

    Raises:
        TypeError: no primitive, or no rule.
        ValueError: there is a rule, and overwrite is False.
    """
    name = target if isinstance(target, str) else getattr(target, "name", None)
    if not isinstance(name, str) or not isinstance(rule, Rule):
        raise TypeError(
            f"register_rule got {target!r} and {_validate.kind(rule)}. Expected a primitive (or "
            "its name) and a dualdp_jax.rules.Rule."
        )
    if name in RULES and not overwrite:
        raise ValueError(
            f"{name!r} has a rule already. Pass overwrite=True to replace it; there are rules for "
            f"{', '.join(sorted(RULES))}."
        )
    RULES[name] = rule

# SPDX-License-Identifier: Apache-2.0
"""What is known about the primitives in which weights meet data: a table of pure functions.

Letters: n examples, l loop steps, b blocks (independent products), t positions, i in, o out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """One use of a primitive.

    Attributes:
        params: the parameters of its equation.
        position: which operand is the weight.
        shape: of the weight.
        dtype: of the weight.
        loops: of each loop around the use, outermost first: whether it has a weight of its own at
            every step (True), or the same weight at all steps (False).
    """

    params: Mapping[str, Any]
    position: int
    shape: tuple[int, ...]
    dtype: Any
    loops: tuple[bool, ...] = ()


class Rule(NamedTuple):
    """How to find per-sample gradients at a primitive; all arrays lead with (n, *loops).

    Attributes:
        accepts: (params, position, shapes of all operands) to whether the rule holds here.
        grads: (spec, other operands, grads_out) to per-sample gradients, (n, *own, *shape) with
            an axis for each loop that has a weight of its own; summed over the other loops.
        sq_norms: the same to their squared norms, (n,), without keeping them; None: from `grads`.
        weighted_sum: (spec, other operands, grads_out, factors (n,)) to the sum over the examples
            of factor times gradient, (*own, *shape), float32 or wider; an example of factor 0 is
            dropped, whatever its numbers are. None: from `grads`.
        sizes: (spec, other operands, grads_out) to {"t", "d_in", "d_out"} for `dualdp.costs`;
            None: the gradient is not worth keeping.
    """

    accepts: Callable[[Mapping[str, Any], int, Sequence[Any]], bool]
    grads: Callable[..., Any]
    sq_norms: Callable[..., Any] | None = None
    weighted_sum: Callable[..., Any] | None = None
    sizes: Callable[..., dict[str, int]] | None = None


from dualdp_jax.rules import conv, dot, lookup  # noqa: E402 - they need Rule

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

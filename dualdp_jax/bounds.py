# SPDX-License-Identifier: Apache-2.0
"""From squared norms per leaf to the norms that are reported and the factors that are applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp.clipping import CLIPPING, factors_for, group_bounds
from dualdp_jax import compat
from dualdp_jax.parameters import Parameters

Clip = Callable[[Sequence[Any], Any], tuple[Any, list[Any]]]


def clipper(parameters: Parameters, clipping: str, max_grad_norm: Any, times: Any = 1.0) -> Clip:
    """The function from squared norms to norms and factors; its arguments are checked here.

    Args:
        parameters: leaves and their groups.
        clipping: one of `dualdp.clipping.CLIPPING`.
        max_grad_norm: C > 0, a number or a scalar array; for "per_layer" also group -> bound.
        times: > 0, a factor of the bounds, which may be traced.

    Returns:
        Function of (squared norms, (n,) per leaf; mask (n,)) to (norms (n,), factors, (n,) per
        leaf). A factor is 0 where the mask is False or the example's norm is not finite: such an
        example must be dropped, not multiplied (0 * nan = nan).

    Guarantees:
        factor * (true norm of the group) <= bound of the group * (1 + 1e-6), for any bound and
            any gradient, also where squares underflow.  [test_contributions_are_bounded]
        A traced bound that is nan or not positive turns the whole sum into nan instead of passing
            gradients unclipped.  [test_traced_bad_bound_poisons_the_sum]
    """
    _validate.choice("clipping", clipping, CLIPPING)
    if isinstance(max_grad_norm, Mapping):
        if clipping != "per_layer":
            raise ValueError(
                f"max_grad_norm is a mapping with clipping={clipping!r}. Expected one number; a "
                "bound for each group goes with clipping='per_layer'."
            )
    else:
        max_grad_norm = _scalar(max_grad_norm)
    groups = parameters.groups if clipping == "per_layer" else [""] * len(parameters.trained)
    names = sorted(set(groups))
    if clipping == "per_layer":
        limits = group_bounds(names, max_grad_norm)
    else:
        limits = dict.fromkeys(names, max_grad_norm)
    members = {name: [i for i, group in enumerate(groups) if group == name] for name in names}

    def clip(sq_norms: Sequence[Any], mask: Any) -> tuple[Any, list[Any]]:
        total = _sum(sq_norms, mask)
        valid = mask & jnp.isfinite(total)
        factors = {}
        for name, indices in members.items():
            size = sum(math.prod(parameters.trained[i].shape) for i in indices)
            sq = _sum([sq_norms[i] for i in indices], mask)
            factor = _factor(clipping, sq, size, jnp.asarray(limits[name] * times, sq.dtype))
            factors[name] = jnp.where(valid, factor, 0)
        return jnp.where(mask, jnp.sqrt(total), 0), [factors[group] for group in groups]

    return clip


def _sum(sq_norms: Sequence[Any], mask: Any) -> Any:
    """Sum of squared norms, (n,)."""
    dtype = jnp.result_type(jnp.float32, *sq_norms)
    return sum((sq.astype(dtype) for sq in sq_norms), jnp.zeros(mask.shape, dtype))


def _factor(clipping: str, sq_norms: Any, size: int, bound: Any) -> Any:
    """Clip factors (n,) of one group of `size` numbers.

    Squares below the smallest normal number are lost, at most `tiny` for each of the numbers; they
    are added back, so that a minute bound still bounds.
    """
    norms = jnp.sqrt(sq_norms + size * jnp.finfo(sq_norms.dtype).tiny)
    factors = factors_for(clipping, norms, bound, xp=jnp)
    return jnp.where((bound > 0) & jnp.isfinite(bound), factors, jnp.nan)


def _scalar(max_grad_norm: Any) -> Any:
    """A positive number, or a traced scalar whose value is checked when it is known."""
    if not isinstance(max_grad_norm, jax.Array | np.ndarray):
        return _validate.positive("max_grad_norm", max_grad_norm)
    if max_grad_norm.shape != ():
        raise ValueError(
            f"max_grad_norm has shape {max_grad_norm.shape}. Expected a number or a scalar array."
        )
    if compat.is_traced(max_grad_norm):
        return max_grad_norm
    return _validate.positive("max_grad_norm", float(max_grad_norm))


def checked_mask(mask: Any, num_examples: int) -> Any:
    """The mask (n,) as an array of bools; all True when there is none."""
    if mask is None:
        return jnp.ones(num_examples, bool)
    mask = jnp.asarray(mask)
    if mask.shape != (num_examples,) or mask.dtype != bool:
        raise ValueError(
            f"mask is {mask.dtype}{list(mask.shape)}. Expected bool[{num_examples}], one for each "
            "example, False for padding."
        )
    return mask

# SPDX-License-Identifier: Apache-2.0
"""Clip factors of each example from the norms of its leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp.plan.clipping import AUTOMATIC_OFFSET, CLIPPING, factors_for, group_bounds, margin_of
from dualdp_jax import compat
from dualdp_jax.per_sample.parameters import Parameters
from dualdp_jax.per_sample.squared_norms import Accuracy, margin_for, total
from dualdp_jax.rules.estimate import Estimate

Array = jax.Array
Bound = float | Array


@dataclass(frozen=True)
class Clip:
    """Clipping of a call: a callable from norms to clip factors.

    Guarantees:
        factor * (true norm of the group) <= bound of the group, for any bound and any gradient.
            [test_contributions_are_bounded]
        A traced bound that is nan or not positive turns the whole sum into nan instead of passing
            gradients unclipped.  [test_a_new_bound_does_not_recompile]
    """

    clipping: str  # one of `dualdp.plan.clipping.CLIPPING`
    groups: list[str]  # clipping group of each trained leaf
    sizes: list[int]  # number of elements of each trained leaf
    bounds: dict[str, Bound]  # mapping from group to bound, a number or a scalar array
    margin: float  # relative rounding margin of the clipped sums

    @property
    def accuracy(self) -> Accuracy:
        """Accuracy to which the clip factors need the norms.

        Errors matter relative to C; in automatic factors C / (norm + 0.01), relative to the offset.
        """
        automatic = self.clipping == "automatic"
        floors = [AUTOMATIC_OFFSET if automatic else self.bounds[group] for group in self.groups]
        return Accuracy(self.groups, floors, self.margin)

    def __call__(
        self, found: list[Estimate], mask: Array, given: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Return the norms of the examples, (n,), and their factors, (n,) per group.

        A factor is 0 where the mask is False or the norm is not finite; such an example must be
        dropped, not multiplied (0 * nan = nan). `given` (n,) holds weights that a check takes in
        the place of the factors, nan for the factors.
        """
        sq_norms = total([leaf.sq_norms for leaf in found])
        valid = mask & jnp.isfinite(sq_norms)
        factors = {}
        for group in dict.fromkeys(self.groups):  # one order in every process
            factor = self._factors(group, found)
            if given is not None:
                factor = jnp.where(jnp.isnan(given), factor, given)
            factors[group] = jnp.where(valid, factor, 0)
        return jnp.where(mask, jnp.sqrt(sq_norms), 0), factors

    def factor(self, group: str, norm: float) -> float:
        """Return the factor for a group's gradient of this norm, in Python floats."""
        if not math.isfinite(norm):
            return 0.0
        bound = float(self.bounds[group]) * ((1 + margin_of("float64")) / (1 + self.margin))
        return float(factors_for(self.clipping, np.asarray([norm], np.float64), bound, xp=np)[0])

    def _factors(self, group: str, found: list[Estimate]) -> Array:
        """Clip factors (n,) of one group.

        Squares below the smallest normal number are flushed to zero, at most `tiny` per number, and
        added back, so that a minute bound still holds. Where a gradient nearly cancels, its sum
        differs from it by rounding: the part beyond a quarter of the margin is added to the norm.
        """
        members = [i for i, own in enumerate(self.groups) if own == group]
        sq_norms = total([found[i].sq_norms for i in members])
        numbers = sum(self.sizes[i] for i in members)
        norms = jnp.sqrt(sq_norms + numbers * jnp.finfo(sq_norms.dtype).tiny)
        moved = [part for i in members if (part := found[i].rounding) is not None]
        if moved:
            norms = norms + jnp.maximum(total(moved) - self.margin / 4 * norms, 0)
        bound = jnp.asarray(self.bounds[group], norms.dtype)
        shrunk = bound * ((1 + margin_of(norms.dtype)) / (1 + self.margin))
        factors = factors_for(self.clipping, norms, shrunk, xp=jnp)
        return jnp.where((bound > 0) & jnp.isfinite(bound), factors, jnp.nan)


def clipper(parameters: Parameters, clipping: str, max_grad_norm: Any, times: Bound = 1.0) -> Clip:
    """Check the clipping arguments of a call and return its `Clip`; `times` scales all bounds."""
    _validate.choice("clipping", clipping, CLIPPING)
    is_split = clipping == "per_layer"
    if not isinstance(max_grad_norm, Mapping):
        max_grad_norm = _scalar(max_grad_norm)
    elif not is_split:
        raise ValueError(
            f"max_grad_norm is a mapping with clipping={clipping!r}. Expected one number; a bound "
            "for each group goes with clipping='per_layer'."
        )
    groups = parameters.groups if is_split else [""] * len(parameters.trained)
    names = sorted(set(groups))
    limits = group_bounds(names, max_grad_norm) if is_split else dict.fromkeys(names, max_grad_norm)
    bounds = {name: limits[name] * times for name in names}
    sizes = [math.prod(leaf.shape) for leaf in parameters.trained]
    return Clip(clipping, groups, sizes, bounds, margin_for(parameters.trained))


def _scalar(max_grad_norm: Bound) -> Bound:
    """Positive number, or a traced scalar, whose value is unknown here."""
    if isinstance(max_grad_norm, jax.Array | np.ndarray):
        shape = max_grad_norm.shape
        if shape != ():
            raise ValueError(
                f"max_grad_norm has shape {shape}. Expected a number or a scalar array."
            )
        if compat.is_traced(max_grad_norm):
            return max_grad_norm
        max_grad_norm = float(max_grad_norm)
    return _validate.positive("max_grad_norm", max_grad_norm)


def checked_mask(mask: Array | None, num_examples: int) -> Array:
    """Return the mask (n,) as an array of bools; all True for None."""
    if mask is None:
        return jnp.ones(num_examples, bool)
    mask = jnp.asarray(mask)
    if mask.shape != (num_examples,) or mask.dtype != bool:
        raise ValueError(
            f"mask is {mask.dtype}{list(mask.shape)}. Expected bool[{num_examples}], one for each "
            "example, False for padding."
        )
    return mask

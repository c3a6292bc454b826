# SPDX-License-Identifier: Apache-2.0
"""From the norms of the leaves to the norms that are reported and the factors that are applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp.clipping import AUTOMATIC_OFFSET, CLIPPING, factors_for, group_bounds, margin_of
from dualdp_jax import compat
from dualdp_jax.norms import Accuracy, Settled, margin_for, total
from dualdp_jax.parameters import Parameters


class Clipped(NamedTuple):
    """What a method makes of some rows.

    Attributes:
        sums: of the clipped gradients, per trained leaf.
        norms: (n,) of the whole gradients.
        factors: clipping group -> (n,).
        losses: (n,).
        aux: stacked over the examples, or None.
    """

    sums: list[Any]
    norms: Any
    factors: dict[str, Any]
    losses: Any
    aux: Any


@dataclass(frozen=True)
class Clip:
    """How the examples of a call are clipped; called with norms, it gives the factors.

    Attributes:
        clipping: one of `dualdp.clipping.CLIPPING`.
        groups: the clipping group of each trained leaf.
        sizes: numbers in each trained leaf.
        bounds: group -> bound; numbers or scalar arrays.
        margin: of the sums.

    Guarantees:
        factor * (true norm of the group) <= bound of the group, for any bound and any gradient.
            [test_contributions_are_bounded]
        A traced bound that is nan or not positive turns the whole sum into nan instead of passing
            gradients unclipped.  [test_traced_bad_bound_poisons_the_sum]
    """

    clipping: str
    groups: list[str]
    sizes: list[int]
    bounds: dict[str, Any]
    margin: float

    @property
    def accuracy(self) -> Accuracy:
        """What the errors of the norms are measured by: the numbers that the factors are made of.

        The automatic factors C / (norm + 0.01) move by an error beside the offset, not beside C.
        """
        automatic = self.clipping == "automatic"
        floors = [AUTOMATIC_OFFSET if automatic else self.bounds[group] for group in self.groups]
        return Accuracy(self.groups, floors, self.margin)

    def __call__(self, found: Settled, mask: Any) -> tuple[Any, dict[str, Any]]:
        """Norms of the examples, (n,), and their factors, (n,) for each group.

        A factor is 0 where the mask is False or the example's norm is not finite: such an example
        must be dropped, not multiplied (0 * nan = nan).

        Args:
            found: norms of the leaves.
            mask: (n,) bool.
        """
        sq_norms = total(found.sq_norms)
        valid = mask & jnp.isfinite(sq_norms)
        factors = {}
        for group in set(self.groups):
            members = [i for i, own in enumerate(self.groups) if own == group]
            factors[group] = jnp.where(valid, self._factors(group, found, members), 0)
        return jnp.where(mask, jnp.sqrt(sq_norms), 0), factors

    def factor(self, group: str, norm: float) -> float:
        """The factor of a group whose gradient has this norm, in plain numbers."""
        if not math.isfinite(norm):
            return 0.0
        bound = float(self.bounds[group]) * ((1 + margin_of("float64")) / (1 + self.margin))
        return float(factors_for(self.clipping, np.asarray([norm], np.float64), bound, xp=np)[0])

    def _factors(self, group: str, found: Settled, members: list[int]) -> Any:
        """Clip factors (n,) of one group.

        Squares below the smallest normal number are lost, at most `tiny` for each of the numbers;
        they are added back, so that a minute bound still bounds. Where a gradient nearly cancels,
        what is summed differs from it by rounding: what of that exceeds a quarter of the margin
        counts as length.
        """
        sq_norms = total([found.sq_norms[i] for i in members])
        numbers = sum(self.sizes[i] for i in members)
        norms = jnp.sqrt(sq_norms + numbers * jnp.finfo(sq_norms.dtype).tiny)
        moved = [found.rounding[i] for i in members if found.rounding[i] is not None]
        if moved:
            norms = norms + jnp.maximum(total(moved) - self.margin / 4 * norms, 0)
        bound = jnp.asarray(self.bounds[group], norms.dtype)
        shrunk = bound * ((1 + margin_of(norms.dtype)) / (1 + self.margin))
        factors = factors_for(self.clipping, norms, shrunk, xp=jnp)
        return jnp.where((bound > 0) & jnp.isfinite(bound), factors, jnp.nan)


def clipper(parameters: Parameters, clipping: str, max_grad_norm: Any, times: Any = 1.0) -> Clip:
    """The clipping of a call; its arguments are checked here.

    Args:
        parameters: leaves and their groups.
        clipping: one of `dualdp.clipping.CLIPPING`.
        max_grad_norm: C > 0, a number or a scalar array; for "per_layer" also group -> bound.
        times: > 0, a factor of the bounds, which may be traced.
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
    bounds = {name: limits[name] * times for name in names}
    sizes = [math.prod(leaf.shape) for leaf in parameters.trained]
    return Clip(clipping, groups, sizes, bounds, margin_for(parameters.trained))


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

# SPDX-License-Identifier: Apache-2.0
"""From per-sample gradients to their clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dualdp import _validate
from dualdp.clipping import CLIPPING, factors_for, group_bounds

from .gradients import Gradients
from .rules.base import Tensor, sq_norms
from .sharded import Shards

#: Below such a bound it matters that squares underflow; above, all that are lost in 2^40 numbers
#: change a norm by less than C * 1e-6.
_LEAST_BOUND = 1e-10


def group_of(name: str) -> str:
    """The module path of a parameter name: its group in per-layer clipping."""
    return name.rpartition(".")[0]


def clipping_bounds(
    parameters: Mapping[str, Any], clipping: str, max_grad_norm: Any
) -> dict[str, Any]:
    """Clipping group -> bound; flat and automatic clipping have the one group ""."""
    _validate.choice("clipping", clipping, CLIPPING)
    groups = sorted({group_of(name) for name in parameters}) if clipping == "per_layer" else [""]
    if isinstance(max_grad_norm, Mapping):
        if clipping != "per_layer":
            raise TypeError(
                f"max_grad_norm is a mapping, but clipping={clipping!r}. Expected a number; "
                'bounds per group need clipping="per_layer".'
            )
        return group_bounds(groups, max_grad_norm)
    if torch.is_tensor(max_grad_norm):
        if max_grad_norm.numel() != 1:
            raise ValueError(
                f"max_grad_norm has shape {tuple(max_grad_norm.shape)}. Expected a number."
            )
        max_grad_norm = float(max_grad_norm)
    bound = _validate.positive("max_grad_norm", max_grad_norm)
    return group_bounds(groups, bound) if clipping == "per_layer" else {"": bound}


def refuse_two_pass(method: str, clipping: str) -> None:
    """Refuse a method that can't clip by layers.

    Raises:
        ValueError: method="two_pass" with clipping="per_layer".
    """
    if clipping == "per_layer" and method == "two_pass":
        raise ValueError(
            'method="two_pass" reweights whole losses, so it can\'t clip per_layer. Expected '
            'clipping="flat" or "automatic", or another method.'
        )


def whole_norms(squares: Mapping[str, Tensor], n: int) -> Tensor:
    """(n,) norms of whole gradients, from the squared norms of their parameters."""
    if not squares:
        return torch.zeros(n)
    dtype = max((s.dtype for s in squares.values()), key=lambda d: d.itemsize)
    return torch.stack([s.to(dtype) for s in squares.values()]).sum(0).sqrt()


def _squares_of_minute_gradients(gradients: Gradients) -> dict[str, Tensor]:
    """Name -> (n,) squared norms that are not too small, however small the gradients are.

    Squares below the smallest normal number are lost, at most `tiny` for each of the numbers; they
    are added back. Norms from products may lose more, so the gradients are formed.
    """
    return {
        name: sq_norms(g) + g.shape[1:].numel() * torch.finfo(g.dtype).tiny
        for name, g in gradients.grads().items()
    }


def _factors(
    squares: Mapping[str, Tensor], norms: Tensor, bounds: Mapping[str, Any], clipping: str
) -> dict[str, Tensor]:
    """Name -> (n,) factor of every example, its group's."""
    if clipping != "per_layer":
        factors = factors_for(clipping, norms, bounds[""], xp=torch)
        return dict.fromkeys(squares, factors)
    found: dict[str, Tensor] = {}
    for group, bound in bounds.items():
        members = {name: s for name, s in squares.items() if group_of(name) == group}
        factors = factors_for(clipping, whole_norms(members, len(norms)), bound, xp=torch)
        found |= dict.fromkeys(members, factors.masked_fill(~norms.isfinite(), 0))
    return found


def clip_and_sum(
    gradients: Gradients,
    n: int,
    bounds: Mapping[str, Any],
    clipping: str,
    mask: Tensor | None,
    second_pass: Callable[[Tensor], dict[str, Tensor]] | None = None,
    shards: Shards | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Name -> clipped sum, and the norms (n,) before clipping, 0 for padding.

    Args:
        gradients: of n examples.
        n: examples.
        bounds: from `clipping_bounds`.
        clipping: one of `dualdp.clipping.CLIPPING`.
        mask: (n,) bool, False for padding, or None.
        second_pass: factors (n,) -> the sum, by another way than the gradients' own; not taken
            where its backward would form the sum in a precision below float32.
        shards: of a model in pieces: each sum becomes this process' piece of the sum over all,
            before the next one is formed.

    Guarantees:
        Contributions are bounded also where squares underflow.
            [test_contributions_are_bounded_where_squares_underflow]
    """
    least = min(bounds.values())
    squares = gradients.sq_norms(least)
    norms = whole_norms(squares, n)
    counted = norms < torch.inf  # nor nan
    if mask is not None:
        mask = mask.to(norms.device)
        counted, norms = counted & mask, norms.where(mask, 0)
    # A factor 0 would not remove a nan, 0 * nan = nan: the rows themselves are left out.
    rows = None if bool(counted.all()) else counted.nonzero().flatten()
    lengths = norms
    if least < _LEAST_BOUND and squares:
        squares = _squares_of_minute_gradients(gradients)
        lengths = whole_norms(squares, n)
    factors = _factors(squares, lengths, bounds, clipping)
    narrow = gradients.is_narrow
    if second_pass is not None and not narrow and _all_pass_again(rows, shards):
        return second_pass(_counting(next(iter(factors.values())), rows)), norms
    sums = gradients.sums(factors, rows)
    return {name: shards.reduce(name, t) if shards else t for name, t in sums}, norms


def _all_pass_again(rows: Tensor | None, shards: Shards | None) -> bool:
    """Whether a second pass gives the sum; over the same rows, so that dropout is the same.

    Where all processes must go the same way, one without any row that counts goes along.
    """
    if shards is None:
        return rows is None
    return shards.first_that(rows is not None and len(rows) > 0) is None


def _counting(factors: Tensor, rows: Tensor | None) -> Tensor:
    """The factors, or zeros where no row counts."""
    return factors if rows is None else torch.zeros_like(factors)

# SPDX-License-Identifier: Apache-2.0
"""From per-sample gradients to their clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualdp import _validate
from dualdp.clipping import AUTOMATIC_OFFSET, CLIPPING, factors_for, group_bounds

from .gradients import Gradients, Limits
from .rules.base import Tensor, sq_norms
from .sharded import Shards

#: Below such a bound it matters that squares underflow; above, all that are lost in 2^40 numbers
#: change a norm by less than C * 1e-6.
_LEAST_BOUND = 1e-10
SecondPass = Callable[[Tensor], dict[str, Tensor] | None]


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


def limits_of(bounds: Mapping[str, float], clipping: str) -> Limits:
    """How exact squared norms must be for these clip factors."""
    if clipping == "per_layer":
        return Limits(group_of, bounds)
    return Limits(lambda name: "", {"": AUTOMATIC_OFFSET} if clipping == "automatic" else bounds)


def whole_norms(squares: Mapping[str, Tensor], n: int, dtype: torch.dtype | None = None) -> Tensor:
    """(n,) norms of whole gradients in `dtype`, from the squared norms of their parameters."""
    if not squares:
        return torch.zeros(n)
    widest = max((s.dtype for s in squares.values()), key=lambda d: d.itemsize)
    return torch.stack([s.to(widest) for s in squares.values()]).sum(0).sqrt().to(dtype or widest)


def norms_of(
    gradients: Gradients, limits: Limits, n: int
) -> tuple[dict[str, Tensor], Tensor, bool]:
    """Squared norms by parameter, the norms (n,) of whole gradients, and whether float32 held all.

    A norm whose square float32 can't hold is formed in float64, so that it is no broken example's.

    Args:
        gradients: of n examples.
        limits: how exact the norms must be.
        n: examples.
    """
    squares = gradients.sq_norms(limits)
    norms = whole_norms(squares, n)
    finite = norms < torch.inf  # nor nan
    if bool(finite.all()):
        return squares, norms, True
    rows = (~finite).nonzero().flatten()
    for name, exact in gradients.exact_sq_norms(rows).items():
        squares[name] = squares[name].double().index_put_((rows,), exact)
    return squares, whole_norms(squares, n, norms.dtype), False


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
        lengths = whole_norms(members, len(norms), norms.dtype)
        factors = factors_for(clipping, lengths, bound, xp=torch)
        found |= dict.fromkeys(members, factors.masked_fill(~norms.isfinite(), 0))
    return found


@dataclass(frozen=True)
class Factors:
    """Clip factors of n examples.

    Attributes:
        of: parameter -> (n,) factors, those of its group.
        norms: (n,) before clipping, 0 for padding.
        rows: of the examples that count, or None for all: a factor 0 would not remove a nan.
        squares: parameter -> (n,) squared norms.
    """

    of: dict[str, Tensor]
    norms: Tensor
    rows: Tensor | None
    squares: dict[str, Tensor]

    def only(self, row: int) -> Factors:
        """The factors that leave one example."""
        rows = torch.tensor([row], device=self.norms.device)
        kept = torch.zeros_like(self.norms).index_fill_(0, rows, 1.0)
        return replace(self, of={name: f * kept for name, f in self.of.items()}, rows=rows)

    def lengths(self, name: str) -> float:
        """Root of the sum of squares of what each example adds to one parameter's sum."""
        return float((self.of[name].square() * self.squares[name]).nansum().sqrt())


def clip_factors(
    gradients: Gradients, n: int, bounds: Mapping[str, Any], clipping: str, mask: Tensor | None
) -> Factors:
    """Clip factors of n examples.

    Args:
        gradients: of n examples.
        n: examples.
        bounds: from `clipping_bounds`.
        clipping: one of `dualdp.clipping.CLIPPING`.
        mask: (n,) bool, False for padding, or None.

    Guarantees:
        Contributions are bounded also where squares underflow.
            [test_contributions_are_bounded_where_squares_underflow]
    """
    squares, norms, are_finite = norms_of(gradients, limits_of(bounds, clipping), n)
    rows = None
    if mask is not None or not are_finite:
        counted = norms < torch.inf  # nor nan
        if mask is not None:
            mask = mask.to(norms.device)
            counted, norms = counted & mask, norms.where(mask, 0)
        rows = None if bool(counted.all()) else counted.nonzero().flatten()
    lengths = norms
    if min(bounds.values()) < _LEAST_BOUND and squares:
        squares = _squares_of_minute_gradients(gradients)
        lengths = whole_norms(squares, n)
    return Factors(_factors(squares, lengths, bounds, clipping), norms, rows, squares)


def clipped_sums(
    gradients: Gradients,
    factors: Factors,
    second_pass: SecondPass | None = None,
    shards: Shards | None = None,
    formed: Callable[[str, Tensor], Tensor] = lambda name, total: total,
) -> dict[str, Tensor]:
    """Name -> sum over the examples of factor times gradient.

    Args:
        gradients: of n examples.
        factors: of the same.
        second_pass: factors (n,) -> the sum, by another way than the gradients' own, or None where
            that turned out to be another function of the data; not taken where its backward would
            form the sum in a precision below float32, or would round what cancels otherwise.
        shards: of a model in pieces: each sum becomes this process' piece of the sum over all,
            before the next one is formed.
        formed: what each sum passes through as soon as it is formed: name, sum -> sum.
    """
    if second_pass is not None and passes_again(gradients, factors.rows, shards):
        shared = next(iter(factors.of.values()))
        sums = second_pass(_counting(shared, factors.rows))
        if sums is not None:
            return {name: formed(name, total) for name, total in sums.items()}
    reduce = (lambda name, total: total) if shards is None else shards.reduce
    each = gradients.sums(factors.of, factors.rows)
    return {name: formed(name, reduce(name, total)) for name, total in each}


def clip_and_sum(
    gradients: Gradients,
    n: int,
    bounds: Mapping[str, Any],
    clipping: str,
    mask: Tensor | None,
    second_pass: SecondPass | None = None,
    shards: Shards | None = None,
    formed: Callable[[str, Tensor], Tensor] = lambda name, total: total,
) -> tuple[dict[str, Tensor], Tensor]:
    """Name -> clipped sum, and the norms (n,) before clipping, 0 for padding.

    Args:
        gradients: of n examples.
        n: examples.
        bounds: from `clipping_bounds`.
        clipping: one of `dualdp.clipping.CLIPPING`.
        mask: (n,) bool, False for padding, or None.
        second_pass: as in `clipped_sums`.
        shards: as in `clipped_sums`.
        formed: as in `clipped_sums`.
    """
    factors = clip_factors(gradients, n, bounds, clipping, mask)
    return clipped_sums(gradients, factors, second_pass, shards, formed), factors.norms


def passes_again(gradients: Gradients, rows: Tensor | None, shards: Shards | None = None) -> bool:
    """Whether a second pass gives the sum; over the same rows, so that dropout is the same.

    Where all processes must go the same way, one without any row that counts goes along.
    """
    if gradients.is_narrow:
        return False
    if shards is None:
        return rows is None and not gradients.one_sum
    some_left_out = rows is not None and len(rows) > 0
    return shards.first_that(some_left_out or gradients.one_sum) is None


def _counting(factors: Tensor, rows: Tensor | None) -> Tensor:
    """The factors, or zeros where no row counts."""
    return factors if rows is None else torch.zeros_like(factors)

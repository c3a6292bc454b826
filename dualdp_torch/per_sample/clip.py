# SPDX-License-Identifier: Apache-2.0
"""Clip factors and clipped sums of per-sample gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp.plan.clipping import AUTOMATIC_OFFSET, CLIPPING, factors_for, group_bounds
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.per_sample.gradients import Captured, Limits, Squares, added_up, one_group
from dualdp_torch.per_sample.vmap_and_loop import is_same_forward, reweighted
from dualdp_torch.rules.base import Tensor

#: Underflow of squares matters below this bound; above, the squares lost in 2^40 numbers change a
#: norm by less than C * 1e-6.
_LEAST_BOUND = 1e-10
#: Number of parameters whose gradient sums are compared between the passes of "two_pass".
WITNESSES = 3


class Terms(NamedTuple):
    """Clipping settings of one batch, fixed when the loader yields the batch.

    `scale` undoes the loss reduction: n for a mean, 1 for a sum. `bounds` maps clipping groups to
    C. `mask` is None, or (n,) bool and False for padding.
    """

    scale: float
    bounds: Mapping[str, Any]
    clipping: str
    mask: Tensor | None


def group_of(name: str) -> str:
    """Return the module path of a parameter name: its group in per-layer clipping."""
    return name.rpartition(".")[0]


def clipping_bounds(
    parameters: Mapping[str, Any], clipping: str, max_grad_norm: Any
) -> dict[str, Any]:
    """Return clipping group -> bound; flat and automatic clipping have the one group ""."""
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
    """Refuse per-layer clipping with a method that reweights whole losses."""
    if clipping == "per_layer" and method == "two_pass":
        raise ValueError(
            'method="two_pass" reweights whole losses, so it can\'t clip per_layer. Expected '
            'clipping="flat" or "automatic", or another method.'
        )


def norms_of(gradients: Captured, limits: Limits, n: int) -> tuple[Squares, Tensor]:
    """Return squared norms, and norms (n,) of whole gradients; `are_finite` if float32 held them.

    A norm whose square overflows float32 is recomputed in float64, so that the example is not taken
    for a broken one; and all are where squares that matter may underflow.
    """
    squares = gradients.sq_norms(limits)
    norms = squares.whole.sqrt() if squares.of else torch.zeros(n)
    is_minute = min(limits.floors.values(), default=1.0) < _LEAST_BOUND * gradients.scale
    if not squares.of or (squares.are_finite and not is_minute):
        return squares, norms
    recomputed = ~(norms < torch.inf) | is_minute  # nor nan
    rows = recomputed.nonzero().flatten()
    exact = added_up(gradients.exact_sq_norms(rows), limits.group_of, len(rows))

    def replaced(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Only the selected examples change: the others' factors depend on them alone."""
        return {name: s.double().index_put_((rows,), new[name]) for name, s in old.items()}

    of, totals = replaced(squares.of, exact.of), replaced(squares.totals, exact.totals)
    whole = squares.whole.double().index_put_((rows,), exact.whole)
    return Squares(of, totals, whole, False), _roots(whole, norms.dtype)


def _roots(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,) roots, as `dtype` gives them where it holds the squares: float64 rounds otherwise."""
    if squares.dtype == dtype:
        return squares.sqrt()
    held = squares.to(dtype)
    is_held = (held < torch.inf) & (held >= torch.finfo(dtype).tiny)
    return held.sqrt().where(is_held, squares.sqrt().to(dtype))


def _factors(squares: Squares, norms: Tensor, bounds: Mapping[str, Any], clipping: str) -> Any:
    """Return name -> (n,) clip factors, those of the parameter's group."""
    if clipping != "per_layer":
        return dict.fromkeys(squares.of, factors_for(clipping, norms, bounds[""], xp=torch))
    factors = {}
    for group, total in squares.totals.items():
        found = factors_for(clipping, _roots(total, norms.dtype), bounds[group], xp=torch)
        factors[group] = found.masked_fill(~norms.isfinite(), 0)
    return {name: factors[group_of(name)] for name in squares.of}


def _limits(bounds: Mapping[str, Any], clipping: str) -> Limits:
    """Return the clipping groups and the precision that their norms need."""
    if clipping == "per_layer":
        return Limits(group_of, bounds)
    return Limits(one_group, {"": AUTOMATIC_OFFSET} if clipping == "automatic" else bounds)


@dataclass(frozen=True)
class Factors:
    """Clip factors of n examples: `of` maps parameter names to the (n,) factors of their groups.

    `norms` are (n,) before clipping, 0 for padding; `rows` are the examples to sum, None for all: a
    factor 0 would not remove a nan. `squares` maps parameter names to (n,) squared norms.
    """

    of: dict[str, Tensor]
    norms: Tensor
    rows: Tensor | None
    squares: dict[str, Tensor]

    def lengths(self, name: str) -> float:
        """Return the root of the sum of squared contributions to one parameter's sum."""
        return float((self.of[name].square() * self.squares[name]).nansum().sqrt())


def clip_factors(
    gradients: Captured, n: int, bounds: Mapping[str, Any], clipping: str, mask: Tensor | None
) -> Factors:
    """Return the clip factors of n examples; `bounds` are those of `clipping_bounds`.

    Guarantees:
        Contributions are bounded also where squares underflow.
            [test_contributions_are_bounded_where_squares_underflow]
    """
    squares, norms = norms_of(gradients, _limits(bounds, clipping), n)
    counted, rows = mask, None  # the mask of a loader lies on the host
    if not squares.are_finite:
        counted = norms < torch.inf if mask is None else mask.to(norms.device) & (norms < torch.inf)
    if mask is not None:
        norms = norms.where(mask.to(norms.device), 0)
    if counted is not None and not bool(counted.all()):
        rows = counted.nonzero().flatten().to(norms.device)
    return Factors(_factors(squares, norms, bounds, clipping), norms, rows, squares.of)


def static_clip_factors(
    gradients: Captured, bounds: Mapping[str, Tensor], clipping: str, mask: Tensor
) -> tuple[Factors, Tensor]:
    """Return clip factors by operations that are the same for any batch, and if they are valid.

    `bounds` are () tensors. The second result is a () bool tensor; where it is False, only
    `clip_factors` is exact: it leaves broken examples out and forms gradients that cancel.
    """
    squares, are_valid = gradients.static_sq_norms(_limits(bounds, clipping))
    norms = squares.whole.sqrt().where(mask, 0)
    return Factors(_factors(squares, norms, bounds, clipping), norms, None, squares.of), are_valid


def below_static(bounds: Mapping[str, float]) -> bool:
    """True if a bound is so small that squares may underflow, which `clip_factors` alone treats."""
    return min(bounds.values()) < _LEAST_BOUND


class PassesDifferError(UnsupportedLayerError):
    """The second forward computes another function of the data than the first."""


class SecondPass:
    """Clipped sums by a second forward, and a backward of its reweighted losses.

    The losses of both passes must agree, and so must the gradient sums of the smallest parameters:
    a loss can hardly depend on the dropout masks while its gradient does.

    Args:
        losses: function that runs the forward again and returns its (n,) losses.
        expected: (n,) losses of the first pass.
        contexts: functions that return contexts of the second pass.
        shards: shards of the model, whose sums are reduced as they are formed.
        witnesses: number of parameters whose sums are compared.
        frees: False to keep the captured gradients of the first pass.

    Source: Lee & Kifer 2021.
    """

    def __init__(
        self,
        losses: Callable[[], Tensor],
        expected: Tensor,
        parameters: Mapping[str, Tensor],
        contexts: Sequence[Callable[[], AbstractContextManager[None]]],
        shards: Shards | None = None,
        witnesses: int = 0,
        frees: bool = True,
    ) -> None:
        self._losses, self._expected, self._parameters = losses, expected, parameters
        self._contexts, self._shards, self._frees = contexts, shards, frees
        smallest = sorted(parameters, key=lambda name: parameters[name].numel())
        self._names, self._sums = smallest[:witnesses], dict[str, tuple[Tensor, float]]()

    def begin(self, gradients: Captured, factors: Factors) -> None:
        """Free the gradients of the first pass, so that two need no more memory than one."""
        sums = gradients.sums({name: factors.of[name] for name in self._names}, None)
        for name, total in sums.items():
            self._sums[name] = total, factors.lengths(name)
        if self._frees:
            gradients.forget()

    def __call__(self, weights: Tensor) -> dict[str, Tensor]:
        """Return name -> sum of weights (n,) times per-sample gradients.

        Raises:
            PassesDifferError: the passes do not agree.
        """
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            if self._shards is not None:
                return self._shards.reweighted(self._same_losses, weights)
            sums = reweighted(self._same_losses, self._parameters, weights)
        for name, (total, length) in self._sums.items():
            if float((sums[name] - total).norm()) > 1e-2 * length:
                raise PassesDifferError(_DIFFER)
        self._sums = {}  # these hold for the weights of the first call only
        return sums

    def _same_losses(self) -> Tensor:
        losses = self._losses()
        if not is_same_forward(losses.detach(), self._expected):
            raise PassesDifferError(_DIFFER)
        return losses


_DIFFER = (
    "The second forward of method two_pass gives other outputs than the first: the model draws "
    'random numbers that can\'t be drawn again, or changes. Use method="auto" (of make_private: '
    'grad_sample_mode="auto").'
)


def clipped_sums(
    gradients: Captured,
    factors: Factors,
    second_pass: SecondPass | None = None,
    shards: Shards | None = None,
) -> dict[str, Tensor]:
    """Return name -> sum over the examples of factor times gradient.

    `second_pass`, used only if `passes_again`, computes the sums by a second forward and backward.
    With `shards` each sum is reduced to this process's shard of the sum over all processes before
    the next one is computed.
    """
    if second_pass is not None and passes_again(gradients, factors.rows, shards):
        shared = next(iter(factors.of.values()))
        second_pass.begin(gradients, factors)
        # Processes of a sharded model pass again together, also one in which no row counts.
        return second_pass(shared if factors.rows is None else torch.zeros_like(shared))
    return gradients.sums(factors.of, factors.rows, None if shards is None else shards.reduce)


def weighted_sums(gradients: Captured, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> sum of weight times gradient; rows without a weight are left out."""
    used = torch.stack([w != 0 for w in {id(w): w for w in weights.values()}.values()]).any(0)
    return gradients.sums(weights, None if bool(used.all()) else used.nonzero().flatten())


def passes_again(gradients: Captured, rows: Tensor | None, shards: Shards | None = None) -> bool:
    """True if the sum may come from a second pass: over the same rows, so that dropout is the same.

    False below float32. Processes of a sharded model decide alike, also one in which no row counts.
    """
    if gradients.is_narrow:
        return False
    if shards is None:
        return rows is None and not gradients.one_sum
    some_left_out = rows is not None and len(rows) > 0
    return shards.first_that(some_left_out or gradients.one_sum) is None

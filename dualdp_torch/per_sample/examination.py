# SPDX-License-Identifier: Apache-2.0
"""Where the examples lie in every parameter use of a model, as its first batch shows."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dualdp import exactness
from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.batch import Batch, check_losses, split_aux
from dualdp_torch.per_sample.batch_axis import BatchAxis, candidates
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.checks.identity import CANT_REPEAT, relative_gap
from dualdp_torch.per_sample.model_checks import OF_ONE_SIZE, refuse_mixing_modules
from dualdp_torch.per_sample.modes import Operations
from dualdp_torch.per_sample.outputs import float_leaves
from dualdp_torch.per_sample.parameter_use import SecondOrderError, Use, eagerly
from dualdp_torch.per_sample.random_state import NoRandomness, Start, refuse_written
from dualdp_torch.rules.base import Tensor

#: Number of examples that are examined, and most layers without examples.
EXAMPLES, MOST_SKIPPED = 4, 32
#: Largest relative difference of one example's loss alone and in the batch, by the lowest dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ON_CUDA = 10.0  # factor of the tolerance: kernels and TF32 vary with the batch size
#: Problems of a parameter and of a use, whose name is filled in.
WITHOUT_RULE = "parameter {!r} is used by a function without a rule"
ELSEWHERE = "The examples of {} lay on an axis of another size in the batches before."


@dataclass(frozen=True)
class Axes:
    """Batch axes of the uses of one forward, by their order.

    The uses at the positions `skip` hold no examples, such as tables of positions. `by_data` is
    True if the rows of an axis may be picked by the data, as in `x[mask]`: every batch is checked.
    """

    signatures: tuple[Any, ...]
    batch_axes: tuple[BatchAxis, ...]
    skip: frozenset[int] = frozenset()
    by_data: bool = False

    def misfit(self, uses: Sequence[Use], n: int) -> Use | None:
        """Return a use whose batch axis can't hold n examples, or None."""
        pairs = zip(uses, self.batch_axes, strict=True)
        return next((use for use, axis in pairs if not axis.fits(use.out_shape, n)), None)


class _Seen(NamedTuple):
    """One captured forward: its uses, with copies of their outputs, and its losses."""

    capture: Capture
    outs: list[Tensor]
    losses: Tensor
    has_drawn: bool
    leftover: list[str]  # parameters that got a gradient beside the uses

    def signatures(self) -> tuple[Any, ...]:
        return tuple([use.signature for use in self.capture.uses])

    def tensors(self, number: int) -> list[Tensor]:
        """Return a use's output and its saved inputs, as they were at the call."""
        use = self.capture.uses[number]
        saved = use.acts if isinstance(use.acts, tuple) else (use.acts,)
        if any(tensor._version != version for tensor, version in use.versions):
            saved = ()
        return [tensor for tensor in (self.outs[number], *saved) if tensor is not None]


@dataclass(frozen=True)
class _Examination:
    """Captured forwards of a few examples, and of single ones, without randomness."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    parameters: Mapping[str, Tensor]
    has_aux: bool
    start: Start

    def run(self, batch: Batch, skip: frozenset[int] | None, *, backward: bool = False) -> _Seen:
        """Run a forward, captured unless `skip` is None, and perhaps the backward of its losses."""
        names, outs = {id(p): name for name, p in self.parameters.items()}, list[Tensor]()

        def note(use: Use, out: Tensor) -> None:
            outs.append(out.detach().clone())

        capture = Capture(names, note, skip or frozenset())
        with self.start.replayed(self.model):
            with contextlib.nullcontext() if skip is None else capture:
                out = self.loss_fn(self.model, *batch.arguments())
            losses = check_losses(split_aux(out, self.has_aux)[0], batch.n)
            has_drawn = self.start.random.has_drawn()
            leftover = capture.backward(losses.sum(), self.parameters) if backward else []
        return _Seen(capture, outs, losses.detach(), has_drawn, leftover)


def _usable(batch: Batch, losses: Tensor, mask: Tensor | None) -> Batch | None:
    """Return a few examples with finite losses, evenly spread; None for fewer than two."""
    good = losses.isfinite() if mask is None else losses.isfinite() & mask.to(losses.device)
    rows = good.nonzero().flatten()
    if len(rows) < 2:
        return None
    spread = torch.linspace(0, len(rows) - 1, min(EXAMPLES, len(rows))).round().long()
    return batch.rows(rows[spread.to(rows.device)])


def examine(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    mask: Tensor | None = None,
    has_aux: bool = False,
) -> Axes | str | None:
    """Find where the examples lie in every parameter use, by forwards of single examples.

    What a use takes and gives for an example alone must stand in a batch, on one axis, in any order
    of the batch. Dropout is off, and random draws return a constant.

    Returns:
        `Axes`; the reason why captured uses can't be trusted; or None for fewer than two examples
        with a finite loss.

    Raises:
        UnsupportedLayerError: an example has another loss alone, or a forward writes a parameter.
    """
    refuse_mixing_modules(model)
    start = Start.of(model, is_checked=True)
    own = _Examination(model, loss_fn, parameters, has_aux, start)
    picked = list[bool]()  # if the rows of each result whose size depends on data are picked by it

    def see(func: Any, args: Any, out: Any) -> None:
        if torch.Tag.dynamic_output_shape in func.tags:
            indices = args[1] if func is torch.ops.aten.index.Tensor else ()
            picks = [index.dtype == torch.bool for index in indices if index is not None]
            picked.append(not indices or any(picks))

    with eagerly():
        with Operations(see):
            whole = own.run(batch, None)
        refuse_written(start.sums, model)
        few = _usable(batch, whole.losses, mask)
        if few is None:
            return None
        tolerance = tolerance_of(model, parameters, batch)
        with NoRandomness() if whole.has_drawn else contextlib.nullcontext():
            try:
                return _axes(own, few, tolerance, any(picked))
            except SecondOrderError as error:
                return str(error)
            except RuntimeError as error:
                if type(error) is RuntimeError and few.n < batch.n:
                    raise UnsupportedLayerError(OF_ONE_SIZE.format(error=error)) from error
                raise


def examine_one(model: nn.Module, batch: Batch, parameters: Mapping[str, Tensor]) -> str | None:
    """Return the reason why captured uses can't be trusted, as far as one example shows it."""
    args, kwargs = batch.arguments()
    capture = Capture({id(p): name for name, p in parameters.items()})
    start = Start.of(model, is_checked=True)
    try:
        with eagerly(), start.replayed(model):
            with capture:
                outputs = float_leaves(model(*args, **kwargs))
            refuse_written(start.sums, model)
            total = sum([out.sum() for out in outputs], torch.zeros(()))
            leftover = capture.backward(total, parameters)
    except SecondOrderError as error:
        return str(error)
    return WITHOUT_RULE.format(leftover[0]) if leftover else None


def _axes(own: _Examination, few: Batch, tolerance: float, picks: bool) -> Axes | str:
    """Return the axes on which the first and the last example stand as they are alone."""
    ends, skip = (0, few.n - 1), frozenset[int]()
    backwards = few.rows(torch.arange(few.n - 1, -1, -1))
    while True:
        whole = own.run(few, skip, backward=True)
        turned = own.run(backwards, skip)
        # Copies of one example, of another number: nothing is spread over a batch of one.
        copies = 2 if few.n > 2 else 3
        alone = [own.run(few.rows(torch.full((copies,), row)), skip) for row in ends]
        if not skip and not whole.has_drawn:  # by Python or NumPy: others may be drawn alone
            single = torch.cat([seen.losses[:1] for seen in alone])
            _refuse_apart(own, few, whole.losses[[*ends]], single, tolerance)
        if any(seen.signatures() != whole.signatures() for seen in (turned, *alone)):
            return "which layers run depends on the examples"
        uses, fixed, axes = whole.capture.uses, set[int](), list[list[BatchAxis]]()
        # An example alone may draw other numbers, by Python or NumPy: the identity will tell.
        near = math.inf if whole.has_drawn else 10 * tolerance
        placed = [(whole, row, one) for row, one in zip(ends, alone, strict=True)]
        placed += [(turned, row, one) for row, one in zip(ends[::-1], alone, strict=True)]
        for i, use in enumerate(uses):
            if use.can_skip and any(whole.outs[i].shape == one.outs[i].shape for one in alone):
                fixed.add(use.position)
            rules = use.possible_axes, use.rule.rows_are_free, few.rows_per_unit
            by_shape = candidates(use.out_shape, few.n, *rules)
            axes.append([a for a in by_shape if all(_stands(a, i, *at) <= near for at in placed)])
        if not fixed - skip:
            break
        skip |= {min(fixed - skip)}  # the positions after it may be others without it
        if len(skip) > MOST_SKIPPED:
            return "too many layers hold no examples"
    for use, left in zip(uses, axes, strict=True):
        if len(left) != 1:
            return f"{use} does not keep the examples apart on one axis"
    if whole.capture.hooked:
        return f"a gradient hook is on the output of {whole.capture.hooked}"
    if whole.leftover:
        return WITHOUT_RULE.format(whole.leftover[0])
    found = tuple([left[0] for left in axes])
    return Axes(whole.signatures(), found, skip, picks and any(axis.fold for axis in found))


def _stands(axis: BatchAxis, number: int, whole: _Seen, place: int, alone: _Seen) -> float:
    """Return how far what a use gives an example alone is from what stands at a place of the axis.

    It is nan if the shapes differ. Where positions are added up, an example alone may have fewer of
    them, as in a packed sequence.
    """
    is_free = whole.capture.uses[number].rule.rows_are_free
    n, copies, found = len(whole.losses), len(alone.losses), 0.0
    for together, single in zip(whole.tensors(number), alone.tensors(number), strict=False):
        if single.dim() != together.dim() or not axis.fits(single.shape, copies):
            return math.nan
        ours, theirs = axis.batch_first(together, n)[place], axis.batch_first(single, copies)[0]
        if is_free and (axis.axis or not axis.fold):
            ours = ours[tuple([slice(size) for size in theirs.shape[:-1]])]
        if ours.shape != theirs.shape:
            return math.nan
        found = max(found, relative_gap([ours.double()], [theirs.double()], ...))
    return found


def _refuse_apart(
    own: _Examination, few: Batch, together: Tensor, single: Tensor, tolerance: float
) -> None:
    """Refuse losses of the first and the last example that are others alone, in float64 too."""
    apart = relative_gap([together], [single], ...)
    if apart <= tolerance:
        return
    with contextlib.suppress(*CANT_REPEAT):
        model = copy.deepcopy(own.model).double()
        double = replace(own, model=model, start=own.start.on(model))
        wide = few.on([t.double() if t.is_floating_point() else t for t in few.tensors()])
        rows = [wide.rows(slice(row, row + 1)) for row in (0, few.n - 1)]
        losses = double.run(wide, frozenset()).losses[[0, -1]]
        exact = torch.cat([double.run(row, frozenset()).losses for row in rows])
        if relative_gap([losses], [exact], ...) <= 10 * TOLERANCE[torch.float64]:
            return
    raise UnsupportedLayerError(
        f"The loss of an example is another one alone than in the batch (relative difference "
        f"{exactness.power_of_ten(apart)}): the losses depend on other examples, so no per-sample "
        "gradient exists. Remove what mixes examples (batch statistics, a mean over the batch, "
        "attention over examples)."
    )


def tolerance_of(model: nn.Module, parameters: Mapping[str, Tensor], batch: Batch) -> float:
    """Return the tolerance for the difference of losses, by the lowest precision in use.

    Parameters of a sharded model may have one precision outside the forward and another inside.
    """
    tensors = [*model.parameters(), *parameters.values(), *batch.tensors()]
    device = batch.tensors()[0].device.type
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    largest = max(TOLERANCE.get(dtype, 1e-2) for dtype in dtypes or {torch.float32})
    return largest * (ON_CUDA if device == "cuda" else 1.0)

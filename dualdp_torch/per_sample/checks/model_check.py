# SPDX-License-Identifier: Apache-2.0
"""Checks of a recorded batch's gradients against plain autograd, given the outputs' gradients.

The gradient of example k is that of the product of its outputs and their cotangents, computed for
example k alone. Where the forward draws random numbers, an example alone would draw others: then a
few examples are compared without randomness. Comparisons on the whole batch repeat its random
numbers, with a gradient on k's outputs only: first in the batch, then among other examples, which
must not matter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp import exactness
from dualdp.exactness import ExactnessError, SpotCheck
from dualdp_torch.parallel.tensor_parallel import on_all_alike
from dualdp_torch.per_sample.api import clipped_numbers
from dualdp_torch.per_sample.call import Call
from dualdp_torch.per_sample.checks.spot_check import (
    CANT_REPEAT,
    BatchNumbers,
    Comparison,
    Definition,
    ReferenceLosses,
    chosen_rows,
)
from dualdp_torch.per_sample.checks.tape import Tape
from dualdp_torch.per_sample.clip import Factors, Terms, clip_factors, clipped_sums, norms_of
from dualdp_torch.per_sample.gradients import Gradients, Limits
from dualdp_torch.per_sample.independence import NoRandomness
from dualdp_torch.per_sample.outputs import float_leaves
from dualdp_torch.per_sample.random_state import RandomState
from dualdp_torch.per_sample.recorder import Recorder
from dualdp_torch.per_sample.vmap_and_loop import plain_gradients
from dualdp_torch.rules.base import Tensor, wide

#: Examples compared without randomness if the forward draws; of large batches an eighth.
_FEW = 4
#: Tolerance of outputs, relative to that of gradients.
_CLOSER = 0.1
IMPOSSIBLE = (
    "The model draws random numbers that can't be drawn again, so examples are compared with these "
    "switched off, and no form of the check sees the whole batch."
)


class ModelCheck:
    """Comparisons for one recorded batch.

    If the recorded forward computes the loss, too, an example's loss is that of a forward on its
    row alone; its outputs are hidden, and comparisons on the whole batch would need per-example
    losses.

    Attributes:
        is_impossible: bool, True if the forward's random numbers can't be repeated.
    """

    def __init__(self, recorder: Recorder, numbers: BatchNumbers, terms: Terms) -> None:
        self._recorder, self._numbers = recorder, numbers
        self._subject = recorder.subject(terms.scale, terms.mask)
        # No bound method, so that no reference cycle keeps this object's tensors alive.
        again = partial(_recorded if recorder.computes_loss else _called, recorder.method, terms)
        self._comparison = Comparison(self._subject, again, "the clipped contribution")
        self._definition = _alone_with_loss if recorder.computes_loss else None
        self.is_impossible = False

    def run(self, check: SpotCheck, *, is_first: bool) -> bool:
        """Compare the recorded numbers with plain autograd; False if no example can be compared.

        The numbers drawn for the step decide if and how the whole batch is compared; `is_first`
        runs all comparisons.
        """
        recorder = self._recorder
        rows = chosen_rows(self._numbers, self._subject.mask, check.fractions[0])
        if not rows:
            return False
        with recorder.unchanged():
            if recorder.has_drawn:
                self._without_draws(rows, check)
            else:
                self._alone(self._comparison, self._numbers, rows, recorder.outputs)
            if recorder.computes_loss or not (is_first or check.is_whole):
                return True
            if recorder.has_drawn and not self._subject.draws_as(self._numbers.losses):
                self.is_impossible = True
                return True
            if is_first or check.draw(2, 1) == 0:
                self._comparison.of_sum(self._numbers, check.fractions[2])
            if is_first or check.draw(2, 1) == 1:
                self._among_others(rows[0], check)
        return True

    def _without_draws(self, rows: Sequence[int], check: SpotCheck) -> None:
        """Compare examples with themselves alone, both without random numbers."""
        n = self._subject.batch.n
        first, count = check.draw(n, 1), min(n, max(_FEW, n // 8))
        index = torch.tensor(list(dict.fromkeys([*rows, *((first + i) % n for i in range(count))])))
        few = _with_rows(self._subject, index)
        with NoRandomness():
            # Draws from NumPy or Python can't be switched off: an example alone would draw others.
            comparison = replace(self._comparison, subject=few, is_alone=not few.draws())
            if self._recorder.computes_loss and not comparison.is_alone:
                self.is_impossible = True
                return
            numbers = comparison.again(few)
            if comparison.is_alone:
                outputs = () if self._recorder.computes_loss else _outputs(few)
                self._alone(comparison, numbers, range(len(rows)), outputs)
            else:
                for row in range(len(rows)):
                    comparison.of_row(numbers, row)

    def _alone(
        self,
        comparison: Comparison,
        numbers: BatchNumbers,
        rows: Sequence[int],
        outputs: Sequence[Tensor],
    ) -> None:
        """Compare examples with themselves alone; of the first one also the model's outputs."""
        apart = list[Tensor]()
        alone = self._definition or _noting(ReferenceLosses.alone, apart)
        for row in rows:
            comparison.of_row(numbers, row, alone)
        if not self._recorder.computes_loss:
            index = torch.tensor(rows[:1])
            self._same_output(comparison, index, 0, rows[0], outputs, apart)

    def _among_others(self, row: int, check: SpotCheck) -> None:
        """Compare one example in its batch, and among other examples."""
        n = self._subject.batch.n
        generator = torch.Generator().manual_seed(check.draw(1 << 30, 3))
        # Zero times the gradient of a broken example is nan: a plain backward can't leave it out.
        whole = self._numbers.norms.isfinite().cpu()
        drawn = torch.randint(int(whole.sum()), (n,), generator=generator)
        index = whole.nonzero().flatten()[drawn]
        index[row] = row
        if self._recorder.has_drawn and not self._draws_alike(index):
            self._comparison.of_sum(self._numbers, check.fractions[2])
            return

        def in_its_batch(subject: ReferenceLosses, row: int) -> dict[str, Tensor]:
            if bool(whole.all()):
                return subject.among(row)
            return _with_rows(subject, torch.arange(n).where(whole, row)).among(row)

        def among_others(subject: ReferenceLosses, row: int) -> dict[str, Tensor]:
            return _with_rows(subject, index).among(row)

        comparison, beside = self._comparison, list[Tensor]()
        comparison.of_row(self._numbers, row, in_its_batch, " in its batch")
        among = _noting(among_others, beside)
        comparison.of_row(self._numbers, row, among, " among other examples")
        self._same_output(comparison, index, row, row, self._recorder.outputs, beside)

    def _draws_alike(self, index: Tensor) -> bool:
        """True if the forward draws as many random numbers with the rows `index` as in its batch.

        Some functions draw by the data, such as rrelu for negative numbers only: then an example
        draws other numbers beside others. Batches of a single repeated row show it, too, as the
        numbers of two batches may agree by chance.
        """
        model, n, states = self._subject.model, len(index), list[RandomState]()
        repeated = [torch.full_like(index, n * i // _FEW) for i in range(_FEW)]
        for rows in (torch.arange(n), index, *repeated):
            subject = _with_rows(self._subject, rows)
            with torch.no_grad(), subject.start.replayed(model):
                subject.loss_fn(model, *subject.batch.arguments())
                if states and not states[0].is_as_before(model):
                    return False
                states.append(RandomState.of(model))
        return True

    def _same_output(
        self,
        comparison: Comparison,
        index: Tensor,
        position: int,
        row: int,
        whole: Sequence[Tensor],
        other: Sequence[Tensor],
    ) -> None:
        """Refuse outputs of an example that are others when the model runs on the rows `index`.

        The example is at `position` of `index`; `whole` and `other` are the outputs for the batch
        and for these rows.
        """
        subject = comparison.subject
        k = subject.batch.rows_per_unit
        apart = on_all_alike(subject.model, _apart(whole, other, row, position, k), float)
        if comparison.tolerates(apart / _CLOSER):
            return
        with contextlib.suppress(*CANT_REPEAT), torch.no_grad():
            double = subject.in_double()
            exact = _apart(_outputs(double), _outputs(_with_rows(double, index)), row, position, k)
            if on_all_alike(double.model, exact, float) <= exactness.REPEATED:
                return
        size = exactness.power_of_ten(apart)
        raise ExactnessError(
            "A spot check failed: the model's outputs for one example depend on the other examples "
            f"of the batch (by {size} of them). Nothing was released for this batch. Change what "
            "mixes examples (statistics of the batch, a mean over it, attention over examples).",
            relative_error=size,
            unprotected_details={"apart": apart},
        )


def unclipped(gradients: Gradients, losses: Tensor) -> BatchNumbers:
    """Return the numbers of a batch whose gradients are summed without clipping."""
    n = len(losses)
    squares, norms = norms_of(gradients, Limits(), n)
    ones = dict.fromkeys(squares.of, torch.ones_like(norms))
    factors = Factors(ones, norms, None, squares.of)
    return BatchNumbers(
        norms,
        losses,
        lambda row: clipped_sums(gradients, factors.only(row)),
        sums=clipped_sums(gradients, factors),
        factors=factors.of,
        doubt=gradients.doubt,
    )


def _noting(definition: Definition, outputs: list[Tensor]) -> Definition:
    """Return a definition that appends the model's outputs to `outputs` when first computed."""

    def noted(subject: ReferenceLosses, row: int) -> dict[str, Tensor]:
        found = list[Tensor]()

        def note(model: nn.Module, args: Any, returned: Any) -> None:
            found.extend(leaf.detach() for leaf in float_leaves(returned))

        with contextlib.ExitStack() as stack:
            if not outputs:
                stack.callback(subject.model.register_forward_hook(note).remove)
            gradients = definition(subject, row)
        outputs.extend(found)
        return gradients

    return noted


def _outputs(subject: ReferenceLosses) -> list[Tensor]:
    """Return the model's outputs on a batch, with the recorded random numbers."""
    found = list[Tensor]()
    with subject.start.replayed(subject.model):
        for args, kwargs, _ in subject.batch.arguments():
            found += [leaf.detach() for leaf in float_leaves(subject.model(*args, **kwargs))]
    return found


def _called(method: str, terms: Terms, subject: ReferenceLosses) -> BatchNumbers:
    """Compute the numbers for another batch or model, by the same method."""
    call = Call.checked(
        subject.loss_fn,
        subject.model,
        subject.batch,
        method=method,
        has_aux=False,
        physical_batch_size=None,
        max_memory=None,
        mask=subject.mask,
    )
    call = call.on(subject.model, subject.batch, dict(subject.parameters))
    with subject.start.replayed(subject.model):
        if terms.bounds:
            return clipped_numbers(call, terms.bounds, terms.clipping)[0]
        gradients, losses, _ = call.gradients()
        return unclipped(gradients, losses)


def _recorded(method: str, terms: Terms, subject: ReferenceLosses) -> BatchNumbers:
    """Record a forward that computes its loss, and return its numbers."""
    n, k = subject.batch.n, subject.batch.rows_per_unit
    recorder = Recorder(subject.model, method=method, tape=Tape(), rows_per_unit=k)
    args, kwargs = subject.batch.arguments()
    try:
        with subject.start.replayed(subject.model), torch.enable_grad():
            subject.model.loss(*args, **kwargs).backward()  # type: ignore[operator]
        gradients = recorder.gradients(1.0 if terms.scale == 1 else float(n), "small")
        factors = clip_factors(gradients, n, terms.bounds, terms.clipping, subject.mask)
        return BatchNumbers(
            factors.norms,
            factors.norms,
            lambda row: clipped_sums(gradients, factors.only(row)),
            bounds=terms.bounds,
            clipping=terms.clipping,
        )
    finally:
        recorder.detach()


def _alone_with_loss(subject: ReferenceLosses, row: int) -> dict[str, Tensor]:
    """Return the gradient of one example by a forward on its row that computes the loss, too."""
    args, kwargs = subject.batch.rows(slice(row, row + 1)).arguments()

    def loss() -> Tensor:
        with subject.start.replayed(subject.model):
            found: Tensor = subject.model.loss(*args, **kwargs)  # type: ignore[operator]
            return found

    return plain_gradients(loss, subject.parameters)


def _with_rows(subject: ReferenceLosses, index: Tensor) -> ReferenceLosses:
    mask = None if subject.mask is None else subject.mask[index.to(subject.mask.device)]
    return replace(subject, batch=subject.batch.rows(index), mask=mask)


def _apart(
    whole: Sequence[Tensor], other: Sequence[Tensor], row: int, position: int, k: int
) -> float:
    """Return the largest relative difference of `row` in one batch and `position` in another.

    Both count units of k rows.
    """
    worst = 0.0
    for a, b in zip(whole, other, strict=True):
        x, y = (t.unflatten(0, (-1, k))[at].double() for t, at in ((a, row), (b, position)))
        if x.shape != y.shape:
            return float("inf")
        size = float(torch.linalg.vector_norm(a, 1, dtype=wide(a.dtype))) / max(a.numel(), 1)
        if not math.isfinite(size):
            size = float(a[a.isfinite()].double().abs().mean().nan_to_num())
        gaps = (x - y).abs() / (x.abs() + size).clamp(min=1e-300)
        gaps = gaps.where(x.isfinite() & y.isfinite(), (x != y) & ~(x.isnan() & y.isnan()))
        worst = max(worst, float(gaps.max()) if gaps.numel() else 0.0)
    return worst

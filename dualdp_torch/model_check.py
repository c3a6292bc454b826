# SPDX-License-Identifier: Apache-2.0
"""Checks the gradients of a recorded batch against plain autograd, from what its outputs received.

The gradient of example k is that of the product of its outputs and what they received, which the
model gives for k alone. Where the forward draws random numbers, an example alone would draw others:
then a few examples are compared with dropout and the like switched off. Forms that keep the size of
the batch are compared under its own draws, only k's outputs having a gradient: first in the batch,
then among other examples, since who they are must not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dualdp import exactness
from dualdp.exactness import Check, ExactnessError

from .call import Call
from .clip import Factors, clip_factors, clipped_sums, norms_of
from .fallback import plain_gradients
from .gradients import Gradients, Limits
from .outputs import float_leaves
from .per_sample import clipped_numbers
from .proof import NoRandomness
from .recorder import Recorder
from .rules.base import Tensor
from .sharded import Terms
from .spot_check import Comparison, Engine, Precisions, Subject, chosen_rows
from .tape import Tape

#: Of a batch that draws, so many examples, or an eighth, are compared without the draws.
_FEW = 4
#: Outputs are compared more closely than gradients.
_CLOSER = 0.1
IMPOSSIBLE = (
    "The model draws random numbers that can't be drawn again, so examples are compared with these "
    "switched off, and no form of the check sees the whole batch."
)


class ModelCheck:
    """The comparisons of one recorded batch.

    Args:
        recorder: which recorded it.
        numbers: what came out for it.
        terms: what it was clipped with.

    Attributes:
        is_impossible: its draws can't be repeated.
    """

    def __init__(self, recorder: Recorder, numbers: Engine, terms: Terms) -> None:
        self._recorder, self._numbers, self._terms = recorder, numbers, terms
        self._subject = recorder.subject(terms.scale, terms.mask)
        # Nothing refers back to this object, so that what it holds is freed with it.
        again = partial(self._numbers_again, recorder, terms)
        self._comparison = Comparison(self._subject, again, "the clipped contribution")
        self.is_impossible = False

    def run(self, check: Check, *, is_first: bool) -> bool:
        """Compare, and raise if something differs.

        Args:
            check: what was drawn for the step; the forms that look at the whole batch take turns.
            is_first: all of them are due.

        Returns:
            Whether something was compared; not so if no example counts.

        Raises:
            ExactnessError: the numbers differ from plain autograd, or depend on other examples.
        """
        recorder = self._recorder
        rows = chosen_rows(self._numbers, self._subject.mask, check.fractions[0])
        if not rows:
            return False
        with recorder.unchanged():
            if recorder.has_drawn:
                self._without_draws(rows, check)
            else:
                for row in rows:
                    self._comparison.of_row(self._numbers, row)
                first = torch.tensor(rows[:1])
                self._same_output(self._subject, first, 0, rows[0], self._recorder.outputs)
            if not is_first and not check.is_whole:
                return True
            if recorder.has_drawn and not self._subject.draws_as(self._numbers.losses):
                self.is_impossible = True
                return True
            if is_first or check.draw(2, 1) == 0:
                self._comparison.of_sum(self._numbers, check.fractions[2])
            if is_first or check.draw(2, 1) == 1:
                self._among_others(rows[0], check)
        return True

    @staticmethod
    def _numbers_again(recorder: Recorder, terms: Terms, subject: Subject) -> Engine:
        """The numbers of another batch or model, by the same method."""
        call = Call.checked(
            subject.loss_fn,
            subject.model,
            subject.batch.arguments(),
            method=recorder.method,
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

    def _without_draws(self, rows: Sequence[int], check: Check) -> None:
        """Compare examples with themselves alone, both without random numbers."""
        n = self._subject.batch.n
        first, count = check.draw(n, 1), min(n, max(_FEW, n // 8))
        index = torch.tensor(list(dict.fromkeys([*rows, *((first + i) % n for i in range(count))])))
        few = _with_rows(self._subject, index)
        with NoRandomness():
            # Draws from NumPy or Python can't be switched off: an example alone would get others.
            comparison = replace(self._comparison, subject=few, is_alone=not few.draws())
            numbers = comparison.again(few)
            for place in range(len(rows)):
                self._compare_row(comparison, numbers, place)
            self._same_output_of_few(comparison)

    def _compare_row(self, comparison: Comparison, numbers: Engine, row: int) -> None:
        """One example, and the example alone."""
        comparison.of_row(numbers, row)

    def _among_others(self, row: int, check: Check) -> None:
        """Compare one example in its batch, and among other examples."""
        n = self._subject.batch.n
        generator = torch.Generator().manual_seed(check.draw(1 << 30, 3))
        # Zero times the gradient of a broken example is nan: a plain backward can't leave it out.
        whole = self._numbers.norms.isfinite().cpu()
        drawn = torch.randint(int(whole.sum()), (n,), generator=generator)
        index = whole.nonzero().flatten()[drawn]
        index[row] = row

        def in_its_batch(subject: Subject, row: int) -> dict[str, Tensor]:
            if bool(whole.all()):
                return subject.among(row)
            return _with_rows(subject, torch.arange(n).where(whole, row)).among(row)

        def among_others(subject: Subject, row: int) -> dict[str, Tensor]:
            return _with_rows(subject, index).among(row)

        self._comparison.of_row(self._numbers, row, in_its_batch, " in its batch")
        self._comparison.of_row(self._numbers, row, among_others, " among other examples")
        self._same_output(self._subject, index, row, row)

    def _same_output(
        self,
        subject: Subject,
        index: Tensor,
        place: int,
        row: int,
        recorded: Sequence[Tensor] | None = None,
    ) -> None:
        """Refuse outputs of an example that depend on the others.

        Args:
            subject: of the batch.
            index: rows of the batch that the model is run on.
            place: where the example stands among them.
            row: where it stands in the batch.
            recorded: outputs for the batch; None if they are to be computed.

        Raises:
            ExactnessError: they do.
        """
        with torch.no_grad(), Precisions() as precisions:
            whole = _outputs(subject) if recorded is None else recorded
            apart = _apart(whole, _outputs(_with_rows(subject, index)), row, place)
        if apart <= _CLOSER * exactness.TOLERANCE[precisions.lowest]:
            return
        exact = _apart_in_double(subject, index, row, place)
        if exact is not None and exact <= exactness.REPEATED:
            return
        size = exactness.power_of_ten(apart)
        raise ExactnessError(
            "A spot check failed: the model's outputs for one example depend on the other examples "
            f"of the batch (by {size} of them). Nothing was released for this batch. Change what "
            "mixes examples (statistics of the batch, a mean over it, attention over examples).",
            relative_error=size,
            unprotected_details={"apart": apart},
        )

    def _same_output_of_few(self, comparison: Comparison) -> None:
        """The outputs of the first of a few examples, which is alone in another batch."""
        if comparison.is_alone:
            self._same_output(comparison.subject, torch.tensor([0]), 0, 0)


def unclipped(gradients: Gradients, losses: Tensor) -> Engine:
    """The numbers of a batch whose gradients are added up as they are."""
    n = len(losses)
    squares, norms, _ = norms_of(gradients, Limits(), n)
    factors = Factors(dict.fromkeys(squares, torch.ones_like(norms)), norms, None, squares)
    return Engine(
        norms,
        losses,
        lambda row: clipped_sums(gradients, factors.only(row)),
        sums=clipped_sums(gradients, factors),
        factors=factors.of,
        doubt=gradients.doubt,
    )


def _outputs(subject: Subject) -> list[Tensor]:
    """The model's outputs on a batch, under its draws."""
    args, kwargs, _ = subject.batch.arguments()
    with subject.start.replayed(subject.model):
        return [leaf.detach() for leaf in float_leaves(subject.model(*args, **kwargs))]


def _apart_in_double(subject: Subject, index: Tensor, row: int, place: int) -> float | None:
    """The difference of two rows in float64; None where the model can't be run in it."""
    try:
        double = subject.in_double()
        with torch.no_grad():
            return _apart(_outputs(double), _outputs(_with_rows(double, index)), row, place)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


class WholeStepCheck(ModelCheck):
    """The comparisons of a batch whose loss was computed in the recorded forward.

    The loss of one example alone is that of a forward on its row alone, whatever comes between the
    layers and the loss. Forms that keep the size of the batch would need the losses one by one.
    """

    def run(self, check: Check, *, is_first: bool) -> bool:
        """As in `ModelCheck`; each example is compared with itself alone."""
        rows = chosen_rows(self._numbers, self._subject.mask, check.fractions[0])
        with self._recorder.unchanged():
            if rows and self._recorder.has_drawn:
                self._without_draws(rows, check)
            for row in () if self._recorder.has_drawn else rows:
                self._compare_row(self._comparison, self._numbers, row)
        return bool(rows)

    def _compare_row(self, comparison: Comparison, numbers: Engine, row: int) -> None:
        """One example, and the loss of its row alone."""

        def alone(subject: Subject, row: int) -> dict[str, Tensor]:
            args, kwargs = subject.batch.rows(slice(row, row + 1)).arguments()

            def loss() -> Tensor:
                with subject.start.replayed(subject.model):
                    found: Tensor = subject.model.loss(*args, **kwargs)  # type: ignore[operator]
                    return found

            return plain_gradients(loss, subject.parameters)

        comparison.of_row(numbers, row, alone)

    def _same_output_of_few(self, comparison: Comparison) -> None:
        """Nothing: the loss is what is compared, and nobody else sees the outputs."""

    @staticmethod
    def _numbers_again(recorder: Recorder, terms: Terms, subject: Subject) -> Engine:
        """The numbers of another batch or model, recorded anew."""
        return recorded(subject, recorder.method, terms)


def recorded(subject: Subject, method: str, terms: Terms) -> Engine:
    """The numbers of a forward that computes its loss, recorded once more."""
    recorder = Recorder(subject.model, method=method, when=lambda: True, tape=Tape())
    args, kwargs = subject.batch.arguments()
    n = subject.batch.n
    try:
        with subject.start.replayed(subject.model), torch.enable_grad():
            subject.model.loss(*args, **kwargs).backward()  # type: ignore[operator]
        gradients = recorder.gradients(1.0 if terms.scale == 1 else float(n), "small")
        factors = clip_factors(gradients, n, terms.bounds, terms.clipping, subject.mask)
        return Engine(
            factors.norms,
            factors.norms,
            lambda row: clipped_sums(gradients, factors.only(row)),
            bounds=terms.bounds,
            clipping=terms.clipping,
        )
    finally:
        recorder.detach()


def _with_rows(subject: Subject, index: Tensor) -> Subject:
    """The subject on other rows of its batch."""
    mask = None if subject.mask is None else subject.mask[index.to(subject.mask.device)]
    return replace(subject, batch=subject.batch.rows(index), mask=mask)


def _apart(whole: Sequence[Tensor], other: Sequence[Tensor], row: int, place: int) -> float:
    """The largest difference of a row of a batch and one of another, relative to the numbers."""
    worst = 0.0
    for a, b in zip(whole, other, strict=True):
        x, y = a[row].double(), b[place].double()
        if x.shape != y.shape:
            return float("inf")
        sizes = a.double().abs()
        size = float(sizes[sizes.isfinite()].mean().nan_to_num())
        gaps = (x - y).abs() / (x.abs() + size).clamp(min=1e-300)
        gaps = gaps.where(x.isfinite() & y.isfinite(), (x != y) & ~(x.isnan() & y.isnan()))
        worst = max(worst, float(gaps.max()) if gaps.numel() else 0.0)
    return worst

# SPDX-License-Identifier: Apache-2.0
"""Checks that the loss of a training loop is the mean or the sum of one loss per example.

The loop's code between loader and backward is replayed (`replay.py`). With the other rows of the
batch replaced, the gradient of one example's outputs must not change; and it must be 1 / n of the
gradient that the same code gives for that example alone, or equal to it for a sum. The first test
finds losses that compare, rank or normalise examples, the second finds dependence on their number.
No list of safe functions is needed.

A loop is identified by the functions that it calls, with dtypes and axes. New code is checked on
its first batch; known code on randomly drawn steps.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dualdp.exactness import REPEATED, TOLERANCE, ExactnessError, power_of_ten
from dualdp_torch.per_sample.checks.replay import (
    Replayed,
    ReplayError,
    Rows,
    Script,
    name_of,
    read_by,
)
from dualdp_torch.per_sample.checks.tape import OTHER, Slot, Tape, slots_of
from dualdp_torch.per_sample.random_state import untouched_generators
from dualdp_torch.rules.base import Tensor
from dualdp_torch.rules.precision import matmul_in_tf32

REDUCTIONS = ("mean", "sum")
#: Number of checked loops in the cache.
_MOST_LOOPS = 256
#: Number of values of one integer in known code that are checked; further ones are not.
_MOST_VALUES = 16
#: Largest size of a tensor of unknown origin that is compared from batch to batch.
_SMALL = 1 << 16
#: Number of replacements of the other rows.
_FORMS = 4
#: Number of integers of a loop whose meanings are tried one by one, if no common one fits.
_UNCLEAR = 6
#: Batch size up to which an integer equal to n may well be a constant.
_FEW = 8
_WAY_OUT = (
    "Expected one loss per example, computed from that example's own row and from public numbers, "
    "and their {declared}."
)
_WEIGHTED = (
    "Weighted means (class weights, ignored targets, masks) need each example's own mean first: "
    'cross_entropy(..., weight=w, reduction="none").{declared}() for class weights; or '
    'reduction="sum", with loss_reduction="sum" declared to dualdp. Outputs (n, 1) and targets '
    "(n,) are compared each with each: give both one shape."
)
_CARRIED = (
    "Data were read into Python numbers (item(), float(), tolist(), numpy(), len()) before the "
    "loss was complete, and a number that the loss uses afterwards differs from one batch to the "
    "next, or was computed from them: other examples may enter the loss by it. Keep it a tensor, "
    "or read what is logged after backward()."
)
_FOREIGN = (
    "A tensor that the loss uses was made where nobody saw it (from_numpy, a script, another "
    "thread, an earlier batch), and differs from one batch to the next: examples may enter the "
    "loss by it. Compute it in this loop with torch functions, make it from a Python number, or "
    "give each example its own row of it in the data set."
)
_DECIDED = (
    "The loop decides by data that it read (item(), tolist(), numpy()) what it computes "
    "afterwards, so another batch has another loss. Use torch.where, or decide after backward()."
)


_OF_MODEL = (
    " The loss that a model computes from labels is often a mean over all tokens of the batch: "
    "write per_example_loss(model, outputs, labels).mean() of dualdp_torch.trainer instead."
)


class Problem(NamedTuple):
    """Problem found in a loop, as sentences without values of the data.

    The error is relative to the gradient of one example's outputs; inf without a comparison.
    """

    text: str
    error: float = math.inf


class Number(NamedTuple):
    """Meaning of a Python number in the code of a loop.

    Attributes:
        kind: str: "is" a constant, "times" n, "over" n, or "free".
        value: float, the constant or quotient.
    """

    kind: str
    value: float

    def at(self, m: int, recorded: float) -> float:
        """Return the number for a batch of m examples."""
        if self.kind == "times":
            return type(recorded)(self.value * m)
        return self.value / m if self.kind == "over" else recorded

    def fits(self, value: float, n: int) -> bool:
        """True if `value` has this meaning in a batch of n examples."""
        if self.kind == "free":
            return True
        if self.kind == "is":
            return value == self.value
        product = value * n if self.kind == "over" else value
        expected = self.value if self.kind == "over" else self.value * n
        return math.isclose(product, expected, rel_tol=1e-12)


def _exactly_rows(value: float, n: int, k: int) -> Number:
    """Read a number as n k, the rows of n examples, or 1 / (n k); else as a constant."""
    if n > 1 and value == n * k:
        return Number("times", k)
    if n > 1 and isinstance(value, float) and math.isclose(value * n * k, 1, rel_tol=1e-12):
        return Number("over", 1 / k)
    return Number("is", value)


def _exactly_n(value: float, n: int, k: int) -> Number:
    """Read a number as n or 1 / n, of n examples or their n k rows; else as a constant."""
    found = _exactly_rows(value, n, 1)
    return _exactly_rows(value, n, k) if found.kind == "is" else found


def _multiple_of_n(value: float, n: int, k: int) -> Number:
    """Read a number as a multiple of n, or 1 / n; else as a constant."""
    if n > 1 and isinstance(value, int) and value and value % n == 0:
        return Number("times", value // n)
    return _exactly_n(value, n, k)


def _integer_n(value: float, n: int, k: int) -> Number:
    """Like `_exactly_n` for integers only: 9.0 is more often a constant than a count."""
    return _exactly_n(value, n, k) if isinstance(value, int) else Number("is", value)


def _constant(value: float, n: int, k: int) -> Number:
    return Number("is", value)


def _of_two_batches(value: float, n: int, before: float, then: int) -> Number:
    """Infer a number's meaning from its values in batches of n and `then` examples."""
    if value == before:
        return Number("is", value)
    if math.isclose(value * then, before * n, rel_tol=1e-12):
        quotient = value / n
        return Number("times", int(quotient) if isinstance(value, int) else quotient)
    if math.isclose(value * n, before * then, rel_tol=1e-12):
        return Number("over", value * n)
    return Number("free", value)


#: (position of a call on the tape, index among its numbers or tensors).
Position = tuple[int, int]
Meanings = dict[Position, Number]


@dataclass
class CheckedLoop:
    """Record of a loop that was checked.

    Attributes:
        n: number of examples of the first checked batch.
        numbers: value of each Python number in the code.
        meanings: meaning of each number; a guess while only one batch size was seen.
        is_certain: bool, True if `meanings` is more than a guess.
        foreign: digest of each tensor that no call made and that holds no rows.
        decided: calls up to the first read, and the live calls after it.
        read: position of the first call that returned data as Python values, or None.
        code: key of its calls, see `Tape.code`.
        others: further integer values of a number that were checked.
    """

    n: int
    numbers: dict[Position, float]
    meanings: Meanings
    is_certain: bool
    foreign: dict[Position, Any]
    decided: tuple[Any, Any]
    read: int | None
    code: Any
    others: dict[Position, set[float]] = field(default_factory=dict)


class CriterionCheck:
    """Checks of the code of one loop, declared to end in a "mean" or a "sum"."""

    def __init__(self, declared: str) -> None:
        self.declared = declared
        self._known: OrderedDict[Any, CheckedLoop] = OrderedDict()

    def knows(self, tape: Tape) -> bool:
        """True if the same code was checked before, also with its present numbers.

        Raises:
            CarriedNumberError: a number or tensor changed that may have been computed from data.
        """
        known = self._known.get(tape.signature())
        if known is None:
            return False
        if _foreign(tape, known.foreign) != known.foreign:
            raise CarriedNumberError(_FOREIGN)
        numbers, n = _numbers(tape, known.numbers), tape.num_units
        if not known.is_certain:
            if n == known.n and numbers == known.numbers:
                return True
            return self._learn(known, numbers, n)
        changed = [at for at, v in numbers.items() if not known.meanings[at].fits(v, n)]
        changed = [at for at in changed if numbers[at] not in known.others.get(at, ())]
        if changed:
            self._refuse_carried(known, changed)
        return not changed

    def _learn(self, known: CheckedLoop, numbers: dict[Position, float], n: int) -> bool:
        """Infer the numbers' meanings from a second batch; True if no check is needed."""
        if n == known.n:
            changed = [at for at, v in numbers.items() if v != known.numbers[at]]
            self._refuse_carried(known, changed)
            return False
        found = {at: _of_two_batches(v, n, known.numbers[at], known.n) for at, v in numbers.items()}
        self._refuse_carried(known, [at for at, number in found.items() if number.kind == "free"])
        guessed, known.meanings, known.is_certain = known.meanings, found, True
        return found == guessed

    def _refuse_carried(self, known: CheckedLoop, changed: list[Position]) -> None:
        """Refuse numbers that change from batch to batch after data were read."""
        if known.read is not None and any(call > known.read for call, _ in changed):
            raise CarriedNumberError(_CARRIED)

    def check(
        self,
        tape: Tape,
        cotangents: Sequence[Tensor | None],
        rows: Sequence[int],
        model: nn.Module,
        *,
        seed: int = 0,
        is_whole: bool = True,
    ) -> Problem | None:
        """Compare the gradients of some examples' outputs with those of each example alone.

        Args:
            tape: closed tape of the batch, with its backward.
            cotangents: gradient of each output of the model.
            rows: indices of the examples to compare.
            model: module whose generators are restored.
            seed: seed for the choice of replacement rows.
            is_whole: bool, True to replace the other rows for each of `rows`, False for one of
                them. New code is tried with every replacement, known code with one for each row.

        Returns:
            A problem, or None; then the code is known from now on.
        """
        trial = _BatchReplay(tape, cotangents, self.declared, model)
        with untouched_generators(model), torch.enable_grad():
            problem = trial.identity()
            if problem is not None or trial.is_empty:
                return problem
            known = self._known.get(tape.signature())
            meanings = self._learned(tape, known)
            first = 0 if known is None else seed // _FORMS % len(rows)
            for i, row in enumerate([*rows[first:], *rows[:first]]):
                forms = range(_FORMS)
                if known is not None:
                    form = (seed + i) % _FORMS
                    forms = range(form, form + (is_whole or not i))
                problem = trial.others(row, seed, forms) or trial.alone(row, meanings)
                if problem is not None:
                    return problem
            if trial.carries():
                return Problem(_CARRIED)
            if known is None and self._decides(trial):
                return Problem(_DECIDED)
        self._remember(tape, trial, known)
        return None

    def _learned(self, tape: Tape, known: CheckedLoop | None) -> Meanings | None:
        """Return the certain meanings of the code's numbers; None if there are none.

        Of other code those of the same calls: an axis as long as the batch by chance, such as that
        of a one-hot encoding, makes its signature another one.
        """
        if known is not None and known.is_certain:
            return known.meanings
        code = tape.code()
        alike = (k for k in self._known.values() if k.is_certain and k.code == code)
        return next((k.meanings for k in alike), None)

    def _decides(self, trial: _BatchReplay) -> bool:
        """True if an earlier batch ran other code after the same reads of data."""
        prefix, after = trial.decided()
        same = [known for known in self._known.values() if prefix and known.decided[0] == prefix]
        return any(known.decided[1] != after for known in same)

    def _remember(self, tape: Tape, trial: _BatchReplay, known: CheckedLoop | None) -> None:
        """Record code that passed the check, with its numbers."""
        numbers, n = _numbers(tape, trial.script.examined), tape.num_units
        if known is None:
            self._known[tape.signature()] = CheckedLoop(
                n,
                numbers,
                trial.meanings,
                trial.is_certain,
                _foreign(tape, trial.script.examined),
                trial.decided(),
                trial.read,
                tape.code(),
            )
        elif known.is_certain:
            for at, value in numbers.items():
                if not known.meanings[at].fits(value, n):
                    values = known.others.setdefault(at, set())
                    values.add(value)
                    if isinstance(value, float) or len(values) > _MOST_VALUES:
                        known.meanings[at] = Number("free", value)
        elif n == known.n and numbers != known.numbers:
            changed = {at: v for at, v in numbers.items() if v != known.numbers[at]}
            known.meanings |= {at: Number("free", v) for at, v in changed.items()}
            known.is_certain = True
        if len(self._known) > _MOST_LOOPS:
            self._known.popitem(last=False)


def error_of(problem: Problem, is_known: bool) -> Exception:
    """Return the exception for a problem; `is_known` code passed a check before."""
    if not is_known:
        return ValueError(problem.text)
    return ExactnessError(
        f"A spot check failed: {problem.text} Nothing was released for this batch. Correct the "
        "loop and begin a new run; the releases before are not vouched for.",
        relative_error=power_of_ten(problem.error),
        unprotected_details={"error": problem.error},
    )


class CarriedNumberError(ValueError):
    """A number of the loss may have been computed from data that were read before."""


def _calls_at(positions: Iterable[int | Position]) -> list[int]:
    """Positions of calls, given these or positions inside them."""
    return sorted({at if isinstance(at, int) else at[0] for at in positions})


def _numbers(tape: Tape, positions: Iterable[int | Position]) -> dict[Position, float]:
    """Python numbers of the calls at `positions`."""
    calls = _calls_at(positions)
    return {(at, i): v for at in calls for i, v in enumerate(tape.calls[at].numbers)}


def _foreign(tape: Tape, positions: Iterable[int | Position]) -> dict[Position, Any]:
    """Digest of each tensor of unknown origin and without rows, of the calls at `positions`.

    The model's own call, which may take tensors that all examples share, is at -1.
    """
    found: dict[Position, Any] = {}
    if not any(slot.kind == OTHER and not slot.requires_grad for slot in tape.slots):
        return found
    taken = {at: read_by(tape.calls[at]) for at in _calls_at(positions) if at >= 0}
    for number, forward in enumerate(tape.forwards, 1):
        taken[-number] = list(slots_of(forward.arguments))
    for at, slots in taken.items():
        for i, slot in enumerate(slots):
            if slot.kind == OTHER and not slot.requires_grad and tape.row_axis(slot) is None:
                found[at, i] = _digest(slot.value)
    return found


def _digest(tensor: Tensor | None) -> Any:
    """Return dtype, shape and bytes of a small tensor; None for large ones and parameters."""
    if tensor is None or isinstance(tensor, nn.Parameter) or tensor.numel() > _SMALL:
        return None
    whole = tensor.detach().cpu().contiguous().flatten()
    return tensor.dtype, tuple(tensor.shape), whole.view(torch.uint8).numpy().tobytes()


class _BatchReplay:
    """Replays of one batch, whose examples are its units of `rows_per_unit` rows.

    Attributes:
        script: the live calls of the tape.
        is_empty: bool, True if no example has a gradient, so that nothing can be compared.
        meanings: meaning of each number by which the row alone was right.
        is_certain: bool, True if they differ in kind, so that no other meanings fit.
        read: position of the first call that returned data as Python values, or None.
    """

    def __init__(
        self,
        tape: Tape,
        cotangents: Sequence[Tensor | None],
        declared: str,
        model: nn.Module,
    ) -> None:
        self.tape, self.script, self.declared = tape, Script(tape), declared
        self._model = model
        self.n, self._k = tape.num_units, tape.rows_per_unit
        self._recorded = [
            torch.zeros_like(slot.value) if grad is None else grad  # type: ignore[arg-type]
            for slot, grad in zip(tape.outputs, cotangents, strict=True)
        ]
        self._tolerance = TOLERANCE[self._precision()]
        self.is_empty, self._data = False, set[int]()
        self.read: int | None = None
        self.meanings: Meanings = {}
        self.is_certain = False
        self._scale = float(self.n) if declared == "mean" else 1.0
        self._all = torch.arange(self.n)

    def _rows(self, units: Tensor, examined: int, **options: Any) -> Rows:
        return Rows.of(units, examined, self._k, **options)

    def _way_out(self) -> str:
        """Return what to do about a loss that joins examples."""
        of_model = _OF_MODEL if self.tape.computes_loss else ""
        return f"{_WAY_OUT} {_WEIGHTED}".format(declared=self.declared) + of_model

    def _precision(self) -> str:
        """Return the lowest precision in use, a key of `TOLERANCE`."""
        tape = self.tape
        dtypes = {slot.dtype for slot in (*tape.slots, *tape.outputs)}
        dtypes |= {dtype for at in self.script.live for _, dtype in tape.calls[at].autocast}
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        known = [name for name in names if name in TOLERANCE] or ["float32"]
        on_cuda = any(s.value is not None and s.value.is_cuda for s in tape.outputs)
        if on_cuda and matmul_in_tf32():
            known.append("tf32")
        return max(known, key=TOLERANCE.__getitem__)

    def identity(self) -> Problem | None:
        """Replay the recorded batch, which must reproduce the recorded gradients."""
        reason = self._not_recorded()
        if reason is None:
            try:
                self._same = self.script.run(self._rows(self._all, 0), finds_draws=True)
                reason = self._differs_from_recorded()
            except ReplayError as error:
                reason = str(error)
        if reason is None:
            return None
        return Problem(
            f"The loss can't be computed again from the batch and the model's outputs, so it can't "
            f"be checked: {reason}. {_WAY_OUT.format(declared=self.declared)}"
        )

    def _not_recorded(self) -> str | None:
        """Return the reason why a replay would differ from the loop, or None."""
        script = self.script
        if self.tape.was_written():
            return (
                "a tensor was written to where that could not be seen, by its array (numpy(), "
                "DLPack) or while the loader had ended (next(iter(loader))). Write to a copy"
            )
        stale = [slot for slot in script.sources if slot.is_stale()]
        if stale:
            return (
                f"a tensor of shape {tuple(stale[0].shape)} was changed in place where the change "
                "could not be seen. Use an operation that makes a new tensor"
            )
        kept = _kept_on(self._model, script.sources)
        if kept:
            return (
                f"a tensor of shape {kept[0]} enters it that is kept on the module, as its "
                f"attribute {kept[1]!r}, from one forward to the loss. Return it from the model's "
                "forward, with the examples on axis 0"
            )
        if any(slot in script.sources for slot in self.tape.scalars):
            return (
                "a number that the model returned enters it, which its forward computed from the "
                "whole batch. Return one number for each example"
            )
        strangers = script.strangers()
        if strangers:
            what = "a parameter" if isinstance(strangers[0].value, nn.Parameter) else "a tensor"
            return (
                f"{what} of shape {tuple(strangers[0].shape)} with a gradient enters it that "
                "neither the batch nor the model's outputs lead to (kept on a module, made by an "
                "autograd.Function, by compiled code, or a parameter outside of the model). Return "
                "it from the model's forward, or use clipped_grad_sum"
            )
        return None

    def _differs_from_recorded(self) -> str | None:
        """Return the difference between the replay and the recorded backward, or None."""
        for grad in self._recorded:
            if grad.dim() and len(grad) != self.tape.n and bool(grad.any()):
                what = "examples" if self._k == 1 else "rows"
                return (
                    f"the model returned a tensor of shape {tuple(grad.shape)}, which is not one "
                    f"row for each of {self.tape.n} {what}"
                )
        apart = _apart(self._same.cotangents, self._recorded)
        if apart <= self._tolerance:
            self._norms = _row_norms(self._recorded, self.n, self._k)
            self.is_empty = not bool((self._norms > 0).any())
            return None
        return (
            "the gradients of the outputs come out otherwise. A gradient hook, an "
            "autograd.Function, or a change in place that nobody sees is between them and the "
            "loss; use clipped_grad_sum"
        )

    def others(self, row: int, seed: int, forms: range) -> Problem | None:
        """Replay with the other rows replaced; this row's gradient may not change."""
        tried, reason = 0, ""
        each = _replacements(self.n, row, seed, self._k) if forms else iter(())
        for rows in itertools.islice(each, forms.start, forms.stop):
            try:
                found = self.script.run(rows)
            except ReplayError as error:
                reason = str(error)
                continue
            tried += rows.others == 1.0
            problem = self._differs_among_others(found, rows, row)
            if problem is not None:
                return problem
        if tried or len(forms) < _FORMS:
            return None
        return Problem(
            f"The loss can't be computed with other rows in the batch: {reason}. "
            + _WAY_OUT.format(declared=self.declared)
        )

    def _differs_among_others(self, found: Replayed, rows: Rows, row: int) -> Problem | None:
        """Compare one row's values in a replay with the recorded ones; None if they agree."""
        problem = self._read_otherwise(found)
        if problem is not None:
            return problem
        if self._input_apart(found, row, row) > self._tolerance / 10:
            return Problem(
                "What the model gets for one example depends on the other rows of the batch"
                f"{self._first(found, row)}. Prepare each example by itself, in the data set or "
                "with public numbers.",
            )
        error = self._error(found, row, row, self._scale)
        if error <= self._tolerance or self._is_rounding(rows, row, self._scale):
            return None
        return Problem(
            "The loss mixes the examples of a batch: with the other rows replaced, the gradient of "
            f"one example's outputs is another one (by {power_of_ten(error)} of it"
            f"{self._first(found, row)}). {self._way_out()}",
            error,
        )

    def _read_otherwise(self, found: Replayed) -> Problem | None:
        """Note Python values that depend on the rows; return a problem for bools."""
        for position, value in found.reads.items():
            if _is_same(value, self._same.reads.get(position)):
                continue
            if isinstance(value, bool):
                name = name_of(self.tape.calls[position].function)
                return Problem(
                    f"The loop decides by the data of the batch ({name} of a tensor) before its "
                    "loss is complete, so another batch may have another loss. Use torch.where, or "
                    "decide after backward()."
                )
            if not isinstance(value, str):
                self._data.add(position)
                self.read = min(self._data)
        return None

    def carries(self) -> bool:
        """True if a number of the code was read from data before, or combines two such values."""
        if self.read is None:
            return False
        values = [value for at, value in self._same.reads.items() if at in self._data]
        read = [v for value in values if not isinstance(value, list) for v in _floats(value)]
        listed = {v for value in values if isinstance(value, list) for v in _floats(value)}
        later = [at for at in self.script.examined if at > self.read]
        numbers = [v for at in later for v in self.tape.calls[at].numbers if type(v) is float]
        made = {*read, *(1 - v for v in read), *(v for v in listed if v % 1)}
        for a in read[:_MOST_VALUES]:
            made |= {a + b for b in read[:_MOST_VALUES]} | {a * b for b in read[:_MOST_VALUES]}
            made |= {a - b for b in read[:_MOST_VALUES]} | {a / b for b in read if b}
        made -= {0.0, 1.0}
        return any(math.isclose(v, m, rel_tol=1e-12) for v in numbers for m in made)

    def alone(self, row: int, learned: Meanings | None) -> Problem | None:
        """Replay the row alone; the recorded gradient must be 1 / n of the result, or equal."""
        reason, worst = "", None
        for meanings, is_likely, is_mixed in self._readings(learned):
            if not is_likely and worst is not None and self.n > _FEW:
                continue
            for rows in self._rows_alone(row, meanings):
                try:
                    found = self.script.run(rows)
                except ReplayError as error:
                    reason = reason or str(error)
                    continue
                problem = self._differs_alone(found, rows, row)
                if problem is None:
                    self.meanings, self.is_certain = meanings, is_mixed
                    return None
                worst = worst or problem
                if not self.script.has_free_draws:
                    break
        return worst or Problem(
            f"The loss can't be computed for one example alone: {reason}. "
            "Write it for any number of rows, without Python loops over them and without data that "
            "were read out of tensors; or use clipped_grad_sum.",
        )

    def _readings(self, learned: Meanings | None) -> Iterator[tuple[Meanings, bool, bool]]:
        """Yield meanings of the code's numbers, and whether they are likely, and of mixed kinds.

        As learned from other batches, then by one rule for all numbers, then by several.
        """
        if learned is not None:
            yield learned, True, False
        numbers = _numbers(self.tape, self.script.examined)
        # A number that was the same in batches of two sizes is none of theirs.
        constants = {
            at: meaning
            for at, meaning in (learned or {}).items()
            if meaning.kind == "is" and meaning.value == numbers[at]
        }
        rules = [_exactly_n, _multiple_of_n, _integer_n, _constant]
        for rule in rules if self._k == 1 else [_exactly_rows, *rules]:
            meanings = {at: rule(v, self.n, self._k) for at, v in numbers.items()}
            yield meanings | constants, rule is not _constant, False
        unclear = [at for at, v in numbers.items() if type(v) is int and v and v % self.n == 0]
        for chosen in itertools.product((True, False), repeat=min(len(unclear), _UNCLEAR)):
            if any(chosen) and not all(chosen):
                counts = itertools.compress(unclear, chosen)
                counted = {at: _multiple_of_n(numbers[at], self.n, self._k) for at in counts}
                constant = {at: Number("is", v) for at, v in numbers.items()}
                yield constant | counted | constants, False, True

    def decided(self) -> tuple[Any, Any]:
        """Return all calls up to the first read of data, and the live calls after it."""
        if self.read is None:
            return (), ()
        calls, read = self.tape.calls, self.read
        after = tuple([calls[at].tokens for at in self.script.live if at > read])
        return tuple([call.tokens for call in calls[: read + 1]]), after

    def _rows_alone(self, row: int, meanings: Meanings) -> Iterator[Rows]:
        """Yield rows for the example alone, once and twice, and with both kinds of draws."""
        for copies in (1, 2):

            def number(call: int, i: int, value: float, m: int = copies) -> float:
                meaning = meanings.get((call, i)) or _exactly_n(value, self.n, self._k)
                return meaning.at(m, value)

            rows = self._rows(torch.full((copies,), row), 0, number=number)
            yield rows
            if self.script.has_free_draws:
                yield replace(rows, whole_draws=True)

    def _differs_alone(self, found: Replayed, rows: Rows, row: int) -> Problem | None:
        """Compare one row's gradient and input with those in the batch; None if they agree."""
        copies = len(rows.units)
        if self._input_apart(found, 0, row) > self._tolerance / 10:
            return Problem(
                "What the model gets for one example is another one when the example is alone. "
                "Prepare each example by itself, in the data set or with public numbers."
            )
        scale = float(copies) if self.declared == "mean" else 1.0
        error = self._error(found, 0, row, scale)
        if error <= self._tolerance or self._is_rounding(rows, row, scale):
            return None
        other, as_other = ("sum", self.n) if self.declared == "mean" else ("mean", copies / self.n)
        if self._error(found, 0, row, as_other) <= self._tolerance:
            return Problem(
                f"loss_reduction={self.declared!r}, but the loss is a {other}. Declare "
                f"loss_reduction={other!r}: the clipping bound depends on it.",
                error,
            )
        return Problem(
            "What one example weighs in the loss depends on how many others there are, or on what "
            f"they are: alone, the gradient of its outputs is another one (by "
            f"{power_of_ten(error)} of it). {self._way_out()}",
            error,
        )

    def _error(self, found: Replayed, position: int, row: int, scale: float) -> float:
        """Return the difference of one row's gradient from the recorded one, relative to it."""
        ours = _row(found.cotangents, position, len(found.cotangents[0]), self._k) * scale
        recorded = self._row_recorded(self._same, row)
        if not bool(recorded.isfinite().all()):
            return 0.0  # such an example contributes nothing
        size = max(float(recorded.norm()), float(self._norms.mean()) * self._scale)
        apart = float((ours - recorded).norm())
        return apart / size if math.isfinite(apart) else math.inf

    def _row_recorded(self, found: Replayed, row: int) -> Tensor:
        """Scaled gradient of an example's outputs in a replay of the recorded batch."""
        return _row(found.cotangents, row, self.n * self._k, self._k) * self._scale

    def _input_apart(self, found: Replayed, position: int, row: int) -> float:
        """Difference of an example's inputs in a replay from the recorded ones."""
        inputs = self._same.inputs
        return _input_apart(found.inputs, inputs, position, row, self.n * self._k, self._k)

    def _is_rounding(self, rows: Rows, row: int, scale: float) -> bool:
        """True if a difference is rounding, that is, vanishes in float64.

        A float64 loss can only be replayed in float32: a recorded gradient below a millionth of the
        replayed one has no significant digits.
        """
        is_wide = any(slot.dtype == torch.float64 for slot in self.tape.outputs)
        other = torch.float32 if is_wide else torch.float64
        try:
            same = self.script.run(self._rows(self._all, row, dtype=other))
            again = self.script.run(replace(rows, dtype=other))
        except ReplayError:
            return False
        recorded = float(self._row_recorded(self._same, row).norm())
        base = self._row_recorded(same, row)
        if is_wide:
            return recorded <= REPEATED * float(base.norm())
        ours = _row(again.cotangents, rows.examined, len(rows.index), self._k) * scale
        return float((ours - base).norm()) <= REPEATED * recorded

    def _first(self, found: Replayed, row: int) -> str:
        """Return "; first in NAME" for the first function whose result for one row changed."""
        for position in self.script.live:
            call = self.tape.calls[position]
            for slot in call.made:
                ours, base = found.values.get(slot.index), self._same.values.get(slot.index)
                sizes = {self.n: 1, self.n * self._k: self._k}  # rows of an example in the tensor
                size = sizes.get(slot.shape[0]) if slot.shape else None
                if ours is None or base is None or size is None:
                    continue
                own = slice(row * size, (row + 1) * size)
                if ours.shape != base.shape or not _is_same(ours[own].tolist(), base[own].tolist()):
                    return f"; first in {name_of(call.function)}"
        return ""


def _kept_on(model: nn.Module, slots: Sequence[Slot]) -> tuple[tuple[int, ...], str] | None:
    """Return shape and name of a tensor that is a plain attribute of a module, or None."""
    held = {
        id(value): name
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    for slot in slots:
        tensor = slot.ref()
        if slot.kind == OTHER and tensor is not None and id(tensor) in held:
            return tuple(slot.shape), held[id(tensor)]
    return None


def _replacements(n: int, row: int, seed: int, k: int) -> Iterator[Rows]:
    """Yield replacements of all examples but one: drawn with repetition, copied, scaled.

    There are n of them, of k rows each.
    """
    rng = np.random.default_rng([seed, row])
    rest = np.array([i for i in range(n) if i != row])

    def around(new: Any) -> Rows:
        index = np.full(n, row)
        index[rest] = new
        return Rows.of(torch.from_numpy(index), row, k)

    drawn = rng.choice(n, size=len(rest))
    if (drawn == rest).all():
        drawn[:] = row
    yield around(drawn)
    yield around(np.full(len(rest), rng.choice(rest)) if n > 2 else row)
    yield Rows.of(torch.arange(n), row, k, others=0.5)
    yield around(row)


def _row(tensors: Sequence[Tensor], position: int, num_rows: int, k: int) -> Tensor:
    """Return the k rows of one example in all tensors, flat, float64."""
    own = slice(position * k, (position + 1) * k)
    rows = [t[own].flatten().double() for t in tensors if t.dim() and len(t) == num_rows]
    return torch.cat(rows) if rows else torch.zeros(1, dtype=torch.float64)


def _row_norms(tensors: Sequence[Tensor], n: int, k: int) -> Tensor:
    """Return (n,) norms of the examples' k rows of all tensors together."""
    norms = [_norms(t, n).cpu() for t in tensors if t.dim() and len(t) == n * k]
    whole = torch.stack(norms).square().sum(0).sqrt() if norms else torch.zeros(n)
    return whole.nan_to_num(0, 0, 0)


def _norms(tensor: Tensor, n: int) -> Tensor:
    """(n k, ...) -> (n,) float64 norms."""
    return torch.linalg.vector_norm(tensor.reshape(n, -1), dim=1, dtype=torch.float64)


def _gap_and_size(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest value of the second; nan counts as 0."""
    a, b = ours.double().nan_to_num(0, 0, 0), theirs.double().nan_to_num(0, 0, 0)
    return float((a - b).abs().max()), float(b.abs().max())


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest value."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if not torch.equal(a, b):
            gap, size = _gap_and_size(a, b)
            worst = max(worst, gap / size if size else (math.inf if gap else 0.0))
    return worst


def _input_apart(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], position: int, row: int, num_rows: int, k: int
) -> float:
    """Return the largest relative difference of the k rows of one example of the model's inputs."""
    here, there = (slice(at * k, (at + 1) * k) for at in (position, row))
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        x, y = (a[here], b[there]) if len(b) == num_rows else (a, b)  # whole, if all rows share it
        if x.shape != y.shape:
            return math.inf
        if x.numel():
            gap, size = _gap_and_size(x, y)
            worst = max(worst, gap / (size or 1.0) if a.is_floating_point() else gap)
    return worst


def _floats(value: Any) -> list[float]:
    """Return the first numbers of a Python value that was read."""
    values = np.asarray(value, dtype=object).flatten().tolist() if value is not None else []
    return [float(v) for v in values[:_MOST_VALUES] if isinstance(v, int | float)]


def _is_same(ours: Any, theirs: Any) -> bool:
    """True if two Python values are equal, with nan equal to nan."""
    try:
        return bool(np.array_equal(np.asarray(ours), np.asarray(theirs), equal_nan=True))
    except (TypeError, ValueError):
        return repr(ours) == repr(theirs)


def sum_of_squares(cotangents: list[Tensor | None], n: int) -> np.ndarray[Any, Any]:
    """Return (n,) squared norms of each example's output gradients; 0 if not finite."""
    total = np.zeros(n)
    for grad in cotangents:
        if grad is not None and grad.dim() and len(grad) == n:
            squares = _norms(grad.detach(), n).square()
            total += torch.nan_to_num(squares, 0, 0, 0).cpu().numpy()
    return total

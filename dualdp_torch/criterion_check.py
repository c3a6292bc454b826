# SPDX-License-Identifier: Apache-2.0
"""Checks that the loss of a training loop is the mean or the sum of one loss per example.

What the loop computes between its loader and its backward is replayed (`dualdp_torch.replay`).
With the other rows of the batch replaced, the gradient of one example's outputs must not move; and
it must be 1 / n of what the same code gives for that example alone, or 1 for a sum. The first test
finds losses that compare, rank or normalise examples, the second what depends on their number. No
table says which functions are safe.

A loop is known by the functions that it calls, with dtypes and axes. Code that is met for the first
time is checked on that very batch; known code on the steps that are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dualdp.exactness import REPEATED, TOLERANCE, ExactnessError, power_of_ten

from .random_state import untouched_generators
from .replay import Replayed, ReplayError, Rows, Script, name_of
from .rules.base import Tensor
from .tape import OTHER, Slot, Tape, slots_of

REDUCTIONS = ("mean", "sum")
#: Loops that are remembered.
REMEMBERED = 256
#: Values of one integer in known code, each of which is checked; further ones are not.
_MOST_VALUES = 16
#: Numbers of a tensor from elsewhere that is compared from batch to batch.
_SMALL = 1 << 16
#: Integers of a loop that are read each for itself, where no reading of all alike will do.
_UNCLEAR = 6
#: Up to so many examples, an integer that equals their number may well be another one.
_FEW = 8
_WAY_OUT = (
    "Expected one loss per example, computed from that example's own row and from public numbers, "
    "and their {declared}."
)
_WEIGHTED = (
    'Weighted means (class weights, ignored targets, masks) need reduction="sum", or each '
    "example's own mean first."
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


class Finding(NamedTuple):
    """What is wrong with a loop.

    Attributes:
        text: one sentence or more, without any number of the data.
        error: relative to the gradient of one example's outputs; inf where nothing was compared.
    """

    text: str
    error: float = math.inf


class Number(NamedTuple):
    """What a Python number in the code of a loop means.

    Attributes:
        kind: "is" a constant, "times" n, "over" n, or "free".
        value: the constant or quotient.
    """

    kind: str
    value: float

    def at(self, m: int, recorded: float) -> float:
        """The number for a batch of m examples."""
        if self.kind == "times":
            return type(recorded)(self.value * m)
        return self.value / m if self.kind == "over" else recorded

    def fits(self, value: float, n: int) -> bool:
        """Whether the number is this one in a batch of n examples."""
        if self.kind == "free":
            return True
        if self.kind == "is":
            return value == self.value
        product = value * n if self.kind == "over" else value
        expected = self.value if self.kind == "over" else self.value * n
        return math.isclose(product, expected, rel_tol=1e-12)


def _exactly_n(value: float, n: int) -> Number:
    """The number of examples, or one over it; else a constant."""
    if n > 1 and value == n:
        return Number("times", 1)
    if n > 1 and isinstance(value, float) and math.isclose(value * n, 1, rel_tol=1e-12):
        return Number("over", 1)
    return Number("is", value)


def _multiple_of_n(value: float, n: int) -> Number:
    """A multiple of the number of examples, or one over it; else a constant."""
    if n > 1 and isinstance(value, int) and value and value % n == 0:
        return Number("times", value // n)
    return _exactly_n(value, n)


def _integer_n(value: float, n: int) -> Number:
    """As `_exactly_n`, of integers alone: 9.0 is more often a constant than a count."""
    return _exactly_n(value, n) if isinstance(value, int) else Number("is", value)


def _constant(value: float, n: int) -> Number:
    return Number("is", value)


def _of_two_batches(value: float, n: int, before: float, then: int) -> Number:
    """What a number means that is one thing in a batch of n, and was another in one of `then`."""
    if value == before:
        return Number("is", value)
    if math.isclose(value * then, before * n, rel_tol=1e-12):
        quotient = value / n
        return Number("times", int(quotient) if isinstance(value, int) else quotient)
    if math.isclose(value * n, before * then, rel_tol=1e-12):
        return Number("over", value * n)
    return Number("free", value)


Meaning = Callable[[float, int], Number]


@dataclass
class Known:
    """Code that was checked.

    Attributes:
        n: examples of the batch on which it was met.
        numbers: (position of a call, position among its numbers) -> value there.
        guess: what they were taken for, as long as nothing told.
        meanings: what they mean, once batches of two sizes told; None before.
        others: further values of integers that were checked.
        read: position of the first call that returned data as Python values, or None.
        foreign: (position of a call, position among its tensors) -> digest of a tensor that no call
            made and that holds no rows.
        decided: what was called up to that read, and what of it mattered afterwards.
    """

    n: int
    numbers: dict[tuple[int, int], float]
    guess: Meaning
    foreign: dict[tuple[int, int], Any] = field(default_factory=dict)
    decided: tuple[Any, Any] = ((), ())
    meanings: dict[tuple[int, int], Number] | None = None
    others: dict[tuple[int, int], set[float]] = field(default_factory=dict)
    read: int | None = None


class CriterionCheck:
    """Checks the code of one loop.

    Args:
        declared: "mean" or "sum".
    """

    def __init__(self, declared: str) -> None:
        self.declared = declared
        self._known: OrderedDict[Any, Known] = OrderedDict()

    # ------------------------------------------------------------------ is a check due?

    def knows(self, tape: Tape) -> bool:
        """Whether this very code was checked before, also with the numbers that it uses now.

        Args:
            tape: with its backward.

        Raises:
            CarriedNumberError: a number changed that may have been computed from data.
        """
        known = self._known.get(tape.signature())
        if known is None:
            return False
        if _foreign(tape, known.foreign) != known.foreign:
            raise CarriedNumberError(_FOREIGN)
        numbers, n = _numbers(tape, known.numbers), tape.n or 0
        if known.meanings is None:
            if n == known.n and numbers == known.numbers:
                return True
            return self._learn(known, numbers, n)
        changed = [at for at, v in numbers.items() if not known.meanings[at].fits(v, n)]
        changed = [at for at in changed if numbers[at] not in known.others.get(at, ())]
        if changed:
            self._refuse_carried(known, changed)
        return not changed

    def _learn(self, known: Known, numbers: dict[tuple[int, int], float], n: int) -> bool:
        """Take from a second batch what numbers mean; whether nothing needs a check for it."""
        if n == known.n:
            changed = [at for at, v in numbers.items() if v != known.numbers[at]]
            self._refuse_carried(known, changed)
            return False
        found = {at: _of_two_batches(v, n, known.numbers[at], known.n) for at, v in numbers.items()}
        self._refuse_carried(known, [at for at, number in found.items() if number.kind == "free"])
        known.meanings = found
        guesses = [known.guess(v, known.n) for v in known.numbers.values()]
        return list(found.values()) == guesses

    def _refuse_carried(self, known: Known, changed: list[tuple[int, int]]) -> None:
        """Refuse numbers that change from batch to batch after data were read."""
        if known.read is not None and any(call > known.read for call, _ in changed):
            raise CarriedNumberError(_CARRIED)

    # ------------------------------------------------------------------ the check

    def check(
        self,
        tape: Tape,
        cotangents: Sequence[Tensor | None],
        rows: Sequence[int],
        model: nn.Module,
        *,
        seed: int = 0,
        is_whole: bool = True,
    ) -> Finding | None:
        """Compare the gradients of some examples' outputs with what they are alone.

        Args:
            tape: of the batch, closed, with its backward.
            cotangents: gradient that each output of the model received.
            rows: examples that are looked at.
            model: whose generators stay as they are.
            seed: decides who replaces the other rows.
            is_whole: replace them in every way, instead of one.

        Returns:
            What is wrong, or None; then the code is known from now on.
        """
        trial = _Trial(tape, cotangents, self.declared, model)
        with untouched_generators(model), torch.enable_grad():
            finding = trial.identity()
            if finding is not None or trial.is_empty:
                return finding
            known = self._known.get(tape.signature())
            meanings = known.meanings if known is not None else None
            for row in rows:
                finding = trial.others(row, seed, is_whole) or trial.alone(row, meanings)
                if finding is not None:
                    return finding
            if trial.carries():
                return Finding(_CARRIED)
            if known is None and self._decides(trial):
                return Finding(_DECIDED)
        self._remember(tape, trial, known)
        return None

    def _decides(self, trial: _Trial) -> bool:
        """Whether other code came after the same reads of data, in a batch before."""
        prefix, after = trial.decided()
        same = [known for known in self._known.values() if prefix and known.decided[0] == prefix]
        return any(known.decided[1] != after for known in same)

    def _remember(self, tape: Tape, trial: _Trial, known: Known | None) -> None:
        """The code was found right, with the numbers that it used."""
        numbers, n = _numbers(tape, trial.script.live), tape.n or 0
        if known is None:
            self._known[tape.signature()] = Known(
                n,
                numbers,
                trial.guess,
                foreign=_foreign(tape, trial.script.live),
                decided=trial.decided(),
                meanings=trial.meanings,
                read=trial.read,
            )
        elif known.meanings is not None:
            for at, value in numbers.items():
                if not known.meanings[at].fits(value, n):
                    values = known.others.setdefault(at, set())
                    values.add(value)
                    if isinstance(value, float) or len(values) > _MOST_VALUES:
                        known.meanings[at] = Number("free", value)
        elif n == known.n and numbers != known.numbers:
            known.meanings = {
                at: known.guess(v, n) if v == known.numbers[at] else Number("free", v)
                for at, v in numbers.items()
            }
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def error_of(finding: Finding, is_known: bool) -> Exception:
    """The error of a finding: of code that was right before, or of code that is new.

    Args:
        finding: what is wrong.
        is_known: the code was checked before, and used since.
    """
    if not is_known:
        return ValueError(finding.text)
    return ExactnessError(
        f"A spot check failed: {finding.text} Nothing was released for this batch. Correct the "
        "loop and begin a new run; the releases before are not vouched for.",
        relative_error=power_of_ten(finding.error),
        unprotected_details={"error": finding.error},
    )


class CarriedNumberError(ValueError):
    """A number of the loss may have been computed from data that were read before."""


def _numbers(tape: Tape, positions: Any) -> dict[tuple[int, int], float]:
    """The numbers of some calls, by their places."""
    calls = sorted({at if isinstance(at, int) else at[0] for at in positions})
    return {(at, i): v for at in calls for i, v in enumerate(tape.calls[at].numbers)}


def _foreign(tape: Tape, positions: Any) -> dict[tuple[int, int], Any]:
    """Digests of the tensors of some calls that nobody saw being made, by their places."""
    found: dict[tuple[int, int], Any] = {}
    for at in sorted({at if isinstance(at, int) else at[0] for at in positions}):
        call = tape.calls[at]
        for i, slot in enumerate(slots_of((call.args, call.kwargs))):
            if slot.kind == OTHER and not slot.requires_grad and tape.row_axis(slot) is None:
                found[at, i] = _digest(slot.value)
    return found


def _digest(tensor: Tensor | None) -> Any:
    """What tells a small tensor from another one; parameters may be trained, and pass."""
    if tensor is None or isinstance(tensor, nn.Parameter) or tensor.numel() > _SMALL:
        return None
    whole = tensor.detach().cpu().contiguous().flatten()
    return tensor.dtype, tuple(tensor.shape), whole.view(torch.uint8).numpy().tobytes()


class _Trial:
    """The replays of one batch.

    Attributes:
        script: the calls that matter.
        is_empty: no example has a gradient, so that nothing can be seen.
        guess: what numbers of the code were taken for.
        meanings: the same, where each number has its own; else None.
        read: as in `Known`.
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
        self.n = tape.n or 0
        values = [slot.value for slot in tape.outputs]
        self._heard = [
            torch.zeros_like(v) if c is None else c  # type: ignore[arg-type]
            for v, c in zip(values, cotangents, strict=True)
        ]
        self._tolerance = TOLERANCE[self._precision()]
        self.is_empty, self._data = False, set[int]()
        self.read: int | None = None
        self.guess: Meaning = _exactly_n
        self.meanings: dict[tuple[int, int], Number] | None = None
        self._scale = float(self.n) if declared == "mean" else 1.0
        self._all = torch.arange(self.n)

    def _precision(self) -> str:
        """The lowest precision that takes part, as a key of `TOLERANCE`."""
        tape = self.tape
        dtypes = {slot.dtype for slot in (*tape.slots, *tape.outputs)}
        dtypes |= {dtype for at in self.script.live for _, dtype in tape.calls[at].autocast}
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        known = [name for name in names if name in TOLERANCE] or ["float32"]
        on_cuda = any(s.value is not None and s.value.is_cuda for s in tape.outputs)
        if on_cuda and torch.backends.cuda.matmul.allow_tf32:
            known.append("tf32")
        return max(known, key=TOLERANCE.__getitem__)

    # ------------------------------------------------------------------ the recorded rows again

    def identity(self) -> Finding | None:
        """Replay the batch itself, which must give what the backward gave."""
        problem = self._not_recorded()
        if problem is None:
            try:
                self._same = self.script.run(Rows(self._all, 0), finds_draws=True)
            except ReplayError as error:
                problem = str(error)
        if problem is None:
            problem = self._differs_from_heard()
        if problem is None:
            return None
        return Finding(
            f"The loss can't be computed again from the batch and the model's outputs, so it can't "
            f"be checked: {problem}. {_WAY_OUT.format(declared=self.declared)}"
        )

    def _not_recorded(self) -> str | None:
        """Why a replay would not be the loop."""
        script = self.script
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

    def _differs_from_heard(self) -> str | None:
        """How the replay differs from the backward."""
        for heard in self._heard:
            if len(heard.shape) and heard.shape[0] != self.n and bool(heard.any()):
                return (
                    f"the model returned a tensor of shape {tuple(heard.shape)}, which is not one "
                    f"row for each of {self.n} examples"
                )
        apart = _apart(self._same.cotangents, self._heard)
        if apart <= self._tolerance:
            norms = self._norms = _row_norms(self._heard, self.n)
            self.is_empty = not bool((norms > 0).any())
            return None
        return (
            "the gradients of the outputs come out otherwise. A gradient hook, an "
            "autograd.Function, or a change in place that nobody sees is between them and the "
            "loss; use clipped_grad_sum"
        )

    # ------------------------------------------------------------------ the other rows replaced

    def others(self, row: int, seed: int, is_whole: bool) -> Finding | None:
        """Replay with the other rows replaced; nothing of this row may change."""
        tried, reason = 0, ""
        ways = list(_replacements(self.n, row, seed))
        for rows in ways if is_whole else ways[seed % 2 :: 2]:
            try:
                found = self.script.run(rows)
            except ReplayError as error:
                reason = str(error)
                continue
            tried += rows.others == 1.0
            finding = self._moved(found, rows, row)
            if finding is not None:
                return finding
        if tried or not is_whole:
            return None
        return Finding(
            f"The loss can't be computed with other rows in the batch: {reason}. "
            + _WAY_OUT.format(declared=self.declared)
        )

    def _moved(self, found: Replayed, rows: Rows, row: int) -> Finding | None:
        """What of one row another replay changed."""
        finding = self._read_otherwise(found)
        if finding is not None:
            return finding
        if _input_apart(found.inputs, self._same.inputs, row, row, self.n) > self._tolerance / 10:
            return Finding(
                "What the model gets for one example depends on the other rows of the batch"
                f"{self._first(found, row)}. Prepare each example by itself, in the data set or "
                "with public numbers.",
            )
        error = self._error(found, row, row, self._scale)
        if error <= self._tolerance or self._is_rounding(rows, row, self._scale):
            return None
        return Finding(
            "The loss mixes the examples of a batch: with the other rows replaced, the gradient of "
            f"one example's outputs is another one (by {power_of_ten(error)} of it"
            f"{self._first(found, row)}). {_WAY_OUT.format(declared=self.declared)} {_WEIGHTED}",
            error,
        )

    def _read_otherwise(self, found: Replayed) -> Finding | None:
        """Python values that came out otherwise on other rows."""
        for position, value in found.reads.items():
            if _is_same(value, self._same.reads.get(position)):
                continue
            if isinstance(value, bool):
                name = name_of(self.tape.calls[position].function)
                return Finding(
                    f"The loop decides by the data of the batch ({name} of a tensor) before its "
                    "loss is complete, so another batch may have another loss. Use torch.where, or "
                    "decide after backward()."
                )
            if not isinstance(value, str):
                self._data.add(position)
                self.read = min(self._data)
        return None

    def carries(self) -> bool:
        """Whether a number of the code is one that was read before it, or made of two of them."""
        if self.read is None:
            return False
        values = [value for at, value in self._same.reads.items() if at in self._data]
        read = [v for value in values if not isinstance(value, list) for v in _floats(value)]
        listed = {v for value in values if isinstance(value, list) for v in _floats(value)}
        later = [at for at in self.script.live if at > self.read]
        numbers = [v for at in later for v in self.tape.calls[at].numbers if type(v) is float]
        made = {*read, *(1 - v for v in read), *(v for v in listed if v % 1)}
        for a in read[:_MOST_VALUES]:
            made |= {a + b for b in read[:_MOST_VALUES]} | {a * b for b in read[:_MOST_VALUES]}
            made |= {a - b for b in read[:_MOST_VALUES]} | {a / b for b in read if b}
        made -= {0.0, 1.0}
        return any(math.isclose(v, m, rel_tol=1e-12) for v in numbers for m in made)

    # ------------------------------------------------------------------ the row alone

    def alone(self, row: int, meanings: dict[tuple[int, int], Number] | None) -> Finding | None:
        """Replay the row alone; its gradient must be 1 / n of that, or 1."""
        reason, worst = "", None
        for guess, each in self._readings(meanings):
            is_guess = guess is _constant or (each is not None and each is not meanings)
            if is_guess and worst is not None and self.n > _FEW:
                continue
            for rows in self._alone(row, guess, each):
                try:
                    found = self.script.run(rows)
                except ReplayError as error:
                    reason = reason or str(error)
                    continue
                finding = self._differs_alone(found, rows, row, len(rows.index))
                if finding is None:
                    self.guess = guess
                    self.meanings = each if meanings is None else None
                    return None
                worst = worst or finding
                if not self.script.has_free_draws:
                    break
        return worst or Finding(
            f"The loss can't be computed for one example alone: {reason}. "
            "Write it for any number of rows, without Python loops over them and without data that "
            "were read out of tensors; or use clipped_grad_sum.",
        )

    def _readings(
        self, meanings: dict[tuple[int, int], Number] | None
    ) -> Iterator[tuple[Meaning, dict[tuple[int, int], Number] | None]]:
        """What the numbers of the code may mean: as learned, all alike, or each for itself."""
        if meanings is not None:
            yield _exactly_n, meanings
        for guess in (_exactly_n, _multiple_of_n, _integer_n, _constant):
            yield guess, None
        numbers = _numbers(self.tape, self.script.live)
        unclear = [at for at, v in numbers.items() if type(v) is int and v and v % self.n == 0]
        for chosen in itertools.product((True, False), repeat=min(len(unclear), _UNCLEAR)):
            if any(chosen) and not all(chosen):
                each = {at: _constant(v, self.n) for at, v in numbers.items()}
                each |= {
                    at: _multiple_of_n(numbers[at], self.n)
                    for at, counts in zip(unclear, chosen, strict=False)
                    if counts
                }
                yield _exactly_n, each

    def decided(self) -> tuple[Any, Any]:
        """All calls up to the first read of data, and those after it that matter; or nothing."""
        if self.read is None:
            return (), ()
        calls, read = self.tape.calls, self.read
        after = tuple([calls[at].tokens for at in self.script.live if at > read])
        return tuple([call.tokens for call in calls[: read + 1]]), after

    def _alone(
        self, row: int, guess: Meaning, meanings: dict[tuple[int, int], Number] | None
    ) -> Iterator[Rows]:
        """The row alone; twice, for code that needs two; with draws of both kinds."""
        for copies in (1, 2):
            number = partial(self._number, copies, guess, meanings)
            rows = Rows(torch.full((copies,), row), 0, number=number)
            yield rows
            if self.script.has_free_draws:
                yield replace(rows, whole_draws=True)

    def _number(
        self,
        m: int,
        guess: Meaning,
        meanings: dict[tuple[int, int], Number] | None,
        call: int,
        i: int,
        value: float,
    ) -> float:
        """A number of the code for m examples."""
        if meanings is not None and (call, i) in meanings:
            return meanings[call, i].at(m, value)
        return guess(value, self.n).at(m, value)

    def _differs_alone(self, found: Replayed, rows: Rows, row: int, copies: int) -> Finding | None:
        """How one row's gradient or input differs where it is alone."""
        if _input_apart(found.inputs, self._same.inputs, 0, row, self.n) > self._tolerance / 10:
            return Finding(
                "What the model gets for one example is another one when the example is alone"
                ". Prepare each example by itself, in the data set or with public numbers."
            )
        scale = float(copies) if self.declared == "mean" else 1.0
        error = self._error(found, 0, row, scale)
        if error <= self._tolerance or self._is_rounding(rows, row, scale):
            return None
        other, as_other = ("sum", self.n) if self.declared == "mean" else ("mean", copies / self.n)
        if self._error(found, 0, row, as_other) <= self._tolerance:
            return Finding(
                f"loss_reduction={self.declared!r}, but the loss is a {other}. Declare "
                f"loss_reduction={other!r}: the clipping bound depends on it.",
                error,
            )
        return Finding(
            "What one example weighs in the loss depends on how many others there are, or on what "
            f"they are: alone, the gradient of its outputs is another one (by "
            f"{power_of_ten(error)} of it). {_WAY_OUT.format(declared=self.declared)} {_WEIGHTED}",
            error,
        )

    # ------------------------------------------------------------------ numbers

    def _error(self, found: Replayed, place: int, row: int, scale: float) -> float:
        """How far the gradient of a row's outputs is from the recorded one, relative to it."""
        ours = _row(found.cotangents, place, len(found.cotangents[0])) * scale
        recorded = _row(self._same.cotangents, row, self.n) * self._scale
        if not bool(recorded.isfinite().all()):
            return 0.0  # such an example contributes nothing
        size = max(float(recorded.norm()), float(self._norms.mean()) * self._scale)
        apart = float((ours - recorded).norm())
        return apart / size if math.isfinite(apart) else math.inf

    def _is_rounding(self, rows: Rows, row: int, scale: float) -> bool:
        """Whether a difference is rounding: in float64 there is none.

        A loss in float64 can only be compared with itself in float32: what is no more than a
        millionth of what it is there has no digits that count.
        """
        is_wide = any(slot.dtype == torch.float64 for slot in self.tape.outputs)
        other = torch.float32 if is_wide else torch.float64
        try:
            same = self.script.run(Rows(self._all, row, dtype=other))
            again = self.script.run(replace(rows, dtype=other))
        except ReplayError:
            return False
        recorded = float((_row(self._same.cotangents, row, self.n) * self._scale).norm())
        base = _row(same.cotangents, row, self.n) * self._scale
        if is_wide:
            return recorded <= REPEATED * float(base.norm())
        ours = _row(again.cotangents, rows.place, len(rows.index)) * scale
        return float((ours - base).norm()) <= REPEATED * recorded

    def _first(self, found: Replayed, row: int) -> str:
        """The first function whose result for one row changed."""
        for position in self.script.live:
            call = self.tape.calls[position]
            for slot in slots_of(call.out):
                ours, base = found.values.get(slot.index), self._same.values.get(slot.index)
                if ours is None or base is None or slot.shape[:1] != (self.n,):
                    continue
                if ours.shape != base.shape or not _is_same(ours[row].tolist(), base[row].tolist()):
                    return f"; first in {name_of(call.function)}"
        return ""


def _kept_on(model: nn.Module, slots: Sequence[Slot]) -> tuple[tuple[int, ...], str] | None:
    """Shape and name of a tensor that is a plain attribute of a module, if one of them is."""
    held = {
        id(value): name
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    for slot in slots:
        name = held.get(id(slot.ref())) if slot.kind == OTHER and slot.ref() is not None else None
        if name is not None:
            return tuple(slot.shape), name
    return None


def _replacements(n: int, row: int, seed: int) -> Iterator[Rows]:
    """Ways to replace all rows but one: drawn with repetition, copied, scaled."""
    rng = np.random.default_rng([seed, row])
    rest = np.array([i for i in range(n) if i != row])

    def around(new: Any) -> Tensor:
        index = np.full(n, row)
        index[rest] = new
        return torch.from_numpy(index)

    drawn = rng.choice(n, size=len(rest))
    if (drawn == rest).all():
        drawn[:] = row
    yield Rows(around(drawn), row)
    yield (
        Rows(around(np.full(len(rest), rng.choice(rest))), row) if n > 2 else Rows(around(row), row)
    )
    yield Rows(torch.arange(n), row, others=0.5)
    yield Rows(around(row), row)


def _row(tensors: Sequence[Tensor], place: int, n: int) -> Tensor:
    """One row of all tensors, flat, float64."""
    rows = [t[place].flatten().double() for t in tensors if t.dim() and len(t) == n]
    return torch.cat(rows) if rows else torch.zeros(1, dtype=torch.float64)


def _row_norms(tensors: Sequence[Tensor], n: int) -> Tensor:
    """(n,) norms of the rows of all tensors together."""
    squares = [
        t.double().reshape(n, -1).square().sum(1).cpu() for t in tensors if t.dim() and len(t) == n
    ]
    squares = [s if s.dim() else s[None] for s in squares]
    norms = torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(n)
    return norms.nan_to_num(0, 0, 0)


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest number."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if b.numel() == 0:
            continue
        a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
        gap, size = float((a - b).abs().max()), float(b.abs().max())
        worst = max(worst, gap / size if size else (math.inf if gap else 0.0))
    return worst


def _input_apart(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], place: int, row: int, n: int
) -> float:
    """The largest relative difference of one row of the model's inputs."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if not b.dim() or len(b) != n or not a.dim() or place >= len(a):
            continue
        x, y = a[place].double().nan_to_num(0, 0, 0), b[row].double().nan_to_num(0, 0, 0)
        if x.shape != y.shape:
            return math.inf
        if x.numel():
            gap, size = float((x - y).abs().max()), float(y.abs().max())
            worst = max(worst, gap / (size or 1.0) if a.is_floating_point() else gap)
    return worst


def _floats(value: Any) -> list[float]:
    """The numbers of a value that was read, if they are few."""
    values = np.asarray(value, dtype=object).flatten().tolist() if value is not None else []
    return [float(v) for v in values[:_MOST_VALUES] if isinstance(v, int | float)]


def _is_same(ours: Any, theirs: Any) -> bool:
    """Whether two Python values are the same, nan equal to nan."""
    try:
        return bool(np.array_equal(np.asarray(ours), np.asarray(theirs), equal_nan=True))
    except (TypeError, ValueError):
        return repr(ours) == repr(theirs)


def sum_of_squares(cotangents: list[Tensor | None], n: int) -> np.ndarray[Any, Any]:
    """(n,) squared norms of what the outputs of each example received; 0 where not finite."""
    total = np.zeros(n)
    for grad in cotangents:
        if grad is not None and grad.dim() and len(grad) == n:
            squares = grad.detach().double().reshape(n, -1).square().sum(1)
            total += torch.nan_to_num(squares, 0, 0, 0).cpu().numpy()
    return total

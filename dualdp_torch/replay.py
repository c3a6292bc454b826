# SPDX-License-Identifier: Apache-2.0
"""Calls the functions of a tape again, on other rows than those it was recorded with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .random_state import TorchState
from .rules.base import Tensor
from .tape import MADE, OTHER, Call, Inputs, Numbers, Slice, Slot, Tape, is_in_place, slots_of


class ReplayError(Exception):
    """A recorded function can't be called again on these rows; the message says which and why."""


@dataclass(frozen=True)
class Rows:
    """The rows on which a tape is replayed.

    Attributes:
        index: (m,) rows of the batch, one for each place; all the same one, unless m = n.
        place: where the row stands that is looked at.
        others: factor by which the floating-point numbers of all other rows are multiplied; where
            it is not 1, their truth values are turned, too.
        number: position of a call, position and value of a number of its arguments -> what stands
            there among m rows.
        dtype: of all floating-point numbers; None for that of the record.
        whole_draws: what is drawn from nothing is the same for every row, whatever its size.
    """

    index: Tensor
    place: int
    others: float = 1.0
    number: Callable[[int, int, float], float] = lambda call, i, value: value
    dtype: torch.dtype | None = None
    whole_draws: bool = False

    def pick(self, tensor: Tensor, axis: int) -> Tensor:
        """These rows of a tensor."""
        rows = tensor.index_select(axis, self.index.to(tensor.device))
        if self.others == 1.0 or not (rows.is_floating_point() or rows.dtype is torch.bool):
            return rows
        if rows.dtype is torch.bool:
            own = torch.arange(len(self.index), device=rows.device) == self.place
            return rows ^ ~own.view(*[-1 if i == axis else 1 for i in range(rows.dim())])
        factors = torch.full((len(self.index),), self.others, dtype=rows.dtype, device=rows.device)
        factors[self.place] = 1.0
        return rows * factors.view(*[-1 if i == axis else 1 for i in range(rows.dim())])

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor in the precision of the replay."""
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.dtype)


@dataclass
class Replayed:
    """What a replay gave.

    Attributes:
        cotangents: of each output of the model, (m, ...), zeros where the loss does not use it.
        inputs: tensors that the model was called with.
        reads: position of a call -> the Python value that it returned.
        draws: position of a call that drew random numbers -> state of the generators before it.
        values: index of a slot -> its tensor at the end.
    """

    cotangents: list[Tensor]
    inputs: list[Tensor]
    reads: dict[int, Any] = field(default_factory=dict)
    draws: dict[int, TorchState] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class Script:
    """The calls of a tape that its losses and the inputs of its model come from.

    Args:
        tape: a closed record with at least one backward.

    Attributes:
        live: positions of those calls, and of calls on what comes from the batch that were in place
            or returned Python values.
        sources: tensors that they take from elsewhere.
        draws: as in `Replayed`, once a first replay has found them.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape, self.n = tape, tape.n or 0
        self.draws: dict[int, TorchState] = {}
        self.sources: list[Slot] = []
        self._given: dict[int, Tensor] = {}
        self._from_rows = self._following()
        self.live = self._live()
        self._cut = self._cut_out()
        held = [slot.value for slot in self.sources if slot.version is not None]
        self._protected = {place for place in map(_storage, held) if place is not None}

    def _following(self) -> set[int]:
        """Slots that what the loader or the model gave leads to."""
        tape = self.tape
        found = {slot.index for slot in tape.slots if tape.may_be_rows(slot)}
        for call in tape.calls:
            if any(slot.index in found for slot in slots_of((call.args, call.kwargs))):
                found |= {slot.index for slot in slots_of(call.out)}
        return found

    def _live(self) -> list[int]:
        """Positions, in order; the sources are found on the way."""
        tape = self.tape
        ends = [slot for b in tape.backwards for slot in (*b.losses, *b.weights) if slot]
        ends += slots_of(tape.inputs.arguments) if tape.inputs is not None else ()
        wanted = {slot.index for slot in ends}
        last = max((b.position for b in tape.backwards), default=0)
        found = list[int]()
        for position, call in reversed(list(enumerate(tape.calls[:last]))):
            outs = [slot.index for slot in slots_of(call.out)]
            used = {slot.index for slot in slots_of((call.args, call.kwargs))}
            makes = any(index in wanted for index in outs)
            is_given = bool(outs) and all(index in self._given for index in outs)
            acts = is_in_place(call.function) or not outs
            if (makes and not is_given) or (acts and used & (wanted | self._from_rows)):
                wanted |= used
                found.append(position)
        self.sources = [s for s in tape.slots if s.index in wanted and s.kind != MADE]
        return found[::-1]

    def _cut_out(self) -> set[int]:
        """Slots that the loop cut out of tensors from elsewhere, with n rows.

        Where nobody handed out a batch, `x[:n]` of a larger tensor begins one.
        """
        tape, of_rows, external, found = self.tape, set[int](), set[int](), set[int]()
        for slot in (*self.sources, *tape.outputs):
            (external if tape.row_axis(slot) is None else of_rows).add(slot.index)
        for position in self.live if tape.rows_by_size else ():
            call = tape.calls[position]
            used = {slot.index for slot in slots_of((call.args, call.kwargs))}
            for slot in slots_of(call.out):
                is_cut = not used & of_rows and bool(used & external)
                is_cut &= slot.shape[:1] == (self.n,)
                found |= {slot.index} if is_cut else set()
                if is_cut or used & of_rows:
                    of_rows.add(slot.index)
                elif used & external:
                    external.add(slot.index)
        return found

    @property
    def has_free_draws(self) -> bool:
        """Whether numbers were drawn from nothing, that may belong to rows or not."""
        return any(not _takes(self.tape.calls[position]) for position in self.draws)

    def strangers(self) -> list[Slot]:
        """Tensors from elsewhere through which a gradient of the losses could go."""
        tape = self.tape
        losses = [loss for backward in tape.backwards for loss in backward.losses]
        met = {slot.index: slot for slot in losses}
        for position in reversed(self.live):
            call = tape.calls[position]
            outs = [*slots_of(call.out), *(slots_of(call.args) if call.out is None else ())]
            if call.grad and any(slot.index in met and slot.requires_grad for slot in outs):
                met |= {slot.index: slot for slot in slots_of((call.args, call.kwargs))}
        found = {i: s for i, s in met.items() if s.kind == OTHER and s.requires_grad}
        return list(found.values())

    # ------------------------------------------------------------------ one replay

    def run(self, rows: Rows, *, finds_draws: bool = False) -> Replayed:
        """Call everything again.

        Args:
            rows: on which.
            finds_draws: the rows are those of the batch; calls that draw are noted.

        Raises:
            ReplayError: a function can't be called on these rows.
        """
        env = {index: rows.cast(rows.pick(rows_, 0)) for index, rows_ in self._given.items()}
        leaves: list[Tensor] = []
        for slot in self.sources:
            env[slot.index] = self._source(slot, rows)
        for slot in self.tape.outputs:
            if slot.index not in env:
                env[slot.index] = self._source(slot, rows)
            leaf = env[slot.index].detach().requires_grad_()
            leaves.append(leaf)
            env[slot.index] = leaf.clone()  # no leaf: it may be changed in place
        found = Replayed([], [], values=env)
        losses: list[tuple[Tensor, Tensor | None]] = []
        stops = {b.position: b for b in self.tape.backwards}
        inputs = self.tape.inputs
        if finds_draws and self.tape.start is not None:
            self.tape.start.put()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entered = inputs is None
            for position in [*self.live, len(self.tape.calls)]:
                if not entered and inputs is not None and position >= inputs.position:
                    entered = True
                    found.inputs = self._inputs(inputs, env, rows)
                    if finds_draws and self.tape.after is not None:
                        self.tape.after.put()
                if position < len(self.tape.calls):
                    self._call(position, env, rows, found, finds_draws)
            for backward in stops.values():
                for loss, weight in zip(backward.losses, backward.weights, strict=True):
                    value = None if weight is None else env[weight.index]
                    losses.append((env[loss.index], value))
            found.cotangents = _gradients(losses, leaves)
        if finds_draws:
            self.draws = found.draws
            self.live = self._live()  # without what leads to rows that were cut out
        return found

    def _source(self, slot: Slot, rows: Rows) -> Tensor:
        """The value of a tensor that the tape did not make, on these rows."""
        assert slot.value is not None
        value, axis = slot.value.detach(), self.tape.row_axis(slot)
        if axis is not None:
            return rows.cast(rows.pick(value, axis))
        value = rows.cast(value)
        return value.clone() if slot.version is None else value

    def _inputs(self, inputs: Inputs, env: dict[int, Tensor], rows: Rows) -> list[Tensor]:
        """The tensors that the model is called with."""
        return [env[slot.index].detach() for slot in slots_of(inputs.arguments)]

    def _call(
        self, position: int, env: dict[int, Tensor], rows: Rows, found: Replayed, finds: bool
    ) -> None:
        """Call one function again."""
        call = self.tape.calls[position]
        at_full_size = position in self.draws and len(rows.index) != self.n
        numbers = iter(
            [
                value if at_full_size else rows.number(position, i, value)
                for i, value in enumerate(call.numbers)
            ]
        )
        full = torch.full((self.n,), rows.place) if at_full_size else None

        def now(slot: Slot) -> Tensor:
            try:
                value = env[slot.index]
            except KeyError:
                raise ReplayError(f"{name_of(call.function)} gives fewer results here") from None
            if full is not None and slot.shape[:1] == (self.n,):
                return value.index_select(0, full.to(value.device))
            return value

        args = filled(call.args, now, numbers, rows.dtype)
        kwargs = filled(call.kwargs, now, numbers, rows.dtype)
        self._protect(call, args)
        before = TorchState.now() if finds else None
        if position in self.draws:
            self.draws[position].put()
        try:
            with _as_then(call, rows.dtype), _replayed(call.generators):
                out = _function(call, rows.dtype)(*args, **kwargs)
        except ReplayError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ReplayError(f"{name_of(call.function)} fails there ({reason})") from error
        drew = bool(call.generators) or (
            before is not None and not before.is_same(TorchState.now())
        )
        if before is not None and drew:
            found.draws[position] = before
        if call.out is None:
            found.reads[position] = out
            return
        is_whole = rows.whole_draws and not _takes(call)
        index = rows.index if at_full_size and not is_whole else None
        for slot, tensor in _pairs(call.out, out):
            if index is not None and slot.shape[:1] == (self.n,):
                tensor = tensor.index_select(0, index.to(tensor.device))
            env[slot.index] = rows.cast(tensor)
            if finds and slot.index in self._cut and slot.index not in self._given:
                self._given[slot.index] = tensor.detach().clone()

    def _protect(self, call: Call, args: Any) -> None:
        """Refuse to change a tensor of the loop's own."""
        if not is_in_place(call.function) and "out" not in call.kwargs:
            return
        target = args[0] if args else None
        if torch.is_tensor(target) and _storage(target) in self._protected:
            raise ReplayError(
                f"{name_of(call.function)} writes to a tensor that is kept from step to step"
            )


def _takes(call: Call) -> bool:
    """Whether a call takes a tensor."""
    return next(slots_of((call.args, call.kwargs)), None) is not None


def _storage(tensor: Tensor | None) -> int | None:
    """Where the numbers of a tensor lie, if it has a storage of its own."""
    if tensor is None or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def _gradients(losses: list[tuple[Tensor, Tensor | None]], leaves: list[Tensor]) -> list[Tensor]:
    """The gradients of the losses' sum, zeros where a leaf is not used."""
    live = [(loss, weight) for loss, weight in losses if loss.requires_grad]
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if live and leaves:
        weights = [torch.ones_like(loss) if w is None else w.to(loss) for loss, w in live]
        totals = [loss for loss, _ in live]
        found = torch.autograd.grad(totals, leaves, weights, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return [torch.zeros_like(leaf) if g is None else g.detach() for leaf, g in pairs]


_CAST = {torch.float32: torch.Tensor.float, torch.float64: torch.Tensor.double}
_CASTS = {*_CAST.values(), torch.Tensor.half, torch.Tensor.bfloat16}


def _function(call: Call, dtype: torch.dtype | None) -> Callable[..., Any]:
    """What is called; in a replay in another precision, casts are to that one."""
    casts = dtype is not None and call.function in _CASTS
    function: Callable[..., Any] = _CAST[dtype] if casts else call.function  # type: ignore[index]
    return function


@contextlib.contextmanager
def _as_then(call: Call, dtype: torch.dtype | None) -> Iterator[None]:
    """Gradients and autocast as they were when the call was recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.grad))
        on = dict(call.autocast) if dtype is None else {}
        for device in ("cpu", "cuda"):
            if device in on or torch.is_autocast_enabled(device):
                mode = torch.autocast(device, dtype=on.get(device), enabled=device in on)
                stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _replayed(generators: list[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Generators among the arguments draw again what they drew; then they are as they were."""
    now = [(generator, generator.get_state()) for generator, _ in generators]
    for generator, state in generators:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)


def filled(
    value: Any,
    now: Callable[[Slot], Any],
    numbers: Iterator[float],
    dtype: torch.dtype | None = None,
) -> Any:
    """A recorded argument with tensors and numbers in their places.

    Args:
        value: as it was recorded.
        now: slot -> tensor.
        numbers: of the call, in order.
        dtype: in the place of all floating-point types, if it is one.
    """
    kind = type(value)
    if kind is Slot:
        return now(value)
    if kind is int or kind is float:
        return next(numbers)
    if kind is Numbers:
        next(numbers)
        return value.values
    if kind is Slice:
        return slice(*[filled(v, now, numbers, dtype) for v in value])
    if kind is tuple or kind is list:
        return kind([filled(v, now, numbers, dtype) for v in value])
    if kind is dict:
        return {name: filled(v, now, numbers, dtype) for name, v in value.items()}
    is_float = kind is torch.dtype and value.is_floating_point
    return dtype if dtype is not None and is_float else value


def _pairs(made: Any, out: Any) -> Iterator[tuple[Slot, Tensor]]:
    """The slots of a recorded result, with the tensors that stand there now."""
    if type(made) is Slot:
        yield made, out
    elif isinstance(made, tuple) and isinstance(out, tuple | list):
        for slot, part in zip(made, out, strict=False):
            yield from _pairs(slot, part)


def name_of(function: Any) -> str:
    """The name of a torch function as people write it."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)

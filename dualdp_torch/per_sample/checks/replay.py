# SPDX-License-Identifier: Apache-2.0
"""Replay of a tape: its recorded functions, called again on other rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dualdp_torch.per_sample.checks.tape import (
    GRAD,
    MADE,
    OTHER,
    Backward,
    Call,
    Numbers,
    Slice,
    Slot,
    Tape,
    autocast_as,
    is_in_place,
    slots_of,
    storage_of,
)
from dualdp_torch.per_sample.parameter_use import comes_from
from dualdp_torch.per_sample.random_state import TorchState
from dualdp_torch.rules.base import Tensor

_THROUGH_MODEL = (
    "a gradient of an input enters it that went through the recorded forward. Compute it by "
    "torch.autograd.grad(loss, x) under engine.pause(), or call clipped_grad_sum"
)


class ReplayError(Exception):
    """A recorded function can't be called on these rows; the message names it and the reason."""


@dataclass(frozen=True)
class Rows:
    """Rows on which a tape is replayed.

    Attributes:
        index: (m,) row of the batch for each position, in whole units; all of the same unit, unless
            m = n.
        examined: position of the examined unit, counted in units.
        rows_per_unit: int, K of the tape.
        others: factor for the floating-point values of all other rows; if it is not 1, their bool
            values are negated, too.
        number: function from a call's position, the index of a number among its arguments, and its
            recorded value to the value for m rows.
        dtype: dtype of all floating-point values; None for the recorded ones.
        whole_draws: bool, True if results drawn without a tensor argument are not indexed by row.
    """

    index: Tensor
    examined: int
    rows_per_unit: int = 1
    others: float = 1.0
    number: Callable[[int, int, float], float] = lambda call, i, value: value
    dtype: torch.dtype | None = None
    whole_draws: bool = False

    @staticmethod
    def of(units: Tensor, examined: int, rows_per_unit: int, **options: Any) -> Rows:
        """Return the rows of these units, (u,), each with all K of its rows."""
        index = (units[:, None] * rows_per_unit + torch.arange(rows_per_unit)).flatten()
        return Rows(index, examined, rows_per_unit, **options)

    @property
    def units(self) -> Tensor:
        """Unit of the batch for each unit of positions."""
        return self.index[:: self.rows_per_unit] // self.rows_per_unit

    def pick(self, tensor: Tensor, axis: int) -> Tensor:
        """Return these rows of a tensor, those of other examples scaled, or flags negated."""
        rows = tensor.index_select(axis, self.index.to(tensor.device))
        if self.others == 1.0 or not (rows.is_floating_point() or _are_flags(rows)):
            return rows
        shape = [-1 if i == axis else 1 for i in range(rows.dim())]
        positions = torch.arange(len(self.index), device=rows.device)
        own = positions // self.rows_per_unit == self.examined
        if not rows.is_floating_point():
            return rows ^ (~own.view(shape)).to(rows.dtype)
        factors = torch.full((len(self.index),), self.others, dtype=rows.dtype, device=rows.device)
        return rows * factors.masked_fill_(own, 1.0).view(shape)

    def cast(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the precision of the replay."""
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.dtype)


def _are_flags(tensor: Tensor) -> bool:
    """True for a mask: bools, or integers that are 0 or 1."""
    if tensor.dtype is torch.bool:
        return True
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and bool(((tensor == 0) | (tensor == 1)).all())


@dataclass
class Replayed:
    """Results of a replay.

    Attributes:
        cotangents: gradient of each output of the model, (m, ...), zeros where the loss ignores it.
        inputs: tensors that the model was called with.
        reads: mapping from the position of a call to the Python value that it returned.
        draws: mapping from the position of a call that drew random numbers to the generators' state
            before it.
        values: mapping from the index of a slot to its last tensor.
    """

    cotangents: list[Any]
    inputs: list[Tensor]
    reads: dict[int, Any] = field(default_factory=dict)
    draws: dict[int, TorchState] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class Script:
    """Calls of a closed tape on which its losses and the model's inputs depend.

    Attributes:
        live: positions of those calls, and of in-place calls and calls returning Python values that
            act on data of the batch.
        public: positions of calls that make inputs of the model to which no row leads, such as a
            generator's images: any batch has these, row by row, so they are not made again.
        sources: slots read by these calls that no call made.
        draws: generator states by call, see `Replayed`; empty before the first replay.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape, self.n = tape, tape.n or 0
        self.draws: dict[int, TorchState] = {}
        self.sources: list[Slot] = []
        self._from_rows = self._following()
        self._given, self.public = self._public_inputs()
        self.live = self._live()
        self._cut = self._cut_out()
        held = [slot.value for slot in self.sources if slot.version is not None]
        self._protected = {address for address in map(storage_of, held) if address is not None}

    def _following(self) -> set[int]:
        """Return the slots that depend on tensors of the loader or the model."""
        tape = self.tape
        found = {slot.index for slot in tape.slots if tape.may_be_rows(slot)}
        for call in tape.calls:
            if any(slot.index in found for slot in read_by(call)):
                found |= {slot.index for slot in call.made}
        return found

    def _public_inputs(self) -> tuple[dict[int, Tensor], list[int]]:
        """Return the value of each input made of draws and parameters alone, and the calls for it.

        Data of the batch that are written into other tensors lead to all that share their memory.
        """
        tape, found, wanted = self.tape, dict[int, Tensor](), set[int]()
        written = {
            call.taken[0].storage
            for call in tape.calls
            if is_in_place(call.function) and any(s.index in self._from_rows for s in call.taken)
        }
        for slot in (s for forward in tape.forwards for s in slots_of(forward.arguments)):
            value = slot.ref()
            if value is None or slot.shape[:1] != (self.n,) or slot.index in self._from_rows:
                continue
            makes, indices = self._makers(slot)
            ancestors = [tape.slots[index] for index in indices]
            is_public = all(s.kind == MADE or isinstance(s.value, nn.Parameter) for s in ancestors)
            if is_public and {s.storage for s in ancestors}.isdisjoint(written):
                found[slot.index] = value.detach()
                wanted |= makes
        return found, sorted(wanted)

    def _makers(self, slot: Slot) -> tuple[set[int], set[int]]:
        """Return positions of the calls that lead to a tensor, and the slots on the way.

        Changes of parameters in place, by an optimizer of theirs, are left out.
        """
        found, wanted = set[int](), {slot.index}
        for position, call in reversed(list(enumerate(self.tape.calls))):
            acts = is_in_place(call.function) and any(
                s.index in wanted and not isinstance(s.value, nn.Parameter) for s in call.taken[:1]
            )
            if acts or any(s.index in wanted for s in call.made if s.kind == MADE):
                found.add(position)
                wanted |= {s.index for s in read_by(call)}
        return found, wanted

    def _live(self) -> list[int]:
        """Return the positions of the live calls in order, and set `sources`."""
        tape = self.tape
        ends = [slot for b in tape.backwards for slot in (*b.losses, *b.weights) if slot]
        for forward in tape.forwards:
            ends += slots_of(forward.arguments)
        wanted = {slot.index for slot in ends}
        leading = set(wanted)  # leads to the losses themselves
        last = max((b.position for b in tape.backwards), default=0)
        found = list[int]()
        for position, call in reversed(list(enumerate(tape.calls[:last]))):
            outs = [slot.index for slot in call.made]
            used = {slot.index for slot in call.taken}
            makes = any(index in wanted for index in outs)
            is_given = bool(outs) and all(index in self._given for index in outs)
            acts = is_in_place(call.function) or not outs
            target = {slot.index for slot in slots_of((call.args[:1], call.kwargs))}
            if is_collective(call.function):  # a value for the log is not sent again
                acts = bool(target & leading)
            elif leading.intersection(outs) or (is_in_place(call.function) and target & leading):
                leading |= used
            if (makes and not is_given) or (acts and used & (wanted | self._from_rows)):
                wanted |= used
                found.append(position)
        self.sources = [s for s in tape.slots if s.index in wanted and s.kind != MADE]
        return found[::-1]

    def _cut_out(self) -> set[int]:
        """Return the slots with n rows that the loop cut out of tensors from elsewhere.

        Without a loader, `x[:n]` of a larger tensor is such a batch.
        """
        tape, of_rows, external, found = self.tape, set[int](), set[int](), set[int]()
        for slot in (*self.sources, *tape.outputs):
            (external if tape.row_axis(slot) is None else of_rows).add(slot.index)
        for position in self.live if tape.rows_by_size else ():
            call = tape.calls[position]
            used = {slot.index for slot in call.taken}
            for slot in call.made:
                is_cut = not used & of_rows and bool(used & external)
                is_cut &= slot.shape[:1] == (self.n,)
                found |= {slot.index} if is_cut else set()
                if is_cut or used & of_rows:
                    of_rows.add(slot.index)
                elif used & external:
                    external.add(slot.index)
        return found

    @property
    def examined(self) -> list[int]:
        """Positions of all calls whose numbers and constants must not carry data."""
        return sorted({*self.live, *self.public})

    @property
    def has_free_draws(self) -> bool:
        """True if a call without tensor arguments draws numbers, per row or for the batch."""
        return any(not self.tape.calls[position].taken for position in self.draws)

    def strangers(self) -> list[Slot]:
        """Return differentiable tensors of unknown origin in the graph of the losses."""
        tape = self.tape
        losses = [loss for backward in tape.backwards for loss in backward.losses]
        met = {slot.index: slot for slot in losses}
        for position in reversed(self.live):
            call = tape.calls[position]
            outs = [*call.made, *(slots_of(call.args) if call.out is None else ())]
            if call.grad and any(slot.index in met and slot.requires_grad for slot in outs):
                met |= {slot.index: slot for slot in call.taken}
        found = {i: s for i, s in met.items() if s.kind == OTHER and s.requires_grad}
        return list(found.values())

    def run(self, rows: Rows, *, finds_draws: bool = False) -> Replayed:
        """Replay all live calls; if `rows` is the recorded batch, note which of them draw.

        Raises:
            ReplayError: a function can't be called on these rows.
        """
        tape = self.tape
        env = {index: rows.cast(rows.pick(given, 0)) for index, given in self._given.items()}
        leaves: list[Tensor] = []
        calls = [self.tape.calls[at] for at in self.examined]
        is_written = any(is_in_place(call.function) or "out" in call.kwargs for call in calls)
        for slot in self.sources:
            env[slot.index] = self._source(slot, rows)
        for slot in tape.outputs:
            if slot.index not in env:
                env[slot.index] = self._source(slot, rows)
            leaf = env[slot.index].detach().requires_grad_()
            leaves.append(leaf)
            env[slot.index] = leaf.clone() if is_written else leaf  # a leaf can't be changed
        found = Replayed([None] * len(leaves), [], values=env)
        entered, left, backwards = list(tape.forwards), list(tape.states), list(tape.backwards)
        if finds_draws and tape.start is not None:
            tape.start.put()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for position in [*(self.examined if finds_draws else self.live), len(tape.calls)]:
                while entered and position >= entered[0].position:
                    arguments = slots_of(entered.pop(0).arguments)
                    found.inputs += [env[slot.index].detach() for slot in arguments]
                while left and position >= left[0][0]:
                    _, state = left.pop(0)
                    if finds_draws:
                        state.put()
                while backwards and position >= backwards[0].position:  # before later changes
                    _add_gradients(backwards.pop(0), env, leaves, found.cotangents)
                if position in self.public:
                    self._draw_again(tape.calls[position], env)
                elif position < len(tape.calls):
                    self._call(position, env, rows, found, finds_draws)
        for i, leaf in enumerate(leaves):
            if found.cotangents[i] is None:
                found.cotangents[i] = torch.zeros_like(leaf)
        if finds_draws:
            self.draws = found.draws
            self.live = self._live()  # without what leads to rows that were cut out
        return found

    def _source(self, slot: Slot, rows: Rows) -> Tensor:
        """Return the value of a source tensor on these rows."""
        assert slot.value is not None
        value, axis = slot.value.detach(), self.tape.row_axis(slot)
        if axis is not None:
            return rows.cast(rows.pick(value, axis))
        value = rows.cast(value)
        return value.clone() if slot.version is None else value

    def _call(
        self, position: int, env: dict[int, Tensor], rows: Rows, found: Replayed, finds: bool
    ) -> None:
        """Call one function again, and store its results."""
        call = self.tape.calls[position]
        if is_collective(call.function):
            raise ReplayError(f"{name_of(call.function)} brings in examples of other processes")
        if call.function == GRAD:
            raise ReplayError(_THROUGH_MODEL)
        at_full_size = position in self.draws and len(rows.index) != self.n
        numbers = call.numbers
        if not at_full_size:
            numbers = [rows.number(position, i, value) for i, value in enumerate(numbers)]
        in_order = iter(numbers)
        full = None
        if at_full_size:
            full = Rows.of(torch.full((self.tape.num_units,), rows.examined), 0, rows.rows_per_unit)

        def now(slot: Slot) -> Tensor:
            try:
                value = env[slot.index]
            except KeyError:
                raise ReplayError(f"{name_of(call.function)} gives fewer results here") from None
            return self._of(slot, value, full)

        args, kwargs = _arguments(call, now, in_order, rows.dtype)
        self._protect(call, args)
        before = TorchState.now() if finds else None
        if position in self.draws:
            self.draws[position].put()
        try:
            function = call.function
            if rows.dtype is not None and function in _CASTS:
                function = _CAST[rows.dtype]
            with _as_then(call, rows.dtype), _replayed(call.generators):
                out = function(*args, **kwargs)
        except ReplayError:
            raise
        except Exception as error:
            if call.function is torch.autograd.grad:
                raise ReplayError(_THROUGH_MODEL) from error
            reason = str(error).strip().split("\n")[0]
            raise ReplayError(f"{name_of(call.function)} fails there ({reason})") from error
        if before is not None and (call.generators or not before.is_same(TorchState.now())):
            found.draws[position] = before
        if call.out is None:
            found.reads[position] = out
            return
        is_whole = rows.whole_draws and not call.taken
        for slot, tensor in _pairs(call.out, out):
            tensor = self._of(slot, tensor, rows if at_full_size and not is_whole else None)
            env[slot.index] = rows.cast(tensor)
            if finds and slot.index in self._cut and slot.index not in self._given:
                self._given[slot.index] = tensor.detach().clone()

    def _of(self, slot: Slot, value: Tensor, rows: Rows | None) -> Tensor:
        """Return these rows, or units, of a value whose slot had one for each; None for all."""
        sizes = {self.tape.num_units: "units", self.n: "index"}
        name = sizes.get(slot.shape[0]) if slot.shape else None
        if rows is None or name is None:
            return value
        index: Tensor = getattr(rows, name)
        return value.index_select(0, index.to(value.device))

    def _draw_again(self, call: Call, env: dict[int, Tensor]) -> None:
        """Call a function that makes a public input again, for the numbers that it draws."""

        def now(slot: Slot) -> Any:
            kept: Any = slot.value
            return env[slot.index] if slot.index in env else kept.clone()

        with contextlib.suppress(Exception), _replayed(call.generators):
            for slot, tensor in _pairs(call.out, repeated(call, now)):
                if slot.index not in self._given:
                    env[slot.index] = tensor

    def _protect(self, call: Call, args: Any) -> None:
        """Refuse an in-place call on a tensor that the loop keeps between steps."""
        if not is_in_place(call.function) and "out" not in call.kwargs:
            return
        target = args[0] if args else None
        if torch.is_tensor(target) and storage_of(target) in self._protected:
            raise ReplayError(
                f"{name_of(call.function)} writes to a tensor that is kept from step to step"
            )


def read_by(call: Call) -> list[Slot]:
    """Return the slots that a call reads: all it takes, but for statistics that are only updated.

    Batch norm in training reads those of the batch, not the running ones.
    """
    if call.function is not F.batch_norm or not _training(*call.args, **call.kwargs):
        return call.taken
    kept = [a for i, a in enumerate(call.args) if i not in (1, 2)]
    named = {k: v for k, v in call.kwargs.items() if not k.startswith("running_")}
    return list(slots_of((kept, named)))


def _add_gradients(
    backward: Backward, env: dict[int, Tensor], leaves: list[Tensor], totals: list[Any]
) -> None:
    """Add the gradients of one backward's weighted losses to those of the leaves."""
    pairs = [
        (env[loss.index], w) for loss, w in zip(backward.losses, backward.weights, strict=True)
    ]
    live = [(loss, w) for loss, w in pairs if loss.requires_grad]
    if not live or not leaves:
        return
    weights = [torch.ones_like(loss) if w is None else env[w.index].to(loss) for loss, w in live]
    losses = [loss for loss, _ in live]
    found = torch.autograd.grad(losses, leaves, weights, retain_graph=True, allow_unused=True)
    for i, grad in enumerate(found):
        if grad is not None:
            totals[i] = grad.detach() if totals[i] is None else totals[i] + grad.detach()


def _training(*args: Any, training: bool = False, **_: Any) -> bool:
    """True if a call of batch norm, with these arguments, is in training."""
    return bool(args[5] if len(args) > 5 else training)


_CAST = {torch.float32: torch.Tensor.float, torch.float64: torch.Tensor.double}
_CASTS = {*_CAST.values(), torch.Tensor.half, torch.Tensor.bfloat16}


@contextlib.contextmanager
def _as_then(call: Call, dtype: torch.dtype | None) -> Iterator[None]:
    """Context with the call's recorded grad mode and autocast."""
    with torch.set_grad_enabled(call.grad), autocast_as(call.autocast if dtype is None else ()):
        yield


@contextlib.contextmanager
def _replayed(generators: list[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Context in which generators among the arguments draw the recorded numbers; restores them."""
    now = [(generator, generator.get_state()) for generator, _ in generators]
    for generator, state in generators:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)


def _arguments(
    call: Call, now: Callable[[Slot], Any], numbers: Iterator[float], dtype: torch.dtype | None
) -> tuple[Any, Any]:
    """Return positional and named arguments of a recorded call."""
    args = _filled(call.args, now, numbers, dtype)
    return args, _filled(call.kwargs, now, numbers, dtype)


def repeated(call: Call, now: Callable[[Slot], Any]) -> Any:
    """Return the result of a recorded call on other tensors, given the tensor of each slot."""
    args, kwargs = _arguments(call, now, iter(call.numbers), None)
    with _as_then(call, None):
        return call.function(*args, **kwargs)


def _filled(
    value: Any, now: Callable[[Slot], Any], numbers: Iterator[float], dtype: torch.dtype | None
) -> Any:
    """Fill tensors and the call's numbers into a recorded argument; `dtype` replaces float ones."""
    kind = type(value)
    if kind is Slot:
        return now(value)
    if kind is int or kind is float:
        return next(numbers)
    if kind is Numbers:
        next(numbers)
        return value.values
    if kind is Slice:
        return slice(*[_filled(v, now, numbers, dtype) for v in value])
    if kind is tuple or kind is list:
        return kind([_filled(v, now, numbers, dtype) for v in value])
    if kind is dict:
        return {name: _filled(v, now, numbers, dtype) for name, v in value.items()}
    is_float = kind is torch.dtype and value.is_floating_point
    return dtype if dtype is not None and is_float else value


def _pairs(made: Any, out: Any) -> Iterator[tuple[Slot, Tensor]]:
    """Yield each slot of a recorded result with its new tensor."""
    if type(made) is Slot:
        yield made, out
    elif isinstance(made, tuple) and isinstance(out, tuple | list):
        for slot, part in zip(made, out, strict=False):
            yield from _pairs(slot, part)


def is_collective(function: Any) -> bool:
    """True if a function sends tensors between processes, judged by its module."""
    return comes_from(function, "torch.distributed")


def name_of(function: Any) -> str:
    """Return the name of a torch function; for an attribute, its name."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)

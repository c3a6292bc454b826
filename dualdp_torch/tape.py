# SPDX-License-Identifier: Apache-2.0
"""A record of the torch functions that a training loop calls outside its model.

Between the hand-out of a batch and the backward, a loop prepares inputs, calls its model and
computes a loss. The tape writes down each function with its arguments, by reference: a tensor that
another recorded function made is known by its number only, so that the record keeps no memory but
that of the batch, the model's outputs and constants. `dualdp_torch.replay` calls the functions
again on other rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _pytree as pytree

from .random_state import TorchState
from .rules.base import Tensor

#: Where a tensor of the record comes from.
ROW, OUTPUT, OTHER, MADE = "row", "output", "other", "made"
_DEPTH = 5  # of objects that are opened in search of the batch's tensors
_LONG = 64  # numbers of a list that are kept apart; a longer one counts as one
_MOST = 256  # calls of a record after which those without a trace are dropped
_UNUSED = 1024  # calls after which a batch whose loader is gone is given up
#: Functions that begin a backward, with their arguments up to the weights of the losses.
_BACKWARDS: dict[Any, tuple[str, ...]] = {
    torch.Tensor.backward: ("self", "gradient"),
    torch.autograd.backward: ("tensors", "grad_tensors"),
    torch.autograd.grad: ("outputs", "inputs", "grad_outputs"),
}


def _attribute(name: str) -> Any:
    return getattr(torch.Tensor, name)


#: Functions that tell nothing of a tensor's numbers and make no tensor of them.
_UNSEEN = {
    *(
        _attribute(name).__get__
        for name in (
            *("requires_grad", "is_leaf", "grad_fn", "device", "dtype", "layout", "ndim"),
            *("is_cuda", "is_cpu", "is_meta", "is_sparse", "retains_grad", "output_nr", "_version"),
        )
    ),
    *(torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
    *(torch.Tensor.is_contiguous, torch.Tensor.get_device, torch.Tensor.data_ptr),
    *(torch.is_floating_point, torch.is_complex, torch.Tensor.__repr__, torch.Tensor.__format__),
    *(torch.Tensor.register_hook, torch.Tensor.retain_grad, _attribute("grad").__set__),
    *(torch._C._set_grad_enabled, torch.ops.profiler._record_function_enter_new._op),
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_GRAD = _attribute("grad").__get__
#: Functions whose weights depend on whether a target has this value, with their arguments.
_IGNORING = {
    function: ("input", "target", "weight", "size_average", "ignore_index")
    for function in (nn.functional.cross_entropy, nn.functional.nll_loss)
}


class Slot:
    """A tensor of the record.

    Attributes:
        index: its number.
        kind: ROW, OUTPUT or OTHER where the tape did not make it, else MADE.
        value: the tensor, or a copy of what it was before it was changed in place; None of MADE.
        version: of the tensor when it was met first; None of a copy, and of MADE.
        shape: when it was met first.
        dtype: of its numbers.
        requires_grad: when it was met first.
        is_late: it was met after data of the batch had been read into lists or arrays.
    """

    __slots__ = (
        *("dtype", "index", "is_late", "kind", "ref", "requires_grad", "shape", "value"),
        "version",
    )

    def __init__(self, index: int, kind: str, tensor: Tensor, is_late: bool = False) -> None:
        self.index, self.kind, self.is_late = index, kind, is_late
        self.ref = weakref.ref(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.requires_grad = tensor.requires_grad
        self.value: Tensor | None = None if kind == MADE else tensor
        has_version = kind != MADE and not tensor.is_inference()
        self.version: int | None = tensor._version if has_version else None

    def signature(self, n: int) -> tuple[Any, ...]:
        """Kind, dtype and axes, each of them n, 1 or other."""
        axes = tuple(["n" if size == n else 1 if size == 1 else 0 for size in self.shape])
        return self.kind, self.dtype, self.requires_grad, axes

    def is_stale(self) -> bool:
        """Whether the tensor was changed since it was met, without a copy of what it was."""
        return self.version is not None and self._now != self.version

    @property
    def _now(self) -> int:
        """The version of a tensor that the tape did not make."""
        assert self.value is not None
        return self.value._version

    def keep(self) -> None:
        """Copy the tensor before it is changed, if that was not done."""
        if self.version is not None and self.value is not None and not self.is_stale():
            self.value, self.version = self.value.detach().clone(), None


class Call(NamedTuple):
    """One recorded call.

    Attributes:
        function: what was called.
        args: positional arguments, with a `Slot` in the place of each tensor.
        kwargs: named arguments, likewise.
        out: the result, likewise.
        grad: whether gradients were on.
        autocast: device type -> dtype, where autocast was on.
        numbers: plain Python numbers among the arguments, in order.
        tokens: what is the same when the same code runs on another batch.
        generators: generators among the arguments, with their states before the call.
    """

    function: Any
    args: Any
    kwargs: Any
    out: Any
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    numbers: list[float]
    tokens: tuple[Any, ...]
    generators: list[tuple[torch.Generator, Tensor]]


class Backward(NamedTuple):
    """One recorded backward that reached the model.

    Attributes:
        losses: the scalars.
        weights: gradients that they were given, or None each.
        position: number of calls before it.
    """

    losses: tuple[Slot, ...]
    weights: tuple[Slot | None, ...]
    position: int


class Inputs(NamedTuple):
    """The arguments of the recorded forward.

    Attributes:
        arguments: (positional, named), with slots.
        numbers: as in `Call`.
        tokens: as there.
        position: number of calls before it.
    """

    arguments: Any
    numbers: list[float]
    tokens: tuple[Any, ...]
    position: int


class Tape(TorchFunctionMode):
    """Writes down torch functions while it is open; see `begin`, `enter_model`, `leave_model`.

    Attributes:
        n: examples of the batch; None until the model is entered, where nobody said it before.
        calls: recorded calls, in order.
        slots: tensors of the record.
        inputs: of the recorded forward; None before it.
        outputs: slots of the model's outputs that gradients are asked for.
        backwards: recorded ones.
        start: state of torch's generators when the batch was handed out.
        after: their state when the model was left.
        rows_by_size: tensors of unknown origin with n on axis 0 count as rows of the batch.
        in_backward: a backward that is seen is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_open, self._is_inside, self._above = False, False, 0
        self._forget()

    def _forget(self) -> None:
        self.n: int | None = None
        self.calls: list[Call] = []
        self.slots: list[Slot] = []
        self.outputs: list[Slot] = []
        self.backwards: list[Backward] = []
        self.inputs: Inputs | None = None
        self.start: TorchState | None = None
        self.after: TorchState | None = None
        self.rows_by_size = True
        self._rows: dict[int, Tensor] = {}
        self._ids: dict[int, Slot] = {}
        self._most, self._is_last, self._was_read = _MOST, False, False
        self._reached = self.in_backward = False
        self._losses: list[Tensor] = []
        self._ignored: list[Tensor] = []

    # ------------------------------------------------------------------ the life of a record

    def begin(self, batch: Any = None, n: int | None = None) -> None:
        """Forget everything and record from now on.

        Args:
            batch: what the loader hands out; None where nobody knows it.
            n: its examples.
        """
        self.end()
        self._forget()
        self.n, self.start = n, TorchState.now()
        if batch is not None:
            found = _Opened()
            found.open(batch, _DEPTH)
            self._rows = {id(t): t for t in found.tensors}
            self.rows_by_size = found.has_data or not found.tensors
        self._is_open, self._is_inside, self._above = True, False, 0
        join(self, 0)

    @property
    def is_open(self) -> bool:
        """Whether a batch is being recorded, also while its model runs."""
        return self._is_open

    def end(self) -> None:
        """Record no more; what was recorded stays."""
        if self._is_open:
            self._is_open = False
            lift(self)

    def leave_loader(self) -> None:
        """The loader is gone; only a forward on its last batch, as it is, begins a record again."""
        self._is_last = True
        self.end()

    def clear(self) -> None:
        """Record no more and free everything."""
        self.end()
        self._forget()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing is recorded inside; afterwards recording goes on, unless it ended there."""
        above = lift(self) if self._is_open else None
        if above is not None:
            self._above = above
        try:
            yield
        finally:
            if above is not None and self._is_open and not self._is_inside:
                lift(self)
                join(self, above)

    def enter_model(self, args: Any, kwargs: Any, n: int) -> None:
        """The recorded forward begins: its functions are not the loop's.

        Args:
            args: positional arguments of the model.
            kwargs: named ones.
            n: examples.
        """
        if self.start is None:
            return
        self._above = lift(self) or self._above
        self._is_open = self._is_inside = True
        self.n = n if self.n is None else self.n
        tokens, numbers = list[Any](), list[float]()
        taken = self._take((args, kwargs), tokens, numbers)
        for slot in slots_of(taken):
            slot.kind = ROW if self.may_be_rows(slot) else slot.kind
        self.inputs = Inputs(taken, numbers, tuple(tokens), len(self.calls))

    def leave_model(self, outputs: Iterable[Any]) -> None:
        """The recorded forward has ended.

        Args:
            outputs: leaves of what is handed to the loop.
        """
        if not self._is_open:
            return
        self.after, self._is_inside = TorchState.now(), False
        for tensor in outputs:
            if isinstance(tensor, Tensor):
                slot = self._new(tensor, OUTPUT if tensor.requires_grad else ROW)
                self.outputs += [slot] if tensor.requires_grad else []
        join(self, self._above)

    def free_outputs(self) -> None:
        """What the model returned is not needed further."""
        for slot in self.outputs:
            slot.value = None

    def rewind(self) -> None:
        """Forget the recorded forward and what came after it: it failed, or is to be repeated."""
        self._is_inside = False
        if self.start is not None and not self._is_last:
            self._is_open = True
            lift(self)
            join(self, self._above)
        if self.inputs is not None:
            del self.calls[self.inputs.position :]
        self.outputs, self.backwards, self.inputs, self.after = [], [], None, None
        self._reached = self.in_backward = False

    # ------------------------------------------------------------------ a call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_seen = func not in _UNSEEN and not (func == _GRAD and isinstance(args[0], nn.Parameter))
        if not is_seen or not self._is_open or self.in_backward:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs or {})
        return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a call and write it down, if it takes or makes a tensor."""
        grad, autocast = torch.is_grad_enabled(), autocast_dtypes()
        tokens: list[Any] = [func, grad, autocast]
        numbers: list[float] = []
        met = len(self.slots)
        taken = self._take(args, tokens, numbers)
        named = self._take(kwargs, tokens, numbers) if kwargs else {}
        if is_in_place(func) or "out" in kwargs:
            self._keep((args[:1], kwargs.get("out")))
        generators = [
            (g, g.get_state()) for g in (*args, *kwargs.values()) if type(g) is torch.Generator
        ]
        out = func(*args, **kwargs)
        if func in _IGNORING:
            self._note_ignored(dict(zip(_IGNORING[func], args, strict=False)) | kwargs)
        made = self._made(out)
        if made is None and isinstance(out, list | np.ndarray):
            self._was_read = True
        if len(self.slots) > met or any(type(token) is int for token in tokens):
            call = Call(
                func, taken, named, made, grad, autocast, numbers, tuple(tokens), generators
            )
            self.calls.append(call)
            if len(self.calls) > self._most:
                self._shorten()
            if self._is_last and len(self.calls) > _UNUSED:
                self.end()
        return out

    def _note_ignored(self, call: Mapping[str, Any]) -> None:
        """Whether some targets are ignored is part of what the code does."""
        target = call["target"]
        if torch._C._functorch.is_functorch_wrapped_tensor(target):
            return  # of one example, whose loss is its own
        if call.get("reduction", "mean") == "mean" and not target.is_floating_point():
            self._ignored.append((target == call.get("ignore_index", -100)).any())

    def _shorten(self) -> None:
        """Drop calls whose results are gone: nothing can come from them any more."""
        wanted = {slot.index for slot in self.slots if slot.ref() is not None}
        before = self.inputs.position if self.inputs is not None else len(self.calls)
        kept = list[Call]()
        for position, call in reversed(list(enumerate(self.calls))):
            if is_in_place(call.function) or any(s.index in wanted for s in slots_of(call.out)):
                wanted |= {slot.index for slot in slots_of((call.args, call.kwargs))}
                kept.append(call)
            elif position < before:
                before -= 0 if self.inputs is None else 1
        self.calls = kept[::-1]
        if self.inputs is not None:
            self.inputs = self.inputs._replace(position=before)
        for slot in self.slots:
            if slot.kind == OTHER and slot.index not in wanted:
                slot.value = slot.version = None
        self._most = max(_MOST, 2 * len(self.calls))

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a backward; one that reaches the model is written down as such."""
        names = _BACKWARDS[func]
        given = dict(zip(names, args, strict=False)) | kwargs
        losses, weights = _listed(given[names[0]]), _listed(given.get(names[-1]))
        position, self.in_backward, self._reached = len(self.calls), True, False
        self._losses = losses
        try:
            out = func(*args, **kwargs)
        finally:
            self.in_backward, self._losses = False, []
        if self._reached:
            weights += [None] * (len(losses) - len(weights))
            slots = tuple([self._slot(loss) for loss in losses])
            held = tuple([None if w is None else self._slot(w) for w in weights])
            self.backwards.append(Backward(slots, held, position))
        elif func is torch.autograd.grad:  # a part of the criterion
            tokens, numbers = [func, True, ()], list[float]()
            taken, named = self._take((args, kwargs), tokens, numbers)
            call = Call(func, taken, named, self._made(out), True, (), numbers, tuple(tokens), [])
            self.calls.append(call)
        return out

    def reached(self) -> None:
        """A gradient came to an output of the model.

        Raises:
            RuntimeError: by no backward that is seen.
            ValueError: the loss is no scalar.
        """
        if not self._is_open:
            return
        if not self.in_backward:
            raise RuntimeError(
                "A backward ran whose loss could not be found, so it can't be checked. Expected "
                "loss.backward(), torch.autograd.backward or torch.autograd.grad, called from "
                "Python in the thread that took the batch; call one of them."
            )
        for loss in self._losses:
            if loss.numel() != 1:
                raise ValueError(
                    f"backward was called on a loss of shape {tuple(loss.shape)}. Expected a "
                    "scalar, the mean or the sum over the examples."
                )
        self._reached = True

    # ------------------------------------------------------------------ tensors and numbers

    def _take(self, value: Any, tokens: list[Any], numbers: list[float]) -> Any:
        """An argument with slots in the place of tensors."""
        if isinstance(value, Tensor):
            slot = self._slot(value)
            tokens.append(slot.index)
            return slot
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if kind is int or kind is float:
            numbers.append(value)
            tokens.append(kind)
            return value
        if kind is np.ndarray and value.dtype != object:
            numbers.append(hash(value.tobytes()))
            tokens.append((kind, value.dtype.str, value.ndim))
            return Numbers(value.copy())
        if kind is tuple or kind is list or kind is torch.Size:
            if len(value) > _LONG and all(type(v) in (int, float) for v in value):
                numbers.append(hash(tuple(value)))
                tokens.append("numbers")
                return Numbers(kind(value))
            tokens.append(kind)
            return (list if kind is list else tuple)(
                [self._take(v, tokens, numbers) for v in value]
            )
        if kind is dict:
            tokens.append(tuple(value))
            return {name: self._take(v, tokens, numbers) for name, v in value.items()}
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return Slice(*[self._take(v, tokens, numbers) for v in parts])
        tokens.append(value if kind in _PLAIN else kind)
        return value

    def _slot(self, tensor: Tensor) -> Slot:
        """The slot of a tensor; one that is met for the first time comes from elsewhere."""
        slot = self._ids.get(id(tensor))
        if slot is not None and slot.ref() is tensor:
            return slot
        return self._new(tensor, ROW if id(tensor) in self._rows else OTHER)

    def _new(self, tensor: Tensor, kind: str) -> Slot:
        """A new slot of a tensor."""
        slot = self._ids[id(tensor)] = Slot(len(self.slots), kind, tensor, self._was_read)
        self.slots.append(slot)
        return slot

    def _made(self, out: Any) -> Any:
        """A result, with slots in the place of tensors."""
        if isinstance(out, Tensor):
            slot = self._ids.get(id(out))
            known = slot is not None and slot.ref() is out
            return slot if known else self._new(out, MADE)
        if isinstance(out, tuple | list):
            made = tuple([self._made(v) for v in out])
            return made if any(True for _ in slots_of(made)) else None  # lists of numbers are read
        return None

    def _keep(self, targets: Any) -> None:
        """Copy what is about to be changed in place, unless the tape made it."""
        for tensor in pytree.tree_leaves(targets):
            if not torch.is_tensor(tensor):
                continue
            slots = [self._slot(tensor)]
            if tensor._is_view() and (base := self._ids.get(id(tensor._base))) is not None:
                slots.append(base)
            for slot in slots:
                slot.keep()

    def signature(self) -> tuple[Any, ...]:
        """Equal for another batch on which the same code ran: functions, dtypes, axes.

        No value of the batch decides but one: whether a cross entropy ignores some targets.
        """
        n = self.n or 0
        return (
            tuple([call.tokens for call in self.calls]),
            self.inputs and self.inputs[2:],
            tuple([(b.position, *[s and s.index for s in (*b[0], *b[1])]) for b in self.backwards]),
            tuple([slot.signature(n) for slot in self.slots]),
            tuple([bool(some) for some in self._ignored]),
        )

    def may_be_rows(self, slot: Slot) -> bool:
        """Whether a tensor from elsewhere is, or may hold, rows of the batch."""
        if slot.kind in (ROW, OUTPUT):
            return True
        is_named = slot.kind != OTHER or isinstance(slot.value, nn.Parameter)
        return self.rows_by_size and not is_named and not slot.is_late

    def row_axis(self, slot: Slot) -> int | None:
        """The axis of a tensor from elsewhere that holds the examples, or None."""
        if slot.kind == OUTPUT:
            return 0 if slot.shape[:1] == (self.n,) else None
        if slot.kind == ROW:
            return next((axis for axis, size in enumerate(slot.shape) if size == self.n), None)
        return 0 if self.may_be_rows(slot) and slot.shape[:1] == (self.n,) else None


class Numbers(NamedTuple):
    """A long list of numbers, as an argument."""

    values: Any


class Slice(NamedTuple):
    """A slice, as an argument."""

    start: Any
    stop: Any
    step: Any


#: Types of arguments that are compared by value.
_PLAIN = {bool, str, type(None), torch.dtype, torch.device, torch.layout, type(Ellipsis)}


@dataclasses.dataclass
class _Opened:
    """The tensors inside of whatever a loader handed out.

    Attributes:
        tensors: found so far.
        has_data: there is something else that may hold data: arrays, text, numbers.
    """

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    has_data: bool = False

    def open(self, value: Any, depth: int) -> None:
        """Look into a value."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif value is None or depth == 0:
            self.has_data |= value is not None
        elif isinstance(value, Mapping):
            self._all(value.values(), depth)
        elif isinstance(value, list | tuple | set):
            self._all(value, depth)
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
            self._all(vars(value).values(), depth)
        else:
            self.has_data = True

    def _all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.open(value, depth - 1)


_in_place: dict[Any, bool] = {}


def is_in_place(func: Any) -> bool:
    """Whether a function changes its first argument, by its name as torch gives them."""
    found = _in_place.get(func)
    if found is None:
        name = getattr(func, "__name__", "")
        private = name.startswith("__")
        changes = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        setter = name in ("__setitem__", "__set__")
        found = changes or setter or (name.endswith("_") and not private)
        _in_place[func] = found
    return found


def autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    """(device type, dtype) where autocast is on."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return tuple([(device, torch.get_autocast_dtype(device)) for device in on])


def slots_of(value: Any) -> Iterator[Slot]:
    """The slots inside of a recorded argument or result."""
    if type(value) is Slot:
        yield value
    elif isinstance(value, Numbers):
        return
    elif isinstance(value, tuple | list):
        for part in value:
            yield from slots_of(part)
    elif type(value) is dict:
        for part in value.values():
            yield from slots_of(part)


def _listed(value: Any) -> list[Any]:
    """A tensor or several, as a list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def lift(mode: TorchFunctionMode) -> int | None:
    """Take a mode off this thread's stack, wherever it is; how many were above it, if it was."""
    stack = _get_current_function_mode_stack()
    if stack and stack[-1] is mode:
        _pop_mode()
        return 0
    place = next((i for i, other in enumerate(stack) if other is mode), None)
    if place is None:
        return None
    above = [_pop_mode() for _ in stack[place + 1 :]]
    _pop_mode()
    for other in reversed(above):
        _push_mode(other)
    return len(above)


def join(mode: TorchFunctionMode, above: int) -> None:
    """Put a mode on this thread's stack, below as many others."""
    held = list[Any]()
    if above:
        held = [_pop_mode() for _ in _get_current_function_mode_stack()[-above:]]
    _push_mode(mode)
    for other in reversed(held):
        _push_mode(other)

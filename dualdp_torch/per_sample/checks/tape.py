# SPDX-License-Identifier: Apache-2.0
"""Tape of the torch functions that a training loop calls outside its model.

Between receiving a batch and calling backward, a loop prepares inputs, calls its model and computes
a loss. The tape records each call with references to its arguments: a tensor made by another
recorded call is stored as an index, so that the tape holds only the memory of the batch, the
model's outputs and constants. `replay.py` repeats the calls on other rows.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.random_state import TorchState
from dualdp_torch.rules.base import Tensor

#: Origins of a tensor on the tape.
ROW, OUTPUT, OTHER, MADE = "row", "output", "other", "made"
_DEPTH = 5  # levels of nested objects that are searched for the batch's tensors
_LONG = 64  # a longer list of numbers counts as one number
_MOST = 256  # calls on a tape after which those with freed results are dropped
_UNUSED = 1024  # calls on a tape at which it stops, if its loader has ended
#: Functions that begin a backward, with their arguments up to the weights of the losses.
_BACKWARDS: dict[Any, tuple[str, ...]] = {
    torch.Tensor.backward: ("self", "gradient"),
    torch.autograd.backward: ("tensors", "grad_tensors"),
    torch.autograd.grad: ("outputs", "inputs", "grad_outputs"),
}


def _attribute(name: str) -> Any:
    return getattr(torch.Tensor, name)


#: Functions that neither read a tensor's values nor make a tensor.
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
    _attribute("_backward_hooks").__set__,
    torch._C._set_grad_enabled,
    torch.ops.profiler._record_function_enter_new,
    torch.ops.profiler._record_function_enter_new._op,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
GRAD = _attribute("grad").__get__
#: Functions that return a tensor's values as Python numbers or an array.
_READS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__),
    torch.Tensor.__float__,
}
#: Functions that ignore targets of one value, with their arguments.
_IGNORING = {
    function: ("input", "target", "weight", "size_average", "ignore_index")
    for function in (nn.functional.cross_entropy, nn.functional.nll_loss)
}


class Slot:
    """Tensor on the tape, with its shape, dtype and requires_grad when first met.

    Attributes:
        index: position in `Tape.slots`.
        kind: ROW, OUTPUT or OTHER for a tensor that no recorded call made, else MADE.
        value: the tensor, or a copy made before an in-place change; None for MADE.
        version: version of the tensor when first met; None for a copy, and for MADE.
        storage: address of the tensor's memory, or None.
        is_late: bool, True if first met after data were read into lists or arrays.
    """

    __slots__ = (
        *("dtype", "index", "is_late", "kind", "ref", "requires_grad", "shape", "storage"),
        *("value", "version"),
    )

    def __init__(self, index: int, kind: str, tensor: Tensor, is_late: bool = False) -> None:
        self.index, self.kind, self.is_late = index, kind, is_late
        self.ref = weakref.ref(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.requires_grad, self.storage = tensor.requires_grad, storage_of(tensor)
        self.value: Tensor | None = None if kind == MADE else tensor
        has_version = kind != MADE and not tensor.is_inference()
        self.version: int | None = tensor._version if has_version else None

    def signature(self, n: int) -> tuple[Any, ...]:
        """Return kind, dtype, requires_grad, and axes, each of them "n", 1 or 0 for other."""
        axes = tuple(["n" if size == n else 1 if size == 1 else 0 for size in self.shape])
        return self.kind, self.dtype, self.requires_grad, axes

    def is_stale(self) -> bool:
        """True if the tensor was changed since it was met, and no copy was made before."""
        if self.version is None:
            return False
        assert self.value is not None
        return self.value._version != self.version

    def keep(self) -> None:
        """Copy the tensor before an in-place change, unless that was done."""
        if self.version is not None and self.value is not None and not self.is_stale():
            self.value, self.version = self.value.detach().clone(), None


class Watched(NamedTuple):
    """Tensor whose memory the loop holds in another form, with values and version when seen."""

    tensor: Tensor
    values: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Watched:
        """Return the tensor with its present values."""
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor, tensor.detach().clone(), version)

    def is_written(self) -> bool:
        """True if the values are others now, or freed."""
        if self.tensor.untyped_storage().nbytes() == 0:
            return self.values.numel() > 0
        now, before = (
            x.detach().contiguous().reshape(-1).view(torch.uint8)  # nan is the same nan
            for x in (self.tensor, self.values)
        )
        return not torch.equal(now, before)

    def again(self) -> Watched:
        """Return it with the values that a torch function wrote, or as it is."""
        is_same = self.version is None or self.tensor._version == self.version
        return self if is_same else Watched.of(self.tensor)


class Call(NamedTuple):
    """Recorded call; arguments and result hold a `Slot` in the place of each tensor.

    Attributes:
        out: the result; None if it holds no tensor.
        grad: bool, True if gradients were enabled.
        autocast: pairs of device type and dtype for which autocast was enabled.
        numbers: Python numbers among the arguments, in order.
        tokens: key that is equal if the same code runs on another batch.
        generators: pairs of a generator among the arguments and its state before the call.
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

    @property
    def taken(self) -> list[Slot]:
        """Tensors among the arguments."""
        return list(slots_of((self.args, self.kwargs)))

    @property
    def made(self) -> list[Slot]:
        """Tensors in the result."""
        return list(slots_of(self.out))


class Backward(NamedTuple):
    """Recorded backward that reached the model: scalar losses, and the gradient passed for each.

    `position` is the number of calls before it.
    """

    losses: tuple[Slot, ...]
    weights: tuple[Slot | None, ...]
    position: int


class ModelCall(NamedTuple):
    """Recorded forward: its arguments (positional, named), as in `Call`.

    `position` is the number of calls before it; `outputs` are its differentiable outputs.
    """

    arguments: Any
    numbers: list[float]
    tokens: tuple[Any, ...]
    position: int
    outputs: list[Slot]


class Tape(TorchFunctionMode):
    """Records torch functions while it is open; see `begin`, `enter_model`, `leave_model`.

    Attributes:
        rows_per_unit: K, number of consecutive rows that a loss may join, such as 2 of a pair.
        n: number of rows; None until the model is entered, unless given to `begin`.
        calls: recorded calls, in order.
        slots: tensors on the tape.
        forwards: recorded forwards.
        backwards: recorded backwards that reached the model.
        start: state of torch's generators when the record began.
        scalars: slots of the numbers that the model returned.
        computes_loss: bool, True if a forward returned a number beside its outputs, such as a loss.
        states: number of calls before each forward's end, and torch's generators there.
        rows_by_size: bool, True if tensors of unknown origin with n on axis 0 count as rows.
        in_backward: bool, True while a recorded backward runs.
    """

    def __init__(self, rows_per_unit: int = 1) -> None:
        super().__init__()
        self.rows_per_unit = rows_per_unit
        self._is_open, self._is_inside, self._above = False, False, 0
        self._forget()

    def _forget(self) -> None:
        self.n: int | None = None
        self.calls: list[Call] = []
        self.slots: list[Slot] = []
        self.forwards: list[ModelCall] = []
        self.backwards: list[Backward] = []
        self.start: TorchState | None = None
        self.states: list[tuple[int, TorchState]] = []
        self.scalars: list[Slot] = []
        self.computes_loss = False
        self.rows_by_size = True
        self._rows: dict[int, Tensor] = {}
        self._ids: dict[int, Slot] = {}
        self._most, self._is_last, self._was_read = _MOST, False, False
        self._reached = self.in_backward = False
        self._losses: list[Tensor] = []
        self._ignored: list[Tensor] = []
        self._watched: list[Watched] = []
        self._was_written = False

    def begin(self, batch: Any = None, n: int | None = None) -> None:
        """Clear the tape and record from now on; batch and n rows are the loader's, if known."""
        self.end()
        self._forget()
        self.n, self.start = n, TorchState.now()
        if batch is not None:
            tensors, has_data = _tensors_in(batch, _DEPTH)
            self._rows = {id(t): t for t in tensors}
            self.rows_by_size = has_data or not tensors
        self._is_open, self._is_inside, self._above = True, False, 0
        insert_mode(self, 0)

    def end(self) -> None:
        """Stop recording, and keep the record."""
        if self._is_open:
            self._is_open = False
            remove_mode(self)

    def leave_loader(self) -> None:
        """Stop recording at the loader's end; only `enter_model` begins again.

        What a loop like `x = next(iter(loader))` does to the batch is not seen until then, so it
        may not write to it.
        """
        self._is_last = True
        if self._is_open:
            self._watched += [Watched.of(tensor) for tensor in self._rows.values()]
        self.end()

    def clear(self) -> None:
        """Stop recording, and free the record."""
        self.end()
        self._forget()

    @property
    def num_units(self) -> int:
        """Number of units of `rows_per_unit` rows; 0 before the model is entered."""
        return (self.n or 0) // self.rows_per_unit

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which nothing is recorded; recording resumes after it unless it was ended."""
        above = remove_mode(self) if self._is_open else None
        if above is not None:
            self._above = above
        try:
            yield
        finally:
            if above is not None and self._is_open and not self._is_inside:
                remove_mode(self)
                insert_mode(self, above)

    def enter_model(self, args: Any, kwargs: Any, n: int) -> None:
        """Begin the recorded forward on n examples, whose functions are not recorded."""
        if self.start is None:
            return
        self._above = remove_mode(self) or self._above
        self._is_open = self._is_inside = True
        self.n = n if self.n is None else self.n
        tokens, numbers = list[Any](), list[float]()
        taken = self._take((args, kwargs), tokens, numbers)
        for slot in slots_of(taken):
            is_rows = slot.shape[:1] == (n,) and self.may_be_rows(slot)
            slot.kind = ROW if is_rows else slot.kind
        self.forwards.append(ModelCall(taken, numbers, tuple(tokens), len(self.calls), []))

    def computed_apart(self, given: Any) -> Apart:
        """Return what the loop computed from the batch's rows beside a forward's arguments `given`.

        Of tensors only those that the loop still holds.
        """
        found, was_read = set[int](), False
        for call in self.calls:
            if not any(s.index in found or s.kind in (ROW, OUTPUT) for s in call.taken):
                continue
            was_read |= call.out is None and call.function in _READS
            found.update(slot.index for slot in call.made)
            written = next(slots_of(call.args), None) if is_in_place(call.function) else None
            if written is not None and written.storage is not None:
                found.update(s.index for s in self.slots if s.storage == written.storage)
        held = [tensor for index in found if (tensor := self.slots[index].ref()) is not None]
        if not held:
            return Apart([], [], was_read)
        arguments = _tensors_in(given, _DEPTH)[0]
        return Apart(held, arguments, was_read)

    def leave_model(self, outputs: Iterable[Any]) -> None:
        """End the recorded forward, whose outputs the loop receives."""
        if not self._is_open:
            return
        self.states.append((len(self.calls), TorchState.now()))
        self._is_inside = False
        for tensor in outputs:
            if isinstance(tensor, Tensor):
                slot = self._new(tensor, OUTPUT if tensor.requires_grad else ROW)
                self.forwards[-1].outputs.extend([slot] if tensor.requires_grad else [])
                self.scalars.extend([slot] if tensor.dim() == 0 else [])
        insert_mode(self, self._above)

    @property
    def outputs(self) -> list[Slot]:
        """Slots of the differentiable outputs of all forwards."""
        return [slot for forward in self.forwards for slot in forward.outputs]

    def note_number(self, number: Tensor) -> None:
        """Note a number that the model made from more than its outputs."""
        if self._is_open:
            self.scalars.append(self._new(number, OTHER))

    def drop(self, index: int) -> None:
        """Forget one forward, whose gradient does not count."""
        del self.forwards[index : index + 1]

    def free_outputs(self) -> None:
        """Free the model's outputs."""
        for slot in self.outputs:
            slot.value = None

    def rewind(self, first: int = 0) -> None:
        """Forget the forwards from `first` on, and all later calls: they failed or are repeated."""
        self._is_inside = False
        if self.start is not None and not self._is_last:
            self._is_open = True
            remove_mode(self)
            insert_mode(self, self._above)
        if len(self.forwards) > first:
            position = self.forwards[first].position
            del self.calls[position:], self.forwards[first:]
            self.states = [(before, state) for before, state in self.states if before <= position]
        self.backwards = self.backwards if first else []
        self._reached = self.in_backward = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return self._hear_eagerly(func, args, kwargs)
        return self._hear(func, args, kwargs)

    @torch._disable_dynamo  # a loop that is compiled is recorded call by call
    def _hear_eagerly(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return self._hear(func, args, kwargs)

    def _hear(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        is_seen = func not in _UNSEEN and not (func == GRAD and isinstance(args[0], nn.Parameter))
        if not is_seen or not self._is_open or self.in_backward:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs or {})
        return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and record it if it takes or makes a tensor."""
        grad, autocast = torch.is_grad_enabled(), autocast_dtypes()
        tokens: list[Any] = [func, grad, autocast]
        numbers: list[float] = []
        met = len(self.slots)
        taken = self._take(args, tokens, numbers)
        named = self._take(kwargs, tokens, numbers) if kwargs else {}
        writes = is_in_place(func) or "out" in kwargs
        if writes:
            self._look()
            self._keep((args[:1], kwargs.get("out")))
        generators = [
            (g, g.get_state()) for g in (*args, *kwargs.values()) if type(g) is torch.Generator
        ]
        out = func(*args, **kwargs)
        if writes:
            self._watched = [watched.again() for watched in self._watched]
        if func in _IGNORING:
            self._note_ignored(dict(zip(_IGNORING[func], args, strict=False)) | kwargs)
        made = self._made(out)
        if made is None and isinstance(out, list | np.ndarray):
            self._was_read = True
        if _is_memory(out):
            self._watched.append(Watched.of(args[0]))
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
        """Note if a cross entropy ignores some targets, for the signature."""
        target = call["target"]
        if torch._C._functorch.is_functorch_wrapped_tensor(target):
            return  # inside vmap: the loss of one example
        if call.get("reduction", "mean") == "mean" and not target.is_floating_point():
            self._ignored.append((target == call.get("ignore_index", -100)).any())

    def _shorten(self) -> None:
        """Drop calls whose results were freed: no later call can use them."""
        wanted = {slot.index for slot in self.slots if slot.ref() is not None}
        wanted |= {slot.index for b in self.backwards for slot in (*b.losses, *b.weights) if slot}
        kept = list[int]()
        for position, call in reversed(list(enumerate(self.calls))):
            if is_in_place(call.function) or any(slot.index in wanted for slot in call.made):
                wanted |= {slot.index for slot in call.taken}
                kept.append(position)
        kept.reverse()
        self.calls = [self.calls[position] for position in kept]
        self.forwards = [f._replace(position=bisect_left(kept, f.position)) for f in self.forwards]
        self.backwards = [
            b._replace(position=bisect_left(kept, b.position)) for b in self.backwards
        ]
        self.states = [(bisect_left(kept, position), state) for position, state in self.states]
        for slot in self.slots:
            if slot.kind == OTHER and slot.index not in wanted:
                slot.value = slot.version = None
        self._most = max(_MOST, 2 * len(self.calls))

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a backward, and record it if it reaches the model's outputs."""
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
        elif func is torch.autograd.grad:  # part of the criterion, which differentiates
            tokens, numbers = [func, True, ()], list[float]()
            taken, named = self._take((args, kwargs), tokens, numbers)
            call = Call(func, taken, named, self._made(out), True, (), numbers, tuple(tokens), [])
            self.calls.append(call)
        return out

    def reached(self) -> None:
        """Note that a gradient arrived at an output of the model, of a recorded scalar loss."""
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

    def _take(self, value: Any, tokens: list[Any], numbers: list[float]) -> Any:
        """Return an argument with slots for tensors; append its tokens and numbers."""
        kind = type(value)
        if kind in _PLAIN:
            tokens.append(value)
            return value
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
        """Return the slot of a tensor; a new tensor is of kind ROW or OTHER."""
        slot = self._ids.get(id(tensor))
        if slot is not None and slot.ref() is tensor:
            return slot
        return self._new(tensor, ROW if id(tensor) in self._rows else OTHER)

    def _new(self, tensor: Tensor, kind: str) -> Slot:
        slot = self._ids[id(tensor)] = Slot(len(self.slots), kind, tensor, self._was_read)
        self.slots.append(slot)
        return slot

    def _made(self, out: Any) -> Any:
        """Return a result with slots for tensors, or None if it holds none."""
        if isinstance(out, Tensor):
            slot = self._ids.get(id(out))
            known = slot is not None and slot.ref() is out
            return slot if known else self._new(out, MADE)
        if isinstance(out, tuple | list):
            made = tuple([self._made(v) for v in out])
            return made if any(True for _ in slots_of(made)) else None
        return None

    def _keep(self, targets: Any) -> None:
        """Copy tensors before an in-place change, unless a recorded call made them."""
        for tensor in pytree.tree_leaves(targets):
            if not torch.is_tensor(tensor):
                continue
            slots = [self._slot(tensor)]
            if tensor._is_view() and (base := self._ids.get(id(tensor._base))) is not None:
                slots.append(base)
            for slot in slots:
                slot.keep()

    def _look(self) -> None:
        """Note if a tensor whose memory the loop holds was written to since it was last seen."""
        self._was_written |= any([watched.is_written() for watched in self._watched])

    def was_written(self) -> bool:
        """True if the loop wrote to a tensor's memory, as through the array of `x.numpy()`."""
        self._look()
        return self._was_written

    def code(self) -> tuple[Any, ...]:
        """Return a key that is equal if the same calls ran, on tensors of any axes."""
        return (
            tuple([call.tokens for call in self.calls]),
            tuple([(forward.tokens, forward.position) for forward in self.forwards]),
            tuple([(b.position, *[s and s.index for s in (*b[0], *b[1])]) for b in self.backwards]),
        )

    def signature(self) -> tuple[Any, ...]:
        """Return a key that is equal if the same code ran on another batch.

        It holds functions, dtypes and axes; of the values only if a cross entropy ignores targets.
        """
        n = self.n or 0
        return (
            *self.code(),
            tuple([slot.signature(n) for slot in self.slots]),
            tuple([bool(some) for some in self._ignored]),
        )

    def may_be_rows(self, slot: Slot) -> bool:
        """True if a tensor that no call made is, or may hold, rows of the batch."""
        if slot.kind in (ROW, OUTPUT):
            return True
        is_named = slot.kind != OTHER or isinstance(slot.value, nn.Parameter)
        return self.rows_by_size and not is_named and not slot.is_late

    def row_axis(self, slot: Slot) -> int | None:
        """Return the axis of a tensor that no call made on which the examples are, or None."""
        if slot.kind == OUTPUT:
            return 0 if slot.shape[:1] == (self.n,) else None
        if slot.kind == ROW:
            return next((axis for axis, size in enumerate(slot.shape) if size == self.n), None)
        return 0 if self.may_be_rows(slot) and slot.shape[:1] == (self.n,) else None


class Apart(NamedTuple):
    """What a loop computed from a batch's rows before a forward.

    Attributes:
        tensors: those that the loop still holds, the forward's arguments among them.
        arguments: tensors that the forward receives.
        was_read: True if numbers were read from rows, as by `item`.
    """

    tensors: list[Tensor]
    arguments: list[Tensor]
    was_read: bool


class RefuseReads(TorchFunctionMode):
    """Refuses functions that take what a loop computed, by any tensor, and are no arguments.

    It holds the tensors, so that none of another origin gets the memory of one.
    """

    def __init__(self, apart: Apart) -> None:
        super().__init__()
        self._held, given = apart.tensors, {id(tensor) for tensor in apart.arguments}
        self._ids = {id(tensor) for tensor in apart.tensors} - given
        self._memory = set(map(storage_of, apart.tensors))
        self._memory -= {None, *map(storage_of, apart.arguments)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (
                id(value) in self._ids or storage_of(value) in self._memory
            ):
                raise UnsupportedLayerError(
                    f"The model read a tensor of shape {tuple(value.shape)} that the loop computed "
                    "from the batch and that is none of the forward's arguments, such as a mean of "
                    "the batch set as an attribute: one example would change the others' "
                    "gradients. Pass the model a row for each example, or use fixed numbers."
                )
        return func(*args, **(kwargs or {}))


class Numbers(NamedTuple):
    """Argument that is a NumPy array or a long list of numbers."""

    values: Any


class Slice(NamedTuple):
    """Argument that is a slice."""

    start: Any
    stop: Any
    step: Any


#: Types of arguments that are compared by value.
_PLAIN = {bool, str, type(None), torch.dtype, torch.device, torch.layout, type(Ellipsis)}


def _tensors_in(value: Any, depth: int) -> tuple[list[Tensor], bool]:
    """Tensors inside a batch of any type, and whether other values may hold data."""
    if isinstance(value, Tensor):
        return [value], False
    if value is None or depth == 0:
        return [], value is not None
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        inner = vars(value).values()
    else:
        return [], True
    found = [_tensors_in(part, depth - 1) for part in inner]
    return [tensor for tensors, _ in found for tensor in tensors], any(data for _, data in found)


def _is_memory(out: Any) -> bool:
    """True for what shares a tensor's memory, and can be written to without a torch function.

    Storages can, too, but those who ask for them, such as `fully_shard`, free them.
    """
    return isinstance(out, np.ndarray) or type(out).__name__ == "PyCapsule"  # of DLPack


def storage_of(tensor: Tensor | None) -> int | None:
    """Return the storage address of a plain strided tensor or parameter, else None."""
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter):
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


_in_place: dict[Any, bool] = {}


def is_in_place(func: Any) -> bool:
    """True if a function changes its first argument, judged by its name."""
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
    """Return (device type, dtype) pairs for which autocast is enabled."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return tuple([(device, torch.get_autocast_dtype(device)) for device in on])


@contextlib.contextmanager
def autocast_as(dtypes: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Context with autocast enabled as `autocast_dtypes` found it, and disabled elsewhere."""
    on = dict(dtypes)
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if device in on or torch.is_autocast_enabled(device):
                mode = torch.autocast(device, dtype=on.get(device), enabled=device in on)
                stack.enter_context(mode)
        yield


def slots_of(value: Any) -> Iterator[Slot]:
    """Yield the slots inside a recorded argument or result."""
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
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def remove_mode(mode: TorchFunctionMode) -> int | None:
    """Remove a mode from this thread's stack; return the number of modes above it, or None."""
    if (size := _len_torch_function_stack()) and _get_function_stack_at(size - 1) is mode:
        _pop_mode()
        return 0
    stack = _get_current_function_mode_stack()
    position = next((i for i, other in enumerate(stack) if other is mode), None)
    if position is None:
        return None
    above = [_pop_mode() for _ in stack[position + 1 :]]
    _pop_mode()
    for other in reversed(above):
        _push_mode(other)
    return len(above)


def insert_mode(mode: TorchFunctionMode, above: int) -> None:
    """Push a mode on this thread's stack, below the `above` topmost modes."""
    held = list[Any]()
    if above:
        held = [_pop_mode() for _ in _get_current_function_mode_stack()[-above:]]
    _push_mode(mode)
    for other in reversed(held):
        _push_mode(other)

# SPDX-License-Identifier: Apache-2.0
"""Twins: one row of a batch goes through the user's loop alone, beside the batch.

Between the loader's yield and backward, every torch function that the loop calls is called once
more, at once, on the tensors of a twin that holds one row (or the same row among other rows). There
is no record and no replay: in-place calls, views, autocast, grad mode and order are those of the
loop by themselves. At the end the twin's gradient of the model's outputs must be the row's own.

Only a measured difference is a problem. Where a twin can't follow (NumPy, lists, custom autograd
functions) there is a note, and the loop runs on.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dualdp.exactness import TOLERANCE, ExactnessError, power_of_ten
from dualdp_torch.per_sample.checks.readings import (
    Numbers,
    Reading,
    as_constant,
    as_count,
    as_multiple,
    is_long,
)
from dualdp_torch.per_sample.modes import autocast_as, autocast_dtypes, insert_lowest, remove_mode
from dualdp_torch.per_sample.outputs import partial_gradients
from dualdp_torch.per_sample.parameter_use import never_compiled
from dualdp_torch.per_sample.random_state import RECURRENT, RandomState
from dualdp_torch.rules.base import Tensor
from dualdp_torch.rules.precision import matmul_in_tf32

Item = TypeVar("Item")
REDUCTIONS = ("mean", "sum")
_FLOOR = 1e-2  # gradients below this are compared with it: 1 - p of a sure prediction is rounding
_MOST = 1 << 24  # numbers in the outputs of all twins of a whole batch together
_FEWEST_IN_LISTS = 5  # rows; in shorter lists, inputs and targets of one row look like rows
_HOST = torch.device("cpu")
_BACKWARDS = {
    Tensor.backward: ("self", "gradient"),
    torch.autograd.backward: ("tensors", "grad_tensors"),
    torch.autograd.grad: ("outputs", "inputs", "grad_outputs"),
}
#: Functions whose results are those that the loop got: gradients through the model, other draws.
_TAKEN = {"grad", "rand_like", "randn_like", "randint_like"}
#: Functions that draw random numbers; their in-place forms end in "_".
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"),
    *("bernoulli", "multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "rrelu", "gumbel_softmax"),
    *("uniform", "exponential", "geometric", "log_normal", "cauchy", "random", "binomial"),
    *("_standard_gamma", "_sample_dirichlet", "scaled_dot_product_attention", "lstm", "gru"),
    "multi_head_attention_forward",
}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow", "mod")}
_WITH_STATE = ("batch_norm", "instance_norm")  # which write running statistics
_FROM_LISTS = ("tensor", "as_tensor", "asarray")
_READS = ("item", "__float__", "tolist", "numpy", "__array__")
_DECIDES = ("__bool__", "equal", "allclose", "is_nonzero")
#: Modules of functions, and of operators, that send tensors to other processes.
_BETWEEN_PROCESSES = ("torch.distributed", "torch._ops._c10d", "torch._ops.c10d")
_WEIGHTED = (
    "Weighted means (class weights, ignored targets, masks) need each example's own mean first: "
    'cross_entropy(..., weight=w, reduction="none").{declared}() for class weights; or '
    'reduction="sum", with loss_reduction="sum" declared to dualdp. Outputs (n, 1) and targets '
    "(n,) are compared each with each: give both one shape."
)
_WAY_OUT = (
    "Expected one loss per example, computed from that example's own row and from public numbers, "
    "and their {declared}. " + _WEIGHTED
)
_OF_MODEL = (
    " The loss that a model computes from labels is often a mean over all tokens of the batch: "
    "write per_example_loss(model, outputs, labels).mean() of dualdp_torch.trainer instead."
)
CARRIED = (
    "A number that the loop hands to its functions changes from batch to batch after data were "
    "read, as by .item(): if it is made of them, other examples enter the loss by it."
)
_INPUTS = (
    "What the model gets for one example is another one when the other rows are replaced or "
    "left out{first}. Prepare each example by itself, in the data set or with public numbers."
)
_MIXES = (
    "The loss mixes the examples of a batch: with the other rows replaced, the gradient of one "
    "example's outputs is another one (by {error} of it{first}). "
)
_WEIGHS = (
    "What one example weighs in the loss depends on how many others there are, or on what they "
    "are: alone, the gradient of its outputs is another one (by {error} of it{first}). "
)
_DECLARED = (
    "loss_reduction={declared!r}, but the loss is a {other}. Declare loss_reduction={other!r}: the "
    "clipping bound depends on it."
)
_OF_PARAMETERS = (
    "autograd.grad asked for gradients of parameters, which a private loop has not: what it gets "
    "is the noisy mean, in p.grad after optimizer.step(). Expected loss.backward(), and for a log "
    "p.grad after the step; other uses belong under engine.pause(), and are not private."
)
BACK = "Rows of the batch went through NumPy or Python lists; the loss is checked without them."
DECIDED = "The loop decides by data of the batch, as in `if loss > 1`, before its backward."
UNSEEN = "A backward of the loop was not seen (another thread, compiled code): it is not checked."
LOST = "The loss of one example could not be followed through the loop: {reason}."


class Problem(NamedTuple):
    """What is wrong with a loop, without values of the data; the error is relative."""

    text: str
    error: float = math.inf

    def raised(self, was_right: bool) -> Exception:
        """Return the exception; `was_right` if the loop passed this check before."""
        if not was_right:
            return ValueError(self.text)
        return ExactnessError(
            f"A spot check failed: {self.text} Nothing was released for this batch. Correct the "
            "loop and begin a new run; the releases before are not vouched for.",
            relative_error=power_of_ten(self.error),
            unprotected_details={"error": self.error},
        )


# ---------------------------------------------------------------------- one twin


class LostError(Exception):
    """A twin can't follow the loop."""


class Twin:
    """The loop on some units of its batch, of which that at `position` is compared.

    Attributes:
        reading: what Python numbers mean for one unit.
        is_whole: True to take tensors of unknown origin whole, and not by rows.
        problem: why it could not follow the loop, or None.
        parts: name of the first function that gave the row something else than in the batch.
        reads: floats that the loop read -> what this twin read in their place.
        guessed: places of Python numbers -> what they were read as.
        leaves: for each forward, its outputs for these rows.
        grads: gradient of a leaf.
        shared: tensors whose twins a fork has in common with the twin it came from.
    """

    def __init__(self, n: int, k: int, units: Tensor, position: int) -> None:
        self.n, self.k, self.units, unit = n, k, units, int(units[position])
        self.index = (units[:, None] * k + torch.arange(k)).flatten()
        self.own, self.at = slice(unit * k, unit * k + k), slice(position * k, position * k + k)
        self.is_alone, self.is_whole = len(units) < n, False
        self.reading: Reading = as_count
        self.tensors, self.shared = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.reads, self.guessed = dict[float, float](), dict[int, float]()
        self.leaves, self.grads = list[list[Tensor]](), WeakIdKeyDictionary()
        self.problem: str | None = None
        self.parts = ""
        self.has_other_inputs = self.decides_otherwise = False
        self.is_torn = False  # True if a reading was lost that may have been right

    @property
    def is_base(self) -> bool:
        """True for a twin from which others fork, where a call has a second reading."""
        return self.reading is as_count and not self.is_whole

    def fork(self, **changes: Any) -> Twin:
        """Return a twin that goes on from here otherwise, and copies what it writes to."""
        twin = copy.copy(self)
        twin.shared = self.tensors.copy()
        for name in ("tensors", "reads", "guessed", "leaves", "grads"):
            setattr(twin, name, getattr(self, name).copy())
        vars(twin).update(changes)
        return twin

    def placed(self, tensor: Tensor) -> Tensor:
        """Return a tensor where this twin computes: one row alone on the CPU.

        There an index out of range is an exception; on a GPU it would end the program.
        """
        return tensor.to(_HOST) if self.is_alone else tensor

    def pick(self, tensor: Tensor, axis: int | None = 0) -> Tensor:
        """Return a copy of the twin's rows or units of a tensor; the tensor if it has none."""
        size = tensor.shape[axis] if axis is not None and tensor.dim() > axis else 0
        index = {self.n: self.units, self.n * self.k: self.index}.get(size)
        if index is None or axis is None:
            return self.placed(tensor)
        return self.placed(tensor.detach().index_select(axis, index.to(tensor.device)))

    def keep(self, tensor: Tensor, axis: int | None = 0) -> None:
        """Keep a copy of the twin's part of a tensor of the loop, which the twin may write to."""
        self.tensors[tensor] = self.pick(tensor.detach(), axis).clone()

    def of(self, value: Any, number: Callable[[float], float] = float) -> Any:
        """Return this twin's arguments in the place of those in nested containers."""

        def own(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._of_tensor(leaf)
            if type(leaf) in (int, float):
                return number(leaf)
            is_device = isinstance(leaf, torch.device) or (
                type(leaf) is str and leaf.split(":")[0] in ("cuda", "mps", "xpu")
            )
            return _HOST if is_device and self.is_alone else leaf

        return _mapped(own, value)

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        if tensor in self.tensors:
            ours: Tensor = self.tensors[tensor]
            if tensor.requires_grad and not ours.requires_grad:
                if tensor.is_leaf:  # x.requires_grad_(), for the gradient of an input
                    return ours.requires_grad_()
                if torch.is_grad_enabled():
                    raise LostError("its gradient passes a function that was not seen")
            return ours
        if tensor.requires_grad and not tensor.is_leaf:
            raise LostError("a tensor with a gradient was made where nobody saw it")
        is_fixed = self.is_whole or tensor.requires_grad or _is_parameter(tensor)
        return self.pick(tensor, None if is_fixed else 0)

    def own_target(self, target: Tensor) -> None:
        """Copy what is written to, if another twin has it, too."""
        if target in self.shared:
            del self.shared[target]
            if self.tensors[target]._is_view():
                self.is_torn = True
                raise LostError("a part of a tensor is written")
            self.tensors[target] = self.tensors[target].clone()

    def note(self, name: str, out: Any, ours: Any) -> None:
        """Keep what a call gave: tensors, numbers that were read, decisions."""
        if isinstance(out, Tensor) and isinstance(ours, Tensor):
            self.tensors[out] = ours
            if not self.parts and out.shape[:1] == (self.n * self.k,):
                same = ours.shape[1:] == out.shape[1:] and ours.shape[:1] == self.index.shape
                if not same or not _is_near(ours[self.at], out[self.own]):
                    self.parts = name
        elif isinstance(out, tuple | list) and isinstance(ours, tuple | list):
            for theirs, own in zip(out, ours, strict=False):
                self.note(name, theirs, own)
        elif type(out) is bool and type(ours) is bool:
            self.decides_otherwise |= out != ours
        elif self.is_alone and type(ours) is float and is_long(out):  # no constant by chance
            self.reads[out] = ours

    def backward(self, losses: Sequence[Any], weights: Sequence[Any]) -> None:
        """Add the gradients of weighted losses to those of the outputs."""
        pairs = zip(self.of(losses), self.of(weights), strict=True)
        live = [(loss, w) for loss, w in pairs if getattr(loss, "requires_grad", False)]
        leaves = sum(self.leaves, [])
        if not live or not leaves:
            return
        given = [torch.ones_like(loss) if w is None else w for loss, w in live]
        found = partial_gradients([loss for loss, _ in live], leaves, given)
        for leaf, grad in zip(leaves, found, strict=True):
            if grad is not None:
                self.grads[leaf] = self.grads[leaf] + grad if leaf in self.grads else grad

    def error(self, cotangents: Sequence[Tensor | None], reduction: str, of_all: bool) -> float:
        """Return how far the row's gradient is from the loop's, relative to it.

        `of_all` compares every row of a twin of many: each is a row of the batch elsewhere.
        """
        own = self.index if of_all else self.index[self.at]
        count, square = len(own) // self.k, 0.0
        ours, theirs = ([torch.zeros(count, 1).double()] for _ in range(2))
        for leaf, cotangent in zip(sum(self.leaves, []), cotangents, strict=True):
            if leaf.dim() and len(leaf) == len(self.index):
                whole = self.grads.get(leaf, torch.zeros_like(leaf))
                ours.append(_flat(whole if of_all else whole[self.at], count))
                if cotangent is None:
                    theirs.append(ours[-1] * 0)
                else:
                    theirs.append(_flat(cotangent[own.to(cotangent.device)], count))
                    square += float(cotangent.double().nan_to_num(0, 0, 0).square().sum())
        scale = float(self.n) if self.is_alone and reduction == "mean" else 1.0
        a, b = torch.cat(ours, 1), torch.cat(theirs, 1) * scale
        floor = _FLOOR if self.is_alone or reduction == "sum" else _FLOOR / self.n
        size = b.norm(dim=1).clamp(min=max(math.sqrt(square / self.n) * scale, floor))
        gap = ((a - b).norm(dim=1) / size).nan_to_num(math.inf)
        gap = gap[b.isfinite().all(1)]  # other examples contribute nothing
        return float(gap.max()) if len(gap) else 0.0


# ---------------------------------------------------------------------- the mode


class _Call(NamedTuple):
    """One call of the loop: its arguments and what it gave, and the place of its first number."""

    func: Callable[..., Any]
    name: str
    given: tuple[Any, Any]
    tensors: list[Tensor]
    numbers: list[float]
    out: Any
    targets: list[Tensor]
    draws: RandomState | None
    first: int


class Twins(TorchFunctionMode):
    """Function mode that leads some twins through a loop, from the loader's yield to its backward.

    A unit is led alone, and among others. Where a number or a tensor of the loop has a second
    reading, the twin forks: one reading by which the loop is right is enough. Examples are units of
    `rows_per_unit` consecutive rows, which a loss may join. The mode is the lowest of the stack, so
    that a context of the user's that ends removes its own; without twins it is not there.

    Attributes:
        notes: what the twins could not see in this batch.
        is_on: True if this batch has twins.
        has_passed: True once a batch passed.
        rows_of: function from the number of rows to those to be led, of a block without a loader;
            its twins begin at the model's first call. None with a loader.
    """

    def __init__(self, rows_per_unit: int = 1) -> None:
        super().__init__()
        self.k, self.has_passed, self.is_on = rows_per_unit, False, False
        self.numbers = Numbers(rows_per_unit)
        self.rows_of: Callable[[int], Sequence[int]] | None = None
        self.clear()

    def begin(self, batch: Any, num_rows: int, rows: Sequence[int], seed: int, among: int) -> None:
        """Begin to lead twins of the units that hold `rows`, `among` of them among others, too."""
        self.clear()
        n, lists = num_rows // self.k, list[list[list[Tensor]]]()
        self._n = n
        self._batch = list(_tensors_in(batch, 5))
        if any(x.is_nested or x.layout is not torch.strided for x in self._batch):
            return  # which the model may not get; made dense, it is what the loop sees
        if any(tensor.shape[:1] != (num_rows,) for tensor in self._batch):
            if num_rows < _FEWEST_IN_LISTS:
                return
            lists = _lists_of_rows(batch, num_rows)
        draw = torch.Generator().manual_seed(seed)
        units = list(dict.fromkeys(row // self.k for row in rows)) if n > 1 else []
        for unit in units:
            self.twins.append(Twin(n, self.k, torch.tensor([unit]), 0))
        for unit in units[:among]:
            others = torch.randint(n, (n,), generator=draw)
            others[unit] = unit
            self.twins.append(Twin(n, self.k, others, unit))
        self.is_on = bool(self.twins)
        for tensor in self._batch if self.is_on else ():
            axes = [axis for axis, size in enumerate(tensor.shape) if size == num_rows]
            self._take(tensor, axes[0] if axes else None)
        for of_list, twin in itertools.product(lists, self.twins):
            places = range(num_rows) if twin.is_alone else twin.index.tolist()
            for row, place in zip(of_list, places, strict=True):
                for tensor, own in zip(row, of_list[place], strict=False):
                    self._rows[tensor] = True
                    twin.tensors[tensor] = twin.placed(own.detach()).clone()
        for tensor in self._batch:
            if tensor.dim() and num_rows not in tensor.shape and tensor not in self._rows:
                self._led[tensor], self._has_joined = "joined", True  # as targets of CTC
        self._listen()

    def _listen(self) -> None:
        if self.is_on:
            remove_mode(self)
            insert_lowest(self)

    def end(self) -> None:
        """Stop to lead."""
        remove_mode(self)

    def clear(self) -> None:
        """Stop to lead, and free the twins."""
        if self.is_on:
            self.end()
        self.twins, self._batch, self.notes = list[Twin](), list[Tensor](), list[str]()
        self._forks = set[Any]()
        self.is_on = self._has_left = self._is_busy = self._was_read = self._has_backward = False
        self._has_drawn = self._is_inside = self._is_open = self._gives_number = False
        self._n, self._has_joined = 0, False
        self._led: Any = WeakIdKeyDictionary()
        self._drawn = WeakIdKeyDictionary()
        self._rows: Any = WeakIdKeyDictionary()  # in lists of all rows of the batch
        self.numbers.next_batch()

    def leave_loader(self) -> None:
        """Stop to lead until the model is called: the loader ended, as next(iter(loader)) does."""
        self._has_left = self.is_on
        self.end()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which nothing is led."""
        was_on = self.is_on and remove_mode(self)
        has_failed = True
        try:
            with self.unheard():
                yield
            has_failed = False
        finally:
            is_heard = self._is_open or not self._is_inside
            if was_on and is_heard and not (has_failed and self._has_left):
                self._listen()

    def _others(self) -> list[Twins]:
        """Twins of other private models that are led through the same loop."""
        modes = _get_current_function_mode_stack()
        return [mode for mode in modes if isinstance(mode, Twins) and mode is not self]

    def _are_of_others(self, tensors: Sequence[Tensor]) -> bool:
        """True if another private model's rows led to some of these tensors, and ours to none."""
        others = self._others()
        if not others or any(tensor in self._led for tensor in tensors):
            return False
        return any(tensor in other._led for other in others for tensor in tensors)

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Context whose functions are this model's, which twins of other models do not follow."""
        others = [other for other in self._others() if not other._is_busy]
        for other in others:
            other._is_busy = True
        try:
            yield
        finally:
            for other in others:
                other._is_busy = False

    def each_unheard(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items that are made `unheard`, such as the batches of a loader."""
        left = iter(items)
        while True:
            with self.unheard():
                item = next(left, None)
            if item is None:
                return
            yield item

    # ------------------------------------------------------------------ the model

    def enter_model(
        self, args: Any, kwargs: Any, num_rows: int, model: nn.Module | None = None
    ) -> None:
        """Begin a forward, whose functions are not led; compare what it gets, and what it holds."""
        if self.rows_of is not None and not self.is_on:
            self.begin((), num_rows, self.rows_of(num_rows), 0, 2)
        if not self.is_on:
            return
        self.end()
        self._is_inside, self._model = True, model
        given = _tensors((args, kwargs))
        state = () if model is None else (*model.buffers(), *model.parameters())
        known = (*given, *held_tensors(model).values(), *state)
        for tensor in known:
            self._compare_input(tensor)
        passed = {id(tensor) for tensor in (*known, *self._batch)}
        # What else the loop made of rows may be read inside, from a closure or a global name.
        self._is_open = any(id(tensor) not in passed for tensor in self._led)
        for tensor in given:
            if tensor not in self._led:
                self._look_for_arrays(tensor)
                self._take(tensor, 0)

    def leave_model(
        self,
        outputs: Sequence[tuple[Tensor, Tensor]],
        numbers: Sequence[tuple[Tensor, Tensor]],
        again: Callable[[Tensor], Forwarded],
    ) -> None:
        """End the forward.

        Args:
            outputs: pairs of a tensor as made in the model and as handed out.
            numbers: the same of numbers, such as the loss of labels.
            again: function from units to what the model gives for them.
        """
        if not self.is_on:
            return
        self.end_forward()
        numel = sum(made.numel() for made, out in outputs if out.requires_grad)
        among = [twin for twin in self.twins if not twin.is_alone]
        for twin in among[max(0, _MOST // max(numel, 1)) :]:
            self.twins.remove(twin)
        held = held_tensors(self._model)
        for twin in self.twins:
            leaves = [twin.pick(made.detach()).detach() for made, _ in outputs]
            twin.leaves.append([])
            for leaf, (_, out) in zip(leaves, outputs, strict=True):
                if out.requires_grad:
                    twin.leaves[-1].append(leaf.requires_grad_())
                with torch.enable_grad():
                    twin.tensors[out] = leaf.clone()
            for tensor in (*(out for _, out in numbers), *held.values()):
                twin.keep(tensor, None)
            with contextlib.suppress(Exception):  # of this row; what is used then is unknown
                if twin.is_alone and (numbers or held):
                    self._compute_inside(twin, outputs, numbers, held, again)
        for tensor in (*(out for _, out in (*outputs, *numbers)), *held.values()):
            self._led[tensor] = True
        self._gives_number |= bool(numbers)
        self._listen()

    def _compute_inside(
        self, twin: Twin, outputs: Any, numbers: Any, held: Mapping[Any, Tensor], again: Any
    ) -> None:
        """Give a row alone the numbers that the model returns, and tensors that it keeps on itself.

        They are those of a forward of the row with its draws of the batch, which has to give the
        same outputs. The numbers become functions of these.
        """
        with _OwnDraws(twin):
            inside = again(twin.units)
        ours = [twin.tensors[out] for _, out in outputs]
        pairs = list(zip(ours, inside.outputs, strict=True))
        if not all(a.shape == b.shape and _is_near(a, b) for a, b in pairs):
            return
        for key, tensor in held.items():
            twin.tensors[tensor] = twin.placed(inside.held[key].detach()).clone()
        used = [(leaf, t) for leaf, t in pairs if t.requires_grad]
        for (_, out), number in zip(numbers, inside.numbers, strict=True):
            value = twin.placed(number.detach())
            if number.requires_grad and used:
                ones = [torch.ones_like(number)]
                grads = partial_gradients([number], [t for _, t in used], ones)
                with torch.enable_grad():
                    for (leaf, _), grad in zip(used, grads, strict=True):
                        if grad is not None:
                            value = value + ((leaf - leaf.detach()) * twin.placed(grad)).sum()
            twin.tensors[out] = value

    def end_forward(self) -> None:
        """End a forward, also one that failed."""
        self.end()
        self._is_inside = False

    def drop(self, index: int) -> None:
        """Forget one forward, whose gradient does not count."""
        for twin in self.twins:
            del twin.leaves[index : index + 1]

    def rewind(self, first: int = 0) -> None:
        """Forget the forwards from `first` on: they failed or are repeated."""
        if self.is_on:
            self.end_forward()
            for twin in self.twins:
                del twin.leaves[first:]
            if not self._has_left:
                self._listen()

    def _compare_input(self, tensor: Tensor) -> None:
        """Compare what the model gets, where a twin has it, with that of its rows in the batch."""
        if tensor not in self._led or tensor in self._drawn:
            return
        for twin in self.twins:
            ours = twin.tensors.get(tensor)
            if ours is None or twin.problem is not None:
                continue
            theirs = twin.placed(tensor.detach())
            if tensor.shape[:1] == (self._n * self.k,):
                ours, theirs = ours[twin.at], theirs[twin.own]
            if ours.shape != theirs.shape:
                twin.problem = "what the model gets for one example has another shape"
            elif not _is_near(ours.detach(), theirs):
                twin.has_other_inputs = True

    def _take(self, tensor: Tensor, axis: int | None) -> None:
        """Give a tensor's own rows to the twins."""
        self._led[tensor] = True
        for twin in self.twins:
            twin.keep(tensor, axis)

    def _take_target(self, target: Tensor) -> None:
        """Give the twins what the loop writes to; of a view, as of a buffer, all that it shows."""
        self._led[target], base = True, target._base
        may_follow = base is not None and base.is_contiguous() and base not in self._led
        if base is None or not may_follow or _may_be_rows(base, self._n, self.k):
            for twin in self.twins:
                twin.keep(target, None if twin.is_whole or _is_parameter(target) else 0)
            return
        self._take(base, None)
        offset = target.storage_offset() - base.storage_offset()
        for twin in self.twins:
            ours = twin.tensors[base]
            twin.tensors[target] = ours.as_strided(target.shape, target.stride(), offset)

    # ------------------------------------------------------------------ functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._hear(func, args, kwargs or {})

    @never_compiled  # a loop that is compiled is led call by call
    def _hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of the loop, and call it again for the twins."""
        leaves = _leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._is_inside:
            for tensor in tensors:
                self._compare_input(tensor)
            return func(*args, **kwargs)
        if self._is_busy or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return func(*args, **kwargs)
        if self._are_of_others(tensors):
            return func(*args, **kwargs)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__ + ("" if name == "__get__" else "=")
        writes = "out" in kwargs or name == "__setitem__" or name in _IN_PLACE
        writes |= name[-1:] in "_=" and name[:2] != "__"
        generators = [g for g in (*args, *kwargs.values()) if type(g) is torch.Generator]
        is_random = bool(generators) or name.rstrip("_") in _RANDOM
        self._has_drawn |= is_random
        is_led = any(tensor in self._led for tensor in tensors)
        numbers = [leaf for leaf in leaves if type(leaf) in (int, float)]
        is_ours = is_led or self._concerns(name, tensors, numbers, args, writes)
        targets = _tensors(kwargs.get("out", args[:1])) if writes else []
        for target in targets if is_led else ():
            if target not in self._led:  # it gets a twin of its own
                self._take_target(target)
        draws = RandomState(generators) if is_random and is_ours else None
        out = func(*args, **kwargs)
        if is_led and name in _READS:
            self._was_read |= name in _READS[2:]
            self.numbers.first_read = min(self.numbers.first_read, len(self.numbers.seen))
        seen, first = [(name, v) for v in numbers], len(self.numbers.seen)
        if is_ours and str(getattr(func, "__module__", "")).startswith(_BETWEEN_PROCESSES):
            led = [tensor for tensor in tensors if tensor in self._led]
            self._hear_processes(name, led + _tensors(out))
        elif is_ours and (writes or name in _READS + _DECIDES or _tensors(out)):
            self.numbers.seen += seen
            given = (args, kwargs), tensors, numbers
            self._lead(_Call(func, name, *given, out, targets, draws, first))
        elif not tensors:  # keeps its place among the numbers where it is no multiple of n
            self.numbers.seen += seen
        return out

    def _concerns(self, name: str, tensors: Any, numbers: Any, args: Any, writes: bool) -> bool:
        """True for a call on what may be rows of the batch, or with sizes made of n."""
        for tensor in tensors:
            self._look_for_arrays(tensor)
        if any(_may_be_rows(tensor, self._n, self.k) for tensor in tensors):
            return not writes
        if tensors or (name in _FROM_LISTS and isinstance(args[0], list | tuple)):
            return False  # values, and no sizes
        return any(as_multiple(v, self._n, self.k) != v for v in numbers)

    def _look_for_arrays(self, tensor: Tensor) -> None:
        """Note rows that come back from NumPy or lists, where nobody saw what was done to them."""
        is_new = self._was_read and tensor not in self._led
        if is_new and BACK not in self.notes and _may_be_rows(tensor, self._n, self.k):
            self.notes.append(BACK)

    def _lead(self, call: _Call) -> None:
        """Call a function on every twin's tensors, after the loop's call."""
        led = [t for t in call.tensors if t in self._led]
        made = [*_tensors(call.out), *call.targets]
        has_read = any(value in twin.reads for twin in self.twins for value in call.numbers)
        is_drawn = bool(led or call.draws) and all(t in self._drawn for t in led) and not has_read
        is_taken = is_drawn or call.name in _TAKEN or (call.draws is not None and call.targets)
        values = (*call.given[0], *call.given[1].values()) if self._rows else ()
        joins_rows = any(map(self._are_all_rows, values))
        of_joined = self._has_joined and any(self._led[t] == "joined" for t in led)
        of_rows = bool(led) and not joins_rows and all(t in self._rows for t in led)
        for tensor in made:
            self._led[tensor] = "joined" if of_joined else True
            if of_rows:
                self._rows[tensor] = True
            if is_drawn:
                self._drawn[tensor] = True
            elif not is_taken:
                self._drawn.pop(tensor, None)
        # Of a draw by size nobody knows if it is a table.
        unknown = made if is_taken else [t for t in call.tensors if t not in self._led]
        self._fork(call, unknown, [] if is_taken else call.numbers)
        # Hooks of the loop, as of a checkpoint around its loss, count the tensors that they get.
        hooks: Any = contextlib.nullcontext()
        if torch._C._autograd._top_saved_tensors_default_hooks(True):
            hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
        with warnings.catch_warnings(), hooks:
            warnings.simplefilter("ignore")
            for twin in reversed(self.twins):  # forks copy what those that they come from write to
                if twin.problem is None:
                    takes = is_taken or (joins_rows and twin.is_alone)
                    try:
                        for target in call.targets:
                            twin.own_target(target)
                        (self._take_own if takes else self._repeat)(call, twin)
                    except Exception as error:  # noqa: BLE001 - of this row alone
                        reason = str(error).split("\n")[0][:80]
                        twin.problem = f"{call.name} can't be called on one row ({reason})"
                        twin.is_torn |= of_joined and twin.is_alone

    def _are_all_rows(self, value: Any) -> bool:
        """True for a list of all rows of the batch."""
        is_list = isinstance(value, list | tuple) and len(value) == self._n * self.k
        return is_list and all(isinstance(v, Tensor) and v in self._rows for v in value)

    def _fork(self, call: _Call, unknown: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Let twins go on by every reading that this call has."""
        n, k, bases = self._n, self.k, [twin for twin in self.twins if twin.is_base]
        doubtful = [
            v
            for at, v in enumerate(numbers, call.first)
            if self.numbers.learned(at, call.name, v, n) is None
        ]
        if self.rows_of is None and any(_may_be_rows(tensor, n, k) for tensor in unknown):
            self._fork_once(bases, is_whole=True)
        for reading in (as_multiple, as_constant):
            if any(reading(v, n, k) != as_count(v, n, k) for v in doubtful):
                self._fork_once([twin for twin in bases if twin.is_alone], reading=reading)

    def _fork_once(self, bases: Sequence[Twin], **changes: Any) -> None:
        if str(changes) not in self._forks:
            self._forks.add(str(changes))
            self.twins += [twin.fork(**changes) for twin in bases]

    def _repeat(self, call: _Call, twin: Twin) -> None:
        """Call a function again on a twin's tensors."""
        given = self._arguments(twin, call)
        if call.name in _WITH_STATE:
            given = pytree.tree_map_only(Tensor, torch.clone, given)
        dtypes = autocast_dtypes()
        moves = bool(dtypes) and twin.is_alone and dtypes[-1][0] != "cpu"
        with autocast_as([("cpu", dtypes[-1][1])]) if moves else contextlib.nullcontext():
            if call.draws is not None:
                with call.draws.repeated():
                    drawn = _as_drawn(twin, call.func, call.given, given)
                ours = pytree.tree_map_only(Tensor, twin.placed, drawn)
            else:
                ours = call.func(*given[0], **given[1])
        twin.note(call.name, call.out, ours)

    def _hear_processes(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Make unknown to the twins what other processes may have sent: their rows."""
        for tensor in tensors:
            self._take(tensor, 0)
        for twin in self.twins:
            twin.parts = twin.parts or name
            for tensor in tensors:
                twin.tensors[tensor] = twin.tensors[tensor] * math.nan

    def _take_own(self, call: _Call, twin: Twin) -> None:
        """Give a twin its rows of what the loop got; of a draw by size they may be anything."""
        for tensor in _tensors(call.out):
            axis = None if twin.is_whole and tensor in self._drawn else 0
            picked = twin.pick(tensor.detach(), axis)
            if call.targets and getattr(twin.tensors.get(tensor), "shape", None) == picked.shape:
                twin.tensors[tensor].data.copy_(picked)
            else:
                twin.keep(tensor, axis)

    def _arguments(self, twin: Twin, call: _Call) -> Any:
        """Return a twin's arguments, with its readings of Python numbers."""
        places = itertools.count(call.first)

        def number(value: float) -> float:
            at = next(places)
            if value in twin.reads or not twin.is_alone:
                return twin.reads.get(value, value)
            known = self.numbers.learned(at, call.name, value, twin.n)
            if known is None:
                twin.guessed[at] = known = twin.reading(value, twin.n, twin.k)
            return known

        return twin.of(call.given, number)

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward, and those of the twins; gradients that the loop asked for are taken."""
        names = _BACKWARDS[func]
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        losses, weights = (pytree.tree_leaves(given.get(name)) for name in (names[0], names[-1]))
        weights += [None] * (len(losses) - len(weights))
        self._is_busy = True
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            wanted = pytree.tree_leaves(given.get("inputs"))
            if func is torch.autograd.grad and any(map(_is_parameter, wanted)):
                raise RuntimeError(_OF_PARAMETERS) from error
            raise
        finally:
            self._is_busy = False
        if func is torch.autograd.grad:
            for tensor in _tensors(out):
                self._take(tensor, 0)
            return out
        self._has_backward = True
        for twin in self.twins:
            if twin.problem is None:
                try:
                    twin.backward(losses, weights)
                except Exception as error:  # noqa: BLE001 - of this row alone
                    twin.problem = f"backward can't be called on one row ({error})"
        return out

    # ------------------------------------------------------------------ the verdict

    def verdict(self, cotangents: Sequence[Tensor | None], declared: str) -> Problem | None:
        """Return what is wrong with the loop, or None.

        Args:
            cotangents: gradient of each differentiable output of the forwards, in order; empty for
                a forward that computes the loss, of which what it gets is compared.
            declared: "mean" or "sum", the reduction of the examples' losses.
        """
        self.end()
        self.numbers.end_batch(self._n)
        is_unseen = bool(cotangents) and not self._has_backward
        seen = {
            UNSEEN: is_unseen,
            DECIDED: any(twin.decides_otherwise for twin in self.twins),
            CARRIED: self.numbers.was_carried,
        }
        self.notes += [text for text, is_true in seen.items() if is_true]
        if is_unseen:
            return None
        if all(twin.problem for twin in self.twins if twin.is_alone):
            self.notes.append(LOST.format(reason=self.twins[0].problem))
        kinds = {str(c.dtype).removeprefix("torch.") for c in cotangents if c is not None}
        if any(c is not None and c.is_cuda for c in cotangents) and matmul_in_tf32():
            kinds.add("tf32")
        limit = max([TOLERANCE.get(kind, 3e-2) for kind in kinds], default=1e-3)
        found = None
        for start in dict.fromkeys(twin.own.start for twin in self.twins):
            twins = [twin for twin in self.twins if twin.own.start == start]
            if not any(twin.is_torn for twin in twins):
                found = found or self._among(twins, cotangents, declared, limit)
                found = found or self._alone(twins, cotangents, declared, limit)
        self.has_passed |= found is None
        return found

    def _among(self, twins: Any, cotangents: Any, declared: str, limit: float) -> Problem | None:
        """Compare the row among other rows."""
        among = [twin for twin in twins if not twin.is_alone]
        ran = [twin for twin in among if twin.problem is None] or among
        if ran and all(twin.has_other_inputs for twin in ran):  # lost inside the model or not
            return Problem(_INPUTS.format(first=_first(ran)))
        errors = [
            math.inf
            if twin.has_other_inputs
            else twin.error(cotangents, declared, not self._has_drawn)
            for twin in ran
            if twin.problem is None
        ]
        error = min(errors, default=0.0)
        return self._refusal(_MIXES, ran, error, declared) if error > limit else None

    def _alone(self, twins: Any, cotangents: Any, declared: str, limit: float) -> Problem | None:
        """Compare the row alone, by all readings of numbers: one that agrees is enough."""
        ran = [
            twin
            for twin in twins
            if twin.is_alone and not twin.problem and not self.numbers.refute(twin.guessed, self._n)
        ]
        errors = [twin.error(cotangents, declared, False) for twin in ran]
        is_right = any(
            e <= limit and not t.has_other_inputs for e, t in zip(errors, ran, strict=True)
        )
        if not ran or is_right or self.numbers.are_unclear(self._n):
            return None
        if all(twin.has_other_inputs for twin in ran):
            return Problem(_INPUTS.format(first=_first(ran)))
        other = "sum" if declared == "mean" else "mean"
        if any(twin.error(cotangents, other, False) <= limit for twin in ran):
            return Problem(_DECLARED.format(declared=declared, other=other), min(errors))
        return self._refusal(_WEIGHS, ran, min(errors), declared)

    def _refusal(self, text: str, twins: Sequence[Twin], error: float, declared: str) -> Problem:
        """Return what is wrong, where twins first met it, and the way out."""
        text = text.format(error=power_of_ten(error), first=_first(twins))
        text += _WAY_OUT.format(declared=declared)
        return Problem(text + _OF_MODEL if self._gives_number else text, error)


# ---------------------------------------------------------------------- draws


def _as_drawn(twin: Twin, func: Any, loops: Any, ours: Any) -> Any:
    """Call a function that draws on the loop's arguments with a twin's rows in their place.

    Return what the twin's rows get, which is what they get in the batch.
    """
    if not twin.is_alone:
        return func(*ours[0], **ours[1])
    axes, own, rows = [], iter(_leaves(ours)), torch.arange(twin.own.start, twin.own.stop)

    def spread(theirs: Any) -> Any:
        one = next(own)
        if not isinstance(theirs, Tensor):
            return theirs
        sizes = enumerate(zip(theirs.shape, one.shape, strict=True))
        axis = next((i for i, (whole, some) in sizes if whole != some), None)
        one = one.to(theirs.device)
        if axis is None:
            return one
        axes.append(axis)
        return theirs.detach().index_copy(axis, rows.to(theirs.device), one)

    def own_rows(tensor: Any) -> Any:
        axis = min(axes, default=0)
        if isinstance(tensor, Tensor) and tensor.shape[axis : axis + 1] == (twin.n * twin.k,):
            return tensor.index_select(axis, rows.to(tensor.device))
        return tensor

    args, kwargs = _mapped(spread, loops)
    return _mapped(own_rows, [func(*args, **kwargs)])[0]


class _OwnDraws(TorchFunctionMode):
    """Mode of a forward of one unit, which gets of each draw what it gets in the batch."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self._twin = twin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        is_drawing = getattr(func, "__name__", "").rstrip("_") in _RANDOM
        if func in RECURRENT:  # its states hold the rows on axis 1, and it does not look at shapes
            at = 5 + isinstance(args[3], list)  # packed: one argument more
            is_drawing = args[at] > 0 and args[at + 1]
            if is_drawing:
                raise NotImplementedError("The row's part of this dropout is not known.")
        if not is_drawing:
            return func(*given[0], **given[1])
        n, k = self._twin.n, self._twin.k

        def batch(value: Any) -> Any:
            has_rows = isinstance(value, Tensor) and value.shape[:1] == (k,)
            return torch.cat([value] * n) if has_rows else value

        return _as_drawn(self._twin, func, _mapped(batch, given), given)


class Forwarded(NamedTuple):
    """What a model gives for some units: outputs, numbers, and tensors that it keeps on itself."""

    outputs: list[Tensor]
    numbers: list[Tensor]
    held: Mapping[Any, Tensor]


def held_tensors(model: nn.Module | None) -> dict[Any, Tensor]:
    """Return (module, attribute, place) -> tensor that a module keeps beside its state."""
    return {
        (i, key, place): tensor
        for i, module in enumerate(model.modules() if model is not None else ())
        for key, value in vars(module).items()
        if key[:1] != "_" and isinstance(value, Tensor | dict | list | tuple)
        for place, tensor in enumerate(_tensors(value))
    }


# ---------------------------------------------------------------------- small things


def _flat(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor as (count, numbers)."""
    return tensor.detach().reshape(count, -1).double().cpu()


def _first(twins: Sequence[Twin]) -> str:
    """Return "; first in NAME" for the first function where the row and a twin part."""
    name = next((twin.parts for twin in twins if twin.parts), "")
    return f"; first in {name}" if name else ""


def _is_near(ours: Tensor, theirs: Tensor) -> bool:
    """True if two tensors of one shape are equal up to rounding; nan is nan."""
    if ours.dtype != theirs.dtype:
        return False
    if not ours.is_floating_point() or not ours.numel():
        return torch.equal(ours, theirs.to(ours.device))
    a, b = ours.detach().double().cpu(), theirs.detach().double().cpu()
    size = float(b.abs().nan_to_num(0, 0, 0).max())
    tolerance = TOLERANCE[str(ours.dtype).removeprefix("torch.")]
    tolerance /= 10 if tolerance < 1e-2 else 1
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _may_be_rows(tensor: Tensor, n: int, k: int) -> bool:
    """True if a tensor of unknown origin may hold rows of the batch, or a value for each unit."""
    is_named = _is_parameter(tensor) or (tensor.requires_grad and tensor.is_leaf)
    return tensor.shape[:1] in ((n,), (n * k,)) and not is_named


def _lists_of_rows(value: Any, rows: int) -> list[list[list[Tensor]]]:
    """Return the innermost lists of all rows of a batch, each row as its tensors."""
    parts = value.values() if isinstance(value, Mapping) else value
    parts = parts if isinstance(value, Mapping | list | tuple) else ()
    found = [rows_of for part in parts for rows_of in _lists_of_rows(part, rows)]
    if not found and isinstance(value, list | tuple) and len(value) == rows:
        found = [[list(_tensors_in(part, 5)) for part in value]]
    return found


_NESTED = (dict, tuple, list, slice)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested containers of plain types with `function` of their leaves, also of slices."""
    if isinstance(value, dict):
        return dict(zip(value, _mapped(function, [*value.values()]), strict=True))
    parts = [value.start, value.stop, value.step] if isinstance(value, slice) else value
    parts = [_mapped(function, v) if isinstance(v, _NESTED) else function(v) for v in parts]
    if isinstance(value, slice):
        return slice(*parts)
    return parts if type(value) is list else tuple(parts)


def _leaves(value: Any) -> list[Any]:
    found = list[Any]()
    _mapped(found.append, [value])
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors inside a batch of any type."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, str | bytes | type | nn.Module):
        inner: Any = value.values() if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping | list | tuple | set):
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in inner:
            yield from _tensors_in(part, depth - 1)

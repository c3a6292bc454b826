# SPDX-License-Identifier: Apache-2.0
"""The proof that a model treats its examples one by one, made on the first call.

On a few examples, with dropout off: (a) the gradient of ONE example's loss must vanish at every use
of a parameter outside that example's rows, which also finds where those rows are; (b) the example
alone must give the loss it has in the batch; (c) no buffer may change. Uses that fail (a) send the
model through `vmap`; a model that fails (b) or (c) has no per-sample gradient and is refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualdp import UnsupportedLayerError, exactness

from .batch import Batch, check_losses
from .capture import Capture
from .layout import Layout, belongs_to, candidates
from .random_state import RandomState, seed_generators, untouched_generators
from .remembered import known as known
from .rows import refuse_moved as refuse_moved
from .rules.base import Tensor
from .state import State, refuse_written, restored
from .uses import SecondOrderError, Use, eagerly
from .validate import refuse_mixing_modules

#: Examples that the proof looks at, and seeds under which a model that draws is looked at.
EXAMPLES, DRAWS = 4, 5
#: Largest relative difference of one example's loss alone and in the batch, by the lowest dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Uses without examples (tables of positions and the like) that are looked for.
_MOST_SKIPPED = 32
_ON_CUDA = 10.0  # times as much: kernels and TF32 products change with the batch size


@dataclass(frozen=True)
class Proof:
    """What is known about one model under one loss.

    Attributes:
        layouts: signature of each use, in order, and its layout; None where no gradient arrived.
        problem: why captured uses cannot be trusted (the model then goes through `vmap`), or None.
        skip: positions of uses that hold no examples.
        unreached: indices of uses from which no way leads to the losses.
    """

    signatures: tuple[Any, ...]
    layouts: tuple[Layout | None, ...]
    problem: str | None = None
    skip: frozenset[int] = frozenset()
    unreached: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether the proof can be used again."""
        return all(found or i in self.unreached for i, found in enumerate(self.layouts))


class NoRandomness(TorchFunctionMode):
    """Dropout off, and the same constant for every random draw that has examples in its shape."""

    _constant = True

    @classmethod
    @contextlib.contextmanager
    def of_dropout(cls) -> Iterator[None]:
        """Inside, an active mode switches dropout off and lets everything else be drawn."""
        cls._constant = False
        try:
            yield
        finally:
            cls._constant = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func in _WITH_DROPOUT:
            at, name = _WITH_DROPOUT[func]
            at += func in _RECURRENT and isinstance(args[3], list)  # packed: one argument more
            args = (*args[:at], *(0.0 for _ in args[at : at + 1]), *args[at + 1 :])
            kwargs |= {name: 0.0} if name in kwargs else {}
        out = func(*args, **kwargs)
        return out.detach().fill_(0.5) if self._constant and func in _RANDOM else out


_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
#: Functions with dropout inside: its position and name among the arguments.
_WITH_DROPOUT = {
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
    **{function: (5, "dropout") for function in _RECURRENT},
}
_DROPOUT = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}
_RANDOM = {
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal, torch.bernoulli),
    *(torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_),
}


def prove(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: dict[str, nn.Parameter],
    mask: Tensor | None = None,
    has_aux: bool = False,
    writes: set[str] | None = None,
) -> Proof | None:
    """Examine the model on a few examples.

    Args:
        model: the model.
        loss_fn: `loss_fn(model, *batch)` -> (n,) losses.
        batch: the batch, n >= 2.
        parameters: trainable parameters by name.
        mask: (n,) bool, False for padding.
        has_aux: the loss comes with an auxiliary output.
        writes: gets the names of the buffers that a forward writes, the same on every batch.

    Returns:
        The proof, or None when the batch holds fewer than two examples with finite losses.

    Raises:
        UnsupportedLayerError: the losses depend on other examples, or a buffer changes.
    """
    refuse_mixing_modules(model)

    def losses_of(part: Batch) -> Tensor:
        out = loss_fn(model, *part.arguments())
        return check_losses(out[0] if has_aux else out, part.n)

    tolerance = _tolerance(model, parameters, batch)
    with eagerly(), untouched_generators(model), restored(model), NoRandomness():
        before = State(model)
        drawn = RandomState.of(model)
        whole = _without_graph(losses_of, batch)
        has_drawn, written = not drawn.is_as_before(model), before.written()
        if written:
            refuse_written(model, losses_of, batch, written)
        if writes is not None:
            writes.update(written)
        good = whole.isfinite()
        if mask is not None:
            good = good & mask.to(good.device)
        chosen = _spread(good.nonzero().flatten(), EXAMPLES)
        if len(chosen) < 2:
            return None
        few = batch.rows(chosen)
        names = {id(p): name for name, p in parameters.items()}
        nested = None
        try:
            with Capture(names, model=model) as capture:
                losses = losses_of(few)
        except SecondOrderError as error:
            nested, losses = str(error), _without_graph(losses_of, few)
        problem = None
        if not has_drawn:  # else a batch of another size draws other numbers
            problem = _apart(losses.detach(), whole[chosen], tolerance, "in a smaller batch")
            problem = problem or _differs_alone(losses_of, few, losses.detach(), tolerance)
        if problem and not _agrees_in_double(model, loss_fn, batch, chosen, has_aux):
            raise UnsupportedLayerError(problem)
        problem = _draws_join(model, losses_of, few, tolerance)
        if problem:
            raise UnsupportedLayerError(problem)
        if nested:
            return Proof((), (), nested)
        skip: frozenset[int] = frozenset()
        while True:
            found = _locate(capture, losses, parameters, skip)
            if not isinstance(found, Use):
                return found
            if len(skip) == _MOST_SKIPPED or not found.can_skip:
                return Proof((), (), f"{found} does not keep the examples apart on one axis")
            skip |= {found.position}
            with Capture(names, skip=skip, model=model) as capture:
                losses = losses_of(few)


def _without_graph(losses_of: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    """The losses, without a graph unless the model needs one because it differentiates itself."""
    try:
        with torch.no_grad():
            return losses_of(batch)
    except RuntimeError:
        with torch.enable_grad():
            return losses_of(batch).detach()


def _spread(indices: Tensor, count: int) -> Tensor:
    """At most `count` of the indices, from the first to the last."""
    if len(indices) <= count:
        return indices
    positions = [i * (len(indices) - 1) // (count - 1) for i in range(count)]
    return indices[positions]


def _tolerance(model: nn.Module, parameters: Mapping[str, Tensor], batch: Batch) -> float:
    """How far rounding may move a loss, by the lowest precision that takes part.

    Parameters of a sharded model may have one precision outside and another inside.
    """
    tensors = [*model.parameters(), *parameters.values(), *batch.tensors()]
    device = batch.tensors()[0].device.type
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    largest = max(TOLERANCE.get(dtype, 1e-2) for dtype in dtypes or {torch.float32})
    return largest * (_ON_CUDA if device == "cuda" else 1.0)


def _apart(got: Tensor, expected: Tensor, tolerance: float, how: str) -> str | None:
    """How losses depend on who else is in the batch, or None."""
    scale = torch.maximum(expected.abs(), expected.abs().mean()).clamp(min=1e-6)
    apart = (got - expected).abs() > tolerance * scale
    if not bool(apart.any()) and bool(got.isfinite().all()):
        return None
    size = exactness.power_of_ten(float(((got - expected).abs() / scale).max()))
    return (
        f"The loss of an example is another one {how} than in the batch (relative difference "
        f"{size}): the losses depend on other examples, so no per-sample gradient exists. Remove "
        "what mixes examples (batch statistics, a mean over the batch, attention over examples)."
    )


def _differs_alone(
    losses_of: Callable[[Batch], Tensor], few: Batch, together: Tensor, tolerance: float
) -> str | None:
    """How the loss of the first or last example differs alone, or None."""
    for position in (0, few.n - 1):
        alone = _without_graph(losses_of, few.rows(slice(position, position + 1)))
        problem = _apart(alone, together[position : position + 1], tolerance, "alone")
        if problem:
            return problem
    return None


def _draws_join(
    model: nn.Module, losses_of: Callable[[Batch], Tensor], few: Batch, tolerance: float
) -> str | None:
    """How the first example's loss depends on the others under some random numbers, or None.

    Examples that are mixed by chance, with random weights or on every other call, are not mixed
    while random numbers are switched off. So the same numbers are drawn with others beside the
    first example, for several seeds. Dropout, which mixes nothing, stays off: packed sequences
    draw its masks in the order of their lengths.
    """
    rows = torch.arange(few.n)
    replaced = [few.rows(r) for r in (torch.cat([rows[:1], rows[1:].flip(0)]), rows * 0)]
    with NoRandomness.of_dropout(), untouched_generators(model):
        start = RandomState.of(model)
        _without_graph(losses_of, few)
        if start.is_as_before(model):
            return None
        for seed in range(DRAWS):
            seed_generators(model, seed)
            drawn = RandomState.of(model)
            first = _without_graph(losses_of, few)[:1]
            for others in replaced:
                drawn.put()
                again = _without_graph(losses_of, others)[:1]
                problem = _apart(again, first, tolerance, "beside others, on the same draws")
                if problem:
                    return problem
    return None


def _agrees_in_double(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Batch, chosen: Tensor, has_aux: bool
) -> bool:
    """Whether what looked like mixing was rounding: losses that cancel agree in float64.

    All of the comparison is repeated: the whole batch, the few that were chosen, and each alone.
    """
    if any(hasattr(p, "device_mesh") for p in model.parameters()):  # no copy of a sharded model
        return False
    tensors = [t.double() if t.is_floating_point() else t for t in batch.tensors()]
    exact, every = copy.deepcopy(model).double(), Batch(batch.with_tensors(tensors))
    tolerance = TOLERANCE[torch.float64]

    def losses_of(part: Batch) -> Tensor:
        out = loss_fn(exact, *part.arguments())
        return check_losses(out[0] if has_aux else out, part.n)

    try:
        whole, few = _without_graph(losses_of, every), every.rows(chosen)
        together = _without_graph(losses_of, few)
        if together.dtype != torch.float64 or _apart(together, whole[chosen], tolerance, ""):
            return False
        return not _differs_alone(losses_of, few, together, tolerance)
    except (RuntimeError, TypeError, ValueError):  # the model can't be run in float64
        return False


def _locate(
    capture: Capture,
    losses: Tensor,
    parameters: dict[str, nn.Parameter],
    skip: frozenset[int],
) -> Proof | Use:
    """Find every use's layout from the gradients of single examples' losses.

    Returns:
        The proof, or a use that does not hold the examples on one axis.
    """
    n, uses = len(losses), capture.uses
    left = [candidates(use.out_shape, n, use.batch_axes, use.rule.rows_are_free) for use in uses]
    shown, reached = [False] * len(uses), set[int]()
    for example in dict.fromkeys((0, n - 1, *range(n))):
        if all(shown) and example not in (0, n - 1):
            break
        leftover = capture.backward(losses[example], parameters, retain=True)
        if leftover:
            return Proof((), (), f"parameter {leftover[0]!r} is used by a function without a rule")
        for i, use in enumerate(uses):
            if use.grads_out is None:
                continue
            reached.add(i)
            if not bool(use.grads_out.any()):
                continue
            shown[i] = True
            left[i] = [c for c in left[i] if belongs_to(use.grads_out, c, n, example)]
            if not left[i]:
                return use
    layouts = tuple(
        options[0] if seen and len(options) == 1 else None
        for options, seen in zip(left, shown, strict=True)
    )
    unreached = frozenset(range(len(uses))) - reached
    return Proof(tuple(use.signature for use in uses), layouts, skip=skip, unreached=unreached)

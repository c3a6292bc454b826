# SPDX-License-Identifier: Apache-2.0
"""Analysis of a model on the first call: each loss depends on one example, on which batch axes.

On a few examples, with dropout off: (a) the gradient of ONE example's loss must vanish at every
parameter use outside that example's rows, which also finds the batch axis; (b) the example alone
must have the same loss as in the batch; (c) buffers may not depend on the batch; (d) half the sum
of the losses must have half the gradient in an example's rows that its loss alone has, which hooks
and backwards of the user's own may change. A model that fails (a) or (d) uses `vmap`; a model that
fails (b) or (c) has no per-sample gradient and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dualdp import exactness
from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.tensor_parallel import TensorParallel
from dualdp_torch.per_sample.batch import Batch, check_losses, split_aux
from dualdp_torch.per_sample.batch_axis import BatchAxis, belongs_to, candidates
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.model_checks import refuse_mixing_modules
from dualdp_torch.per_sample.parameter_use import SecondOrderError, Use, eagerly
from dualdp_torch.per_sample.random_state import (
    NoRandomness,
    RandomState,
    checksums,
    on_copies,
    refuse_written,
    seed_generators,
    untouched_generators,
)
from dualdp_torch.rules.base import Tensor

#: Number of examples in the analysis, and of seeds for a model that draws random numbers.
EXAMPLES, DRAWS = 4, 5
#: Largest relative difference of one example's loss alone and in the batch, by the lowest dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Largest number of uses without examples, such as tables of positions.
_MOST_SKIPPED = 32
#: Problems of a use, whose name is filled in.
ELSEWHERE = "The examples of {} lay on an axis of another size in the batches before."
PERMUTED = "The examples lie in other rows of {} than in the batches before, as the data say."
_NOT_APART = "{} does not keep the examples apart on one axis"
_ON_CUDA = 10.0  # factor of the tolerance: kernels and TF32 vary with the batch size


@dataclass(frozen=True)
class Analysis:
    """Result of the analysis of one model under one loss.

    Signatures and batch axes are those of the uses, in order; an axis is None where no gradient
    arrived. `problem` is the reason why captured uses cannot be trusted (`vmap` is used then). The
    uses `skip` hold no examples, and the losses do not depend on those in `unreached`.
    """

    signatures: tuple[Any, ...]
    batch_axes: tuple[BatchAxis | None, ...]
    problem: str | None = None
    skip: frozenset[int] = frozenset()
    unreached: frozenset[int] = frozenset()

    def misfit(self, uses: Sequence[Use], n: int) -> Use | None:
        """Return a use whose batch axis can't hold n examples, or None.

        A batch as large as another axis may show that one, which is right for its size alone.
        """
        for use, axis in zip(uses, self.batch_axes, strict=True):
            if axis is not None and not axis.fits(use.out_shape, n):
                return use
        return None

    @property
    def complete(self) -> bool:
        """True if the analysis can be used for further batches."""
        return all(found or i in self.unreached for i, found in enumerate(self.batch_axes))


def analyze(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    mask: Tensor | None = None,
    has_aux: bool = False,
) -> Analysis | None:
    """Analyse a model on a few examples of a batch, n >= 2; None if fewer than two are usable.

    Losses that depend on other examples are refused.
    """
    refuse_mixing_modules(model)
    split = TensorParallel.of(model)
    losses_of = _losses_of(model, loss_fn, has_aux)
    tolerance = _tolerance(model, parameters, batch)
    before = checksums(model)
    with eagerly(), untouched_generators(model), NoRandomness():
        drawn = RandomState.of(model)
        whole = _without_graph(losses_of, batch)
        has_drawn = not drawn.is_as_before(model)
        refuse_written(before, model)
        good = whole.isfinite() if mask is None else whole.isfinite() & mask.to(whole.device)
        chosen = good.nonzero().flatten()
        if len(chosen) > EXAMPLES:  # evenly spread, with the first and the last
            chosen = chosen[[i * (len(chosen) - 1) // (EXAMPLES - 1) for i in range(EXAMPLES)]]
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
        if not has_drawn:  # a batch of another size would draw other numbers
            problem = _apart(losses.detach(), whole[chosen], tolerance, "in a smaller batch")
            problem = problem or _differs_alone(losses_of, few, losses.detach(), tolerance)
        if problem and not _agrees_in_double(model, loss_fn, batch, chosen, has_aux, losses):
            raise UnsupportedLayerError(_counted(model, losses_of, few) or problem)
        problem = _draws_join(model, losses_of, few, tolerance)
        if problem:
            raise UnsupportedLayerError(problem)
        if nested:
            return Analysis((), (), nested)
        if capture.hooked:
            return Analysis((), (), f"a gradient hook is on the output of {capture.hooked}")
        skip: frozenset[int] = frozenset()
        while True:
            found = _locate(
                capture, losses, parameters, skip, batch.rows_per_unit, split, tolerance
            )
            if isinstance(found, Analysis):
                return found
            if len(skip) == _MOST_SKIPPED or not found.can_skip:
                return Analysis((), (), _NOT_APART.format(found))
            skip |= {found.position}
            with Capture(names, skip=skip, model=model) as capture:
                losses = losses_of(few)


def _losses_of(
    model: nn.Module, loss_fn: Callable[..., Any], has_aux: bool
) -> Callable[[Batch], Tensor]:
    """Return a function from a batch to its (n,) losses."""

    def losses_of(batch: Batch) -> Tensor:
        with on_copies(model):
            out = loss_fn(model, *batch.arguments())
        return check_losses(split_aux(out, has_aux)[0], batch.n)

    return losses_of


def _without_graph(losses_of: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    """Return the losses, without a graph unless the model differentiates itself."""
    try:
        with torch.no_grad():
            return losses_of(batch)
    except RuntimeError:
        with torch.enable_grad():
            return losses_of(batch).detach()


def _tolerance(model: nn.Module, parameters: Mapping[str, Tensor], batch: Batch) -> float:
    """Return the tolerance for the difference of losses, by the lowest precision in use.

    Parameters of a sharded model may have one precision outside the forward and another inside.
    """
    tensors = [*model.parameters(), *parameters.values(), *batch.tensors()]
    device = batch.tensors()[0].device.type
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    largest = max(TOLERANCE.get(dtype, 1e-2) for dtype in dtypes or {torch.float32})
    return largest * (_ON_CUDA if device == "cuda" else 1.0)


def _apart(got: Tensor, expected: Tensor, tolerance: float, how: str) -> str | None:
    """Return a message if losses depend on the other examples of the batch, or None."""
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
    """Return a message if the loss of the first or last example differs alone, or None."""
    problem = None
    for one in (slice(0, 1), slice(few.n - 1, few.n)):
        alone = _without_graph(losses_of, few.rows(one))
        problem = problem or _apart(alone, together[one], tolerance, "alone")
    return problem


def _mixes(
    losses_of: Callable[[Batch], Tensor], batch: Batch, chosen: Tensor, tolerance: float
) -> str | None:
    """Return a message if losses differ between the batch, the chosen examples, and each alone."""
    whole, few = _without_graph(losses_of, batch), batch.rows(chosen)
    together = _without_graph(losses_of, few)
    problem = _apart(together, whole[chosen], tolerance, "in a smaller batch")
    return problem or _differs_alone(losses_of, few, together, tolerance)


def _counted(model: nn.Module, losses_of: Callable[[Batch], Tensor], few: Batch) -> str | None:
    """Return a message if a forward changes a number that is an attribute of a module, or None."""

    def numbers() -> dict[tuple[str, str], Any]:
        modules = model.named_modules()
        each = ((path, name, v) for path, m in modules for name, v in vars(m).items())
        return {(path, name): v for path, name, v in each if type(v) in (int, float)}

    before = numbers()
    _without_graph(losses_of, few)
    changed = [name for name, value in numbers().items() if before.get(name) != value]
    if not changed:
        return None
    path, name = changed[0]
    return (
        f"The forward changes the number {f'{path}.{name}'.lstrip('.')!r} of the model, and the "
        "loss of an example with it. Expected a buffer (register_buffer), which a check can put "
        "back."
    )


def _draws_join(
    model: nn.Module, losses_of: Callable[[Batch], Tensor], few: Batch, tolerance: float
) -> str | None:
    """Return a message if the first example's loss depends on others under some draws, or None.

    Random mixing (random weights, or on every other call) disappears while random numbers are off.
    So the same numbers are drawn with other examples beside the first one, for several seeds.
    Dropout, which mixes nothing, remains off: packed sequences draw its masks in the order of their
    lengths.
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
                if problem := _apart(again, first, tolerance, "beside others, on the same draws"):
                    return problem
    return None


def _agrees_in_double(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    chosen: Tensor,
    has_aux: bool,
    losses: Tensor,
) -> bool:
    """True if apparent mixing was rounding: losses with cancellation agree in float64.

    The whole comparison is repeated: the batch, the few chosen examples, and each of them alone.
    The copy in float64 must be the same function, as far as rounding shows: `losses` are those of
    the chosen examples.
    """
    if any(hasattr(p, "device_mesh") for p in model.parameters()):  # no copy of a sharded model
        return False
    tensors = [t.double() if t.is_floating_point() else t for t in batch.tensors()]
    every, tolerance = batch.on(tensors), TOLERANCE[torch.float64]
    try:
        losses_of = _losses_of(copy.deepcopy(model).double(), loss_fn, has_aux)
        of_copy = _without_graph(losses_of, every.rows(chosen))
        if of_copy.dtype != torch.float64 or _apart(losses.detach(), of_copy, 0.1, "in float64"):
            return False
        return not _mixes(losses_of, every, chosen, tolerance)
    except (RuntimeError, TypeError, ValueError):  # no copy, or it can't be run in float64
        return False


def _locate(
    capture: Capture,
    losses: Tensor,
    parameters: Mapping[str, Tensor],
    skip: frozenset[int],
    k: int,
    split: TensorParallel | None,
    tolerance: float,
    examples: Sequence[int] | None = None,
) -> Analysis | Use:
    """Find each use's batch axis from gradients of single losses, or return a use without one.

    These are the losses of `examples`, or all. All processes of a tensor parallel model find the
    same: what one of them has seen.
    """
    n, uses = len(losses), capture.uses
    examples = range(n) if examples is None else examples
    left = [
        candidates(use.out_shape, n, use.possible_axes, use.rule.rows_are_free, k) for use in uses
    ]
    shown, reached = [False] * len(uses), set[int]()
    alone = list[list[Tensor | None]]()
    for example in examples:
        leftover = capture.backward(losses[example], parameters, retain=True)
        if leftover:
            problem = f"parameter {leftover[0]!r} is used by a function without a rule"
            return Analysis((), (), problem)
        alone.append([use.grads_out for use in uses])
        for i, use in enumerate(uses):
            if use.grads_out is not None:
                reached.add(i)
            if use.grads_out is None or not bool(use.grads_out.any()):
                continue
            shown[i] = True
            left[i] = [axis for axis in left[i] if belongs_to(use.grads_out, axis, n, example)]
        if split is not None:
            each = split.group.gather("the batch axes", (shown, left))
            shown = [
                any(all_shown) for all_shown in zip(*(theirs for theirs, _ in each), strict=True)
            ]
            left = [
                [axis for axis in first if all(axis in axes for axes in others)]
                for first, *others in zip(*(theirs for _, theirs in each), strict=True)
            ]
        for use, axes, seen in zip(uses, left, shown, strict=True):
            if seen and not axes:
                return use
    batch_axes = tuple(
        axes[0] if seen and len(axes) == 1 else None for axes, seen in zip(left, shown, strict=True)
    )
    capture.backward(losses.sum() / 2, parameters, retain=True)
    is_linear = all(
        _adds_up(use.grads_out, grads[i], axis, n, example, tolerance)
        for example, grads in zip(examples, alone, strict=True)
        for i, (use, axis) in enumerate(zip(uses, batch_axes, strict=True))
        if axis is not None
    )
    if not (is_linear if split is None else all(split.group.gather("the backward", is_linear))):
        return Analysis((), (), "its backward is not linear in the gradient of the losses")
    return Analysis(
        tuple(use.signature for use in uses),
        batch_axes,
        skip=skip,
        unreached=frozenset(range(len(uses))) - reached,
    )


def _adds_up(
    together: Tensor | None,
    alone: Tensor | None,
    axis: BatchAxis,
    n: int,
    example: int,
    tolerance: float,
) -> bool:
    """True if in an example's rows half the sum of the losses has half its own loss's gradient.

    `together` is the gradient of half the sum, `alone` that of the example's loss; None is zero.
    """
    given = [axis.batch_first(g, n)[example] for g in (together, alone) if g is not None]
    if together is None or alone is None:
        return not any([bool(rows.any()) for rows in given])
    found, expected = (rows.double() for rows in given)
    lost = torch.finfo(given[0].dtype).tiny * given[0].numel() ** 0.5  # where halves underflow
    apart = (found - expected / 2).norm()
    return not bool(apart > tolerance * expected.norm() + lost)  # nor nan


def with_reached_uses(
    analysis: Analysis,
    capture: Capture,
    losses: Tensor,
    parameters: Mapping[str, Tensor],
    model: nn.Module,
    batch: Batch,
) -> Analysis:
    """Return the analysis with the batch axes of uses that only other examples reach, or a problem.

    The examples that were examined gave them no gradient, as where a gate or chance
    (classifier-free guidance) decides. So the losses of examples that reach them are
    differentiated, one by one; the graph is kept. A tensor parallel model keeps its analysis: its
    processes would choose other examples.
    """
    if TensorParallel.of(model):
        return analysis
    n, k, tolerance = len(losses), batch.rows_per_unit, _tolerance(model, parameters, batch)
    found, examples = None, set[int]()
    weights = torch.linspace(1, 2, n, dtype=losses.dtype, device=losses.device)
    try:  # weights, as the gradients of losses that mix may cancel in their sum
        capture.backward(losses @ weights, parameters, retain=True)
        for use, known in zip(capture.uses, analysis.batch_axes, strict=True):
            if known is not None or use.grads_out is None:
                continue
            for axis in candidates(use.out_shape, n, use.possible_axes, use.rule.rows_are_free, k):
                rows = axis.batch_first(use.grads_out, n).reshape(n, -1)
                reached = rows.any(1) & rows.isfinite().all(1) & losses.isfinite()
                examples.update(reached.nonzero().flatten()[: EXAMPLES // 2].tolist())
        if examples:
            skip, few = analysis.skip, sorted(examples)
            found = _locate(capture, losses, parameters, skip, k, None, tolerance, few)
    finally:
        capture.clear()
    if found is None:
        return analysis
    if isinstance(found, Use):
        return Analysis((), (), _NOT_APART.format(found))
    if found.problem:
        return found
    pairs = zip(analysis.batch_axes, found.batch_axes, strict=True)
    return replace(analysis, batch_axes=tuple(known or new for known, new in pairs))


def permuted_use(
    capture: Capture,
    losses: Tensor,
    batch_axes: Sequence[BatchAxis | None],
    parameters: Mapping[str, Tensor],
    *,
    rounds: int | None = None,
) -> Use | None:
    """Return a use in which an example's gradient is in another example's rows, or None.

    The batch axes were found on another batch, whose data may have ordered the rows otherwise.

    For each binary digit of the row number, the losses of the half with digit 0 and of that with
    digit 1 are differentiated: any two examples are in different halves once. The graph is kept.

    `rounds` is the number of digits, equal on processes that share a model; None for those of n.
    """
    n, found = len(losses), list[Use]()
    rows = torch.arange(n, device=losses.device)
    try:
        for digit in range((n - 1).bit_length() if rounds is None else rounds):
            for value in (0, 1):
                half = (rows >> digit & 1) == value
                capture.backward(losses[half].sum(), parameters, retain=True)
                found += [
                    use
                    for use, batch_axis in zip(capture.uses, batch_axes, strict=True)
                    if batch_axis is not None and _reaches_others(use, batch_axis, half)
                ]
    finally:
        capture.clear()
    return found[0] if found else None


def _reaches_others(use: Use, batch_axis: BatchAxis, examples: Tensor) -> bool:
    """True if a use's gradient is nonzero outside the rows of `examples`, (n,) bool."""
    if use.grads_out is None:
        return False
    if not batch_axis.fits(use.out_shape, len(examples)):
        return True
    rows = batch_axis.batch_first(use.grads_out, len(examples))
    return bool(rows[~examples.to(rows.device)].any())

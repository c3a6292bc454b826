# SPDX-License-Identifier: Apache-2.0
"""Spot checks: the engine's numbers for one example against plain autograd of the example's loss.

The reference shares no code with the engine: no capture, no rule, no vmap. The loss of an example
is computed alone and differentiated by autograd. Where the forward draws random numbers, both
sides are computed without randomness, and the sum of the batch is compared under the forward's own
random numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dualdp import exactness
from dualdp.plan.clipping import AUTOMATIC_OFFSET, factors_for
from dualdp_torch.parallel.tensor_parallel import length, local_of, on_all_alike
from dualdp_torch.per_sample.batch import Batch, check_losses
from dualdp_torch.per_sample.clip import group_of
from dualdp_torch.per_sample.independence import NoRandomness
from dualdp_torch.per_sample.model_state import Start
from dualdp_torch.per_sample.parameter_use import USE_LOOP
from dualdp_torch.per_sample.random_state import seed_generators, untouched_generators
from dualdp_torch.per_sample.vmap_and_loop import is_same_forward, plain_gradients
from dualdp_torch.rules.base import Tensor, wide
from dualdp_torch.rules.precision import matmul_in_tf32

Grads = Mapping[str, Tensor]
#: Number of perturbed inputs that measure the sensitivity of plain autograd to rounding.
_ROUNDINGS = 6
#: Smallest norm in whose units errors are measured: squares of float32 underflow below.
_SMALLEST = 1e-15
#: Errors of a model that can't be copied, or not run in float64.
CANT_REPEAT = AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError
_ADVICE = (
    f"{USE_LOOP} And report the model and the loss; or change what treats an example otherwise "
    "alone than in a batch."
)


@dataclass(frozen=True, repr=False)
class BatchNumbers:
    """Numbers that the engine computed for one batch.

    Attributes:
        norms: (n,) norms of whole gradients.
        losses: (n,) losses of the forward that the numbers come from.
        contribution: function from row to name -> the example's term in the sum; empty where only
            norms were computed.
        sums: name -> sum over the batch, or None.
        factors: name -> (n,) factors in the sum, or None.
        bounds: clipping group -> C; None without clipping.
        doubt: (n,) error bound of each norm in units of its tolerance, or None.
        runs_examples: True if the loss function ran on single examples, as in `vmap`.
        formed: name -> (n, *shape) gradients, if they were formed.
        lengths: name -> (n,) norms per parameter, if they were computed.
    """

    norms: Tensor
    losses: Tensor
    contribution: Callable[[int], Grads]
    sums: Grads | None = None
    factors: Grads | None = None
    bounds: Mapping[str, float] | None = None
    clipping: str = "flat"
    doubt: Tensor | None = None
    runs_examples: bool = False
    formed: Grads = field(default_factory=dict)
    lengths: Grads = field(default_factory=dict)

    def groups(self, names: Iterable[str]) -> dict[str, str]:
        """Return parameter name -> clipping group."""
        layers = self.clipping == "per_layer"
        return {name: group_of(name) if layers else "" for name in names}


@dataclass(frozen=True, repr=False)
class ReferenceLosses:
    """Per-example losses, whose gradients plain autograd computes one by one.

    `start` is the state before the forward of the batch; `mask` is (n,), False for padding.
    """

    loss_fn: Callable[..., Any]
    model: nn.Module
    batch: Batch
    parameters: Grads
    start: Start
    has_aux: bool = False
    mask: Tensor | None = None

    def losses(self, rows: slice | None = None) -> Tensor:
        """Return (rows,) losses of the selected examples, computed together."""
        batch = self.batch if rows is None else self.batch.rows(rows)
        with self.start.replayed(self.model):
            out = self.loss_fn(self.model, *batch.arguments())
        return check_losses(out[0] if self.has_aux else out, batch.n)

    def alone(self, row: int) -> dict[str, Tensor]:
        """Return name -> gradient of one example's loss, computed alone, by plain autograd."""
        return plain_gradients(lambda: self.losses(slice(row, row + 1)).sum(), self.parameters)

    def among(self, row: int) -> dict[str, Tensor]:
        """Return name -> gradient of one example's loss in the batch, by plain autograd."""
        return plain_gradients(lambda: self.losses()[row], self.parameters)

    def draws(self) -> bool:
        """Run a forward, and return True if it draws random numbers."""
        with self.start.replayed(self.model), torch.no_grad():
            self.loss_fn(self.model, *self.batch.arguments())
            return self.start.has_drawn(self.model)

    def draws_as(self, losses: Tensor) -> bool:
        """True if a plain forward draws the random numbers of the forward with these losses.

        Equal losses are evidence only if another seed gives other losses: a normalised output may
        hide the difference, so another seed is tried, too.
        """
        with torch.no_grad():
            same = is_same_forward(self.losses(), losses)
            with untouched_generators(self.model):
                seed_generators(self.model, 1)
                other = replace(self, start=Start.of(self.model, self.start.buffers))
                return same and not is_same_forward(other.losses(), losses)

    def in_double(self) -> ReferenceLosses:
        """Return the subject in float64, on a copy of the model."""
        model = copy.deepcopy(self.model).double()
        tensors = [t.double() if t.is_floating_point() else t for t in self.batch.tensors()]
        named = dict(model.named_parameters())
        return replace(
            self,
            model=model,
            batch=self.batch.on(tensors),
            parameters={name: named[name] for name in self.parameters},
            start=self.start.on(model),
        )


class _Side(NamedTuple):
    """One side of a comparison: a norm, and name -> contribution to the sum."""

    norm: float
    parts: Grads


Again = Callable[[ReferenceLosses], BatchNumbers]
Definition = Callable[[ReferenceLosses, int], dict[str, Tensor]]


class Precisions(TorchDispatchMode):
    """Dispatch mode that collects the floating-point dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(out):
            if torch.is_tensor(value) and value.is_floating_point():
                self.seen.add(str(value.dtype).removeprefix("torch."))
                if value.is_cuda and matmul_in_tf32():
                    self.seen.add("tf32")
        return out

    @property
    def lowest(self) -> str:
        """The collected dtype with the largest tolerance, a key of `exactness.TOLERANCE`."""
        known = [name for name in self.seen if name in exactness.TOLERANCE]
        return max(known, key=exactness.TOLERANCE.__getitem__, default="float32")


def check(
    subject: ReferenceLosses,
    engine: BatchNumbers,
    again: Again,
    *,
    drawn: float,
    has_drawn: bool,
    what: str,
) -> bool:
    """Compare an engine's numbers with plain autograd; False if no example can be compared.

    Args:
        subject: reference losses.
        engine: numbers of the engine for the same batch.
        again: function from losses to the engine's numbers for them, for instance in float64.
        drawn: uniform in [0, 1); selects the example.
        has_drawn: True if the engine's forward drew random numbers.
        what: name of the compared result, for the error.
    """
    if not has_drawn:
        return Comparison(subject, again, what).of_batch(engine, drawn)
    with NoRandomness():
        # Draws from NumPy or Python can't be switched off: an example alone would draw others.
        is_alone = engine.runs_examples or not subject.draws()
        quiet = Comparison(subject, again, what, is_alone)
        compared = quiet.of_batch(again(subject), drawn)
    if compared and subject.draws_as(engine.losses):
        Comparison(subject, again, what, is_alone=False).of_sum(engine, drawn)
    return compared


def chosen_rows(engine: BatchNumbers, mask: Tensor | None, drawn: float) -> list[int]:
    """Return the row of a drawn example, and of the one with the largest error bound, else norm.

    Fewer than two if both are the same, or no example has a finite norm; `drawn` is in [0, 1).
    """
    counts = engine.norms.isfinite()
    if mask is not None:
        counts = counts & mask.to(counts.device)
    rows = counts.nonzero().flatten().tolist()
    if not rows:
        return []
    suspects = engine.norms
    if engine.doubt is not None and bool((engine.doubt[counts] > 0).any()):
        suspects = engine.doubt
    return list(dict.fromkeys((_pick(rows, drawn), int(suspects.where(counts, -1).argmax()))))


def _pick(values: Sequence[Any], drawn: float) -> Any:
    """Value at the share `drawn`, in [0, 1), of a sequence."""
    return values[min(int(drawn * len(values)), len(values) - 1)]


@dataclass(frozen=True)
class Comparison:
    """Comparisons for one batch; a difference is computed again before it counts as an error.

    An example's loss is computed alone if `is_alone`, else in the batch; further arguments as in
    `check`.
    """

    subject: ReferenceLosses
    again: Again
    what: str
    is_alone: bool = True

    def of_batch(self, engine: BatchNumbers, drawn: float) -> bool:
        """Compare two examples and the sum; return False if there is no example to compare."""
        rows = chosen_rows(engine, self.subject.mask, drawn)
        for row in rows:
            self.of_row(engine, row)
        if rows:
            self.of_sum(engine, drawn)
        return bool(rows)

    def of_row(
        self,
        engine: BatchNumbers,
        row: int,
        definition: Definition | None = None,
        how: str = "",
    ) -> None:
        """Compare norm and contribution of one example.

        `definition` computes its gradient by plain autograd, by default that of the loss alone, or
        in the batch unless `is_alone`. `how` describes it in the error.
        """
        own = definition or (ReferenceLosses.alone if self.is_alone else ReferenceLosses.among)
        self._judge(
            engine,
            lambda numbers: _Side(float(numbers.norms[row]), numbers.contribution(row)),
            lambda subject, numbers: _clipped(own(subject, row), engine),
            _sides,
            f"{self.what} of one example{how}",
        )

    def of_sum(self, engine: BatchNumbers, drawn: float) -> None:
        """Compare one group's sum, given the factors, with a backward of the weighted losses."""
        if engine.sums is None or engine.factors is None:
            return
        if not bool(engine.losses.isfinite().all() & engine.norms.isfinite().all()):
            return  # the loss of a broken example can't be left out of a plain backward
        groups = engine.groups(engine.sums)
        group = _pick(sorted(set(groups.values())), drawn)
        members = [name for name, own in groups.items() if own == group]

        def weights(numbers: BatchNumbers) -> Tensor:
            return (numbers.factors or {})[members[0]]

        def of_engine(numbers: BatchNumbers) -> _Side:
            return _Side(0.0, {name: (numbers.sums or {})[name] for name in members})

        def together(subject: ReferenceLosses, numbers: BatchNumbers) -> _Side:
            only = {name: subject.parameters[name] for name in members}
            return _Side(0.0, plain_gradients(lambda: _weighted(subject, weights(numbers)), only))

        def one_by_one(subject: ReferenceLosses, numbers: BatchNumbers) -> _Side:
            total = {name: torch.zeros_like(p) for name, p in of_engine(engine).parts.items()}
            for row, factor in enumerate(weights(numbers).tolist()):
                if subject.mask is None or bool(subject.mask[row]):
                    each = subject.alone(row)
                    total = {
                        name: t.to(each[name]) + factor * each[name] for name, t in total.items()
                    }
            return _Side(0.0, total)

        plain_sum = together(self.subject, engine)
        if self.tolerates(self._on_all(_sum_sides(of_engine(engine), plain_sum, engine)).error):
            return
        # A backward that is not linear in the output's gradient differs for the whole batch.
        plain = one_by_one if self.is_alone else together
        self._judge(engine, of_engine, plain, _sum_sides, f"{self.what} over the batch")

    def _on_all(self, found: exactness.Sides) -> exactness.Sides:
        """Sides with the largest error on any process that computes a part of the model."""
        return on_all_alike(self.subject.model, found, lambda sides: sides.error)

    def tolerates(self, error: float) -> bool:
        """True if an error is within the tolerance of the precisions in use."""
        dtypes = {wide(p.dtype) for p in self.subject.parameters.values()}
        strict = exactness.TOLERANCE["float32" if torch.float32 in dtypes else "float64"]
        return error <= strict or error <= exactness.TOLERANCE[self._precision]

    @cached_property
    def _precision(self) -> str:
        """Lowest precision in a forward, which is run to find it."""
        with Precisions() as precisions, torch.no_grad():
            self.subject.losses(slice(0, 1) if self.is_alone else None)
        return precisions.lowest

    def _judge(
        self,
        engine: BatchNumbers,
        ours: Callable[[BatchNumbers], _Side],
        plain: Callable[[ReferenceLosses, BatchNumbers], _Side],
        sides: Callable[[_Side, _Side, BatchNumbers], exactness.Sides],
        what: str,
    ) -> None:
        """Refuse a side of the engine that differs from plain autograd by more than rounding."""
        side, expected = ours(engine), plain(self.subject, engine)
        found = self._on_all(sides(side, expected, engine))
        if self.tolerates(found.error):
            return

        def repeated() -> float | None:
            try:
                double = self.subject.in_double()
                numbers = self.again(double)
                return self._on_all(sides(ours(numbers), plain(double, numbers), numbers)).error
            except CANT_REPEAT:
                return None

        def moved() -> float:
            rounded = _roundings(self.subject, exactness.UNIT[self._precision])
            each = (sides(plain(other, engine), expected, engine) for other in rounded)
            return max(self._on_all(found).error for found in each)

        if exactness.is_wrong(found, self._precision, repeated, moved):
            raise exactness.failure(found, what, _ADVICE) from None


def _weighted(subject: ReferenceLosses, weights: Tensor) -> Tensor:
    """Return the sum of the weighted losses; padding has weight 0."""
    losses = subject.losses()
    if subject.mask is not None:
        losses = losses.masked_fill(~subject.mask.to(losses.device), 0)
    return (losses * weights.to(losses.device, losses.dtype)).sum()


def _clipped(plain: dict[str, Tensor], engine: BatchNumbers) -> _Side:
    """Clip a plain gradient in place by the engine's bounds, and return it with its norm."""
    lengths = {name: length(g) for name, g in plain.items()}
    groups = engine.groups(plain)
    for group, bound in (engine.bounds or {}).items():
        members = [name for name, own in groups.items() if own == group]
        dtype = wide(next(iter(plain.values())).dtype)
        whole = torch.tensor(math.hypot(*(lengths[name] for name in members)), dtype=dtype)
        factor = float(factors_for(engine.clipping, whole, bound, xp=torch))
        for name in members:
            plain[name].mul_(factor)
    return _Side(math.hypot(*lengths.values()), plain)


def _sides(ours: _Side, theirs: _Side, engine: BatchNumbers) -> exactness.Sides:
    """Return both sides as plain numbers."""
    gaps, sizes = {}, {}
    for name, part in ours.parts.items():
        gap = part - theirs.parts[name].to(part)
        gaps[name], sizes[name] = length(gap), length(part)
    groups = engine.groups(gaps)
    bounds = {group: float(bound) for group, bound in (engine.bounds or {}).items()}
    largest = max(theirs.norm, _SMALLEST)
    scale = max(largest, *bounds.values()) if bounds else largest
    if engine.clipping == "automatic":
        scale = largest + AUTOMATIC_OFFSET
    own_bounds = {group: bounds.get(group, largest) for group in groups.values()}
    return exactness.Sides(ours.norm, theirs.norm, gaps, sizes, groups, own_bounds, scale)


def _sum_sides(ours: _Side, theirs: _Side, engine: BatchNumbers) -> exactness.Sides:
    """Return both sides of a sum: the bound grows with the root of the number of examples."""
    counted = int((engine.norms > 0).sum())
    mean = float(engine.norms.double().square().mean().sqrt())
    bounds = engine.bounds or {"": mean}
    wider = {group: float(bound) * max(counted, 1) ** 0.5 for group, bound in bounds.items()}
    found = _sides(ours, theirs, replace(engine, bounds=wider))
    return replace(found, sizes=dict.fromkeys(found.sizes, 0.0))


def _roundings(subject: ReferenceLosses, unit: float) -> Iterator[ReferenceLosses]:
    """Yield the losses with parameters and inputs perturbed by rounding; parameters are restored.

    `unit` is the unit roundoff of the lowest precision in use, from `exactness.UNIT`.
    """
    parameters = [local_of(p.data) for p in subject.parameters.values()]
    kept = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)

    def rounded(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        return value * (1 + max(4 * torch.finfo(value.dtype).eps, unit) * noise)

    try:
        for _ in range(_ROUNDINGS):
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(rounded(value))
            batch = subject.batch.on([rounded(t) for t in subject.batch.tensors()])
            yield replace(subject, batch=batch)
    finally:
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)

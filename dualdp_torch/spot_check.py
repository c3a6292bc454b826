# SPDX-License-Identifier: Apache-2.0
"""Spot checks in PyTorch: an engine's numbers for one example against plain autograd of its loss.

Nothing that makes the engine's numbers takes part in the other side: no capture, no rule, no vmap.
The loss of an example is computed alone and `backward()` is run on it. Where the forward draws
random numbers, both sides are computed with these switched off, and the sum of the batch is
compared under the draws of the forward itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dualdp import exactness
from dualdp.clipping import AUTOMATIC_OFFSET, factors_for

from .batch import Batch, check_losses
from .clip import group_of
from .fallback import is_same_forward, plain_gradients
from .parts import wide
from .proof import NoRandomness
from .random_state import seed_generators, untouched_generators
from .rules.base import Tensor
from .state import Start

Grads = Mapping[str, Tensor]
#: How often inputs are rounded otherwise, to see how far plain autograd moves by it.
_ROUNDINGS = 6
#: Norms below are not compared: squares of float32 vanish.
_SMALLEST = 1e-15
_ADVICE = (
    'Use method="loop", which is the definition itself, and report the model and the loss; or '
    "change what treats an example otherwise alone than in a batch."
)


@dataclass(frozen=True, repr=False)
class Engine:
    """An engine's numbers for one batch.

    Attributes:
        norms: (n,) of whole gradients.
        losses: (n,) of the forward that the numbers come from.
        contribution: row -> name -> what that example adds to the sum; nothing where only norms
            are asked for.
        sums: name -> the sum over the batch, or None.
        factors: name -> (n,) what each example is scaled by in the sum, or None.
        bounds: clipping group -> C; None where nothing is clipped.
        clipping: one of `dualdp.clipping.CLIPPING`.
        doubt: (n,) the error bound of each norm in units of what is tolerated, or None.
        runs_examples: the loss function ran on one example, as `vmap` does, and not on the batch.
        formed: name -> (n, *shape) gradients, where they are asked for.
        lengths: name -> (n,) norms of the parameters' gradients, where they are asked for.
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
        """Parameter -> its clipping group."""
        layers = self.clipping == "per_layer"
        return {name: group_of(name) if layers else "" for name in names}


@dataclass(frozen=True, repr=False)
class Subject:
    """The definition: losses of examples, each of which has the gradient that it has alone.

    Attributes:
        loss_fn: `loss_fn(model, *batch)` -> (n,) losses.
        model: the model.
        batch: the examples.
        parameters: name -> trainable parameter.
        start: what the forward of the batch began from.
        has_aux: the losses come with something else.
        mask: (n,) bool, False for padding, or None.
    """

    loss_fn: Callable[..., Any]
    model: nn.Module
    batch: Batch
    parameters: Grads
    start: Start
    has_aux: bool = False
    mask: Tensor | None = None

    def losses(self, rows: slice | None = None) -> Tensor:
        """(rows,) losses of some of the examples, computed together."""
        batch = self.batch if rows is None else self.batch.rows(rows)
        with self.start.replayed(self.model):
            out = self.loss_fn(self.model, *batch.arguments())
        return check_losses(out[0] if self.has_aux else out, batch.n)

    def alone(self, row: int) -> dict[str, Tensor]:
        """Name -> gradient of one example's own loss, by plain autograd."""
        return plain_gradients(lambda: self.losses(slice(row, row + 1)).sum(), self.parameters)

    def among(self, row: int) -> dict[str, Tensor]:
        """Name -> gradient of one example's loss in the batch, by plain autograd."""
        return plain_gradients(lambda: self.losses()[row], self.parameters)

    def draws(self) -> bool:
        """Whether a forward draws random numbers."""
        with self.start.replayed(self.model), torch.no_grad():
            self.loss_fn(self.model, *self.batch.arguments())
            return self.start.has_drawn(self.model)

    def draws_as(self, losses: Tensor) -> bool:
        """Whether a plain forward draws what another forward drew, whose losses these are.

        Equal losses show it only if other draws give others: those of a normalised output may not.
        """
        with torch.no_grad():
            same = is_same_forward(self.losses(), losses)
            with untouched_generators(self.model):
                seed_generators(self.model, 1)
                other = replace(self, start=Start.of(self.model, self.start.buffers))
                return same and not is_same_forward(other.losses(), losses)

    def in_double(self) -> Subject:
        """The same in float64, on a copy of the model."""
        model = copy.deepcopy(self.model).double()
        tensors = [t.double() if t.is_floating_point() else t for t in self.batch.tensors()]
        named = dict(model.named_parameters())
        return replace(
            self,
            model=model,
            batch=Batch(self.batch.with_tensors(tensors)),
            parameters={name: named[name] for name in self.parameters},
            start=self.start.on(model),
        )


class _Side(NamedTuple):
    """One side of a comparison: a norm, and name -> what is added to the sum."""

    norm: float
    parts: Grads


Again = Callable[[Subject], Engine]


class Precisions(TorchDispatchMode):
    """Sees the floating-point dtypes of everything that is computed."""

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
                if value.is_cuda and torch.get_float32_matmul_precision() != "highest":
                    self.seen.add("tf32")
        return out

    @property
    def lowest(self) -> str:
        """The one with the largest tolerance, a key of `exactness.TOLERANCE`."""
        known = [name for name in self.seen if name in exactness.TOLERANCE]
        return max(known, key=exactness.TOLERANCE.__getitem__, default="float32")


def check(
    subject: Subject,
    engine: Engine,
    again: Again,
    *,
    drawn: float,
    has_drawn: bool,
    what: str,
) -> bool:
    """Compare an engine's numbers with plain autograd.

    Args:
        subject: the definition.
        engine: its numbers.
        again: the engine's numbers for another subject, such as the same one in float64.
        drawn: uniform in [0, 1): which example is looked at.
        has_drawn: the engine's forward drew random numbers.
        what: what is compared, for the error.

    Returns:
        Whether something was compared; not so if no example counts.

    Raises:
        ExactnessError: they differ.
    """
    if not has_drawn:
        return Comparison(subject, again, what).of_batch(engine, drawn)
    with NoRandomness():
        # Draws from NumPy or Python can't be switched off: an example alone would get other ones.
        is_alone = engine.runs_examples or not subject.draws()
        quiet = Comparison(subject, again, what, is_alone)
        compared = quiet.of_batch(again(subject), drawn)
    if compared and subject.draws_as(engine.losses):
        Comparison(subject, again, what, is_alone=False).of_sum(engine, drawn)
    return compared


def chosen_rows(engine: Engine, mask: Tensor | None, drawn: float) -> list[int]:
    """Two examples: one drawn, and the one with the largest error bound, else the largest norm.

    Args:
        engine: its numbers.
        mask: (n,) bool, False for padding, or None.
        drawn: uniform in [0, 1).

    Returns:
        Their rows; one or none where so few count.
    """
    counts = engine.norms.isfinite()
    if mask is not None:
        counts = counts & mask.to(counts.device)
    rows = counts.nonzero().flatten().tolist()
    if not rows:
        return []
    doubted = engine.doubt is not None and bool((engine.doubt[counts] > 0).any())
    suspects = engine.doubt if doubted and engine.doubt is not None else engine.norms
    first = rows[min(int(drawn * len(rows)), len(rows) - 1)]
    return list(dict.fromkeys((first, int(suspects.where(counts, -1).argmax()))))


@dataclass(frozen=True)
class Comparison:
    """The comparisons of one batch, each repeated before it counts.

    Attributes:
        subject: the definition.
        again: the engine's numbers for another subject.
        what: what is compared.
        is_alone: an example's loss is computed alone, and not in the batch.
    """

    subject: Subject
    again: Again
    what: str
    is_alone: bool = True

    def of_batch(self, engine: Engine, drawn: float) -> bool:
        """Two examples and the sum; returns whether some example counts."""
        rows = chosen_rows(engine, self.subject.mask, drawn)
        for row in rows:
            self.of_row(engine, row)
        if rows:
            self.of_sum(engine, drawn)
        return bool(rows)

    def of_row(
        self,
        engine: Engine,
        row: int,
        definition: Callable[[Subject, int], dict[str, Tensor]] | None = None,
        how: str = "",
    ) -> None:
        """Norm and contribution of one example.

        Args:
            engine: its numbers.
            row: the example.
            definition: subject, row -> name -> gradient of that example by plain autograd; None
                for the example alone, or in its batch where `is_alone` is False.
            how: what the gradient was compared with, for the error.
        """
        side = _Side(float(engine.norms[row]), engine.contribution(row))

        def plain(subject: Subject) -> _Side:
            own = Subject.alone if self.is_alone else Subject.among
            return _clipped((definition or own)(subject, row), engine)

        def exact() -> exactness.Sides:
            double = self.subject.in_double()
            numbers = self.again(double)
            ours = _Side(float(numbers.norms[row]), numbers.contribution(row))
            return _sides(ours, plain(double), numbers)

        self._judge(
            side,
            plain,
            lambda ours, theirs: _sides(ours, theirs, engine),
            exact,
            f"{self.what} of one example{how}",
        )

    def of_sum(self, engine: Engine, drawn: float) -> None:
        """The sum over the batch, given the factors: one plain backward of the weighted losses."""
        if engine.sums is None or engine.factors is None:
            return
        if not bool(engine.losses.isfinite().all() & engine.norms.isfinite().all()):
            return  # the loss of a broken example can't be left out of a plain backward
        groups = engine.groups(engine.sums)
        each = sorted(set(groups.values()))
        group = each[min(int(drawn * len(each)), len(each) - 1)]
        members = [name for name, own in groups.items() if own == group]

        def weights(numbers: Engine) -> Tensor:
            return (numbers.factors or {})[members[0]]

        def together(subject: Subject, numbers: Engine) -> _Side:
            only = {name: subject.parameters[name] for name in members}
            return _Side(0.0, plain_gradients(lambda: _weighted(subject, weights(numbers)), only))

        def one_by_one(subject: Subject, numbers: Engine) -> _Side:
            total = {name: torch.zeros_like(p) for name, p in of_engine(engine).parts.items()}
            for row, factor in enumerate(weights(numbers).tolist()):
                if subject.mask is None or bool(subject.mask[row]):
                    each = subject.alone(row)
                    total = {
                        name: t.to(each[name]) + factor * each[name] for name, t in total.items()
                    }
            return _Side(0.0, total)

        def of_engine(numbers: Engine) -> _Side:
            return _Side(0.0, {name: (numbers.sums or {})[name] for name in members})

        found = _sum_sides(of_engine(engine), together(self.subject, engine), engine)
        if self._is_close(found):
            return
        # A backward that is not linear in what comes down is another one for the whole batch.
        plain = one_by_one if self.is_alone else together

        def exact() -> exactness.Sides:
            double = self.subject.in_double()
            numbers = self.again(double)
            return _sum_sides(of_engine(numbers), plain(double, numbers), numbers)

        self._judge(
            of_engine(engine),
            lambda subject: plain(subject, engine),
            lambda ours, theirs: _sum_sides(ours, theirs, engine),
            exact,
            f"{self.what} over the batch",
        )

    def _is_close(self, found: exactness.Sides) -> bool:
        """Whether both sides are equal in the precision that takes part."""
        dtypes = {wide(p.dtype) for p in self.subject.parameters.values()}
        strict = exactness.TOLERANCE["float32" if torch.float32 in dtypes else "float64"]
        return found.error <= strict or found.error <= exactness.TOLERANCE[self._precision]

    @cached_property
    def _precision(self) -> str:
        """The lowest precision of a forward, which is run to see it."""
        with Precisions() as precisions, torch.no_grad():
            self.subject.losses(slice(0, 1) if self.is_alone else None)
        return precisions.lowest

    def _judge(
        self,
        side: _Side,
        plain: Callable[[Subject], _Side],
        compared: Callable[[_Side, _Side], exactness.Sides],
        exact: Callable[[], exactness.Sides],
        what: str,
    ) -> None:
        """Raise if the engine's side differs from plain autograd by more than rounding.

        Raises:
            ExactnessError: it does.
        """
        expected = plain(self.subject)
        found = compared(side, expected)
        if self._is_close(found):
            return

        def repeated() -> float | None:
            try:
                return exact().error
            except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError):
                return None  # the model can't be copied, or not run in float64
            except ValueError:
                return None

        def moved() -> float:
            rounded = _roundings(self.subject, exactness.UNIT[self._precision])
            return max(compared(plain(subject), expected).error for subject in rounded)

        if exactness.is_wrong(found, self._precision, repeated, moved):
            raise exactness.failure(found, what, _ADVICE) from None


def _weighted(subject: Subject, weights: Tensor) -> Tensor:
    """The sum of weighted losses; those of padding have weight 0."""
    losses = subject.losses()
    if subject.mask is not None:
        losses = losses.masked_fill(~subject.mask.to(losses.device), 0)
    return (losses * weights.to(losses.device, losses.dtype)).sum()


def _clipped(plain: dict[str, Tensor], engine: Engine) -> _Side:
    """A gradient as it should enter the sum; it is scaled in place."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    lengths = {name: float(norm(g)) for name, g in plain.items()}
    groups = engine.groups(plain)
    for group, bound in (engine.bounds or {}).items():
        members = [name for name, own in groups.items() if own == group]
        dtype = wide(next(iter(plain.values())).dtype)
        whole = torch.tensor(math.hypot(*(lengths[name] for name in members)), dtype=dtype)
        factor = float(factors_for(engine.clipping, whole, bound, xp=torch))
        for name in members:
            plain[name].mul_(factor)
    return _Side(math.hypot(*lengths.values()), plain)


def _sides(ours: _Side, theirs: _Side, engine: Engine) -> exactness.Sides:
    """Both sides as plain numbers."""
    gaps, sizes = {}, {}
    for name, part in ours.parts.items():
        gap = part - theirs.parts[name].to(part)
        gaps[name] = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
        sizes[name] = float(torch.linalg.vector_norm(part, dtype=torch.float64))
    groups = engine.groups(gaps)
    bounds = {group: float(bound) for group, bound in (engine.bounds or {}).items()}
    largest = max(theirs.norm, _SMALLEST)
    scale = max(largest, *bounds.values()) if bounds else largest
    if engine.clipping == "automatic":
        scale = largest + AUTOMATIC_OFFSET
    own_bounds = {group: bounds.get(group, largest) for group in groups.values()}
    return exactness.Sides(ours.norm, theirs.norm, gaps, sizes, groups, own_bounds, scale)


def _sum_sides(ours: _Side, theirs: _Side, engine: Engine) -> exactness.Sides:
    """As `_sides`, of a sum: errors of n examples add up like the root of n."""
    counted = int((engine.norms > 0).sum())
    mean = float(engine.norms.double().square().mean().sqrt())
    bounds = engine.bounds or {"": mean}
    wider = {group: float(bound) * max(counted, 1) ** 0.5 for group, bound in bounds.items()}
    found = _sides(ours, theirs, replace(engine, bounds=wider))
    return replace(found, sizes=dict.fromkeys(found.sizes, 0.0))


def _roundings(subject: Subject, unit: float) -> Iterator[Subject]:
    """The subject with parameters and inputs rounded otherwise; parameters end as they were.

    Args:
        subject: of which plain gradients are asked.
        unit: of the lowest precision that takes part, as `exactness.UNIT` has it.
    """
    parameters = list(subject.parameters.values())
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
                p.data.copy_(rounded(value))
            batch = subject.batch.with_tensors([rounded(t) for t in subject.batch.tensors()])
            yield replace(subject, batch=Batch(batch))
    finally:
        for p, value in zip(parameters, kept, strict=True):
            p.data.copy_(value)

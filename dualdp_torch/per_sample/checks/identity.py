# SPDX-License-Identifier: Apache-2.0
"""Comparison of a batch's gradients with their definition, before anything is released.

Three comparisons stand for all that could go wrong inside the model and the rules:

- *The random identity.* For random `s_k` of both signs, the weighted sum of our gradients
  is the gradient of `sum_k s_k c_k loss_k` by one plain backward. It looks at every row at once: a
  wrong rule, a lost or swapped row, a wrong batch axis, and rows that meet in the graph break it.
- *Rows alone.* The identity takes the clip factors `c_k` as they are, so the norms of a few rows,
  their factors and their gradients are compared with those of the rows alone.
- *The other rows replaced*, under the same random numbers: a row's outputs and every buffer must
  stay, and no parameter may have been written. This finds what reaches a row beside the graph.

The reference shares no code with the engine: plain forwards, repeated from the state before the
recorded one, and plain autograd.

Source: Freivalds 1977 (one random vector shows that two linear maps differ).
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp import exactness
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import ExactnessError
from dualdp.plan.clipping import AUTOMATIC_OFFSET, factors_for
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.clip import group_of
from dualdp_torch.per_sample.gradients import Captured
from dualdp_torch.per_sample.modes import Operations
from dualdp_torch.per_sample.parameter_use import USE_LOOP
from dualdp_torch.per_sample.random_state import (
    NoRandomness,
    RandomState,
    Start,
    buffers_of,
    changed_buffers,
    refuse_written,
)
from dualdp_torch.per_sample.vmap_and_loop import is_same_forward, plain_gradients
from dualdp_torch.rules.base import Tensor, wide
from dualdp_torch.rules.precision import matmul_in_tf32

Grads = Mapping[str, Tensor]
#: Rows that are compared alone: on the first batch of a kind, and on later checks.
ROWS_FIRST, ROWS_LATER = 16, 4
#: Most rows with a weight in reduced precision, so that one wrong row stands out.
ROWS_REDUCED = 64
#: Tolerance of outputs, relative to that of gradients.
_CLOSER = 0.1
#: Smallest norm in whose units errors are measured: squares of float32 underflow below.
_SMALLEST = 1e-15
#: Number of perturbed inputs that measure the sensitivity of plain autograd to rounding.
_ROUNDINGS = 6
#: Errors of a model that can't be copied, or not run in float64.
CANT_REPEAT = (
    *(AssertionError, AttributeError, KeyError),  # `fully_shard` asserts that nobody copies
    *(NotImplementedError, RuntimeError, TypeError, ValueError),
)
_ADVICE = (
    f"Nothing was released for this batch. {USE_LOOP} And report the model and the loss; or change "
    "what treats an example otherwise alone than in a batch."
)
IMPOSSIBLE = (
    "The model draws random numbers that can't be drawn again, so examples are compared with these "
    "switched off, and no form of the check sees the whole batch."
)


@dataclass(frozen=True, repr=False)
class Numbers:
    """What an engine computed for one batch of n examples.

    Attributes:
        norms: (n,) norms of whole gradients.
        losses: (n,) losses of the forward that they come from.
        weighted_sum: function from name -> (n,) weights to name -> sum of weight times gradient;
            None if only the released sum can be had.
        factors: name -> (n,) clip factors; None without clipping.
        bounds: clipping group -> C; None without clipping.
        sums: name -> sum as it is released, or None.
        doubt: (n,) error bound of each norm in units of its tolerance, or None.
        lengths: name -> (n,) norms by parameter, if they were computed.
        runs_examples: True if the loss function ran on single examples, as under `vmap`.
        gradients: what the weighted sums are made of, where it is needed after a check.
        is_definition: True if each row ran alone, so that only what rows leave behind is compared.
    """

    norms: Tensor
    losses: Tensor
    weighted_sum: Callable[[Grads], Grads] | None
    factors: Grads | None = None
    bounds: Mapping[str, Any] | None = None
    clipping: str = "flat"
    sums: Grads | None = None
    doubt: Tensor | None = None
    lengths: Grads = field(default_factory=dict)
    runs_examples: bool = False
    is_definition: bool = False
    gradients: Captured | None = None

    def groups(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return clipping group -> its parameters."""
        found: dict[str, list[str]] = {}
        for name in names:
            group = group_of(name) if self.clipping == "per_layer" else ""
            found.setdefault(group, []).append(name)
        return found

    def sum_of(self, names: Sequence[str], weights: Tensor) -> Grads:
        """Return name -> sum of weight times gradient, for (n,) weights that all names share."""
        return self.weighted_sum(dict.fromkeys(names, weights)) if self.weighted_sum else {}

    def weights(self) -> Tensor:
        """(n,) weights with which a row contributes at most C: the smallest of its factors.

        Without clipping each row gets the weight that makes its norm 1, and one without a gradient
        the smallest of these: it counts, too.
        """
        if self.factors is not None and self.bounds:
            return torch.stack([*{id(f): f for f in self.factors.values()}.values()]).amin(0)
        norms = self.norms.where(self.norms.isfinite(), 0)
        largest = float(norms.max()) or 1.0
        return 1 / norms.where(norms > 0, largest).clamp(min=_SMALLEST)


class Run(NamedTuple):
    """One plain forward: (n,) losses, outputs with the rows on axis 0, what it left behind.

    `ends` are the states of the generators after each of its parts.
    """

    losses: Tensor
    outputs: list[Tensor]
    buffers: list[dict[str, Tensor]]
    ends: list[RandomState]


@dataclass(frozen=True, repr=False)
class Reference:
    """Definition of a batch's gradients: losses by plain forwards from the state before the batch.

    Attributes:
        calls: function from model and batch to a list of functions without arguments, one for each
            forward of the batch, which return its (n,) losses and its outputs.
        starts: state before each of these forwards.
        alone: function from model and batch to the scalar loss of a forward that computes it, too;
            None if `calls` gives the losses.
    """

    calls: Callable[[nn.Module, Batch], Sequence[Callable[[], tuple[Tensor, list[Tensor]]]]]
    model: nn.Module
    batch: Batch
    parameters: Grads
    starts: Sequence[Start]
    mask: Tensor | None = None
    alone: Callable[[nn.Module, Batch], Tensor] | None = None

    def forwards(self, batch: Batch | None = None) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield losses and outputs of the forwards of a batch, each in its own state."""
        calls = self.calls(self.model, self.batch if batch is None else batch)
        for start, call in zip(self.starts, calls, strict=True):
            with start.replayed(self.model):
                yield call()

    def losses(self, batch: Batch | None = None) -> Tensor:
        """Return the (n,) losses of the forwards of a batch."""
        return reduce(torch.add, [losses for losses, _ in self.forwards(batch)])

    def run(self, batch: Batch | None = None) -> Run:
        """Return what the forwards of a batch give and leave behind."""
        each = [
            (*found, buffers_of(self.model), start.random.now())
            for found, start in zip(self.forwards(batch), self.starts, strict=True)
        ]
        losses, outputs, buffers, ends = zip(*each, strict=True)
        return Run(reduce(torch.add, losses), sum(outputs, []), [*buffers], [*ends])

    def has_drawn(self, run: Run) -> bool:
        """True if the forwards of a batch drew random numbers."""
        pairs = zip(self.starts, run.ends, strict=True)
        return any(start.random.bits() != end.bits() for start, end in pairs)

    def plain(self, weights: Tensor) -> dict[str, Tensor]:
        """Return name -> gradient of the weighted losses, of the rows with a weight."""
        kept = weights.nonzero().flatten()

        def total() -> Tensor:
            losses = self.losses()
            return (losses[kept.to(losses.device)] * weights[kept].to(losses)).sum()

        return plain_gradients(total, self.parameters)

    def gradient_alone(self, row: int) -> dict[str, Tensor]:
        """Return name -> gradient of one row's loss, computed alone."""
        one = self.batch.rows(slice(row, row + 1))

        def loss() -> Tensor:
            if self.alone is None:
                return self.losses(one).sum()
            with self.starts[0].replayed(self.model):
                return self.alone(self.model, one)

        return plain_gradients(loss, self.parameters)

    def gradient_among(self, row: int) -> dict[str, Tensor]:
        """Return name -> gradient of one row's loss in the batch."""
        return self.plain(torch.eye(self.batch.n)[row])

    def with_rows(self, index: Tensor) -> Reference:
        """Return the reference of a batch of these rows."""
        mask = None if self.mask is None else self.mask[index.to(self.mask.device)]
        return replace(self, batch=self.batch.rows(index), mask=mask)

    def in_double(self) -> Reference:
        """Return the reference in float64, on a copy of the model."""
        model = copy.deepcopy(self.model).double()
        tensors = [t.double() if t.is_floating_point() else t for t in self.batch.tensors()]
        named = dict(model.named_parameters())
        return replace(
            self,
            model=model,
            batch=self.batch.on(tensors),
            parameters={name: named[name] for name in self.parameters},
            starts=[start.on(model) for start in self.starts],
        )

    def rounded(self, unit: float) -> Iterator[Reference]:
        """Yield references with parameters and inputs perturbed by rounding; both are restored."""
        kept = [(p.data, p.detach().clone()) for p in self.parameters.values()]
        generator = torch.Generator().manual_seed(0)

        def rounded(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            noise = torch.randn(value.shape, generator=generator).to(value)
            return value * (1 + max(4 * torch.finfo(value.dtype).eps, unit) * noise)

        try:
            for _ in range(_ROUNDINGS):
                for p, value in kept:
                    p.copy_(rounded(value))
                batch = self.batch.on([rounded(t) for t in self.batch.tensors()])
                yield replace(self, batch=batch)
        finally:
            for p, value in kept:
                p.copy_(value)


Again = Callable[[Reference], Numbers]


#: Function from a batch and an engine's numbers to both sides of a comparison, the engine's and the
#: plain one, in units of its scale: name -> part of a sum, and `_EACH` -> numbers of single rows.
_Sides = Callable[[Reference, Numbers], tuple[Grads, Grads]]
_EACH = ""
Definition = Callable[[Reference, int], dict[str, Tensor]]


def check(
    reference: Reference,
    numbers: Numbers,
    again: Again,
    *,
    seed: int,
    is_first: bool,
    what: str,
    note: Callable[[str], None] = lambda reason: None,
) -> bool:
    """Compare an engine's numbers with their definition; False if no row can be compared.

    Args:
        reference: definition of the batch's gradients.
        numbers: the engine's numbers for it.
        again: function from another reference to the engine's numbers, by the same method.
        seed: int, of the drawn rows and signs; odd seeds compare the sum as it is released.
        is_first: bool, True for the first batch of a kind, which is compared in every way.
        what: str, name of the compared result, for the error.
        note: function that hears why a comparison was impossible.

    Raises:
        ExactnessError: the numbers are not what the definition says.
        UnsupportedLayerError: rows meet, or a forward wrote a parameter, or its examples into a
            buffer; an `ExactnessError` where that begins after the first batch.
    """
    counts = numbers.norms.isfinite()
    if reference.mask is not None:
        counts = counts & reference.mask.to(counts.device)
    rows = counts.nonzero().flatten()
    if not len(rows):
        return False
    if not bool(counts.all()):  # zero times the nan of a row that is left out would be nan
        index = torch.arange(len(counts), device=counts.device).where(counts, rows[0])
        reference = replace(reference.with_rows(index), mask=counts)
    draw, chosen = random.Random(seed), rows.tolist()
    comparison = _Comparison(reference, numbers, again, what, draw, chosen, note)
    try:
        for start in reference.starts:
            refuse_written(start.sums, reference.model)
        comparison.replaced(2 if is_first else 1)
        comparison.losses()
        if numbers.is_definition:
            return True
        comparison.alone(ROWS_FIRST if is_first else ROWS_LATER)
        if reference.alone is None:
            is_released = is_first or seed % 2 == 1
            comparison.sums(is_signed=is_first or not is_released, is_released=is_released)
    except UnsupportedLayerError as error:
        if is_first:
            raise
        raise ExactnessError(str(error)) from None
    return True


@dataclass(repr=False)
class _Comparison:
    """Comparisons for one batch; a difference is computed again before it counts as an error.

    `rows` are those that contribute.
    """

    reference: Reference
    numbers: Numbers
    again: Again
    what: str
    draw: random.Random
    rows: list[int]
    note: Callable[[str], None]

    # -------------------------------------------------------------- the random identity

    def sums(self, *, is_signed: bool, is_released: bool) -> None:
        """Compare weighted sums over the batch, each with one plain backward."""
        if self._has_drawn and not self._draws_as_recorded:
            self.note(IMPOSSIBLE)
            return
        what = f"{self.what} over the batch"
        if is_signed and self.numbers.weighted_sum is not None:
            few = self.draw.sample(self.rows, min(len(self.rows), ROWS_REDUCED))
            is_reduced = len(self.rows) > len(few) and self._precision not in ("float32", "float64")
            signed = self._signed(few if is_reduced else self.rows)
            if self.numbers.runs_examples:
                error, _ = _distance(*signed(self.reference, self.numbers))
                if not self._tolerates(error) and (
                    self._has_drawn or all(map(self._is_as_alone, few))
                ):
                    # A backward that is not linear, as by `register_hook(lambda g: g / g.norm())`,
                    # is another one for each row: those that ran alone are right.
                    self._judge(self._of_rows(few, Reference.gradient_alone), what)
                    return
            self._judge(signed, what)
        if is_released and self.numbers.sums is not None and self.numbers.factors is not None:
            self._judge(self._released(), what)

    def _is_as_alone(self, row: int) -> bool:
        """True if the outputs of a row alone are those that it has in the batch."""
        one = self.reference.run(self.reference.batch.rows(slice(row, row + 1)))
        return self._tolerates(relative_gap(self._base.outputs, one.outputs, row, 0) / _CLOSER)

    def _signed(self, rows: Sequence[int]) -> _Sides:
        """Sides of the sum of sign times factor times gradient."""
        signs, names = self._signs(rows), [*self.reference.parameters]
        return _of_sum(
            names,
            lambda numbers: signs.to(numbers.norms) * numbers.weights(),
            lambda numbers, own: numbers.sum_of(names, own),
        )

    def _released(self) -> _Sides:
        """Sides of the sum as it is released; of per-layer clipping that of one drawn group."""
        numbers, kept = self.numbers, torch.zeros_like(self.numbers.norms, dtype=torch.bool)
        kept[self.rows] = True
        groups = numbers.groups(self.reference.parameters)
        group = self.draw.choice(sorted(groups))
        names = groups[group]
        return _of_sum(
            names,
            lambda numbers: (numbers.factors or {})[names[0]].where(kept, 0),
            lambda numbers, own: numbers.sums or {},
            float((numbers.bounds or {}).get(group, math.inf)),
        )

    def _signs(self, rows: Sequence[int]) -> Tensor:
        """(n,) numbers of both signs between 1/2 and 1 at these rows, 0 elsewhere."""
        signs = torch.zeros(len(self.numbers.norms), dtype=torch.float64)
        for row in rows:
            signs[row] = self.draw.uniform(0.5, 1) * self.draw.choice((-1, 1))
        return signs

    # -------------------------------------------------------------- rows alone

    def alone(self, count: int) -> None:
        """Compare norms, factors and gradients of a few rows with those of each row alone."""
        rows = self._suspects(count)
        what = f"{self.what} of one example"
        if not self._has_drawn:
            self._judge(self._of_rows(rows, Reference.gradient_alone), what)
            return
        # A row alone would draw other numbers: compare a small batch without any.
        least = 2 if self.reference.alone is None else 1  # a mean within forward is of all its rows
        few = self.reference.with_rows(torch.tensor((rows * 2)[: max(len(rows), least)]))
        with NoRandomness():
            is_quiet = self.numbers.runs_examples or not few.has_drawn(few.run())
            if is_quiet:
                small = list(range(len(rows)))
                quiet = replace(self, reference=few, numbers=self.again(few), rows=small)
                quiet._judge(quiet._of_rows(small, Reference.gradient_alone), what)
            elif self.reference.alone is not None:
                self.note(IMPOSSIBLE)
        if self.reference.alone is None and self._draws_as_recorded:
            few_rows = rows[: 1 if is_quiet else 2]
            self._judge(self._of_rows(few_rows, Reference.gradient_among), what)

    def _of_rows(self, rows: Sequence[int], gradient: Definition) -> _Sides:
        """Return both sides of the norms, the factors and a signed sum of a few rows.

        The factors' part is what the engine's factors change of the contributions, in units of C.
        """
        names = [*self.reference.parameters] if self.numbers.weighted_sum is not None else []
        signs = self._signs(rows)

        def sides(reference: Reference, numbers: Numbers) -> tuple[Grads, Grads]:
            weights = signs.to(numbers.norms) * numbers.weights()
            largest = float((numbers.weights() * numbers.norms)[[*rows]].max())
            scale = max(largest, _SMALLEST) * max(len(rows), 1) ** 0.5
            each, plain = list[Tensor](), dict[str, Tensor]()
            for row in rows:
                grads = gradient(reference, row)
                each.append(torch.stack([*map(_norm, grads.values())]).cpu())
                for name in names:
                    part = grads[name] * (float(weights[row]) / scale)
                    plain[name] = plain[name] + part if name in plain else part
            ours = {name: part / scale for name, part in numbers.sum_of(names, weights).items()}
            lengths = dict(zip(reference.parameters, torch.stack(each, 1), strict=True))
            norms = [_root(lengths.values()), *(lengths[name] for name in numbers.lengths)]
            own = [x[[*rows]].double().cpu() for x in (numbers.norms, *numbers.lengths.values())]
            bounds, groups = numbers.bounds or {}, numbers.groups(lengths)
            unit = own[0].clamp(min=max(_SMALLEST, *map(float, bounds.values()), 0))
            if numbers.clipping == "automatic":
                unit = own[0] + AUTOMATIC_OFFSET
            found = [x / unit for x in own] + [unit * 0 for _ in bounds]
            expected = [x / unit for x in norms]
            for group, bound in bounds.items():
                size = _root(lengths[name] for name in groups[group])
                whole = size.to(numbers.norms.dtype)
                factors = factors_for(numbers.clipping, whole, float(bound), xp=torch)
                gap = (numbers.factors or {})[groups[group][0]][[*rows]].cpu() - factors
                expected.append(gap * size / max(float(bound), _SMALLEST))
            return ours | {_EACH: torch.cat(found)}, plain | {_EACH: torch.cat(expected)}

        return sides

    def _suspects(self, count: int) -> list[int]:
        """Rows with the most doubtful, the largest and the smallest norm, and drawn ones."""
        norms, doubt = self.numbers.norms, self.numbers.doubt
        own = torch.tensor(self.rows, device=norms.device)
        keys = [norms[own].argmax(), norms[own].argmin()]
        if doubt is not None:
            keys.insert(0, doubt[own].nan_to_num().argmax())
        found = [self.rows[int(key)] for key in keys]
        drawn = self.draw.sample(self.rows, len(self.rows))
        return list(dict.fromkeys([*found, *drawn]))[:count]

    # -------------------------------------------------------------- the other rows replaced

    def replaced(self, count: int) -> None:
        """Run the batch with other rows beside a row, whose outputs and all buffers must stay."""
        base, n = self._base, len(self.numbers.norms)
        for row in [self.rows[-1], self.draw.choice(self.rows)][-count:] if n > 1 else ():
            drawn = enumerate(self.draw.choices(self.rows, k=n))
            index = torch.tensor(
                [r if r != j else self.rows[self.rows.index(r) - 1] for j, r in drawn]
            )
            index[row] = row
            beside = self.reference.with_rows(index).run()
            _refuse_buffers(base.buffers, beside.buffers)
            if not self._tolerates(relative_gap(base.outputs, beside.outputs, row) / _CLOSER):
                self._refuse_outputs(index, row)
        started = [start.buffers for start in self.reference.starts]
        if any(changed_buffers(a, b) for a, b in zip(started, base.buffers, strict=True)):
            changed = [*_others(self.reference.batch)]
            for other in changed:  # on which a counter changes alike
                _refuse_buffers(base.buffers, self.reference.run(other).buffers)
            if not changed:
                _refuse_buffers(started[:1], base.buffers[:1])

    def losses(self) -> None:
        """Compare the losses of rows that ran alone with those that they have in the batch."""
        ran_alone = self.numbers.is_definition or self.numbers.runs_examples
        if not ran_alone or self._has_drawn or self.reference.alone is not None:
            return

        def apart(reference: Reference) -> float:
            is_own = reference is self.reference
            ours = self.numbers if is_own else self.again(reference)
            return relative_gap([reference.losses()], [ours.losses], self.rows)

        self._refuse_apart(apart)

    def _refuse_outputs(self, index: Tensor, row: int) -> None:
        """Refuse outputs that moved with the other rows, unless by rounding or by the draws."""
        again = relative_gap(self._base.outputs, self.reference.run().outputs, row)
        if not self._tolerates(again / _CLOSER):
            self.note(IMPOSSIBLE)  # the same rows give other outputs
        elif not self._has_drawn or self._draws_alike(index):
            self._refuse_apart(
                lambda of: relative_gap(of.run().outputs, of.with_rows(index).run().outputs, row)
            )

    def _refuse_apart(self, apart: Callable[[Reference], float]) -> None:
        """Refuse outputs of a row that depend on other rows, also in float64."""
        size = apart(self.reference)
        if self._tolerates(size / _CLOSER):
            return
        with contextlib.suppress(*CANT_REPEAT):
            if apart(self.reference.in_double()) <= exactness.REPEATED:
                return
        raise UnsupportedLayerError(
            "A spot check failed: the outputs of one example depend on other examples of the "
            f"batch (by {exactness.power_of_ten(size)} of them), so no per-sample gradient exists. "
            "Nothing was released for this batch. Change what mixes examples (statistics of the "
            "batch, a mean over it, attention over examples)."
        )

    def _draws_alike(self, index: Tensor) -> bool:
        """True if a forward draws as many numbers whatever the rows are.

        Some functions draw by the data, such as rrelu for negative numbers only: a row draws other
        numbers beside others. Batches of one repeated row show it where two batches agree.
        """
        repeated = [torch.full_like(index, row) for row in self.rows[:ROWS_LATER]]
        runs = [self.reference.with_rows(rows).run() for rows in (index, *repeated)]
        each = [[end.bits() for end in run.ends] for run in (self._base, *runs)]
        return all(ends == each[0] for ends in each)

    # -------------------------------------------------------------- the judgement

    @cached_property
    def _base(self) -> Run:
        """The plain forward of the batch, without its graph."""
        found = self.reference.run()
        outputs = [output.detach() for output in found.outputs]
        return found._replace(losses=found.losses.detach(), outputs=outputs)

    @cached_property
    def _has_drawn(self) -> bool:
        return self.reference.has_drawn(self._base)

    def _has_losses_of(self, losses: Tensor) -> bool:
        """True if the engine's losses of the rows that count are these."""
        rows = torch.tensor(self.rows, device=losses.device)
        return is_same_forward(losses.detach()[rows], self.numbers.losses.to(losses)[rows])

    @cached_property
    def _draws_as_recorded(self) -> bool:
        """True if a plain forward draws the numbers of the recorded one, as its losses show.

        That is, if another seed gives other losses: a normalised output may hide the difference.
        """
        if not self._has_losses_of(self._base.losses):
            return False
        ends = zip(self.reference.starts, self._base.ends, strict=True)
        other = replace(self.reference, starts=[replace(s, random=end) for s, end in ends])
        with torch.no_grad():
            return not self._has_losses_of(other.losses())

    def _tolerates(self, error: float) -> bool:
        """True if an error is within the tolerance of the parameters, or of what is in use."""
        dtypes = {wide(p.dtype) for p in self.reference.parameters.values()}
        strict = exactness.TOLERANCE["float32" if torch.float32 in dtypes else "float64"]
        return error <= strict or error <= exactness.TOLERANCE[self._precision]

    @cached_property
    def _precision(self) -> str:
        """Lowest precision in a forward, which is run to find it: a key of `TOLERANCE`."""
        seen = set[str]()

        def see(func: Any, args: Any, out: Any) -> None:
            for value in pytree.tree_leaves(out):
                if torch.is_tensor(value) and value.is_floating_point():
                    seen.add(str(value.dtype).removeprefix("torch."))
                    if value.is_cuda and matmul_in_tf32():
                        seen.add("tf32")

        with Operations(see):
            self.reference.losses()
        known = seen & exactness.TOLERANCE.keys()
        return max(known, key=exactness.TOLERANCE.__getitem__, default="float32")

    def _judge(self, sides: _Sides, what: str) -> None:
        """Refuse numbers that differ from the definition by more than rounding.

        Rounding that the loss amplifies is none of ours: then both sides agree in float64, and the
        plain side moves as much when its inputs are rounded otherwise.
        """
        ours, expected = sides(self.reference, self.numbers)
        error, names = _distance(ours, expected)
        if self._tolerates(error):
            return
        repeated = None
        with contextlib.suppress(*CANT_REPEAT):
            double = self.reference.in_double()
            repeated = _distance(*sides(double, self.again(double)))[0]
        if repeated is None or repeated <= exactness.REPEATED:
            rounded = self.reference.rounded(exactness.UNIT[self._precision])
            moved = (_distance(sides(other, self.numbers)[1], expected)[0] for other in rounded)
            if max(moved) >= exactness.ROUNDING * error and not self._exceeds():
                return
        size = exactness.power_of_ten(error)
        raise ExactnessError(
            f"A spot check failed: {what} differs from plain autodiff of the examples' own losses "
            f"by {size} of the clipping bound (parameters "
            f"{', '.join(map(repr, names)) or 'none'}). "
            f"{_ADVICE}",
            parameters=names,
            relative_error=size,
            unprotected_details={"error": error},
        )

    def _exceeds(self) -> bool:
        """True if a contribution exceeds its bound, which no rounding excuses."""
        numbers, precision = self.numbers, self._precision
        if not numbers.bounds or numbers.factors is None or numbers.weighted_sum is None:
            return False
        bound = math.hypot(*map(float, numbers.bounds.values()))
        most = bound * (1 + exactness.TOLERANCE["float32" if "16" in precision else precision])
        for row in self.rows[:ROWS_FIRST]:
            one = torch.zeros_like(numbers.norms)
            one[row] = 1
            parts = numbers.weighted_sum({name: f * one for name, f in numbers.factors.items()})
            if not math.hypot(*map(_length, parts.values())) <= most:
                return True
        return False


def _of_sum(
    names: Sequence[str],
    weights: Callable[[Numbers], Tensor],
    sums: Callable[[Numbers, Tensor], Grads],
    bound: float = math.inf,
) -> _Sides:
    """Return both sides of a weighted sum, in units of the largest contribution to it."""

    def sides(reference: Reference, numbers: Numbers) -> tuple[Grads, Grads]:
        own = weights(numbers)
        each = (own.abs() * numbers.norms)[own != 0]
        largest = min(float(each.max()) if len(each) else 0.0, bound)
        unit = max(largest, _SMALLEST) * max(len(each), 1) ** 0.5
        ours, plain = sums(numbers, own), reference.plain(own)
        return {k: ours[k] / unit for k in names}, {k: plain[k] / unit for k in names}

    return sides


def _root(lengths: Iterable[Tensor]) -> Tensor:
    """Return the (rows,) norms of what has these parts."""
    return torch.stack([*lengths]).norm(dim=0)


def _length(tensor: Tensor) -> float:
    return float(_norm(tensor))


_norm = partial(torch.linalg.vector_norm, dtype=torch.float64)


def _distance(ours: Grads, theirs: Grads) -> tuple[float, list[str]]:
    """Return the difference of two sides, and the parameters with most of it."""
    gaps = {name: _length(ours[name] - part) for name, part in theirs.items() if name != _EACH}
    worst = max(gaps.values(), default=0.0)
    names = sorted((n for n, gap in gaps.items() if not gap < 0.1 * worst), key=lambda n: -gaps[n])
    if _EACH in theirs:
        gaps[_EACH] = float((ours[_EACH] - theirs[_EACH]).abs().max())
    error = math.hypot(*gaps.values())
    return math.inf if math.isnan(error) else error, names[:5]


def relative_gap(
    whole: Sequence[Tensor], beside: Sequence[Tensor], row: Any, place: Any = None
) -> float:
    """Return the largest relative difference of the outputs of a row, or rows, in two batches.

    They are at `place` of the second batch; None for the same as in the first.
    """
    place = row if place is None else place
    worst = 0.0
    for a, b in zip(whole, beside, strict=True):
        x, y = a.detach()[row].double(), b.detach()[place].double()
        if x.shape != y.shape:
            return math.inf
        size = float(a.detach()[a.isfinite()].abs().mean(dtype=wide(a.dtype)).nan_to_num())
        gaps = (x - y).abs() / (x.abs() + size).clamp(min=1e-300)
        gaps = gaps.where(x.isfinite() & y.isfinite(), (x != y) & ~(x.isnan() & y.isnan()))
        worst = max(worst, float(gaps.max()) if gaps.numel() else 0.0)
    return worst


def _refuse_buffers(ours: Sequence[Grads], theirs: Sequence[Grads]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for name in changed_buffers(a, b):
            raise UnsupportedLayerError(
                f"The buffer {name!r} changes in forward, by what the examples are: it carries "
                "them into the state_dict without noise. Freeze it, or call its eval()."
            )


def _others(batch: Batch) -> Iterator[Batch]:
    """Yield batches with other values and other sizes, made of the values of this batch.

    The positions of each example, or the examples of a vector, are reversed and floats halved; of
    several examples, the first is left out.
    """
    other = [t.flip(list(range(1, t.dim())) or [0]) for t in batch.tensors()]
    changed = [t * 0.5 if t.is_floating_point() else t for t in other]
    if not all(map(torch.equal, changed, batch.tensors())):
        yield batch.on(changed)
    if batch.n > 1:
        yield batch.rows(slice(1, batch.n))

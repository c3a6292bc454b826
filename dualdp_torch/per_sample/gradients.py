# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of one batch: as the products they are made of, or as tensors in memory.

`Captured` and `Formed` offer the same operations: gradients, squared norms, and weighted sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dualdp._validate import UnsupportedLayerError
from dualdp.plan.clipping import margin_of
from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.parameter_use import USE_LOOP, Derived, Use, name_of
from dualdp_torch.per_sample.use_gradients import Part, joined, leads_to, tied
from dualdp_torch.rules.base import (
    FORCED,
    Tensor,
    exact_sq_norms,
    has_narrow_type,
    is_narrow,
    last_lengths,
    lengths,
    may_keep,
    on_host,
    sq_norms,
    weighted_sum,
    wide,
)
from dualdp_torch.rules.precision import in_full_precision
from dualdp_torch.rules.together import Described, Product, Table, sq_norms_of, table_of

#: Function of a parameter's name and sum.
Reduce = Callable[[str, Tensor], Tensor]
#: Floor of a squared norm to which its error is compared.
_LEAST = 1e-30
#: Largest size of n gradients, such as those of norms and biases, at which they are copied into one
#: tensor and share kernel calls, on a host and elsewhere: copying more takes longer than the calls
#: saved.
SMALL, SMALL_ELSEWHERE = 1 << 14, 1 << 20


def _added(terms: list[Tensor]) -> Tensor:
    """Return the sum of one or more tensors; a single tensor is not copied."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def _stacked(rows: list[Tensor]) -> Tensor:
    """(n,) each -> (rows, n); a single row is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _least(floors: Sequence[Any], like: Tensor) -> Any:
    """Smallest squares whose errors matter, a number or (groups, 1), from numbers or tensors."""
    if any(map(torch.is_tensor, floors)):
        least = torch.stack([torch.as_tensor(floor, device=like.device) for floor in floors])
        return least.square().clamp(min=_LEAST).to(like.dtype).unsqueeze(1)
    squares = [max(floor**2, _LEAST) for floor in floors]
    return squares[0] if len({*squares}) == 1 else like.new_tensor(squares).unsqueeze(1)


class Squares(NamedTuple):
    """Squared norms (n,): `of` each parameter, their `totals` by clipping group, and the `whole`.

    `are_finite` is True if the whole ones all are.
    """

    of: dict[str, Tensor]
    totals: dict[str, Tensor]
    whole: Tensor
    are_finite: bool


def one_group(name: str) -> str:
    """Return the clipping group of every parameter where whole gradients are clipped."""
    return ""


def _totals(
    names: Sequence[str], rows: Tensor | Sequence[Tensor], group_of: Callable[[str], str]
) -> dict[str, Tensor]:
    """Return group -> (n,) sum of its parameters' rows."""
    if group_of is one_group and torch.is_tensor(rows):
        return {"": rows.sum(0)}
    members: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(group_of(name), []).append(index)
    return {group: _added([rows[i] for i in indices]) for group, indices in members.items()}


def added_up(of: dict[str, Tensor], group_of: Callable[[str], str], n: int) -> Squares:
    """Return name -> (n,) squared norms with their sums."""
    totals = _totals([*of], [*of.values()], group_of)
    whole = _added([*totals.values()]) if of else torch.zeros(n)
    return Squares(of, totals, whole, bool((whole < torch.inf).all()))  # False for nan


@dataclass(frozen=True)
class Limits:
    """Clipping groups and bounds, which decide how large the error of a norm may be.

    Attributes:
        group_of: function from parameter name to clipping group.
        floors: mapping from group to the norm below which no relative precision is needed, a number
            or () tensor: C, or the offset of automatic clipping; groups that are not listed have 0.
    """

    group_of: Callable[[str], str] = str
    floors: Mapping[str, Any] = field(default_factory=dict)


def _summed(table: Table, limits: Limits) -> tuple[dict[str, Tensor], Tensor]:
    """Squared norms (n,) of the clipping groups, and of the whole."""
    totals = _totals(table.names, table.squares, limits.group_of)
    return totals, _added([*totals.values()])


def _compared(
    table: Table, totals: Mapping[str, Tensor], limits: Limits
) -> tuple[list[str], Tensor, Tensor]:
    """Groups with error bounds, and (groups, n) errors and their tolerances."""
    doubted = _totals(table.bounded, table.errors(), limits.group_of)
    error = _stacked([*doubted.values()])
    least = _least([limits.floors.get(group, 0.0) for group in doubted], error)
    tolerated = _stacked([totals[group] for group in doubted]).clamp(min=least)
    return [*doubted], error, tolerated.mul_(margin_of(tolerated.dtype))


class Captured:
    """Per-sample gradients as products of inputs and output gradients of each parameter use.

    Norms computed from products have an error bound. Where it exceeds the tolerance of the clip
    factor, the example's gradient is formed, and the sum takes the formed gradient: a product over
    the batch would round differently, and positions that cancel leave nothing but rounding.

    Attributes:
        is_narrow: bool, True if backward computed some of them in a precision below float32.
        scale: factor of the gradients in memory; squares of theirs may underflow, not of these.

    Args:
        uses: parameter uses, whose output gradients have arrived, with their batch axes; None
            where no gradient arrived.
        parameters: mapping from name to parameter.
        derived: mapping from name to a tensor computed from parameters and used like one.
        n: number of examples.
        scale: factor that undoes the loss reduction: n for a mean, 1 for a sum. It is applied to
            norms and factors, not to each use's gradient.
        keep: "all" keeps every per-sample gradient, "small" those no larger than the output's
            gradient, "cheap" also those that the cost model keeps.
        gathered: function from parameter names to a context in which their storage is allocated;
            None if it always is.
    """

    def __init__(
        self,
        uses: Mapping[Use, BatchAxis | None],
        parameters: Mapping[str, Tensor],
        derived: Mapping[str, Derived],
        *,
        n: int,
        keep: str,
        scale: float = 1.0,
        gathered: Callable[[Iterable[str]], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._parameters, self._derived, self._n, self._keep = parameters, derived, n, keep
        self.scale = scale
        self._gathered = gathered or (lambda names: nullcontext())
        self._parts: dict[str, list[Part]] = {name: [] for name in (*parameters, *derived)}
        self._kept: dict[str, Tensor] = {}
        self._small = list[tuple[list[str], Tensor]]()  # kept ones in one (n, numbers) tensor
        self._apart: dict[str, tuple[Tensor, Tensor]] = {}  # rows, and their formed gradients
        self._doubts: Callable[[], tuple[Tensor, Tensor]] | None = None  # of errors, (groups, n)
        self.is_narrow = is_narrow(parameters.values())
        for use, batch_axis in uses.items():
            if use.grads_out is None:
                continue  # no gradient arrived: the use contributes nothing
            use.check_unchanged()
            if batch_axis is None:
                if not bool(use.grads_out.any()):
                    continue
                raise UnsupportedLayerError(
                    f"Where the examples lie in {use} could not be seen when the model was "
                    f"examined, since gradients vanished there. {USE_LOOP}"
                )
            acts, grads_out = use.acts, use.grads_out
            if batch_axis.axis or batch_axis.fold:
                acts = batch_axis.batch_first(acts, n)
                grads_out = batch_axis.batch_first(grads_out, n)
            narrow = has_narrow_type(grads_out.dtype)
            self.is_narrow |= narrow
            for tensor in acts if isinstance(acts, tuple) else (acts,):
                narrow |= tensor is not None and has_narrow_type(tensor.dtype)
            is_apart = batch_axis.fold == "outer" and not use.rule.rows_are_free
            has_pair = use.rule.pair is not None and {"weight", "bias"} <= use.held.keys()
            beside: dict[str, Tensor] | None = {} if has_pair else None
            for slot, name in use.held.items():
                own = None if slot in use.rule.light else acts
                part = Part(use, slot, own, grads_out, is_apart, beside, narrow)
                self._parts[name].append(part)
            use.acts = use.grads_out = None  # from here on only the parts hold these tensors
            use.versions.clear()
        for name, parts in self._parts.items():
            if len(parts) > 1:
                self._parts[name] = joined(parts)
        self._below = {name: leads_to(value, parameters) for name, value in derived.items()}

    def _zeros(self, name: str) -> Tensor:
        """Return (*shape) zeros in the precision of the parameter's sum."""
        p = self._parameters[name]
        return torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)

    def _keep_pulled_back(self) -> set[str]:
        """Keep whole gradients of parameters that derived tensors lead to; return their names.

        A product over the batch would be rounded to the precision of the derived tensor.
        """
        found, below = dict[str, Tensor](), self._below
        self._below = {}
        for name, leaves in below.items():
            with self._gathered(leaves):  # also without any use: gathering is collective
                only = {leaf: self._parameters[leaf] for leaf in leaves}
                grads = self._formed(name) if self._parts[name] else None
                pulled = {} if grads is None else self._derived[name].pull_back(grads, only)
            for leaf, grad in pulled.items():
                found[leaf] = found[leaf] + grad if leaf in found else grad
        for name, grad in found.items():
            self._kept[name] = sum((part.grads() for part in self._parts[name]), grad)
            self._parts[name] = []
        return {*found}

    def _formed(self, name: str, rows: Tensor | None = None) -> Tensor:
        """Return (n, *shape), the gradients of one tensor, of all examples or of `rows`."""
        if name in self._kept:
            return self._kept[name] if rows is None else self._kept[name][rows]
        if not self._parts[name]:
            zeros = self._zeros(name)
            return zeros.expand(self._n if rows is None else len(rows), *zeros.shape)
        first, *others = self._parts[name]
        found = first.grads(rows)
        for part in others:
            found = found + part.grads(rows)
        return found

    @in_full_precision
    def grads(self) -> dict[str, Tensor]:
        """Return a mapping from parameter name to (n, *shape)."""
        self._keep_pulled_back()
        found = {name: self._formed(name) for name in self._parameters}
        return found if self.scale == 1 else {name: g * self.scale for name, g in found.items()}

    def _norms_alone(self, parts: list[Part]) -> tuple[Described | None, bool]:
        """Squared norms without forming gradients, or their description; None if that is dearer.

        Also if the gradients are kept until the sum: they are if they have no more numbers than the
        output's gradient, or if the cost model says so and they fit in memory.
        """
        first, is_cheap, are_small = parts[0], self._keep == "cheap", True
        numbers = first.use.shapes[first.slot].numel() * self._n
        for part in parts:
            are_small &= numbers <= part.grads_out.numel()
        if self._keep == "all" or (are_small and not (is_cheap and FORCED)):
            return None, True
        alone: Described | None = None
        if len(parts) > 1:
            alone = tied(parts)
        elif first.slot in first.use.rule.sq_norms and not first.is_apart:
            alone = first.ask(first.use.rule.sq_norms[first.slot], can_keep=is_cheap)
        return alone, alone is None and is_cheap and may_keep(numbers, first.grads_out)

    @property
    def doubt(self) -> Tensor | None:
        """(n,) largest error bound of a norm, in units of its tolerance; None without bounds."""
        if self._doubts is None:
            return None
        errors, tolerated = self._doubts()
        return (errors / tolerated).amax(0)

    @property
    def one_sum(self) -> bool:
        """True if some gradients were formed for their norms and must be used in the sum."""
        return bool(self._apart)

    @in_full_precision
    def sq_norms(self, limits: Limits) -> Squares:
        """Return squared norms, as precise as `limits` asks.

        Guarantees:
            An earlier call, whatever its limits, leaves no gradient in a later sum.
                [test_questions_to_a_record_may_be_repeated]
        """
        self._apart, self._doubts = {}, None
        table = self._table()
        of = table.by_name(self._parameters)
        if not table.bounded:
            return added_up(of, limits.group_of, self._n)
        totals, whole = _summed(table, limits)
        groups = [""] if limits.group_of is one_group else map(limits.group_of, table.bounded)
        floor = min([limits.floors.get(group, 0.0) for group in groups])
        # The only look at the host is this one or the next.
        if floor and table.are_moderate(margin_of(whole.dtype) * max(floor**2, _LEAST)):
            # Without a reference to self: in a cycle, activations would stay for many steps.
            self._doubts = lambda: _compared(table, totals, limits)[1:]
            return Squares(of, totals, whole, True)
        doubted, error, tolerated = _compared(table, totals, limits)
        is_exact = error <= tolerated  # False for nan
        self._doubts = lambda: (error.masked_fill(~is_exact, 0), tolerated)
        are_finite = bool((is_exact & (whole < torch.inf)).all())
        if not are_finite:
            doubtful = (~is_exact).unbind(0)
            rows_of = {g: d.nonzero().flatten() for g, d in zip(doubted, doubtful, strict=True)}
            for name in table.bounded:
                rows = rows_of[limits.group_of(name)]
                if len(rows):
                    formed = self._formed(name, rows)
                    of[name][rows] = (sq_norms(formed) * self.scale**2).to(whole.dtype)
                    self._apart[name] = rows, formed
            # In the same order, so that the others' totals are the same to the last bit.
            totals, whole = _summed(table, limits)
            are_finite = bool((whole < torch.inf).all())
        return Squares(of, totals, whole, are_finite)

    @in_full_precision
    def static_sq_norms(self, limits: Limits) -> tuple[Squares, Tensor]:
        """Return squared norms by the same operations for any batch, and if they can be used.

        The second result is a () bool tensor, True if all norms are finite and as precise as
        `limits` asks; `sq_norms` would form gradients where it is False.
        """
        table = self._table()
        of, (totals, whole) = table.by_name(self._parameters), _summed(table, limits)
        are_good = whole < torch.inf
        if table.bounded:
            _, error, tolerated = _compared(table, totals, limits)
            are_good = are_good & (error <= tolerated).all(0)
        return Squares(of, totals, whole, True), are_good.all()

    def _table(self) -> Table:
        """Return squared norms and error bounds of all parameters."""
        new = self._keep_pulled_back()
        dtypes = {p.dtype for p in self._parameters.values()}
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        described, known, shared = dict[str, Described](), dict[str, Tensor](), dict[str, str]()
        small: dict[Any, list[str]] = {}
        for name, p in self._parameters.items():
            parts = self._parts[name]
            if name in self._kept and name not in new:  # by an earlier call
                known[name] = lengths(self._kept[name]).to(widest)
                continue
            if not parts and name not in new:
                described[name] = p.new_zeros(self._n, dtype=widest), None
                continue
            alone, keeps = (None, True) if name in new else self._norms_alone(parts)
            if alone is not None:
                # A description would keep widened copies of all layers until they are computed.
                if wide(p.dtype) != widest or (len(parts) == 1 and parts[0].is_narrow):
                    square, error = sq_norms_of(alone, self._n)
                    alone = square.to(widest), None if error is None else error.to(widest)
                described[name] = alone
                continue
            formed = self._formed(name)
            if keeps:
                self._kept[name] = formed
                parts.clear()  # free the inputs before the next gradient is formed
                for other, product in described.items():
                    if isinstance(product, Product) and product.grads_out is formed:
                        shared[name] = other
                if name in shared and on_host(formed):  # there is only its sum to come, one call
                    continue
                if formed.numel() <= (SMALL if on_host(formed) else SMALL_ELSEWHERE):
                    small.setdefault((formed.dtype, formed.device), []).append(name)
                    continue
            known[name] = lengths(formed).to(widest)
        for names in small.values():
            found = self._lengths_of_small(names, shared)
            known |= {name: each.to(widest) for name, each in found}
        return table_of(described, known, shared, n=self._n, scale=self.scale)

    def _lengths_of_small(
        self, names: list[str], known: Mapping[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and lengths (n,) of kept gradients, which from now on share one tensor.

        Those of one size lie side by side; those whose lengths are `known` come last.
        """
        numbers = {name: self._kept[name].shape[1:].numel() for name in names}
        names = sorted(names, key=lambda name: (name in known, numbers[name]))
        flat = [self._kept[name].reshape(self._n, numbers[name]) for name in names]
        together = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        pieces = together.split([numbers[name] for name in names], 1)
        for name, piece in zip(names, pieces, strict=True):
            self._kept[name] = piece.view(self._kept[name].shape)
        self._small.append((names, together))
        start = 0
        unknown = [name for name in names if name not in known]
        for size, alike in itertools.groupby(unknown, lambda name: numbers[name]):
            same = [*alike]
            block = together.narrow(1, start, size * len(same)).unflatten(1, (-1, size))
            start += size * len(same)
            yield from zip(same, last_lengths(block).unbind(1), strict=True)

    def describe(self) -> list[dict[str, Any]]:
        """Return one dict per parameter use, the "uses" entry of `dualdp_torch.explain`."""
        found = []
        for name in (*self._parameters, *self._derived):
            parts, below = self._parts[name], self._below.get(name)
            alone, keeps = self._norms_alone(parts) if parts else (None, False)
            for part in parts:
                found.append(
                    {
                        "parameters": below or [name],
                        "function": name_of(part.use.function),
                        "form": "gradients" if alone is None or below else "products",
                        "keeps": keeps,
                    }
                )
        return found

    @in_full_precision
    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Return name -> (rows,) float64 squared norms, from formed gradients."""
        self._keep_pulled_back()
        return {
            name: exact_sq_norms(self._formed(name, rows)) * self.scale**2
            for name in self._parameters
        }

    @in_full_precision
    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None, reduce: Reduce | None = None
    ) -> dict[str, Tensor]:
        """Return name -> sum over the examples of factor times gradient, of names with factors.

        Examples that are not among `rows` are left out; None stands for all. `reduce` gets each sum
        before the next one is formed, and returns what stands in its place.
        """
        if self.scale != 1:
            distinct = {id(weights): weights for weights in factors.values()}
            scaled = {key: weights * self.scale for key, weights in distinct.items()}
            factors = {name: scaled[id(weights)] for name, weights in factors.items()}
        self._keep_pulled_back()
        ready = self._sums_of_small(factors) if rows is None else {}
        found = {}
        for name, weights in factors.items():
            total = ready.pop(name) if name in ready else self._sum(name, weights, rows)
            found[name] = total if reduce is None else reduce(name, total)
        return found

    def _sums_of_small(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name -> (*shape) sums of the kept gradients that share one tensor and their factors."""
        found: dict[str, Tensor] = {}
        for names, together in self._small:
            weights = factors.get(names[0])
            if weights is not None and all(factors.get(name) is weights for name in names):
                shapes = [self._kept[name].shape[1:] for name in names]
                pieces = weighted_sum(weights, together).split([shape.numel() for shape in shapes])
                found |= {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return found

    def _sum(self, name: str, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Return the sum of factor, which includes the scale, times gradient in memory."""
        if name in self._kept:
            kept = self._kept[name]
            if rows is not None:
                factors, kept = factors[rows], kept[rows]
            return weighted_sum(factors, kept)
        terms: list[Tensor] = []
        if name in self._apart:
            apart, formed = self._apart[name]
            left = torch.ones(self._n, dtype=torch.bool, device=factors.device)
            if rows is not None:
                left = torch.zeros_like(left).index_fill_(0, rows, True)
            wanted = left[apart]
            terms.append(weighted_sum(factors[apart][wanted], formed[wanted]))
            rows = left.index_fill_(0, apart, False).nonzero().flatten()
        for part in self._parts[name] if rows is None or len(rows) else ():
            terms.append(part.sum(factors, rows))
        if len(terms) == 1:
            return terms[0]
        return _added(terms) if terms else self._zeros(name)

    def forget(self) -> None:
        """Free inputs, output gradients, and kept gradients."""
        self._parts, self._kept, self._below, self._small = {}, {}, {}, []


class Formed(Captured):
    """Per-sample gradients held in memory: a mapping from parameter name to (n, *shape)."""

    def __init__(self, formed: dict[str, Tensor]) -> None:
        n = next((len(grads) for grads in formed.values()), 0)
        super().__init__({}, formed, {}, n=n, keep="all")
        self._kept = {name: grads.to(wide(grads.dtype)) for name, grads in formed.items()}

# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of one batch: as tensors in memory, or as the products they are made of.

`Formed` and `Captured` offer the same operations: gradients, squared norms, and weighted sums.
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
from dualdp_torch.per_sample.use_gradients import Part, joined, leads_to, pick, tied
from dualdp_torch.rules import choices, memory
from dualdp_torch.rules.base import (
    Tensor,
    exact_sq_norms,
    has_narrow_type,
    is_narrow,
    last_lengths,
    lengths,
    on_host,
    sq_norms,
    weighted_sum,
)
from dualdp_torch.rules.base import wide as wide
from dualdp_torch.rules.precision import full_precision, in_full_precision
from dualdp_torch.rules.together import Described, NormTable, Table, sq_norms_of

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


class Formed:
    """Per-sample gradients held in memory: a mapping from parameter name to (n, *shape).

    Attributes, of `Captured` too:
        is_narrow: bool, True if backward computed some of them in a precision below float32.
        doubt: (n,) largest error bound of a norm, in units of its tolerance, over the groups whose
            norms came from products; None before `sq_norms`, or without such norms.
        one_sum: bool, True if some examples' sums must come from the same numbers as their norms.
        scale: factor of the gradients in memory; squares of theirs may underflow, not of these.
    """

    doubt: Tensor | None = None
    one_sum, scale = False, 1.0

    def __init__(self, formed: dict[str, Tensor]) -> None:
        self._n = next((len(g) for g in formed.values()), 0)
        self.is_narrow = is_narrow(formed.values())
        self._formed = {name: g.to(wide(g.dtype)) for name, g in formed.items()}

    def grads(self) -> dict[str, Tensor]:
        """Return a mapping from parameter name to (n, *shape)."""
        return self._formed

    def sq_norms(self, limits: Limits) -> Squares:
        """Return squared norms."""
        found = {name: sq_norms(g) for name, g in self._formed.items()}
        return added_up(found, limits.group_of, self._n)

    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Return name -> (rows,) float64 squared norms of the selected examples."""
        return {name: exact_sq_norms(g[rows]) for name, g in self._formed.items()}

    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weighted sum) for each parameter."""
        for name in self._formed:
            yield name, self.sum(name, factors[name], rows)

    def sum(self, name: str, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Return the sum over the examples of factor times gradient of one parameter."""
        with full_precision():
            return weighted_sum(pick(factors, rows), pick(self._formed[name], rows))

    def forget(self) -> None:
        """Free the gradients."""
        self._formed = {}


class Captured:
    """Per-sample gradients as products of inputs and output gradients of each parameter use.

    Norms computed from products have an error bound. Where it exceeds the tolerance of the clip
    factor, the example's gradient is formed, and the sum takes the formed gradient: a product over
    the batch would round differently, and positions that cancel leave nothing but rounding.

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
        self._small: list[
            tuple[list[str], Tensor]
        ] = []  # kept gradients in one (n, numbers) tensor
        self._apart: dict[str, list[tuple[Tensor, Tensor]]] = {}  # formed: (rows, gradients)
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
            acts = batch_axis.batch_first(use.acts, n)
            grads_out = batch_axis.batch_first(use.grads_out, n)
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

    def _pulled_back(self) -> dict[str, Tensor]:
        """Return name -> (n, *shape), gradients that reach parameters through derived tensors."""
        found: dict[str, Tensor] = {}
        for name, below in self._below.items():
            with self._gathered(below):  # also without any use: gathering is collective
                pulled = self._pulled(name, below, None) if self._parts[name] else {}
            for parameter, grad in pulled.items():
                found[parameter] = found[parameter] + grad if parameter in found else grad
        return found

    def _pulled(self, name: str, below: Iterable[str], rows: Tensor | None) -> dict[str, Tensor]:
        """Return parameter -> (rows, *shape), gradients through one derived tensor."""
        only = {parameter: self._parameters[parameter] for parameter in below}
        grads = self._formed(name, {}, rows)
        return self._derived[name].pull_back(grads, only, per_sample=True)[0]

    def _sum_of_pulled(
        self, name: str, parameter: str, factors: Tensor, rows: Tensor | None
    ) -> list[Tensor]:
        """Weighted sum over the examples of one parameter's gradient through a derived tensor."""
        only = {parameter: self._parameters[parameter]}
        total = _added([part.sum(factors, rows) for part in self._parts[name]])
        found, is_exact = self._derived[name].pull_back(total, only, per_sample=False)
        if is_exact:
            return list(found.values())
        # The sum was rounded to the derived tensor's precision: pull back each example alone, as
        # for its norm.
        rows = torch.arange(self._n, device=factors.device) if rows is None else rows
        terms = []
        for piece in memory.row_slices(len(rows), only[parameter].numel(), factors):
            each = self._pulled(name, only, rows[piece])
            terms += [weighted_sum(factors[rows[piece]], grad) for grad in each.values()]
        return [_added(terms)] if terms else []

    def _formed(
        self, name: str, pulled_back: Mapping[str, Tensor], rows: Tensor | None = None
    ) -> Tensor:
        """Return (n, *shape), the whole gradient of one tensor, of all examples or of `rows`."""
        found = pulled_back.get(name)
        for part in self._parts[name]:
            grads = part.grads(rows)
            found = grads if found is None else found + grads
        if found is None:
            found = self._zeros(name).expand(self._n, *self._parameters[name].shape)
        return found

    @in_full_precision
    def grads(self) -> dict[str, Tensor]:
        """Return a mapping from parameter name to (n, *shape)."""
        pulled_back = self._pulled_back()
        found = {
            name: self._kept[name] if name in self._kept else self._formed(name, pulled_back)
            for name in self._parameters
        }
        return found if self.scale == 1 else {name: g * self.scale for name, g in found.items()}

    def _keeps(self, parts: list[Part]) -> bool:
        """True if one parameter's per-sample gradients are kept until the sum.

        They are if they have no more numbers than the output's gradient, or if the rules say so.
        """
        is_cheap, are_small = self._keep == "cheap", True
        for part in parts:
            numbers = part.use.shapes[part.slot].numel() * self._n
            are_small &= numbers <= part.grads_out.numel()
        if self._keep == "all" or (are_small and not (is_cheap and choices.is_forced())):
            return True
        for part in parts if is_cheap else ():
            keeps = None if part.slot in part.use.rule.light else part.use.rule.keeps
            if keeps is not None and not part.ask(keeps):
                return False
        return is_cheap

    def _norms_alone(self, parts: list[Part]) -> Described | None:
        """Squared norms without forming gradients, or their description; None if dearer."""
        if len(parts) > 1:
            return tied(parts)
        part = parts[0]
        if part.slot not in part.use.rule.sq_norms or part.is_apart:
            return None
        found: Described = part.ask(part.use.rule.sq_norms[part.slot])
        return found

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

    def sq_norms(self, limits: Limits) -> Squares:
        """Return squared norms, as precise as `limits` asks.

        Guarantees:
            An earlier call, whatever its limits, leaves no gradient in a later sum.
                [test_questions_to_a_record_may_be_repeated]
        """
        self._apart, self._doubts = {}, None
        return self._judged(self._table(), limits)

    def static_sq_norms(self, limits: Limits) -> tuple[Squares, Tensor]:
        """Return squared norms by the same operations for any batch, and if they can be used.

        The second result is a () bool tensor, True if all norms are finite and as precise as
        `limits` asks; `sq_norms` would form gradients where it is False.
        """
        table = self._table()
        of, (totals, whole) = self._by_name(table), _summed(table, limits)
        are_good = whole < torch.inf
        if table.bounded:
            _, error, tolerated = _compared(table, totals, limits)
            are_good = are_good & (error <= tolerated).all(0)
        return Squares(of, totals, whole, True), are_good.all()

    @in_full_precision
    def _table(self) -> Table:
        """Return squared norms and error bounds of all parameters."""
        small: dict[Any, dict[str, bool]] = {}
        pulled_back = self._pulled_back()
        dtypes = {wide(p.dtype) for p in self._parameters.values()}
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        table = NormTable(self._n, self.scale)
        for name, p in self._parameters.items():
            parts = self._parts[name]
            if name in self._kept:  # by an earlier call
                table.add_length(name, lengths(self._kept[name]).to(widest))
                continue
            if not parts and name not in pulled_back:
                table.add(name, (p.new_zeros(self._n, dtype=widest), None))
                continue
            keeps = self._keeps(parts)
            alone = None if keeps or name in pulled_back else self._norms_alone(parts)
            if alone is not None:
                # A description would keep widened copies of all layers until they are computed.
                if wide(p.dtype) != widest or (len(parts) == 1 and parts[0].is_narrow):
                    square, error = sq_norms_of(alone, self._n)
                    alone = square.to(widest), None if error is None else error.to(widest)
                table.add(name, alone)
                continue
            formed = self._formed(name, pulled_back)
            has_length = is_here = False
            if keeps:
                self._kept[name] = formed
                parts.clear()  # free the inputs before the next gradient is formed
                has_length, is_here = table.shares(name, formed), on_host(formed)
                if has_length and is_here:  # there is only its sum to come, one call
                    continue
                if formed.numel() <= (SMALL if is_here else SMALL_ELSEWHERE):
                    key = formed.dtype, formed.device
                    small.setdefault(key, {})[name] = has_length
                    continue
            if not has_length:
                table.add_length(name, lengths(formed).to(widest))
        for has_lengths in small.values():
            for name, found in self._lengths_of_small(has_lengths):
                table.add_length(name, found.to(widest))
        return table.finish()

    def _lengths_of_small(self, has_lengths: dict[str, bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and lengths (n,) of kept gradients, which from now on share one tensor.

        Those of one size lie side by side. `has_lengths` is True for names that need no length.
        """
        numbers = {name: self._kept[name].shape[1:].numel() for name in has_lengths}
        names = sorted(has_lengths, key=lambda name: (numbers[name], has_lengths[name]))
        flat = [self._kept[name].reshape(self._n, numbers[name]) for name in names]
        together = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        pieces = together.split([numbers[name] for name in names], 1)
        for name, piece in zip(names, pieces, strict=True):
            self._kept[name] = piece.view(self._kept[name].shape)
        self._small.append((names, together))
        start = 0
        for (size, has_length), alike in itertools.groupby(
            names, lambda name: (numbers[name], has_lengths[name])
        ):
            same = [*alike]
            stop = start + size * len(same)
            if not has_length:
                each = last_lengths(together[:, start:stop].unflatten(1, (-1, size)))
                yield from zip(same, each.unbind(1), strict=True)
            start = stop

    def _by_name(self, table: Table) -> dict[str, Tensor]:
        """Name -> (n,) squared norms."""
        rows = dict(zip(table.names, table.squares.unbind(0), strict=True))
        return {name: rows[name] for name in self._parameters}

    def _judged(self, table: Table, limits: Limits) -> Squares:
        """Squares as precise as `limits` asks: gradients whose norms are too inexact are formed."""
        of = self._by_name(table)
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
        if bool((is_exact & (whole < torch.inf)).all()):
            self._doubts = lambda: (error, tolerated)
            return Squares(of, totals, whole, True)
        self._doubts = lambda: (error.masked_fill(~is_exact, 0), tolerated)
        doubtful = (~is_exact).unbind(0)
        rows_of = {g: d.nonzero().flatten() for g, d in zip(doubted, doubtful, strict=True)}
        for name in table.bounded:
            if len(rows_of[limits.group_of(name)]):
                self._form_apart(name, rows_of[limits.group_of(name)], of)
        # In the same order, so that the other examples' totals are the same to the last bit.
        totals, whole = _summed(table, limits)
        return Squares(of, totals, whole, bool((whole < torch.inf).all()))

    @in_full_precision
    def _form_apart(self, name: str, rows: Tensor, found: dict[str, Tensor]) -> None:
        """Form and keep one parameter's gradients of the examples `rows`; update their norms."""
        shape = self._parameters[name].shape
        for piece in memory.row_slices(len(rows), shape.numel(), found[name]):
            part = rows[piece]
            formed = self._formed(name, {}, part)
            found[name][part] = (sq_norms(formed) * self.scale**2).to(found[name].dtype)
            self._apart.setdefault(name, []).append((part, formed))

    def describe(self) -> list[dict[str, Any]]:
        """Return one dict per parameter use, the "uses" entry of `dualdp_torch.explain`."""
        found = []
        for name in (*self._parameters, *self._derived):
            parts, below = self._parts[name], self._below.get(name)
            keeps = bool(parts) and self._keeps(parts)
            formed = keeps or below is not None or not parts or self._norms_alone(parts) is None
            for part in parts:
                found.append(
                    {
                        "parameters": below or [name],
                        "function": name_of(part.use.function),
                        "form": "gradients" if formed else "products",
                        "keeps": keeps,
                    }
                )
        return found

    @in_full_precision
    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Return name -> (rows,) float64 squared norms, from formed gradients."""
        pulled_back = self._pulled_back()
        found = {}
        for name in self._parameters:
            if name in self._kept:
                found[name] = exact_sq_norms(self._kept[name][rows])
                continue
            through = {k: g[rows] for k, g in pulled_back.items() if k == name}
            if self._parts[name] or through:
                found[name] = exact_sq_norms(self._formed(name, through, rows))
            else:
                found[name] = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        return {name: square * self.scale**2 for name, square in found.items()}

    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weighted sum) for each parameter, computed when it is asked for."""
        if self.scale != 1:
            distinct = {id(weights): weights for weights in factors.values()}
            scaled = {key: weights * self.scale for key, weights in distinct.items()}
            factors = {name: scaled[id(weights)] for name, weights in factors.items()}
        ready = self._sums_of_small(factors) if rows is None else {}
        for name in self._parameters:
            yield name, ready.pop(name) if name in ready else self._sum(name, factors[name], rows)

    @in_full_precision
    def _sums_of_small(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name -> (*shape) sums of the kept gradients that share one tensor and their factors."""
        found: dict[str, Tensor] = {}
        for names, together in self._small:
            weights = factors[names[0]]
            if all(factors[name] is weights for name in names):
                shapes = [self._kept[name].shape[1:] for name in names]
                pieces = weighted_sum(weights, together).split([shape.numel() for shape in shapes])
                found |= {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return found

    def sum(self, name: str, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Return the sum over the examples of factor times gradient of one parameter."""
        return self._sum(name, factors * self.scale, rows)

    @in_full_precision
    def _sum(self, name: str, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Return the sum of factor, which includes the scale, times gradient in memory."""
        if name in self._kept:
            kept = self._kept[name]
            return (
                weighted_sum(factors, kept)
                if rows is None
                else weighted_sum(factors[rows], kept[rows])
            )
        if rows is not None and not len(rows):
            return self._zeros(name)
        terms: list[Tensor] = []
        if name in self._apart:
            rows, terms = self._sums_apart(name, factors, rows)
        if rows is None or len(rows) or not terms:
            for part in self._parts[name]:
                terms.append(part.sum(factors, rows))
        for other, below in self._below.items():
            if name in below:
                with self._gathered([name]):
                    if self._parts[other]:
                        terms += self._sum_of_pulled(other, name, factors, rows)
        if not terms:
            return self._zeros(name)
        return terms[0] if len(terms) == 1 else _added(terms)

    def _sums_apart(
        self, name: str, factors: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the rows that were not formed apart, and the weighted sums of the others."""
        left = torch.ones(self._n, dtype=torch.bool, device=factors.device)
        if rows is not None:
            left = torch.zeros_like(left).index_fill_(0, rows, True)
        sums = []
        for part, formed in self._apart[name]:
            wanted = left[part]
            sums.append(weighted_sum(factors[part][wanted], formed[wanted]))
        for part, _ in self._apart[name]:
            left[part] = False
        return left.nonzero().flatten(), sums

    def forget(self) -> None:
        """Free inputs, output gradients, and kept gradients."""
        self._parts, self._kept, self._below, self._small = {}, {}, {}, []


Gradients = Formed | Captured

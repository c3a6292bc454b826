# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of one batch in two forms: formed, or as the products they are made of.

Both answer the same three questions: the gradients, their squared norms, and their weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dualdp.clipping import margin_of

from . import choices, memory
from .layout import Layout
from .parts import Part, is_narrow, joined, leads_to, pick, tied
from .parts import wide as wide
from .rules.base import Norms, Tensor, exact_sq_norms, sq_norms, weighted_sum
from .uses import Derived, Use, name_of

#: Squares below are too small to be compared.
_LEAST = 1e-30
#: Numbers of n gradients up to which those of one shape, as norms and biases have them, are copied
#: into one tensor and share calls: copying more takes longer than the calls.
SMALL = 1 << 14


def _added(terms: list[Tensor]) -> Tensor:
    """The sum of one or more tensors; one alone is not copied."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


@dataclass(frozen=True)
class Limits:
    """The numbers that clip factors are made of, against which errors of norms are judged.

    Attributes:
        group_of: parameter -> its clipping group.
        floors: group -> the number below which its norm needs no relative precision: C, or what
            automatic clipping adds to the norm; 0 for groups without one.
    """

    group_of: Callable[[str], str] = str
    floors: Mapping[str, float] = field(default_factory=dict)


class Gradients(Protocol):
    """The gradients of n examples.

    Attributes:
        is_narrow: backward computed some of them in a precision below float32.
        doubt: (n,) the largest bound on the error of a norm, in units of what is tolerated, of the
            examples whose norms came from products; None before `sq_norms`, or without any.
        one_sum: some examples' sums must come from the same numbers as their norms.
    """

    is_narrow: bool

    @property
    def doubt(self) -> Tensor | None:
        """As above."""
        ...

    @property
    def one_sum(self) -> bool:
        """As above."""
        ...

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape)."""
        ...

    def sq_norms(self, limits: Limits) -> dict[str, Tensor]:
        """Name -> (n,), as precise as `limits` asks; not finite where a square overflows."""
        ...

    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Name -> (rows,) float64 of some examples, where float32 can't hold a square."""
        ...

    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, sum over the examples `rows` (None: all) of factor times gradient), one by one."""
        ...

    def forget(self) -> None:
        """Free what the gradients are made of; no question after this."""
        ...


class Formed:
    """Gradients that lie in memory: name -> (n, *shape)."""

    doubt: Tensor | None = None
    one_sum = False

    def __init__(self, formed: dict[str, Tensor]) -> None:
        self.is_narrow = is_narrow(formed.values())
        self._formed = {name: g.to(wide(g.dtype)) for name, g in formed.items()}

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape)."""
        return self._formed

    def sq_norms(self, limits: Limits) -> dict[str, Tensor]:
        """Name -> (n,)."""
        return {name: sq_norms(g) for name, g in self._formed.items()}

    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Name -> (rows,) float64 of some examples."""
        return {name: exact_sq_norms(g[rows]) for name, g in self._formed.items()}

    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, shape)."""
        for name, g in self._formed.items():
            yield name, weighted_sum(pick(factors[name], rows), pick(g, rows))

    def forget(self) -> None:
        """Free the gradients."""
        self._formed = {}


class Captured:
    """Gradients as products of what the uses of each parameter saw.

    Norms from products of activations have a bound on their error. Where it is too large for what
    the clip factor is made of, the example's gradient is formed, and the sum takes what was formed:
    a product over the batch would round otherwise, and what positions cancel is rounding.

    Args:
        uses: with their gradients.
        layouts: where the examples lie, use by use.
        parameters: name -> parameter.
        derived: name -> tensor computed from parameters and used like one.
        n: examples.
        keep: "all" keeps every per-sample gradient, "small" those no larger than the output's
            gradient, "cheap" also those that the cost model keeps.
        gathered: names of parameters -> a context in which they have their memory; None where they
            always have.
    """

    def __init__(
        self,
        uses: Iterable[Use],
        layouts: Iterable[Layout | None],
        parameters: Mapping[str, Tensor],
        derived: Mapping[str, Derived],
        *,
        n: int,
        keep: str,
        gathered: Callable[[Iterable[str]], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._parameters, self._derived, self._n, self._keep = parameters, derived, n, keep
        self._gathered = gathered or (lambda names: nullcontext())
        self._parts: dict[str, list[Part]] = {name: [] for name in (*parameters, *derived)}
        self._kept: dict[str, Tensor] = {}
        self._alike: list[tuple[list[str], Tensor]] = []  # kept small ones, (n, names, *shape)
        self._apart: dict[str, list[tuple[Tensor, Tensor]]] = {}  # (rows, gradients), formed
        self._doubts: list[tuple[Tensor, Tensor]] = []  # (error, what is tolerated) of each group
        self.is_narrow = is_narrow(parameters.values())
        for use, layout in zip(uses, layouts, strict=True):
            if use.grads_out is None or layout is None:
                continue  # no gradient arrived: the use contributes nothing
            self.is_narrow |= is_narrow([use.grads_out])
            acts = self._prepare(use.acts, layout)
            grads_out = self._prepare(use.grads_out, layout)
            for slot, name in use.held.items():
                light = slot in use.rule.light
                self._parts[name].append(Part(use, slot, None if light else acts, grads_out))
            use.acts = use.grads_out = None  # from here on only the parts hold them
            use.versions.clear()
        self._parts = {name: joined(parts) for name, parts in self._parts.items()}
        self._below = {name: leads_to(value, parameters) for name, value in derived.items()}

    def _prepare(self, tensor: Any, layout: Layout) -> Any:
        """Batch-first."""
        if isinstance(tensor, tuple):
            return tuple(self._prepare(t, layout) for t in tensor)
        return None if tensor is None else layout.batch_first(tensor, self._n)

    def _zeros(self, name: str) -> Tensor:
        """No gradient, in the shape and precision of the parameter's."""
        p = self._parameters[name]
        return torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)

    def _pulled_back(self) -> dict[str, Tensor]:
        """Name -> (n, *shape): what reaches parameters through tensors computed from them."""
        found: dict[str, Tensor] = {}
        for name, below in self._below.items():
            with self._gathered(below):  # also without any use: other processes may have some
                pulled = self._pulled(name, below, None) if self._parts[name] else {}
            for parameter, grad in pulled.items():
                found[parameter] = found[parameter] + grad if parameter in found else grad
        return found

    def _pulled(self, name: str, below: Iterable[str], rows: Tensor | None) -> dict[str, Tensor]:
        """Parameter -> (rows, *shape): what the uses of a derived tensor give it."""
        only = {parameter: self._parameters[parameter] for parameter in below}
        grads = _added([part.grads(rows) for part in self._parts[name]])
        return self._derived[name].pull_back(grads, only, per_sample=True)[0]

    def _sum_of_pulled(
        self, name: str, parameter: str, factors: Tensor, rows: Tensor | None
    ) -> list[Tensor]:
        """Sum over the examples of factor times what a derived tensor gives one parameter."""
        only = {parameter: self._parameters[parameter]}
        total = _added([part.sum(factors, rows) for part in self._parts[name]])
        found, is_exact = self._derived[name].pull_back(total, only, per_sample=False)
        if is_exact:
            return list(found.values())
        # Rounded to the derived tensor's precision: each example alone, as its norm was.
        rows = torch.arange(self._n, device=factors.device) if rows is None else rows
        terms = []
        for piece in memory.pieces(len(rows), only[parameter].numel(), factors):
            each = self._pulled(name, only, rows[piece])
            terms += [weighted_sum(factors[rows[piece]], grad) for grad in each.values()]
        return [_added(terms)] if terms else []

    def _formed(self, name: str, pulled_back: Mapping[str, Tensor]) -> Tensor:
        """(n, *shape): the whole gradient of one parameter."""
        terms = [part.grads() for part in self._parts[name]]
        if name in pulled_back:
            terms.append(pulled_back[name])
        if not terms:
            return self._zeros(name).expand(self._n, *self._parameters[name].shape)
        return _added(terms)

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape)."""
        pulled_back = self._pulled_back()
        return {
            name: self._kept[name] if name in self._kept else self._formed(name, pulled_back)
            for name in self._parameters
        }

    def _keeps(self, parts: list[Part]) -> bool:
        """Whether one parameter's per-sample gradients stay until the sum."""
        compared = self._keep == "cheap" and choices.is_forced()
        if self._keep == "all" or (not compared and all(part.is_small() for part in parts)):
            return True
        return self._keep == "cheap" and all(part.prefers_keeping() for part in parts)

    def _norms_alone(self, parts: list[Part]) -> Norms | None:
        """(n,) squared norms without the gradients, and a bound on their error; None if dearer."""
        if len(parts) > 1:
            return tied(parts)
        return parts[0].sq_norms() if parts[0].norms_are_cheaper() else None

    @property
    def doubt(self) -> Tensor | None:
        """(n,) the largest error bound of a norm, in units of what is tolerated; None without."""
        if not self._doubts:
            return None
        return torch.stack([error / tolerated for error, tolerated in self._doubts]).amax(0)

    @property
    def one_sum(self) -> bool:
        """Whether some gradients were formed for their norms and must be what is summed."""
        return bool(self._apart)

    def sq_norms(self, limits: Limits) -> dict[str, Tensor]:
        """Name -> (n,).

        Guarantees:
            An earlier question, whatever its limits, leaves no gradient in a later sum.
                [test_questions_to_a_record_may_be_repeated]
        """
        self._apart, self._doubts = {}, []
        found: dict[str, Tensor] = {}
        bounds: dict[str, Tensor] = {}
        small: dict[Any, list[str]] = {}
        pulled_back = self._pulled_back()
        for name in self._parameters:
            parts = self._parts[name]
            if name in self._kept:  # asked before
                found[name] = sq_norms(self._kept[name])
                continue
            if not parts and name not in pulled_back:
                found[name] = self._zeros(name).new_zeros(self._n)
                continue
            keeps = self._keeps(parts)
            alone = None if keeps or name in pulled_back else self._norms_alone(parts)
            if alone is not None:
                found[name], bound = alone
                if bound is not None:
                    bounds[name] = bound
            else:
                formed = self._formed(name, pulled_back)
                if keeps:
                    self._kept[name] = formed
                    parts.clear()  # frees what it was formed from, before the next is formed
                if keeps and formed.numel() <= SMALL:
                    small.setdefault((formed.shape, formed.dtype, formed.device), []).append(name)
                else:
                    found[name] = sq_norms(formed)
        for names in small.values():
            found |= self._sq_norms_of_alike(names)
        found = {name: found[name] for name in self._parameters}
        if bounds:
            self._form_doubtful(found, bounds, limits)
        return found

    def _sq_norms_of_alike(self, names: list[str]) -> dict[str, Tensor]:
        """Name -> (n,) of kept gradients of one shape; several lie in one tensor from here on."""
        if len(names) == 1:
            return {name: sq_norms(self._kept[name]) for name in names}
        together = torch.stack([self._kept[name] for name in names], 1)
        self._kept.update(zip(names, together.unbind(1), strict=True))
        self._alike.append((names, together))
        squares = sq_norms(together.flatten(0, 1)).view(together.shape[:2])
        return dict(zip(names, squares.unbind(1), strict=True))

    def _form_doubtful(
        self, found: dict[str, Tensor], bounds: Mapping[str, Tensor], limits: Limits
    ) -> None:
        """Form the gradients of the examples whose norms may be wrong by too much, by group."""
        members: dict[str, list[str]] = {}
        for name in found:
            members.setdefault(limits.group_of(name), []).append(name)
        groups = [group for group, names in members.items() if not bounds.keys().isdisjoint(names)]
        self._doubts = [
            self._group_doubt(members[g], limits.floors.get(g, 0.0), found, bounds) for g in groups
        ]

    def _group_doubt(
        self, names: list[str], floor: float, found: dict[str, Tensor], bounds: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(n,) error bound of one group's norms, 0 of formed ones; and (n,) what is tolerated."""
        total = _added([found[name] for name in names])
        error = _added([bounds[name] for name in names if name in bounds])
        tolerated = total.clamp(min=max(floor**2, _LEAST)).mul_(margin_of(total.dtype))
        if bool((error <= tolerated).all()):
            return error, tolerated
        doubtful = ~(error <= tolerated)  # nan and infinities are
        for name in names:
            if name in bounds:
                self._form_apart(name, doubtful.nonzero().flatten(), found)
        return error.masked_fill(doubtful, 0), tolerated

    def _form_apart(self, name: str, rows: Tensor, found: dict[str, Tensor]) -> None:
        """Form and keep one parameter's gradients of some examples; their norms are theirs."""
        shape = self._parameters[name].shape
        for piece in memory.pieces(len(rows), shape.numel(), found[name]):
            part = rows[piece]
            formed = _added([p.grads(part) for p in self._parts[name]])
            found[name][part] = sq_norms(formed)
            self._apart.setdefault(name, []).append((part, formed))

    def describe(self) -> list[dict[str, Any]]:
        """The uses of each parameter, as `dualdp_torch.explain` has them."""
        found = []
        for name in (*self._parameters, *self._derived):
            parts, below = self._parts[name], self._below.get(name)
            keeps = bool(parts) and self._keeps(parts)
            formed = keeps or below is not None or self._norms_alone(parts) is None
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

    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Name -> (rows,) float64 of some examples, their gradients formed."""
        pulled_back = self._pulled_back()
        found = {}
        for name in self._parameters:
            if name in self._kept:
                found[name] = exact_sq_norms(self._kept[name][rows])
                continue
            terms = [part.grads(rows) for part in self._parts[name]]
            terms += [pulled_back[name][rows]] if name in pulled_back else []
            zeros = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
            found[name] = exact_sq_norms(_added(terms)) if terms else zeros
        return found

    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, shape): one weighted product per use, formed when it is asked for."""
        ready = self._sums_of_alike(factors) if rows is None else {}
        for name in self._parameters:
            yield name, ready.pop(name) if name in ready else self.sum(name, factors[name], rows)

    def _sums_of_alike(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name -> (*shape) of small kept gradients that one tensor of factors weighs."""
        found: dict[str, Tensor] = {}
        for names, together in self._alike:
            weights = factors[names[0]]
            if all(factors[name] is weights for name in names):
                found.update(zip(names, weighted_sum(weights, together).unbind(0), strict=True))
        return found

    def sum(self, name: str, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Sum over the examples of factor times gradient of one parameter."""
        if name in self._kept:
            return weighted_sum(pick(factors, rows), pick(self._kept[name], rows))
        if rows is not None and not len(rows):
            return self._zeros(name)
        terms: list[Tensor] = []
        if name in self._apart:
            rows, terms = self._sums_apart(name, factors, rows)
        if rows is None or len(rows) or not terms:
            terms += [part.sum(factors, rows) for part in self._parts[name]]
        for other in (other for other, below in self._below.items() if name in below):
            with self._gathered([name]):
                if self._parts[other]:
                    terms += self._sum_of_pulled(other, name, factors, rows)
        return _added(terms) if terms else self._zeros(name)

    def _sums_apart(
        self, name: str, factors: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The rows that are left for the product over the batch, and the sums of the others."""
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
        """Free inputs, gradients of outputs, and kept gradients."""
        self._parts, self._kept, self._below, self._alike = {}, {}, {}, []

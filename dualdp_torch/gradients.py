# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of one batch in two forms: formed, or as the products they are made of.

Both answer the same three questions: the gradients, their squared norms, and their weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import choices
from .layout import Layout
from .rules import embedding, linear
from .rules.base import Tensor, sq_norms, weighted_sum
from .uses import Derived, Use

#: The Gram form is recomputed where its error may exceed this share of max(C, norm)^2.
GRAM_TOLERANCE = 1e-4


def wide(dtype: torch.dtype) -> torch.dtype:
    """Norms, factors and sums are float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _added(terms: list[Tensor]) -> Tensor:
    """The sum of one or more tensors; one alone is not copied."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


class Gradients(Protocol):
    """The gradients of n examples."""

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape)."""
        ...

    def sq_norms(self, max_grad_norm: float | None) -> dict[str, Tensor]:
        """Name -> (n,); `max_grad_norm` bounds the precision that is needed."""
        ...

    def sums(self, factors: Mapping[str, Tensor], rows: Tensor | None) -> dict[str, Tensor]:
        """Name -> sum over the examples `rows` (None: all) of factor times gradient."""
        ...


class Formed:
    """Gradients that lie in memory: name -> (n, *shape)."""

    def __init__(self, formed: dict[str, Tensor]) -> None:
        self._formed = {name: g.to(wide(g.dtype)) for name, g in formed.items()}

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape)."""
        return self._formed

    def sq_norms(self, max_grad_norm: float | None) -> dict[str, Tensor]:
        """Name -> (n,)."""
        return {name: sq_norms(g) for name, g in self._formed.items()}

    def sums(self, factors: Mapping[str, Tensor], rows: Tensor | None) -> dict[str, Tensor]:
        """Name -> shape."""
        return {
            name: weighted_sum(_pick(factors[name], rows), _pick(g, rows))
            for name, g in self._formed.items()
        }


def _pick(tensor: Any, rows: Tensor | None) -> Any:
    """Some of the examples; a row that is left out can't spread its nan."""
    if rows is None or tensor is None:
        return tensor
    return tuple(t[rows] for t in tensor) if isinstance(tensor, tuple) else tensor[rows]


@dataclass(eq=False)
class Part:
    """One use's share in one parameter's gradient; acts and grads_out are batch-first and wide."""

    use: Use
    slot: str
    acts: Any
    grads_out: Tensor

    def _call(self, function: Any, acts: Any, grads_out: Tensor) -> Tensor:
        shape = self.use.shapes[self.slot]
        found: Tensor = function(acts, grads_out, shape=shape, **self.use.options)
        return found

    def grads(self, rows: Tensor | None = None) -> Tensor:
        """(n, *shape)."""
        function = self.use.rule.grads[self.slot]
        return self._call(function, _pick(self.acts, rows), _pick(self.grads_out, rows))

    def norms_are_cheaper(self) -> bool:
        """Whether the rule has squared norms that need not form the gradient."""
        return self.slot in self.use.rule.sq_norms

    def sq_norms(self) -> Tensor:
        """(n,)."""
        return self._call(self.use.rule.sq_norms[self.slot], self.acts, self.grads_out)

    def cancels(self) -> Tensor | None:
        """Bound on the error of `sq_norms`, or None."""
        rule = self.use.rule
        if rule.cancels is None or self.slot not in rule.sq_norms:
            return None
        shape = self.use.shapes[self.slot]
        return rule.cancels(self.acts, self.grads_out, shape=shape, **self.use.options)

    def sum(self, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Sum over the examples of factor times gradient."""
        function = self.use.rule.sums.get(self.slot)
        if function is None:
            return weighted_sum(_pick(factors, rows), self.grads(rows))
        g = _pick(self.grads_out, rows)
        scaled = g * _pick(factors, rows).to(g.dtype).view(-1, *(1,) * (g.dim() - 1))
        return self._call(function, _pick(self.acts, rows), scaled)

    def is_small(self) -> bool:
        """Whether the per-sample gradient is no larger than the output's gradient."""
        return self.use.shapes[self.slot].numel() * len(self.grads_out) <= self.grads_out.numel()

    def prefers_keeping(self) -> bool:
        """Whether the rule keeps the gradient rather than forming it twice."""
        keeps = None if self.slot in self.use.rule.light else self.use.rule.keeps
        return keeps is None or bool(self._call(keeps, self.acts, self.grads_out))


def _joined(parts: list[Part]) -> list[Part]:
    """Uses of one parameter under one rule become one use over the positions of all."""
    groups: dict[Any, list[Part]] = {}
    for part in parts:
        own = part.use.rule.join is None
        key = id(part) if own else (id(part.use.rule), part.slot, str(part.use.options))
        groups.setdefault(key, []).append(part)
    joined = []
    for first, *others in groups.values():
        if others and first.use.rule.join is not None:
            pairs = [(part.acts, part.grads_out) for part in (first, *others)]
            acts, grads_out = first.use.rule.join(pairs)
            first = Part(first.use, first.slot, acts, grads_out)
        joined.append(first)
    return joined


def _tied(parts: list[Part]) -> tuple[Tensor, Tensor] | None:
    """(n,) squared norms and error bounds of a table that is embedding and head at once."""
    by_rule = {id(part.use.rule): part for part in parts}
    table, head = by_rule.get(id(embedding.RULE)), by_rule.get(id(linear.RULE))
    if len(parts) != 2 or table is None or head is None:
        return None
    inner, lengths = embedding.cross_products(
        table.acts,
        table.grads_out,
        head.acts,
        head.grads_out,
        shape=table.use.shapes[table.slot],
        **table.use.options,
    )
    error = linear.GRAM_ERROR * torch.finfo(lengths.dtype).eps * lengths.square()
    return (table.sq_norms() + head.sq_norms() + 2 * inner).clamp(min=0), error


class Captured:
    """Gradients as products of what the uses of each parameter saw.

    Args:
        uses: with their gradients.
        layouts: where the examples lie, use by use.
        parameters: name -> parameter.
        derived: name -> tensor computed from parameters and used like one.
        n: examples.
        keep: "all" keeps every per-sample gradient, "small" those no larger than the output's
            gradient, "cheap" also those that the cost model keeps.
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
    ) -> None:
        self._parameters, self._derived, self._n, self._keep = parameters, derived, n, keep
        self._parts: dict[str, list[Part]] = {name: [] for name in (*parameters, *derived)}
        self._kept: dict[str, Tensor] = {}
        for use, layout in zip(uses, layouts, strict=True):
            if use.grads_out is None or layout is None:
                continue  # no gradient arrived: the use contributes nothing
            acts = self._prepare(use.acts, layout)
            grads_out = self._prepare(use.grads_out, layout)
            for slot, name in use.held.items():
                light = slot in use.rule.light
                self._parts[name].append(Part(use, slot, None if light else acts, grads_out))
            use.acts = use.grads_out = None  # from here on only the parts hold them
            use.versions.clear()
        self._parts = {name: _joined(parts) for name, parts in self._parts.items()}

    def _prepare(self, tensor: Any, layout: Layout) -> Any:
        """Batch-first, and float32 or wider."""
        if isinstance(tensor, tuple):
            return tuple(self._prepare(t, layout) for t in tensor)
        if tensor is None:
            return None
        tensor = layout.batch_first(tensor, self._n)
        return tensor.to(wide(tensor.dtype)) if tensor.is_floating_point() else tensor

    def _zeros(self, name: str) -> Tensor:
        """No gradient, in the shape and precision of the parameter's."""
        p = self._parameters[name]
        return torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)

    def _pulled_back(self) -> dict[str, Tensor]:
        """Name -> (n, *shape): what reaches parameters through tensors computed from them."""
        found: dict[str, Tensor] = {}
        for name, derived in self._derived.items():
            if not self._parts[name]:
                continue
            grads = _added([part.grads() for part in self._parts[name]])
            pulled = derived.pull_back(grads, self._parameters, per_sample=True)
            for parameter, grad in pulled.items():
                grad = grad.to(wide(grad.dtype))
                found[parameter] = found[parameter] + grad if parameter in found else grad
        return found

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

    def _norms_alone(self, parts: list[Part]) -> tuple[Tensor, Tensor | None] | None:
        """(n,) squared norms without the gradients, and a bound on their error; None if dearer."""
        if self._keeps(parts):
            return None
        if len(parts) > 1:
            return _tied(parts)
        return (parts[0].sq_norms(), parts[0].cancels()) if parts[0].norms_are_cheaper() else None

    def sq_norms(self, max_grad_norm: float | None) -> dict[str, Tensor]:
        """Name -> (n,)."""
        found: dict[str, Tensor] = {}
        bounds: dict[str, Tensor] = {}
        pulled_back = self._pulled_back()
        for name in self._parameters:
            parts = self._parts[name]
            if name in self._kept:  # asked before
                found[name] = sq_norms(self._kept[name])
                continue
            if not parts and name not in pulled_back:
                found[name] = self._zeros(name).new_zeros(self._n)
                continue
            alone = None if name in pulled_back else self._norms_alone(parts)
            if alone is not None:
                found[name], bound = alone
                if bound is not None:
                    bounds[name] = bound
            else:
                formed = self._formed(name, pulled_back)
                found[name] = sq_norms(formed)
                if self._keeps(parts):
                    self._kept[name] = formed
                    parts.clear()  # frees what it was formed from, before the next is formed
        if bounds:
            self._recompute(found, bounds, max_grad_norm or 0.0)
        return found

    def _recompute(
        self, found: dict[str, Tensor], bounds: Mapping[str, Tensor], max_grad_norm: float
    ) -> None:
        """Form the gradients of the examples whose Gram norms may have cancelled."""
        total = torch.stack(list(found.values())).sum(0)
        error = torch.stack(list(bounds.values())).sum(0)
        doubtful = error > GRAM_TOLERANCE * total.clamp(min=max_grad_norm**2)
        rows = doubtful.nonzero().flatten()
        for name in bounds if len(rows) else ():
            formed = _added([part.grads(rows) for part in self._parts[name]])
            found[name][rows] = sq_norms(formed)

    def sums(self, factors: Mapping[str, Tensor], rows: Tensor | None) -> dict[str, Tensor]:
        """Name -> shape: one weighted product per use."""
        found = {}
        for name in self._parameters:
            if name in self._kept:
                kept = self._kept[name]
                found[name] = weighted_sum(_pick(factors[name], rows), _pick(kept, rows))
                continue
            terms = [part.sum(factors[name], rows) for part in self._parts[name]]
            for other, derived in self._derived.items():
                if self._parts[other]:
                    weighted = _added([p.sum(factors[name], rows) for p in self._parts[other]])
                    only = {name: self._parameters[name]}
                    terms += derived.pull_back(weighted, only, per_sample=False).values()
            found[name] = _added(terms) if terms else self._zeros(name)
        return found

# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of one batch in two forms: formed, or as the products they are made of.

Both answer the same three questions: the gradients, their squared norms, and their weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .capture import Derived, Use
from .layout import Layout
from .rules.base import Tensor, sq_norms

#: The Gram form is recomputed where its error may exceed this share of max(C, norm)^2.
GRAM_TOLERANCE = 1e-4


def wide(dtype: torch.dtype) -> torch.dtype:
    """Norms, factors and sums are float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weighted_sum(factors: Tensor, grads: Tensor) -> Tensor:
    """(n,), (n, *shape) -> shape."""
    factors = factors.to(grads.dtype)
    return (
        (factors @ grads.flatten(1)).view(grads.shape[1:]) if grads.dim() > 1 else factors @ grads
    )


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
        if self.slot in self.use.rule.light:
            acts = None
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
        keeps = self.use.rule.keeps
        return keeps is None or keeps(self.acts, self.grads_out, self.use.shapes[self.slot])


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
                self._parts[name].append(Part(use, slot, acts, grads_out))

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

    def _added(self, name: str) -> Tensor | None:
        """(n, *shape): the uses under one name add up; None without any."""
        total: Tensor | None = None
        for part in self._parts[name]:
            total = part.grads() if total is None else total + part.grads()
        return total

    def _pulled_back(self) -> dict[str, Tensor]:
        """Name -> (n, *shape): what reaches parameters through tensors computed from them."""
        found: dict[str, Tensor] = {}
        for name, derived in self._derived.items():
            grads = self._added(name)
            if grads is None:
                continue
            pulled = derived.pull_back(grads, self._parameters, per_sample=True)
            for parameter, grad in pulled.items():
                grad = grad.to(wide(grad.dtype))
                found[parameter] = found[parameter] + grad if parameter in found else grad
        return found

    def _formed(self, name: str, pulled_back: Mapping[str, Tensor]) -> Tensor:
        """(n, *shape): the whole gradient of one parameter."""
        terms = [g for g in (self._added(name), pulled_back.get(name)) if g is not None]
        if not terms:
            return self._zeros(name).expand(self._n, *self._parameters[name].shape)
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape)."""
        pulled_back = self._pulled_back()
        return {name: self._formed(name, pulled_back) for name in self._parameters}

    def _keeps(self, parts: list[Part]) -> bool:
        """Whether one parameter's per-sample gradients stay until the sum."""
        if self._keep == "all" or all(part.is_small() for part in parts):
            return True
        return self._keep == "cheap" and all(part.prefers_keeping() for part in parts)

    def _norms_alone(self, parts: list[Part]) -> bool:
        """Whether one parameter's norms come without its per-sample gradients."""
        return len(parts) == 1 and parts[0].norms_are_cheaper() and not self._keeps(parts)

    def sq_norms(self, max_grad_norm: float | None) -> dict[str, Tensor]:
        """Name -> (n,)."""
        found: dict[str, Tensor] = {}
        bounds: dict[str, Tensor] = {}
        pulled_back = self._pulled_back()
        for name in self._parameters:
            parts = self._parts[name]
            if not parts and name not in pulled_back:
                found[name] = self._zeros(name).new_zeros(self._n)
            elif self._norms_alone(parts) and name not in pulled_back:
                found[name] = parts[0].sq_norms()
                bound = parts[0].cancels()
                if bound is not None:
                    bounds[name] = bound
            else:
                formed = self._formed(name, pulled_back)
                found[name] = sq_norms(formed)
                if self._keeps(parts):
                    self._kept[name] = formed
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
            found[name][rows] = sq_norms(self._parts[name][0].grads(rows))

    def sums(self, factors: Mapping[str, Tensor], rows: Tensor | None) -> dict[str, Tensor]:
        """Name -> shape: one weighted product per use."""
        found = {}
        for name in self._parameters:
            if name in self._kept:
                kept = self._kept[name]
                found[name] = weighted_sum(_pick(factors[name], rows), _pick(kept, rows))
                continue
            total = self._zeros(name)
            for part in self._parts[name]:
                total = total + part.sum(factors[name], rows)
            for other, derived in self._derived.items():
                if self._parts[other]:
                    weighted = sum(part.sum(factors[name], rows) for part in self._parts[other])
                    only = {name: self._parameters[name]}
                    pulled = derived.pull_back(torch.as_tensor(weighted), only, per_sample=False)
                    total = total + pulled.get(name, 0)
            found[name] = total
        return found

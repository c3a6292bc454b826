# SPDX-License-Identifier: Apache-2.0
"""Gradient of one parameter use, computed from its saved inputs and output gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dualdp_torch.per_sample.parameter_use import Derived, Use, graph_nodes
from dualdp_torch.rules import embedding, linear
from dualdp_torch.rules.base import Norms, Tensor, weighted_sum, widened
from dualdp_torch.rules.together import GRAM_ERROR, sq_norms_of


def pick(tensor: Any, rows: Tensor | None) -> Any:
    """Return the selected examples; a row that is left out can't spread its nan."""
    if rows is None or tensor is None:
        return tensor
    return tuple(t[rows] for t in tensor) if isinstance(tensor, tuple) else tensor[rows]


def _as_rows(tensor: Any) -> Any:
    """(n, k, ...) -> (n k, ...), of one tensor or each of a tuple."""
    if isinstance(tensor, tuple):
        return tuple(map(_as_rows, tensor))
    return None if tensor is None else tensor.flatten(0, 1)


@dataclass(eq=False)
class Part:
    """Contribution of one parameter use to one parameter's gradient, batch-first.

    Tensors are kept in the precision that the forward computed them in; where that is narrower than
    float32 (`is_narrow`), they are widened, that is copied, when a rule reads them. `slot` is the
    parameter's argument in the use; `acts` are its saved input(s), if needed. If `is_apart`, the
    rule takes the rows of a unit, on axis 1, as examples of their own. `beside` holds the bias's
    gradients, formed with those of the weight, until its part returns them; None if the rule forms
    no pairs. Callers are in full precision (`rules.precision`).
    """

    use: Use
    slot: str
    acts: Any
    grads_out: Tensor
    is_apart: bool = False
    beside: dict[str, Tensor] | None = None
    is_narrow: bool = False

    def ask(
        self,
        function: Any,
        rows: Tensor | None = None,
        factors: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return a rule function's answer for all examples or `rows`, of `factors` (n,) times."""
        acts, g = self.acts, self.grads_out
        if rows is not None:
            acts, g = pick(acts, rows), g[rows]
            factors = pick(factors, rows)
        if self.is_narrow:
            acts, g = widened(acts), widened(g)
        if factors is not None:
            g = g * factors.to(g.dtype).view(-1, *(1,) * (g.dim() - 1))
        if self.is_apart:
            acts, g = _as_rows(acts), g.flatten(0, 1)
        return function(acts, g, shape=self.use.shapes[self.slot], **self.use.options, **options)

    def grads(self, rows: Tensor | None = None) -> Tensor:
        """Return the per-use gradients, (n, *shape), or of the examples `rows` only."""
        rule = self.use.rule
        if rows is None and self.beside is not None and not self.is_apart:
            if self.slot in self.beside:
                return self.beside.pop(self.slot)
            pair = self.ask(rule.pair) if self.slot == "weight" else None
            if pair is not None:
                self.beside["bias"] = pair[1]
                return pair[0]
        grads: Tensor = self.ask(rule.grads[self.slot], rows)
        # Of rows that are apart, a unit's gradient is their sum.
        return grads.unflatten(0, (-1, self.grads_out.shape[1])).sum(1) if self.is_apart else grads

    def sum(self, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Return the sum over the examples of factor times gradient."""
        function = self.use.rule.sums.get(self.slot)
        if function is None:
            return weighted_sum(pick(factors, rows), self.grads(rows))
        found: Tensor = self.ask(function, rows, factors)
        return found


def joined(parts: list[Part]) -> list[Part]:
    """Merge the uses of one parameter under one rule into one use over all their positions."""
    if len(parts) < 2:
        return parts
    groups: dict[Any, list[Part]] = {}
    for part in parts:
        own = part.use.rule.join is None or part.is_apart
        key = id(part) if own else (id(part.use.rule), part.slot, str(part.use.options))
        groups.setdefault(key, []).append(part)
    found = []
    for first, *others in groups.values():
        if others and first.use.rule.join is not None:  # of one key, so that none is apart
            pairs = [(widened(part.acts), widened(part.grads_out)) for part in (first, *others)]
            acts, grads_out = first.use.rule.join(pairs)
            first = Part(first.use, first.slot, acts, grads_out)
        found.append(first)
    return found


def tied(parts: list[Part]) -> Norms | None:
    """(n,) squared norms and error bounds of a table used as embedding and head; None otherwise."""
    by_rule = {id(part.use.rule): part for part in parts}
    table, head = by_rule.get(id(embedding.RULE)), by_rule.get(id(linear.RULE))
    if len(parts) != 2 or table is None or head is None:
        return None
    inner, lengths = embedding.cross_products(
        *map(widened, (table.acts, table.grads_out, head.acts, head.grads_out)),
        shape=table.use.shapes[table.slot],
        **table.use.options,
    )
    error = GRAM_ERROR * torch.finfo(lengths.dtype).eps * lengths.square()
    own, heads = (
        sq_norms_of(part.ask(part.use.rule.sq_norms[part.slot], can_keep=False), len(lengths))[0]
        for part in (table, head)
    )
    return (own + heads + 2 * inner).clamp(min=0), error


def leads_to(derived: Derived, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that a derived tensor was computed from."""
    names = {id(p): name for name, p in parameters.items()}
    variables = (getattr(node, "variable", None) for node in graph_nodes([derived.value.grad_fn]))
    return list(dict.fromkeys(names[id(p)] for p in variables if id(p) in names))

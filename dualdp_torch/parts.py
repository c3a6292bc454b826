# SPDX-License-Identifier: Apache-2.0
"""What one use of a parameter contributes to its gradient: the products that it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dualdp import UnsupportedLayerError

from .layout import Layout
from .rules import embedding, linear
from .rules.base import Norms, Tensor, weighted_sum, without_autocast
from .uses import Derived, Use


def wide(dtype: torch.dtype) -> torch.dtype:
    """Norms, factors and sums are float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_narrow(tensors: Iterable[Tensor]) -> bool:
    """Whether some of them hold floating-point numbers narrower than float32."""
    return any(_narrow(t.dtype) for t in tensors)


def _narrow(dtype: torch.dtype) -> bool:
    """Whether these are floating-point numbers narrower than float32."""
    return dtype.itemsize < 4 and dtype.is_floating_point


def pick(tensor: Any, rows: Tensor | None) -> Any:
    """Some of the examples; a row that is left out can't spread its nan."""
    if rows is None or tensor is None:
        return tensor
    return tuple(t[rows] for t in tensor) if isinstance(tensor, tuple) else tensor[rows]


def widened(tensor: Any) -> Any:
    """The tensor, or tensors, float32 or wider where they are floating-point numbers."""
    if isinstance(tensor, tuple):
        return tuple(widened(t) for t in tensor)
    return tensor.float() if tensor is not None and _narrow(tensor.dtype) else tensor


@dataclass(eq=False)
class Part:
    """One use's share in one parameter's gradient, batch-first.

    What a low precision computed is kept as it came, and is widened where it is looked at.
    """

    use: Use
    slot: str
    kept_acts: Any
    kept_grads_out: Tensor

    @property
    def acts(self) -> Any:
        """Saved input(s), float32 or wider."""
        return widened(self.kept_acts)

    @property
    def grads_out(self) -> Tensor:
        """Gradient of the output, float32 or wider."""
        grads_out: Tensor = widened(self.kept_grads_out)
        return grads_out

    @without_autocast
    def _call(self, function: Any, acts: Any, grads_out: Tensor) -> Any:
        return function(acts, grads_out, shape=self.use.shapes[self.slot], **self.use.options)

    def grads(self, rows: Tensor | None = None) -> Tensor:
        """(n, *shape)."""
        function = self.use.rule.grads[self.slot]
        return self._call(function, pick(self.acts, rows), pick(self.grads_out, rows))

    def norms_are_cheaper(self) -> bool:
        """Whether the rule has squared norms that need not form the gradient."""
        return self.slot in self.use.rule.sq_norms

    def sq_norms(self) -> Norms:
        """(n,), and a bound on their error, or None."""
        function = self.use.rule.sq_norms[self.slot]
        norms: Norms = self._call(function, self.acts, self.grads_out)
        return norms

    def sum(self, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Sum over the examples of factor times gradient."""
        function = self.use.rule.sums.get(self.slot)
        if function is None:
            return weighted_sum(pick(factors, rows), self.grads(rows))
        g = pick(self.grads_out, rows)
        scaled = g * pick(factors, rows).to(g.dtype).view(-1, *(1,) * (g.dim() - 1))
        return self._call(function, pick(self.acts, rows), scaled)

    def is_small(self) -> bool:
        """Whether the per-sample gradient is no larger than the output's gradient."""
        size = self.use.shapes[self.slot].numel() * len(self.kept_grads_out)
        return size <= self.kept_grads_out.numel()

    def prefers_keeping(self) -> bool:
        """Whether the rule keeps the gradient rather than forming it twice."""
        keeps = None if self.slot in self.use.rule.light else self.use.rule.keeps
        return keeps is None or bool(self._call(keeps, self.acts, self.grads_out))


def joined(parts: list[Part]) -> list[Part]:
    """Uses of one parameter under one rule become one use over the positions of all."""
    groups: dict[Any, list[Part]] = {}
    for part in parts:
        own = part.use.rule.join is None
        key = id(part) if own else (id(part.use.rule), part.slot, str(part.use.options))
        groups.setdefault(key, []).append(part)
    found = []
    for first, *others in groups.values():
        if others and first.use.rule.join is not None:
            pairs = [(part.acts, part.grads_out) for part in (first, *others)]
            acts, grads_out = first.use.rule.join(pairs)
            first = Part(first.use, first.slot, acts, grads_out)
        found.append(first)
    return found


@without_autocast
def tied(parts: list[Part]) -> Norms | None:
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
    squares = table.sq_norms()[0] + head.sq_norms()[0]
    return (squares + 2 * inner).clamp(min=0), error


def complete(use: Use, layout: Layout | None, scale: float) -> None:
    """Check what a use holds, and undo the loss's reduction.

    Args:
        use: whose gradient has arrived, or never will.
        layout: where its examples lie, if that was seen.
        scale: what undoes the reduction.

    Raises:
        UnsupportedLayerError: the examples' gradients can't be told apart, or inputs were changed.
    """
    if use.grads_out is None:
        return
    use.check_unchanged()
    if layout is None and bool(use.grads_out.any()):
        raise UnsupportedLayerError(
            f"Where the examples lie in {use} could not be seen when the model was examined, since "
            'gradients vanished there. Use method="vmap".'
        )
    if scale != 1:
        use.grads_out = use.grads_out * scale


def leads_to(derived: Derived, parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that a tensor was computed from."""
    names = {id(p): name for name, p in parameters.items()}
    found: dict[str, None] = {}
    seen: set[Any] = set()
    stack = [derived.value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        found |= {} if name is None else {name: None}
        stack += [child for child, _ in node.next_functions]
    return list(found)

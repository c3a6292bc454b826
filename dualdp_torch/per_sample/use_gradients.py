# SPDX-License-Identifier: Apache-2.0
"""Gradient of one parameter use, computed from its saved inputs and output gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.parameter_use import USE_LOOP, Derived, Use, graph_nodes
from dualdp_torch.rules import embedding, linear
from dualdp_torch.rules.base import (
    Norms,
    Tensor,
    weighted_sum,
    widened,
)
from dualdp_torch.rules.precision import in_full_precision
from dualdp_torch.rules.together import GRAM_ERROR, Described, sq_norms_of


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
    float32 (`is_narrow`), they are widened, that is copied, when read. `slot` is the parameter's
    argument in the use; `kept_acts` are its saved input(s), if needed. If `is_apart`, the rule
    takes the rows of a unit, on axis 1, as examples of their own. `beside` holds the bias's
    gradients, formed with those of the weight, until its part returns them; None if the rule forms
    no pairs.
    """

    use: Use
    slot: str
    kept_acts: Any
    kept_grads_out: Tensor
    is_apart: bool = False
    beside: dict[str, Tensor] | None = None
    is_narrow: bool = False

    @property
    def acts(self) -> Any:
        """Saved input(s), float32 or wider."""
        return widened(self.kept_acts) if self.is_narrow else self.kept_acts

    @property
    def grads_out(self) -> Tensor:
        """Gradient of the output, float32 or wider."""
        return widened(self.kept_grads_out) if self.is_narrow else self.kept_grads_out

    def _ask(self, function: Any, acts: Any, grads_out: Tensor) -> Any:
        if self.is_apart:
            acts, grads_out = _as_rows(acts), _as_rows(grads_out)
        return function(acts, grads_out, shape=self.use.shapes[self.slot], **self.use.options)

    _call = in_full_precision(_ask)

    def grads(self, rows: Tensor | None = None) -> Tensor:
        """Return the per-use gradients, (n, *shape), or of the examples `rows` only."""
        if rows is None and self.beside is not None and self.slot in self.beside:
            return self.beside.pop(self.slot)
        rule, acts, g = self.use.rule, pick(self.acts, rows), pick(self.grads_out, rows)
        if rows is None and self.beside is not None and self.slot == "weight":
            pair = self._call(rule.pair, acts, g)
            if pair is not None:
                weight, self.beside["bias"] = (self._of_units(each, g) for each in pair)
                return weight
        return self._of_units(self._call(rule.grads[self.slot], acts, g), g)

    def _of_units(self, grads: Tensor, grads_out: Tensor) -> Tensor:
        """Return gradients (n, *shape), of rows that are apart their sums."""
        return grads.unflatten(0, grads_out.shape[:2]).sum(1) if self.is_apart else grads

    def norms_are_cheaper(self) -> bool:
        """True if the rule computes squared norms without forming the gradient."""
        return self.slot in self.use.rule.sq_norms and not self.is_apart

    def sq_norms(self) -> Described:
        """Return (n,) squared norms, and a bound on their error or None, or their description."""
        function = self.use.rule.sq_norms[self.slot]
        norms: Described = self._call(function, self.acts, self.grads_out)
        return norms

    def sum(self, factors: Tensor, rows: Tensor | None) -> Tensor:
        """Return the sum over the examples of factor times gradient."""
        function = self.use.rule.sums.get(self.slot)
        if function is None:
            return weighted_sum(pick(factors, rows), self.grads(rows))
        g = pick(self.grads_out, rows)
        scaled = g * pick(factors, rows).to(g.dtype).view(-1, *(1,) * (g.dim() - 1))
        return self._call(function, pick(self.acts, rows), scaled)

    def is_small(self) -> bool:
        """True if the per-sample gradients have no more elements than the output's gradient."""
        g = self.kept_grads_out
        return self.use.shapes[self.slot].numel() * g.shape[0] <= g.numel()

    def prefers_keeping(self) -> bool:
        """True if the rule keeps the gradient rather than forming it twice."""
        keeps = None if self.slot in self.use.rule.light else self.use.rule.keeps
        return keeps is None or bool(self._ask(keeps, self.acts, self.grads_out))


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
            pairs = [(part.acts, part.grads_out) for part in (first, *others)]
            acts, grads_out = first.use.rule.join(pairs)
            first = Part(first.use, first.slot, acts, grads_out)
        found.append(first)
    return found


@in_full_precision
def tied(parts: list[Part]) -> Norms | None:
    """(n,) squared norms and error bounds of a table used as embedding and head; None otherwise."""
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
    error = GRAM_ERROR * torch.finfo(lengths.dtype).eps * lengths.square()
    own, heads = (sq_norms_of(part.sq_norms(), len(lengths))[0] for part in (table, head))
    squares = own + heads
    return (squares + 2 * inner).clamp(min=0), error


def check_use(use: Use, batch_axis: BatchAxis | None) -> None:
    """Check that a use has a batch axis and unchanged inputs."""
    if use.grads_out is None:
        return
    use.check_unchanged()
    if batch_axis is None and bool(use.grads_out.any()):
        raise UnsupportedLayerError(
            f"Where the examples lie in {use} could not be seen when the model was examined, since "
            f"gradients vanished there. {USE_LOOP}"
        )


def leads_to(derived: Derived, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that a derived tensor was computed from."""
    names = {id(p): name for name, p in parameters.items()}
    variables = (getattr(node, "variable", None) for node in graph_nodes([derived.value.grad_fn]))
    return list(dict.fromkeys(names[id(p)] for p in variables if id(p) in names))

# SPDX-License-Identifier: Apache-2.0
"""Per-layer clipping during the backward, so that only one layer's gradient is in memory at a time.

A layer is clipped, summed, reduced and freed as soon as the gradients of its outputs have arrived.
After a whole backward, an example with a non-finite norm is left out of every sum; here that is
decided layer by layer, so that layers above an overflow include it, within their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.clip import Terms, clip_factors, clipped_sums, group_of
from dualdp_torch.per_sample.gradients import Captured
from dualdp_torch.per_sample.parameter_use import Derived, Use
from dualdp_torch.per_sample.use_gradients import check_use, leads_to
from dualdp_torch.rules.base import Tensor


@dataclass(eq=False)
class Layer:
    """Parameters that are clipped together, since they share uses.

    `waiting` are uses whose gradient has not arrived. If `is_last`, a use is of a derived tensor,
    and the layer is clipped in `finish`.
    """

    names: list[str] = field(default_factory=list)
    uses: dict[Use, BatchAxis | None] = field(default_factory=dict)
    waiting: set[Use] = field(default_factory=set)
    is_last: bool = False


class Layered:
    """Clipped sums of one batch of n examples, computed layer by layer.

    Arguments are those of `Captured`, from a recorded forward of a sharded model.

    Guarantees:
        The same sums as after the backward.  [test_sharded_runs_end_where_one_device_ends]
        One layer's gradient is alive at a time.  [test_one_whole_gradient_is_alive_at_a_time]
    """

    def __init__(
        self,
        uses: Mapping[Use, BatchAxis | None],
        derived: Mapping[str, Derived],
        parameters: Mapping[str, Tensor],
        terms: Terms,
        *,
        n: int,
        shards: Shards,
    ) -> None:
        self._derived, self._parameters, self._terms = derived, parameters, terms
        self._n, self._shards = n, shards
        self._layers = _layers(uses, derived, parameters)
        self._of_use = {use: layer for layer in self._layers for use in layer.uses}
        self._sums: dict[str, Tensor] = {}
        self._squares: list[Tensor] = []

    def arrived(self, use: Use) -> None:
        """Note that a use's gradient arrived, and clip its layer if it is complete."""
        layer = self._of_use[use]
        layer.waiting.discard(use)
        if not layer.waiting and not layer.is_last:
            self._clip(layer)

    def _clip(self, layer: Layer) -> None:
        for use, batch_axis in layer.uses.items():
            check_use(use, batch_axis)
        parameters = {name: self._parameters[name] for name in layer.names}
        derived = self._derived if layer.is_last else {}
        bounds = {group_of(name): self._terms.bounds[group_of(name)] for name in layer.names}
        clipping, mask = self._terms.clipping, self._terms.mask
        with torch.no_grad():
            captured = Captured(
                layer.uses,
                layer.uses.values(),
                parameters,
                derived,
                n=self._n,
                scale=self._terms.scale,
                keep="small",
                gathered=self._shards.gathered,
            )
            factors = clip_factors(captured, self._n, bounds, clipping, mask)
            self._sums |= clipped_sums(captured, factors, shards=self._shards)
        self._squares.append(factors.norms.square())
        self._layers.remove(layer)

    def finish(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return name -> clipped sum, and the whole norms (n,) before clipping, 0 for padding."""
        for layer in list(self._layers):
            self._clip(layer)
        self._shards.require_same_order(self._sums)
        norms = torch.stack(self._squares).sum(0).sqrt()
        return {name: self._sums[name] for name in self._parameters}, norms


def _layers(
    uses: Mapping[Use, BatchAxis | None],
    derived: Mapping[str, Derived],
    parameters: Mapping[str, Tensor],
) -> list[Layer]:
    """Return the clipping groups as layers, joined where a use holds parameters of several."""
    layers: dict[str, Layer] = {}
    for name in parameters:
        layers.setdefault(group_of(name), Layer()).names.append(name)
    below = {name: leads_to(value, parameters) for name, value in derived.items()}
    for use, batch_axis in uses.items():
        is_last = any(name in below for name in use.held.values())
        names = [n for held in use.held.values() for n in below.get(held, [held])]
        layer = _joined(layers, dict.fromkeys(map(group_of, names)))
        layer.uses[use] = batch_axis
        layer.waiting.add(use)
        layer.is_last |= is_last
    return list(dict.fromkeys(layers.values()))


def _joined(layers: dict[str, Layer], groups: Iterable[str]) -> Layer:
    first, *others = dict.fromkeys(layers[group] for group in groups)
    for other in others:
        first.names += other.names
        first.uses |= other.uses
        first.waiting |= other.waiting
        first.is_last |= other.is_last
        layers.update({g: first for g, layer in layers.items() if layer is other})
    return first

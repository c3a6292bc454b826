# SPDX-License-Identifier: Apache-2.0
"""Per-layer clipping while the backward runs, so that one layer's gradient at a time is alive.

It is clipped, summed, reduced and dropped as soon as the gradients of the layer's outputs are
there. Elsewhere an example whose whole norm is not finite counts for nothing; here that is decided
layer by layer: those above the one where it overflows have counted it, within their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .clip import clip_and_sum, group_of
from .gradients import Captured
from .layout import Layout
from .parts import complete, leads_to
from .rules.base import Tensor
from .sharded import Shards, Terms
from .uses import Derived, Use


@dataclass(eq=False)
class Layer:
    """Parameters that are clipped together with others of the same uses.

    Attributes:
        names: of the parameters.
        uses: of them, with their layouts.
        waiting: uses whose gradient has not arrived.
        is_last: some are used through tensors computed from them, which are left to the end.
    """

    names: list[str] = field(default_factory=list)
    uses: dict[Use, Layout | None] = field(default_factory=dict)
    waiting: set[Use] = field(default_factory=set)
    is_last: bool = False


class Layered:
    """The clipped sums of one batch, layer by layer.

    Args:
        uses: of the recorded forward, with their layouts.
        derived: name -> tensor computed from parameters and used like one.
        parameters: name -> parameter, as the forward saw it.
        terms: of the batch, whose groups are layers.
        n: examples.
        shards: of the model.

    Guarantees:
        The same sums as after the backward.  [test_sharded_runs_end_where_one_device_ends]
        One layer's gradient is alive at a time.  [test_one_whole_gradient_is_alive_at_a_time]
    """

    def __init__(
        self,
        uses: Mapping[Use, Layout | None],
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
        """The gradient of one use's output is there."""
        layer = self._of_use[use]
        layer.waiting.discard(use)
        if not layer.waiting and not layer.is_last:
            self._clip(layer)

    def _clip(self, layer: Layer) -> None:
        """Clip, add up and reduce one layer."""
        for use, layout in layer.uses.items():
            complete(use, layout, self._terms.scale)
        parameters = {name: self._parameters[name] for name in layer.names}
        derived = self._derived if layer.is_last else {}
        groups = {group_of(name) for name in layer.names}
        with torch.no_grad():
            captured = Captured(
                layer.uses,
                layer.uses.values(),
                parameters,
                derived,
                n=self._n,
                keep="small",
                gathered=self._shards.gathered,
            )
            sums, norms = clip_and_sum(
                captured,
                self._n,
                {group: self._terms.bounds[group] for group in groups},
                self._terms.clipping,
                self._terms.mask,
                None,
                self._shards,
            )
        self._sums |= sums
        self._squares.append(norms.square())
        self._layers.remove(layer)

    def finish(self) -> tuple[dict[str, Tensor], Tensor]:
        """Name -> clipped sum, and the whole norms (n,) before clipping, 0 for padding.

        Raises:
            ValueError: the layers came in another order than on the other processes.
        """
        for layer in list(self._layers):
            self._clip(layer)
        self._shards.require_same_order(self._sums)
        norms = torch.stack(self._squares).sum(0).sqrt()
        return {name: self._sums[name] for name in self._parameters}, norms


def _layers(
    uses: Mapping[Use, Layout | None],
    derived: Mapping[str, Derived],
    parameters: Mapping[str, Tensor],
) -> list[Layer]:
    """The groups of clipping, joined where a use holds parameters of several."""
    layers: dict[str, Layer] = {}
    for name in parameters:
        layers.setdefault(group_of(name), Layer()).names.append(name)
    below = {name: leads_to(value, parameters) for name, value in derived.items()}
    for use, layout in uses.items():
        is_last = any(name in below for name in use.held.values())
        names = [n for held in use.held.values() for n in below.get(held, [held])]
        layer = _joined(layers, dict.fromkeys(map(group_of, names)))
        layer.uses[use] = layout
        layer.waiting.add(use)
        layer.is_last |= is_last
    return list(dict.fromkeys(layers.values()))


def _joined(layers: dict[str, Layer], groups: Iterable[str]) -> Layer:
    """The layer of all these groups."""
    first, *others = dict.fromkeys(layers[group] for group in groups)
    for other in others:
        first.names += other.names
        first.uses |= other.uses
        first.waiting |= other.waiting
        first.is_last |= other.is_last
        layers.update({g: first for g, layer in layers.items() if layer is other})
    return first

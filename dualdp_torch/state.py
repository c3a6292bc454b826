# SPDX-License-Identifier: Apache-2.0
"""What a forward may leave behind on a model: nothing that depends on the examples.

A buffer or frozen parameter that a forward writes carries the examples of one batch, raw, into the
`state_dict`. Counters of steps and the vectors of spectral norm's power iteration are written too,
but the same whatever the batch is, and pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dualdp import UnsupportedLayerError

from .batch import Batch
from .random_state import RandomState, untouched_generators
from .rules.base import Tensor


class State:
    """Identity and version of every buffer and frozen parameter of a model, at one moment.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._seen = model, _places(model)

    def written(self) -> list[str]:
        """Names of what was changed, replaced, added or removed since."""
        now = _places(self._model)
        if len(now) == len(self._seen) and all(map(_is_same, now, self._seen)):
            return []
        before, after = self._named(self._seen), self._named(now)
        names = before.keys() | after.keys()
        return sorted(n for n in names if not _is_same(after.get(n), before.get(n)))

    def _named(self, places: list[_Place]) -> dict[str, _Place]:
        """The places by the names of their tensors."""
        prefixes = {id(m): f"{name}." if name else "" for name, m in self._model.named_modules()}
        return {prefixes.get(id(place.module), "") + place.key: place for place in places}


class _Place(NamedTuple):
    """A tensor of a module at one version."""

    module: nn.Module
    key: str
    tensor: Tensor
    version: int


def _is_same(a: _Place | None, b: _Place | None) -> bool:
    """Whether both are one tensor at one version."""
    return a is not None and b is not None and a.tensor is b.tensor and a.version == b.version


def _places(model: nn.Module) -> list[_Place]:
    """Buffers and frozen parameters, found without making names: this runs at every forward."""
    found, waiting, met = list[_Place](), [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        waiting += [child for child in module._modules.values() if child is not None]
        for key, tensor in module._buffers.items():
            if tensor is not None:
                found.append(_Place(module, key, tensor, tensor._version))
        for key, p in module._parameters.items():
            if p is not None and not p.requires_grad:
                found.append(_Place(module, key, p, p._version))
    return found


def _untrained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of the buffers and frozen parameters."""
    yield from model.named_buffers()
    yield from ((name, p) for name, p in model.named_parameters() if not p.requires_grad)


@contextlib.contextmanager
def restored(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[None]:
    """What a forward writes to these buffers inside is taken back; None stands for all buffers."""
    tensors = dict(_untrained(model))
    if names is None:
        names = [name for name, _ in model.named_buffers()]
    kept = {name: tensors[name].detach().clone() for name in names if name in tensors}
    try:
        yield
    finally:
        now = dict(_untrained(model))
        with torch.no_grad():
            for name, value in kept.items():
                if name in now and not _same(now[name], value):
                    now[name].copy_(value)


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Plain attributes of modules, lists and mappings among them, are afterwards what they were."""
    kept = [(vars(m), dict(vars(m)), _containers(vars(m))) for m in model.modules()]
    try:
        yield
    finally:
        for now, then, containers in kept:
            if not _is_alike(now, then):
                now.clear()
                now.update(then)
            for container, content in containers:
                _refill(container, content)


def _containers(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(container, copy of it) of the lists, mappings and sets among attributes."""
    kinds = (list, dict, set)
    return [(v, v.copy()) for v in attributes.values() if isinstance(v, kinds)]


def _refill(container: Any, content: Any) -> None:
    """Give a container the content that it had."""
    if isinstance(container, dict):
        if not _is_alike(container, content):
            container.clear()
            container.update(content)
    elif isinstance(container, list):
        container[:] = content
    elif container != content:
        container.clear()
        container.update(content)


def _is_alike(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """Whether two mappings hold the same things under the same names."""
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


@dataclass(frozen=True)
class Start:
    """What a forward begins from: the generators, and the buffers that it writes.

    Attributes:
        random: states of the generators.
        buffers: name -> value.
    """

    random: RandomState
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, written: Iterable[str]) -> Start:
        """What the next forward begins from.

        Args:
            model: the model.
            written: names of the buffers that a forward writes.
        """
        tensors = dict(_untrained(model)) if written else {}
        kept = {name: tensors[name].detach().clone() for name in written if name in tensors}
        return cls(RandomState.of(model), kept)

    def on(self, model: nn.Module) -> Start:
        """The same for a copy of the model, whose own generators go on from where they are."""
        own = RandomState.of(model).own
        return replace(self, random=replace(self.random, own=own))

    def has_drawn(self, model: nn.Module) -> bool:
        """Whether numbers were drawn since."""
        return not self.random.is_as_before(model)

    @contextlib.contextmanager
    def replayed(self, model: nn.Module) -> Iterator[None]:
        """A context that begins from here, after which everything is as it was before."""
        with untouched_generators(model), restored(model, self.buffers):
            self.random.put()
            tensors = dict(_untrained(model)) if self.buffers else {}
            with torch.no_grad():
                for name, value in self.buffers.items():
                    tensors[name].copy_(value)
            yield


def refuse_written(
    model: nn.Module, run: Callable[[Batch], object], batch: Batch, names: list[str]
) -> None:
    """Refuse what a forward has written, unless it writes the same on every batch.

    Args:
        model: the model.
        run: a batch -> a forward of the model on it.
        batch: whose forward has written.
        names: from `State.written`.

    Raises:
        UnsupportedLayerError: a value depends on the batch, or a tensor was replaced.
    """
    state, found = RandomState.of(model), []
    others = [o for o in _others(batch) if _differs(o, batch)]  # none: nothing can be told
    for rows in (batch, *others):
        with torch.no_grad(), restored(model, names), state.replayed(model):
            run(rows)
            now = dict(_untrained(model))
            found.append({n: now[n].detach().clone() for n in names if n in now})
    for name in names:
        if others and all(_same(found[0].get(name), values.get(name)) for values in found):
            continue
        kind = "frozen parameter" if name in dict(model.named_parameters()) else "buffer"
        raise UnsupportedLayerError(
            f"The {kind} {name!r} changes in forward, by what the examples are: it carries them "
            "into the state_dict without noise. Freeze it, or call the module's eval()."
        )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two values of a buffer are equal, nan included."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def _others(batch: Batch) -> Iterator[Batch]:
    """Batches of other values and of another size, whose tensors hold only numbers of this one.

    The positions of each example are turned about, numbers halved; of several examples, the first
    one is left out or stands in for the last.
    """
    yield Batch(batch.with_tensors([_turned(t) for t in batch.tensors()]))
    if batch.n > 1:
        rows = torch.arange(batch.n)
        yield batch.rows(rows[1:])
        yield batch.rows(rows.clamp(max=batch.n - 2))


def _differs(other: Batch, batch: Batch) -> bool:
    """Whether another batch holds anything else."""
    pairs = zip(other.tensors(), batch.tensors(), strict=True)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def _turned(tensor: Tensor) -> Tensor:
    """Another tensor of the same shape, with the numbers of each row elsewhere."""
    other = tensor.flip(list(range(1, tensor.dim())) or [0])
    return other * 0.5 if tensor.is_floating_point() else other

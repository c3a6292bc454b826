# SPDX-License-Identifier: Apache-2.0
"""State of a model that a forward may change, and refusal of changes that depend on the examples.

A buffer or frozen parameter written by a forward would carry the examples of one batch into the
`state_dict` without noise. Step counters and the power iteration of spectral norm are written, too,
but get the same values for every batch, and are allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.process_group import modules_of
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.random_state import RandomState, untouched_generators
from dualdp_torch.rules.base import Tensor


class State:
    """Identity and version of every buffer and frozen parameter of a model, at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._seen = model, _versions(model)

    def written(self) -> list[str]:
        """Return the names of tensors changed, replaced, added or removed since."""
        now = _versions(self._model)
        if len(now) == len(self._seen) and all(map(_is_same, now, self._seen)):
            return []
        prefixes = {id(m): f"{name}." if name else "" for name, m in self._model.named_modules()}
        before, after = (
            {prefixes.get(id(version.module), "") + version.key: version for version in versions}
            for versions in (self._seen, now)
        )
        names = before.keys() | after.keys()
        return sorted(n for n in names if not _is_same(after.get(n), before.get(n)))


def numbers_on(model: nn.Module) -> list[float]:
    """Return the floats that the modules hold as attributes, also in lists and dicts."""
    values = [list(vars(module).values()) for module in modules_of(model)]
    return [leaf for leaf in pytree.tree_leaves(values) if type(leaf) is float]


class _Version(NamedTuple):
    module: nn.Module
    key: str
    tensor: Tensor
    version: int


def _is_same(a: _Version | None, b: _Version | None) -> bool:
    return a is not None and b is not None and a.tensor is b.tensor and a.version == b.version


def _versions(model: nn.Module) -> list[_Version]:
    """Return buffers and frozen parameters, without building names: this runs at every forward."""
    found = list[_Version]()
    for module in modules_of(model):
        for key, tensor in module._buffers.items() if module._buffers else ():
            if tensor is not None:
                found.append(_Version(module, key, tensor, tensor._version))
        for key, p in module._parameters.items() if module._parameters else ():
            if p is not None and not p.requires_grad:
                found.append(_Version(module, key, p, p._version))
    return found


def _untrained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the buffers and frozen parameters."""
    yield from model.named_buffers()
    yield from ((name, p) for name, p in model.named_parameters() if not p.requires_grad)


def _copies(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return name -> copy of these buffers and frozen parameters, without those that are gone."""
    tensors = dict(_untrained(model)) if names else {}
    return {name: tensors[name].detach().clone() for name in names if name in tensors}


@contextlib.contextmanager
def restored(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[None]:
    """Context that restores these buffers and frozen parameters, or all buffers, at its end."""
    if names is None:
        names = [name for name, _ in model.named_buffers()]
    kept = _copies(model, names)
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
    """Context that restores the attributes of modules, lists and mappings included."""
    kinds = (list, dict, set)
    kept: list[tuple[Any, Any]] = []
    for attributes in map(vars, model.modules()):
        kept.append((attributes, dict(attributes)))
        kept += [(v, v.copy()) for v in attributes.values() if isinstance(v, kinds)]
    try:
        yield
    finally:
        for container, content in kept:
            _refill(container, content)


@contextlib.contextmanager
def unchanged_by_forward(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Context whose forward writes copies of these buffers, and whose attributes are restored.

    Unlike `restored` it writes to no tensor that the forward's graph holds.
    """
    names = set(names)
    copies = {id(t): t.clone() for name, t in model.named_buffers() if name in names}
    with attributes_kept(model):
        for module in model.modules():
            module._buffers.update(
                {key: copies[id(t)] for key, t in module._buffers.items() if id(t) in copies}
            )
        yield


def _refill(container: Any, content: Any) -> None:
    """Make a list, mapping or set hold the same objects again, if it does not."""
    if isinstance(container, list):
        container[:] = content
        return
    if isinstance(container, dict):
        same_keys = container.keys() == content.keys()
        is_same = same_keys and all(container[key] is content[key] for key in container)
    else:
        is_same = container == content
    if not is_same:
        container.clear()
        container.update(content)


@dataclass(frozen=True)
class Start:
    """State before a forward: the generators, and the values of buffers that it writes by name."""

    random: RandomState
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, written: Iterable[str]) -> Start:
        """Return the state before the next forward, which writes the buffers `written`."""
        return cls(RandomState.of(model), _copies(model, written))

    def on(self, model: nn.Module) -> Start:
        """Return this state for a copy of the model, with the copy's own generators as they are."""
        own = RandomState.of(model).own
        return replace(self, random=replace(self.random, own=own))

    def has_drawn(self, model: nn.Module) -> bool:
        """True if numbers were drawn since."""
        return not self.random.is_as_before(model)

    @contextlib.contextmanager
    def replayed(self, model: nn.Module) -> Iterator[None]:
        """Context that begins in this state, and restores the present state at its end."""
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
    """Refuse tensors that a forward `run` has written, unless they are the same on every batch."""
    state, found = RandomState.of(model), []
    pairs = [(o, list(zip(o.tensors(), batch.tensors(), strict=True))) for o in _others(batch)]
    # Of other values or shapes; without any, no value is accepted.
    others = [o for o, both in pairs if not all(torch.equal(a, b) for a, b in both)]
    for rows in (batch, *others):
        with torch.no_grad(), restored(model, names), untouched_generators(model):
            state.put()
            run(rows)
            found.append(_copies(model, names))
    for name in names:
        if others and all(_same(found[0].get(name), values.get(name)) for values in found):
            continue
        kind = "frozen parameter" if name in dict(model.named_parameters()) else "buffer"
        raise UnsupportedLayerError(
            f"The {kind} {name!r} changes in forward, by what the examples are: it carries them "
            "into the state_dict without noise. Freeze it, or call the module's eval()."
        )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """True if two values of a buffer are equal, nan included."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def _others(batch: Batch) -> Iterator[Batch]:
    """Yield batches with other values and another size, made of the values of this batch.

    The positions of each example, or the examples of a vector, are reversed and floats halved; of
    several examples, the first is left out, or the last is replaced by the one before.
    """
    other = [t.flip(list(range(1, t.dim())) or [0]) for t in batch.tensors()]
    yield batch.on([t * 0.5 if t.is_floating_point() else t for t in other])
    if batch.n > 1:
        rows = torch.arange(batch.n)
        yield batch.rows(rows[1:])
        yield batch.rows(rows.clamp(max=batch.n - 2))

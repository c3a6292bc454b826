# SPDX-License-Identifier: Apache-2.0
"""Cache of what a model's first batch of a kind showed, valid while model and loss are alive."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dualdp_torch.parallel.process_group import modules_of
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.examination import Axes
from dualdp_torch.per_sample.parameter_use import comes_from
from dualdp_torch.per_sample.units import UnitLoss

_log = logging.getLogger("dualdp")
#: Number of losses and shapes cached for one model.
MAX_CACHED = 64
_FUNCTIONS = {types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial}
_HOOKS_OF_ALL_MODULES = (
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_backward_pre_hooks,
    nn.modules.module._global_backward_hooks,
)
#: What these hold is not looked at; most attributes of these types are tables of the module itself.
_CONTAINERS = {dict, OrderedDict, set, list, tuple}


class AnalysisCache:
    """What is known of one model, loss and batch shape.

    Attributes:
        axes: signatures of the parameter uses -> their batch axes.
        problem: reason why captured uses can't be trusted, or None.
        needs_loop: bool, True if `vmap` can't be trusted either.
        skip: positions of uses that hold no examples; None before an examination.
        by_data: bool, True if the data may pick rows of a use, so that every batch is checked.
        bytes_each: gradients that are kept -> bytes per example.
        checked: calls that were compared with their definition.
        passes_differ: bool, True if a second forward is another function than the first.
    """

    def __init__(self, referents: list[Callable[[], Any]]) -> None:
        self.axes: dict[Any, Axes] = {}
        self.problem: str | None = None
        self.skip: frozenset[int] | None = None
        self.by_data = False
        self.needs_loop = False
        self.bytes_each: dict[str, int] = {}
        self.checked: set[Any] = set()
        self.passes_differ = False
        self._referents, self._seed = referents, 0

    def is_alive(self) -> bool:
        """True if all objects that the key holds by id still exist."""
        for referent in self._referents:
            if referent() is None:
                return False
        return True

    def next_seed(self) -> int:
        """Return the seed of the next check, which draws others than the one before."""
        self._seed += 1
        return self._seed

    def give_up_uses(self, model: nn.Module, reason: str) -> None:
        """Note that captured uses failed on the first batch, so that `vmap` is tried."""
        self.problem = reason
        _log.warning("%s goes through vmap: %s", type(model).__name__, reason)

    def give_up_vmap(self, model: nn.Module, reason: str) -> None:
        """Note that `vmap` failed on the first batch, so that each example runs alone."""
        self.needs_loop = True
        _log.warning("%s goes through the loop: %s", type(model).__name__, reason)

    @property
    def is_known(self) -> bool:
        """True if the model was examined on such a batch."""
        return bool(self.axes or self.problem)

    def add(self, found: Axes | str | None) -> None:
        """Keep what an examination found for further batches."""
        if isinstance(found, str):
            self.problem = found
        elif found is not None:
            self.axes[found.signatures] = found
            self.skip = found.skip if self.skip is None else self.skip
            self.by_data |= found.by_data


_models: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Any, AnalysisCache]] = (
    weakref.WeakKeyDictionary()
)


def cached_analyses(model: nn.Module, loss_fn: Callable[..., Any], batch: Batch) -> AnalysisCache:
    """Return the cached analyses for this model, loss and shapes; empty on a first call.

    A model with other modules, hooks, functions or switches than before is a new one.
    """
    referents: list[Callable[[], Any]] = []
    modules, switches = modules_of(model), list[Any]()
    parameters = [p for module in modules for p in module._parameters.values()]
    for module in modules:
        for value in vars(module).values():
            # What may choose the path: switches, if a number is zero, which function, and types.
            kind = type(value)
            if value is None or kind is bool or kind is str:
                switches.append(value)
            elif kind is int or kind is float:
                switches.append((kind, value != 0))
            elif kind not in _CONTAINERS:
                switches.append(_function(value, referents) if kind in _FUNCTIONS else kind)
    key = (
        _function(loss_fn, referents),
        batch.signature(),
        tuple(map(type, modules)),
        tuple(switches),
        _hooks(modules, referents),
        torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        tuple([(id(p), p.requires_grad) for p in parameters if p is not None]),
    )
    of_model = _models.setdefault(model, OrderedDict())
    found = of_model.pop(key, None)
    if found is None or not found.is_alive():
        found = AnalysisCache(referents)
    of_model[key] = found  # the least recently used entry is dropped first
    if len(of_model) > MAX_CACHED:
        of_model.popitem(last=False)
    return found


def _hooks(modules: Iterable[nn.Module], referents: list[Callable[[], Any]]) -> tuple[Any, ...]:
    """Return the hooks by their modules, without our own, which every recorder adds anew."""
    of_each = [
        (place, m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)
        for place, m in enumerate(modules)
        if m._forward_pre_hooks or m._forward_hooks or m._backward_pre_hooks or m._backward_hooks
    ]
    return tuple(
        [
            (place, kind, _function(hook, referents))
            for place, *tables in [(None, *_HOOKS_OF_ALL_MODULES), *of_each]
            for kind, table in enumerate(tables)
            for hook in table.values()
            if not comes_from(hook, "dualdp_torch.")
        ]
    )


def _function(function: Any, referents: list[Callable[[], Any]]) -> Any:
    """Return a key that is equal for functions created anew at every step over the same objects."""
    if isinstance(function, UnitLoss):
        return function.has_weights, function.has_aux, _function(function.loss_fn, referents)
    if isinstance(function, types.MethodType):
        return _id(function.__self__, referents), _function(function.__func__, referents)
    if isinstance(function, functools.partial):
        given = (*function.args, *function.keywords.values())
        names, inner = tuple(function.keywords), _function(function.func, referents)
        return inner, names, _objects(given, referents)
    if not isinstance(function, types.FunctionType):
        return _id(function, referents)
    held = list[Any]()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return function.__code__, _objects(held, referents)


def _objects(values: Iterable[Any], referents: list[Callable[[], Any]]) -> tuple[Any, ...]:
    """Return a key of what a function holds: data and containers by kind, everything else by id."""
    return tuple([_object(value, referents) for value in values])


def _object(value: Any, referents: list[Callable[[], Any]]) -> Any:
    kind = type(value)
    if torch.is_tensor(value):
        return value.shape, value.dtype
    if kind is float:
        return kind, value != 0
    return kind if kind in _CONTAINERS else _id(value, referents)


def _id(value: Any, referents: list[Callable[[], Any]]) -> int:
    """Return the object's id and record a weak reference; an object without one is kept alive."""
    try:
        referents.append(weakref.ref(value))
    except TypeError:
        if value is not None:  # a referent None would read as a dead reference
            referents.append(lambda: value)
    return id(value)

# SPDX-License-Identifier: Apache-2.0
"""What a model's first batch of a kind showed, kept while model and loss are alive.

The axes of a recorded model's uses are found here, too, the same on all processes.
"""

from __future__ import annotations

import contextlib
import logging
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.parallel.process_group import modules_of
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.batch_axis import BatchAxis, of_single
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.examination import ELSEWHERE, Axes, examine, examine_one
from dualdp_torch.per_sample.outputs import projected
from dualdp_torch.per_sample.parameter_use import USE_LOOP, comes_from
from dualdp_torch.per_sample.units import UnitLoss
from dualdp_torch.per_sample.vmap_and_loop import gradients_set_aside

_log = logging.getLogger("dualdp")
_SAMPLE = 8  # examples that one process shares for the analysis by all
#: Number of losses and shapes cached for one model.
MAX_CACHED = 64
_FUNCTIONS = {types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial}
#: Tables of hooks of a module; those of all modules are named alike.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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
        was_alone: bool, True if all that is known came from a batch of one example.
        bytes_each: gradients that are kept -> bytes per example.
        checked: calls that were compared with their definition.
    """

    def __init__(self, referents: list[Callable[[], Any]]) -> None:
        self.axes: dict[Any, Axes] = {}
        self.problem: str | None = None
        self.skip: frozenset[int] | None = None
        self.by_data = self.was_alone = False
        self.needs_loop = False
        self.bytes_each: dict[str, int] = {}
        self.checked: set[Any] = set()
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
    referents = list[Callable[[], Any]]()
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    parts: list[Any] = [_key(loss_fn, referents), *batch.signature(), is_autocast]
    of_all = vars(nn.modules.module)
    tables = [(name, of_all[f"_global{name}"]) for name in _HOOKS]
    for module in modules_of(model):
        parts.append(type(module))
        own = vars(module)
        for value in own.values():  # what the module may choose by: if it is zero, a function, ...
            kind = type(value)
            if value is None or kind is bool or kind is str:
                parts.append(value)
            elif kind is int or kind is float:
                parts.append((kind, value != 0))
            elif kind in _FUNCTIONS:
                parts.append(_key(value, referents))
            elif kind not in _CONTAINERS:
                parts.append(kind)
        for p in module._parameters.values():
            parts.append(None if p is None else (id(p), p.requires_grad))
        for name in _HOOKS:
            tables.append((name, own[name]))
    for place, (name, table) in enumerate(tables):
        for hook in table.values():
            if not comes_from(hook, "dualdp_torch."):  # ours are added anew by every recorder
                parts.append((place, name, _key(hook, referents)))
    key = tuple(parts)
    of_model = _models.setdefault(model, OrderedDict())
    found = of_model.pop(key, None)
    if found is None or not found.is_alive():
        found = AnalysisCache(referents)
    of_model[key] = found  # the least recently used entry is dropped first
    if len(of_model) > MAX_CACHED:
        of_model.popitem(last=False)
    return found


def _key(value: Any, referents: list[Callable[[], Any]], depth: int = 2) -> Any:
    """Return a key that is equal for functions created anew at every step over the same objects.

    What they hold counts by kind if it is data or a container, and by id if it is an object, to
    which a weak reference is recorded; an object without one is kept alive.
    """
    kind: Any = type(value)
    parts = list[Any]()
    if value is None or kind is bool or kind is str or kind is int:
        return value
    if kind is float:
        return kind, value != 0
    if kind in _CONTAINERS or torch.is_tensor(value):
        return (value.shape, value.dtype) if torch.is_tensor(value) else kind
    if isinstance(value, UnitLoss):
        return value.has_weights, value.has_aux, _key(value.loss_fn, referents)
    if depth and isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif depth and isinstance(value, partial):
        kind, parts = tuple(value.keywords), [value.func, *value.args, *value.keywords.values()]
    elif depth and isinstance(value, types.FunctionType):
        kind, parts = value.__code__, list(value.__defaults__ or ())
        parts += (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                parts.append(cell.cell_contents)
    else:
        try:
            referents.append(weakref.ref(value))
        except TypeError:
            referents.append(lambda: value)
        return id(value)
    return kind, *[_key(part, referents, depth - 1) for part in parts]


class ForwardAnalysis:
    """Finds the batch axes of the parameter uses of a recorded model.

    A sharded model gathers its parameters in a forward of all processes together. So all processes
    analyse it on the same few examples as soon as one process needs the analysis.

    `inside` has the parameters as the forward sees them; in the context that `pause` returns, the
    model's calls are not recorded. An example is a unit of `rows_per_unit` rows. The uses at the
    positions `skip` hold no examples, and `cache` has the analyses of the model on batches like the
    last one.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: Mapping[str, nn.Parameter],
        shards: Shards | None,
        pause: Callable[[], AbstractContextManager[None]],
        rows_per_unit: int,
    ) -> None:
        self._model, self._inside, self._shards, self._pause = model, inside, shards, pause
        self._loss = partial(projected, rows_per_unit=rows_per_unit)
        self._batch: Batch
        self.cache = AnalysisCache([])
        self.skip: frozenset[int] = frozenset()

    def begin(self, batch: Batch) -> str | None:
        """Analyse a new model; return the reason why captured uses can't be trusted, or None."""
        self._batch, self.cache = batch, cached_analyses(self._model, self._loss, batch)
        self._examine_if(lambda: self.cache.was_alone or not self.cache.is_known)
        if batch.n > 1:
            self.cache.was_alone = False
        elif self._shards is None and not (self.cache.is_known or self.cache.was_alone):
            self._examine(batch)
            self.cache.was_alone = True
        problem = self.cache.problem
        if problem and self._shards is not None:
            raise UnsupportedLayerError(
                f"{problem}, so its gradients need vmap, which can't gather the parameters of a "
                "model under fully_shard. Expected layers that a rule covers; change that layer, "
                "or train without fully_shard."
            )
        # A batch of one shows nothing, but must skip the same uses as the other processes.
        before = self.skip if self._shards is not None else frozenset()
        self.skip = before if self.cache.skip is None else self.cache.skip
        return problem

    def batch_axes(self, capture: Capture) -> tuple[BatchAxis | None, ...]:
        """Return the batch axis of each use of the forward that has ended, None if not known."""
        cache, signatures = self.cache, tuple([use.signature for use in capture.uses])
        self._examine_if(lambda: signatures not in cache.axes)
        n, k = self._batch.n, self._batch.rows_per_unit
        if capture.hooked:
            raise UnsupportedLayerError(
                f"The forward registers a gradient hook on the output of {capture.hooked}, whose "
                f"gradient is captured before the hook. {USE_LOOP}"
            )
        if n == 1:
            return tuple(
                of_single(use.out_shape, use.possible_axes, use.rule.rows_are_free, k)
                for use in capture.uses
            )
        if signatures not in cache.axes:
            reason = cache.problem or "fewer than two of its outputs are finite"
            raise UnsupportedLayerError(
                f"The model could not be examined on this batch: {reason}, or chance (layerdrop) "
                f"or the other examples decide which layers run. {USE_LOOP}"
            )
        misfit = cache.axes[signatures].misfit(capture.uses, n)
        if misfit is not None:
            cache.add(ELSEWHERE.format(misfit))
            raise UnsupportedLayerError(f"{ELSEWHERE.format(misfit)} {USE_LOOP}")
        return cache.axes[signatures].batch_axes

    def _examine_if(self, is_missing: Callable[[], bool]) -> None:
        """Examine the model if `is_missing`, on the examples of each such process in turn."""
        missing = self._batch.n > 1 and is_missing()
        if self._shards is None:
            if missing:
                self._examine(self._batch)
            return
        while (rank := self._shards.first_that(missing)) is not None:
            few = self._batch.rows(slice(0, _SAMPLE)).arguments()
            device = self._batch.tensors()[0].device
            sample = self._shards.sample_of(rank, few, device)
            k = self._batch.rows_per_unit
            self._examine(Batch(sample, shares=True, rows_per_unit=k))
            missing = missing and rank != self._shards.group.rank and is_missing()

    def _examine(self, batch: Batch) -> None:
        """Examine the model on a batch, and cache the result if it may be reused."""
        with self._pause(), gradients_set_aside(self._inside), torch.enable_grad():
            if batch.n == 1:
                found: Axes | str | None = examine_one(self._model, batch, self._inside)
            else:
                found = examine(self._model, self._loss, batch, self._inside)
        theirs, ours = batch.signature(), self._batch.signature()
        if theirs == ours or (self._batch.n == 1 and theirs[:2] == ours[:2]):
            self.cache.add(found)

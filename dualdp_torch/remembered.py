# SPDX-License-Identifier: Apache-2.0
"""What was found out about a model on its first call, for as long as model and loss are alive."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .batch import Batch

if TYPE_CHECKING:
    from .proof import Proof

#: Losses and shapes that are remembered of one model.
REMEMBERED = 64


class Remembered(dict[Any, "Proof"]):
    """Proofs by the signatures of the uses, under one loss and batch shape.

    Attributes:
        bytes_each: bytes that one example makes a call keep, by which gradients it keeps.
        checked: calls whose numbers were compared with the definition (`spot_check`).
        writes: buffers that a forward writes, the same on every batch.
        passes_differ: a second forward is another function than the first.
    """

    def __init__(self, referents: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.bytes_each: dict[str, int] = {}
        self.checked: set[Any] = set()
        self.writes: set[str] = set()
        self.passes_differ = False
        self._referents = referents

    def is_alive(self) -> bool:
        """Whether everything that the key knows by its id is still the same thing."""
        return all(referent() is not None for referent in self._referents)


_models: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Any, Remembered]] = (
    weakref.WeakKeyDictionary()
)


def known(model: nn.Module, loss_fn: Callable[..., Any], batch: Batch) -> Remembered:
    """The proofs made for this model, loss and shapes, by signatures of the uses."""
    referents: list[Callable[[], Any]] = []
    modules = list(model.modules())
    key = (
        _loss_token(loss_fn, referents),
        batch.signature(),
        tuple([module.training for module in modules]),
        _switches(modules),
        torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        tuple(
            [
                (id(p), p.requires_grad)
                for module in modules
                if module._parameters
                for p in module._parameters.values()
                if p is not None
            ]
        ),
    )
    of_model = _models.setdefault(model, OrderedDict())
    found = of_model.pop(key, None)
    if found is None or not found.is_alive():
        found = Remembered(referents)
    of_model[key] = found  # the last one used is the last one forgotten
    if len(of_model) > REMEMBERED:
        of_model.popitem(last=False)
    return found


def _switches(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Flags and words that modules keep as attributes: they choose what a forward does."""
    kinds = (bool, str)
    return tuple([v for m in modules for v in vars(m).values() if type(v) in kinds])


def _loss_token(loss_fn: Any, referents: list[Callable[[], Any]]) -> Any:
    """Equal for a function that is made anew at every step over the same things."""
    if isinstance(loss_fn, types.MethodType):
        return _id(loss_fn.__self__, referents), _loss_token(loss_fn.__func__, referents)
    if isinstance(loss_fn, functools.partial):
        given = (*loss_fn.args, *loss_fn.keywords.values())
        names, inner = tuple(loss_fn.keywords), _loss_token(loss_fn.func, referents)
        return inner, names, _tokens(given, referents)
    if not isinstance(loss_fn, types.FunctionType):
        return _id(loss_fn, referents)
    cells = [cell.cell_contents for cell in loss_fn.__closure__ or ()]
    defaults = (*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values())
    return loss_fn.__code__, _tokens(cells, referents), _tokens(defaults, referents)


def _tokens(values: Iterable[Any], referents: list[Callable[[], Any]]) -> tuple[Any, ...]:
    """Tensors by shape, since they are data; everything else by identity."""
    return tuple((v.shape, v.dtype) if torch.is_tensor(v) else _id(v, referents) for v in values)


def _id(value: Any, referents: list[Callable[[], Any]]) -> int:
    """The id, which stays true as long as the referent answers; what can't be watched is kept."""
    try:
        referents.append(weakref.ref(value))
    except TypeError:
        if value is not None:  # None would look like something gone
            referents.append(lambda: value)
    return id(value)

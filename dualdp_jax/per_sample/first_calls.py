# SPDX-License-Identifier: Apache-2.0
"""Cache of the kinds of calls already checked, by loss, parameters, shapes, method and clipping."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from dualdp_jax import compat
from dualdp_jax.per_sample.call import Call
from dualdp_jax.per_sample.request import Request

_MOST = 1024  # cached kinds
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, type, types.ModuleType)
_seen: OrderedDict[Hashable, None] = OrderedDict()


def is_new(kind: Hashable) -> bool:
    """True if no call of this kind has passed its check."""
    return kind not in _seen


def remember(kind: Hashable) -> None:
    """Record that a call of this kind passed its check."""
    _seen[kind] = None
    while len(_seen) > _MOST:
        _seen.popitem(last=False)


def forget() -> None:
    """Clear the cache of checked kinds."""
    _seen.clear()


def kind_of(loss_fn: Any, call: Call, request: Request, size: int) -> Hashable:
    """Key of the calls for which one check suffices; it leaves out the number of examples.

    `loss_fn` is the user's, and `size` the number of examples per chunk.
    """
    trained, rows = call.parameters.trained, call.rows[0]
    return (
        identity(loss_fn),
        tuple(zip(call.parameters.names, map(_array, trained), strict=True)),
        tuple((leaf.shape[1:], str(leaf.dtype)) for leaf in rows),
        request.kind_key,
        size < call.num_examples,
        compat.setting("jax_enable_x64"),
    )


def identity(value: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """Key of a function by its code and the values it closes over.

    A lambda written in a loop has one key as long as it closes over the same values.

    `inside` holds the ids of the values that contain this one.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, jax.Array | np.ndarray):
        return _array(value)
    if id(value) in inside:
        return "itself", len(inside) - inside.index(id(value))
    of = lambda parts: tuple(identity(part, (*inside, id(value))) for part in parts)  # noqa: E731
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return functools.partial, tuple(value.keywords), of(parts)
    if isinstance(value, types.MethodType):
        return types.MethodType, of((value.__func__, value.__self__))
    if isinstance(value, types.FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__code__, of((*compat.closure_of(value), *defaults))
    if isinstance(value, tuple | list):
        return type(value), of(value)
    if isinstance(value, dict):
        return dict, of(value), of(value.values())
    return _Same(value)


def _array(value: Any) -> Hashable:
    return "array", tuple(value.shape), str(value.dtype)


class _Same:
    """Key that equals another key of the same living object, and nothing else."""

    def __init__(self, value: Any) -> None:
        self.number = id(value)
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # no weak reference: never equal
            self.value = lambda: None

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Same) or self.value() is None:
            return False
        return self.value() is other.value()

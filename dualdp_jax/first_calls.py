# SPDX-License-Identifier: Apache-2.0
"""Which kinds of calls were checked already: by loss, parameters, shapes, method and clipping."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from dualdp_jax import compat
from dualdp_jax.call import Call
from dualdp_jax.request import Request
from dualdp_jax.rules import RULES

_MOST = 1024  # kinds that are remembered
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, type, types.ModuleType)
_seen: OrderedDict[Hashable, None] = OrderedDict()


def is_new(kind: Hashable) -> bool:
    """Whether no call of this kind passed its check yet."""
    return kind not in _seen


def remember(kind: Hashable) -> None:
    """A call of this kind passed its check."""
    _seen[kind] = None
    while len(_seen) > _MOST:
        _seen.popitem(last=False)


def forget() -> None:
    """Take every call for a first one again."""
    _seen.clear()


def kind_of(loss_fn: Any, call: Call, request: Request, size: int) -> Hashable:
    """What a call has in common with others that one check speaks for; not the number of rows.

    Args:
        loss_fn: the user's.
        call: the examples and their loss.
        request: what is asked.
        size: examples worked on at once.
    """
    trained, rows = call.parameters.trained, call.rows[0]
    clip = request.clip
    return (
        identity(loss_fn),
        tuple(zip(call.parameters.names, map(_array, trained), strict=True)),
        tuple((leaf.shape[1:], str(leaf.dtype)) for leaf in rows),
        request.kind,
        request.method,
        request.per_parameter,
        None if clip is None else (clip.clipping, tuple(clip.groups)),
        size < call.num_examples,
        tuple(RULES.items()),
        compat.setting("jax_enable_x64"),
    )


def identity(value: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """What a function does, as far as its code and what it closes over tell; equal if they are.

    A lambda that is written in a loop is one function as long as it closes over the same things.

    Args:
        value: a function, or what one closes over.
        inside: ids of the values that this one is part of.
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
        cells = [_content(cell) for cell in value.__closure__ or ()]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__code__, of((*cells, *defaults))
    if isinstance(value, tuple | list):
        return type(value), of(value)
    if isinstance(value, dict):
        return dict, of(value), of(value.values())
    return _Same(value)


def _content(cell: Any) -> Any:
    """What a closure's cell holds, if anything does."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _array(value: Any) -> Hashable:
    return "array", tuple(value.shape), str(value.dtype)


def _nothing() -> None:
    """What is left of an object that is gone."""


class _Same:
    """Equal to itself of the same living object, and to nothing else."""

    def __init__(self, value: Any) -> None:
        self.number = id(value)
        self.value: Callable[[], Any] = _nothing
        with contextlib.suppress(TypeError):  # else nothing tells whether it still lives
            self.value = weakref.ref(value)

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Same) or self.value() is None:
            return False
        return self.value() is other.value()

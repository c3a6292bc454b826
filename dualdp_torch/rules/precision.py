# SPDX-License-Identifier: Apache-2.0
"""Precision of norms and sums: that of the captured tensors, whatever the user's model runs in.

A product in TF32 is wrong by 1e-3, and a contribution may then exceed C by as much, where the clip
factors leave room for 1e-4. So autocast and TF32 are off while norms and sums are formed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HAS_CUDA = torch.backends.cuda.is_built()
_backends: Any = torch.backends
#: (object, attribute, value without TF32) of each setting; torch before 2.9 has the last two.
_SETTINGS: tuple[tuple[Any, str, Any], ...] = (
    (_backends.cuda.matmul, "fp32_precision", "ieee"),
    (_backends.cudnn.conv, "fp32_precision", "ieee"),
    (_backends.cudnn.rnn, "fp32_precision", "ieee"),
) if hasattr(_backends.cudnn, "conv") else (
    (_backends.cuda.matmul, "allow_tf32", False),
    (_backends.cudnn, "allow_tf32", False),
)  # fmt: skip
_OFF = ("ieee", "none", False)


def matmul_in_tf32() -> bool:
    """Return True if products of float32 matrices on a GPU are rounded to TF32 or less."""
    owner, name, _ = _SETTINGS[0]
    return getattr(owner, name) not in _OFF


def in_full_precision(function: _Function) -> _Function:
    """Decorate a function to run without autocast and TF32, at the precision of its arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if not (_HAS_CUDA or is_autocast):
            return function(*args, **kwargs)
        with full_precision():
            return function(*args, **kwargs)

    return cast("_Function", called)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Context without autocast and TF32; the user's settings come back at its end."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        for owner, name, off in _SETTINGS if _HAS_CUDA else ():
            value = getattr(owner, name)
            if value not in _OFF:
                stack.callback(setattr, owner, name, value)
                setattr(owner, name, off)
        yield

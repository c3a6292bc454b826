# SPDX-License-Identifier: Apache-2.0
"""Modes: functions on this thread's stack, above and below the user's; operations; autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Dispatch mode that shows `see` every operation, its arguments and its result."""

    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func, args, out)
        return out


def remove_mode(mode: TorchFunctionMode) -> bool:
    """Remove a mode from this thread's stack; False if it was not there."""
    if (size := _len_torch_function_stack()) and _get_function_stack_at(size - 1) is mode:
        _pop_mode()
        return True
    stack = _get_current_function_mode_stack()
    if mode not in stack:
        return False
    _replace_modes(stack, [other for other in stack if other is not mode])
    return True


def insert_lowest(mode: TorchFunctionMode) -> None:
    """Put a mode below all others of this thread's stack."""
    stack = _get_current_function_mode_stack()
    _replace_modes(stack, [mode, *stack])


def _replace_modes(stack: list[TorchFunctionMode], modes: list[TorchFunctionMode]) -> None:
    for _ in stack:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return (device type, dtype) pairs for which autocast is enabled."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return tuple([(device, torch.get_autocast_dtype(device)) for device in on])


@contextlib.contextmanager
def autocast_as(dtypes: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Context with autocast enabled as `autocast_dtypes` found it, and disabled elsewhere."""
    on = dict(dtypes)
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if device in on or torch.is_autocast_enabled(device):
                mode = torch.autocast(device, dtype=on.get(device), enabled=device in on)
                stack.enter_context(mode)
        yield

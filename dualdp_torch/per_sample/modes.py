# SPDX-License-Identifier: Apache-2.0
"""Function modes on this thread's stack, below and above those of the user, and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


def remove_mode(mode: TorchFunctionMode) -> int | None:
    """Remove a mode from this thread's stack; return the number of modes above it, or None."""
    if (size := _len_torch_function_stack()) and _get_function_stack_at(size - 1) is mode:
        _pop_mode()
        return 0
    stack = _get_current_function_mode_stack()
    position = next((i for i, other in enumerate(stack) if other is mode), None)
    if position is None:
        return None
    above = [_pop_mode() for _ in stack[position + 1 :]]
    _pop_mode()
    for other in reversed(above):
        _push_mode(other)
    return len(above)


def insert_mode(mode: TorchFunctionMode, above: int) -> None:
    """Push a mode on this thread's stack, below the `above` topmost modes."""
    held = [_pop_mode() for _ in _get_current_function_mode_stack()[-above:]] if above else []
    _push_mode(mode)
    for other in reversed(held):
        _push_mode(other)


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

# SPDX-License-Identifier: Apache-2.0
"""Attributes of other objects that are replaced for the duration of a run."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any


def set_temporarily(undo: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of an object until `undo.close()`, which restores them."""
    own = vars(owner)
    for name, value in values.items():
        if name in own:
            undo.callback(own.update, {name: own[name]})
        else:
            undo.callback(partial(own.pop, name))
        own[name] = value

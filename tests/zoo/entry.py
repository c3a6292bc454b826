# SPDX-License-Identifier: Apache-2.0
"""Rows of the zoo: an ordinary model with its loss and a batch, and what the library says to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

#: Examples in a batch of the zoo.
N = 4


class Problem(NamedTuple):
    """One model, its loss, and one batch.

    Attributes:
        model: `nn.Module`; for JAX a pytree of parameters or an `nnx.Module`.
        loss_fn: as in `clipped_grad_sum` of the stack.
        batch: its further arguments; every array has the `N` examples on axis 0.
        trainable: JAX: pytree of bools, or None.
    """

    model: Any
    loss_fn: Callable[..., Any]
    batch: tuple[Any, ...]
    trainable: Any = None


def one_each(entries: Sequence[Any], methods: Iterable[str]) -> list[Any]:
    """Parameters (entry, method) of a test: the methods take turns."""
    return [
        pytest.param(entry, method, id=f"{entry.name}-{method}")
        for entry, method in zip(entries, itertools.cycle(methods), strict=False)
    ]


@dataclass(frozen=True)
class Entry:
    """One row of the zoo.

    Attributes:
        name: unique in its table.
        build: () -> Problem, the same numbers at every call; imports what it needs.
        refusal: regular expression of the reason for which the functional calls refuse the model;
            None: they are exact.
        engine_refusal: the same for the engine around the user's own loop.
    """

    name: str
    build: Callable[[], Problem]
    refusal: str | None = None
    engine_refusal: str | None = None

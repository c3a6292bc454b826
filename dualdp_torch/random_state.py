# SPDX-License-Identifier: Apache-2.0
"""Every source of random numbers that a model or a loop may draw from: saved, and restored."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .rules.base import Tensor


class TorchState(NamedTuple):
    """States of torch's global generators.

    Attributes:
        host: of the CPU's.
        devices: of each CUDA device, if any is in use.
    """

    host: Tensor
    devices: list[Tensor]

    def restore(self) -> None:
        """Draw again what was drawn after this state was saved."""
        torch.set_rng_state(self.host)
        for device, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, device)

    def is_same(self, other: TorchState) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = [(self.host, other.host), *zip(self.devices, other.devices, strict=False)]
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def torch_state() -> TorchState:
    """The states of torch's global generators now."""
    on_cuda = torch.cuda.is_initialized()
    return TorchState(torch.get_rng_state(), torch.cuda.get_rng_state_all() if on_cuda else [])


class RandomState(NamedTuple):
    """States of all generators that a model may draw from.

    Attributes:
        torch: torch's global ones.
        python: of the module `random`.
        numpy: of NumPy's global one.
        own: generators that modules hold, with their states.
    """

    torch: TorchState
    python: Any
    numpy: Any
    own: list[tuple[Any, Any]]

    def restore(self) -> None:
        """Draw again what was drawn after these states were saved."""
        self.torch.restore()
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        for generator, state in self.own:
            _set(generator, state)


def random_state(model: nn.Module) -> RandomState:
    """The states of all generators that a model may draw from, now.

    Args:
        model: its modules are searched for generators of torch, NumPy and Python.
    """
    held = {id(v): v for m in model.modules() for v in _held(vars(m).values())}
    return RandomState(
        torch_state(),
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002
        [(generator, _get(generator)) for generator in held.values()],
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """All generators are afterwards what they were before."""
    before = random_state(model)
    try:
        yield
    finally:
        before.restore()


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _held(values: Any) -> Iterator[Any]:
    """The generators among attributes, also in lists and mappings."""
    for value in values:
        if isinstance(value, _KINDS):
            yield value
        elif type(value) in (list, tuple):
            yield from (v for v in value if isinstance(v, _KINDS))
        elif type(value) is dict:
            yield from (v for v in value.values() if isinstance(v, _KINDS))


def _get(generator: Any) -> Any:
    """The state of one generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def _set(generator: Any, state: Any) -> None:
    """Put one generator into a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)

# SPDX-License-Identifier: Apache-2.0
"""States of the generators that a model may draw from, to repeat a forward with the same draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dualdp_torch.rules.base import Tensor


class TorchState(NamedTuple):
    """States of torch's global generators, which are cheap to save.

    Attributes:
        host: state of the CPU generator.
        devices: state of the generator on each CUDA device; empty if CUDA is not in use.
    """

    host: Tensor
    devices: list[Tensor]

    @classmethod
    def now(cls) -> TorchState:
        """Return the current states."""
        on_cuda = torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if on_cuda else [])

    def put(self) -> None:
        """Restore the generators to these states."""
        torch.set_rng_state(self.host)
        for device, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, device)

    def is_same(self, other: TorchState) -> bool:
        """True if both states are equal."""
        pairs = [(self.host, other.host), *zip(self.devices, other.devices, strict=False)]
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class RandomState:
    """States of torch's, NumPy's and Python's global generators and of those that modules hold.

    Attributes:
        torch: states of torch's generators.
        python: state of `random`.
        numpy: state of `numpy.random`.
        own: pairs (generator, state) of generators that are attributes of modules.
    """

    torch: TorchState
    python: Any
    numpy: Any
    own: list[tuple[Any, Any]]

    @classmethod
    def of(cls, model: nn.Module) -> RandomState:
        """Return the current states."""
        return cls(
            TorchState.now(),
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 - models draw from it
            [
                (generator, _state(generator))
                for module in model.modules()
                for generator in vars(module).values()
                if isinstance(generator, _GENERATORS)
            ],
        )

    def is_as_before(self, model: nn.Module) -> bool:
        """True if nothing was drawn since."""
        now = RandomState.of(model)
        same = self.torch.is_same(now.torch) and self.python == now.python
        same &= all(np.array_equal(a, b) for a, b in zip(self.numpy, now.numpy, strict=True))
        return same and [_as_text(s) for _, s in self.own] == [_as_text(s) for _, s in now.own]

    def put(self) -> None:
        """Restore every generator to these states."""
        self.torch.put()
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        for generator, state in self.own:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _as_text(state: Any) -> str:
    """Return a state as complete text, for comparison."""
    if torch.is_tensor(state):
        return str(state.tolist())
    with np.printoptions(threshold=1 << 20):
        return str(state)


@contextlib.contextmanager
def untouched_generators(model: nn.Module) -> Iterator[None]:
    """Context that restores all generators at its end."""
    now = RandomState.of(model)
    try:
        yield
    finally:
        now.put()


def seed_generators(model: nn.Module, seed: int) -> None:
    """Seed every generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    for generator, _ in RandomState.of(model).own:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed)

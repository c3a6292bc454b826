# SPDX-License-Identifier: Apache-2.0
"""States of the generators that a model may draw from, to repeat a forward with the same draws."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dualdp_torch.rules.base import Tensor


class TorchState(NamedTuple):
    """States of torch's global generators, which are cheap to save: CPU and each CUDA device."""

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
    """States of torch's, NumPy's and Python's global generators and of those that modules hold."""

    torch: TorchState
    shared: list[tuple[Any, Any]]  # generator and state, of Python's and NumPy's
    own: list[tuple[Any, Any]]  # generator and state, of attributes of modules

    @classmethod
    def of(cls, model: nn.Module | None = None) -> RandomState:
        """Return the current states; those of no module's generators without a model."""
        modules = () if model is None else model.modules()
        held = [v for m in modules for v in vars(m).values() if isinstance(v, _GENERATORS)]
        read = [[(g, _access(g)[0]()) for g in some] for some in (_SHARED, held)]
        return cls(TorchState.now(), *read)

    def is_as_before(self, model: nn.Module) -> bool:
        """True if nothing was drawn since."""
        now = RandomState.of(model)
        ours, theirs = ([_bits(state) for _, state in s.shared + s.own] for s in (self, now))
        return self.torch.is_same(now.torch) and ours == theirs

    def put(self) -> None:
        """Restore every generator to these states."""
        self.torch.put()
        for generator, state in self.shared + self.own:
            _access(generator)[1](state)


_SHARED = (random, np.random)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]:
    """Return the functions that read, set and seed a generator's state."""
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate, generator.setstate, generator.seed
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        put = partial(setattr, bits, "state")
        return lambda: bits.state, put, lambda seed: put(type(bits)(seed).state)
    seed = generator.manual_seed if isinstance(generator, torch.Generator) else generator.seed
    return generator.get_state, generator.set_state, seed


def _bits(state: Any) -> bytes:
    """Return a state as bytes, for comparison."""
    return state.numpy().tobytes() if torch.is_tensor(state) else pickle.dumps(state)


@contextlib.contextmanager
def untouched_generators(model: nn.Module | None = None) -> Iterator[None]:
    """Context that restores all generators at its end."""
    now = RandomState.of(model)
    try:
        yield
    finally:
        now.put()


def seed_generators(model: nn.Module, seed: int) -> None:
    """Seed every generator."""
    torch.manual_seed(seed)
    now = RandomState.of(model)
    for generator, _ in now.shared + now.own:
        _access(generator)[2](seed)

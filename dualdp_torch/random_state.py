# SPDX-License-Identifier: Apache-2.0
"""The generators that a model may draw from: a forward can be run again on the same draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .rules.base import Tensor


@dataclass(frozen=True)
class RandomState:
    """States of torch's, NumPy's and Python's global generators and of those that modules hold.

    Attributes:
        host: torch's on the processor.
        devices: torch's on each CUDA device, where any is in use.
        python: that of `random`.
        numpy: that of `numpy.random`.
        own: (generator, state) of attributes of modules.
    """

    host: Tensor
    devices: list[Tensor]
    python: Any
    numpy: Any
    own: list[tuple[Any, Any]]

    @classmethod
    def of(cls, model: nn.Module) -> RandomState:
        """The states as they are now."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 - models draw from it
            [(g, _state(g)) for m in model.modules() for g in vars(m).values() if _is_generator(g)],
        )

    def is_as_before(self, model: nn.Module) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState.of(model)
        same = torch.equal(self.host, now.host) and self.python == now.python
        same &= all(map(torch.equal, self.devices, now.devices))
        same &= all(np.array_equal(a, b) for a, b in zip(self.numpy, now.numpy, strict=True))
        return same and [_plain(s) for _, s in self.own] == [_plain(s) for _, s in now.own]

    def put(self) -> None:
        """Bring every generator to these states."""
        torch.set_rng_state(self.host)
        for device, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        for generator, state in self.own:
            _put(generator, state)

    @contextlib.contextmanager
    def replayed(self, model: nn.Module) -> Iterator[None]:
        """The same draws again, after which the generators go on where they were."""
        with untouched_generators(model):
            self.put()
            yield


class TorchState(NamedTuple):
    """States of torch's global generators alone, which cost little to keep.

    Attributes:
        host: that of the processor.
        devices: those of each CUDA device, where any is in use.
    """

    host: Tensor
    devices: list[Tensor]

    @classmethod
    def now(cls) -> TorchState:
        """The states as they are now."""
        on_cuda = torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if on_cuda else [])

    def put(self) -> None:
        """Bring the generators to these states."""
        torch.set_rng_state(self.host)
        for device, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, device)

    def is_same(self, other: TorchState) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = [(self.host, other.host), *zip(self.devices, other.devices, strict=False)]
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@contextlib.contextmanager
def untouched_generators(model: nn.Module) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on where they were."""
    now = RandomState.of(model)
    try:
        yield
    finally:
        now.put()


def seed_generators(model: nn.Module, seed: int) -> None:
    """Bring every generator to the state of a seed."""
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


def _is_generator(value: Any) -> bool:
    """Whether an attribute is a generator of torch, NumPy or Python."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _state(generator: Any) -> Any:
    """The state of a generator of any kind."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _put(generator: Any, state: Any) -> None:
    """Bring a generator of any kind to a state."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _plain(state: Any) -> str:
    """A state as text, whole, to be compared."""
    if torch.is_tensor(state):
        return str(state.tolist())
    with np.printoptions(threshold=1 << 20):
        return str(state)

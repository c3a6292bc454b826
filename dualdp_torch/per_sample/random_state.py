# SPDX-License-Identifier: Apache-2.0
"""State before a forward, to repeat it: the generators that it draws from, and what it writes."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.process_group import modules_of
from dualdp_torch.rules.base import Tensor

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state_of(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return the function that sets a generator's state, and a copy of the state."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state"), bits.state
    return generator.set_state, generator.get_state()


class RandomState:
    """State of torch's, NumPy's and Python's global generators, and of others, such as modules'."""

    def __init__(self, own: Iterable[Any] = ()) -> None:
        self._own = [*own]
        self._states: list[tuple[Callable[[Any], Any], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state()),  # noqa: NPY002
            *map(_state_of, self._own),
        ]
        if torch.cuda.is_initialized():
            of_cuda = torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()
            self._states.append(of_cuda)

    @classmethod
    def of(cls, model: nn.Module) -> RandomState:
        """Return the state with that of the generators that modules hold as attributes."""
        attributes = [v for m in modules_of(model) for v in vars(m).values()]
        return cls([v for v in attributes if isinstance(v, _GENERATORS)])

    def on(self, model: nn.Module) -> RandomState:
        """Return this state for the generators of a copy of the model."""
        other = RandomState.of(model)
        pairs = zip(other._states, self._states, strict=True)
        other._states = [(put, state) for (put, _), (_, state) in pairs]
        return other

    def bits(self) -> list[bytes]:
        """Return the states as bytes, for comparison."""
        return [
            state.numpy().tobytes() if torch.is_tensor(state) else pickle.dumps(state)
            for _, state in self._states
        ]

    def now(self) -> RandomState:
        """Return the present state of the same generators."""
        return RandomState(self._own)

    def has_drawn(self) -> bool:
        """True if numbers were drawn since."""
        return self.bits() != self.now().bits()

    def put(self) -> None:
        """Restore every generator to its state."""
        for put, state in self._states:
            put(state)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Context that begins in this state, and restores the present one at its end."""
        now = self.now()
        self.put()
        try:
            yield
        finally:
            now.put()


def untouched_generators(model: nn.Module | None = None) -> AbstractContextManager[None]:
    """Return a context that restores all generators at its end."""
    return (RandomState() if model is None else RandomState.of(model)).repeated()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> copy of every buffer."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@contextlib.contextmanager
def on_copies(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Context whose forwards write copies of the buffers, and which restores what modules hold.

    The buffers themselves are not written, since a graph may hold them. `values` maps names to what
    the copies hold instead. Attributes are restored, the content of lists and mappings too. FSDP
    exchanges parameters, which stay. Hooks that were added go, since the attribute that tells that
    they are there does; a hook may remove itself for good.
    """
    kept, modules = list[tuple[Any, Any, bool]](), modules_of(model)
    for attributes in map(vars, modules):
        kept.append((attributes, attributes.copy(), False))
        for key, v in attributes.items():
            if isinstance(v, list | dict | set) and key != "_parameters":
                kept.append((v, v.copy(), "_hooks" in key))
    copies, given = dict[int, Tensor](), values or {}
    for name, buffer in model.named_buffers():
        copies[id(buffer)] = given.get(name, buffer).detach().clone()
    for buffers in [module._buffers for module in modules if module._buffers]:
        buffers.update({key: copies.get(id(b), b) for key, b in buffers.items()})
    try:
        yield
    finally:
        for container, content, are_hooks in kept:
            if isinstance(container, list):
                container[:] = content
            elif container or content:
                if are_hooks:
                    content = {key: hook for key, hook in content.items() if key in container}
                container.clear()
                container.update(content)


def checksums(model: nn.Module) -> dict[tuple[str, int], Tensor]:
    """Return (name, size) -> sum of the bits of every parameter, which a write to it changes.

    The size is that of what lies here, since FSDP gathers some parameters and frees others.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    found = {}
    for name, p in model.named_parameters():
        held = p.detach()
        local = held.to_local() if hasattr(held, "to_local") else held  # type: ignore[operator]
        bits = local.contiguous().reshape(-1).view(kinds[local.element_size()])
        found[name, len(bits)] = bits.sum(dtype=torch.int64)
    return found


def refuse_written(before: Mapping[tuple[str, int], Tensor] | None, model: nn.Module) -> None:
    """Refuse a model whose forward wrote a parameter since these checksums, if there are any."""
    now = checksums(model) if before is not None else {}
    for (name, size), total in (before or {}).items():
        if (name, size) in now and total != now[name, size]:
            raise UnsupportedLayerError(
                f"The parameter {name!r} is written in forward: which of its numbers change tells "
                "of the examples, without noise. Compute the changed values as a tensor in forward "
                "(F.normalize(self.table.weight)), or write them after optimizer.step()."
            )


@dataclass(frozen=True)
class Start:
    """State before a forward: generators, buffers, and numbers that are attributes, by module.

    `sums` are checksums of the parameters; None if the forward is repeated without being checked.
    """

    random: RandomState
    buffers: dict[str, Tensor]
    numbers: list[dict[str, float]]
    sums: dict[tuple[str, int], Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module, *, is_checked: bool = False) -> Start:
        """Return the state before the next forward."""
        sums = checksums(model) if is_checked else None
        each = [vars(module).items() for module in modules_of(model)]
        numbers = [{k: v for k, v in own if type(v) is int or type(v) is float} for own in each]
        return cls(RandomState.of(model), buffers_of(model), numbers, sums)

    def on(self, model: nn.Module) -> Start:
        """Return this state for a copy of the model, of its own precision."""
        named = model.named_buffers()
        buffers = {name: self.buffers.get(name, b).to(b.dtype) for name, b in named}
        return replace(self, random=self.random.on(model), buffers=buffers)

    @contextlib.contextmanager
    def replayed(self, model: nn.Module) -> Iterator[None]:
        """Context that begins in this state, and restores the present state at its end."""
        with self.random.repeated(), on_copies(model, self.buffers):
            for module, numbers in zip(modules_of(model), self.numbers, strict=False):
                vars(module).update(numbers)
            yield


def same_value(a: Tensor | None, b: Tensor | None) -> bool:
    """True if two values of a buffer are equal, nan included."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b) or torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def changed_buffers(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Return the names of buffers whose values differ, or that one of both has."""
    return sorted(name for name in a.keys() | b.keys() if not same_value(a.get(name), b.get(name)))


class NoRandomness(TorchFunctionMode):
    """Mode without dropout, in which random draws return a constant."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "").rstrip("_")
        if "dropout" in name and "native" not in name:
            return args[0] if args else kwargs["input"]
        if func in _WITH_DROPOUT:
            at, p = _WITH_DROPOUT[func]
            at += func in RECURRENT and isinstance(args[3], list)  # packed: one argument more
            args = (*args[:at], *(0.0 for _ in args[at : at + 1]), *args[at + 1 :])
            kwargs |= {p: 0.0} if p in kwargs else {}
        out = func(*args, **kwargs)
        return out.detach().fill_(0.5) if name in _DRAWS else out


RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
#: Functions with dropout inside: its position and name among the arguments.
_WITH_DROPOUT = {
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
    **{function: (5, "dropout") for function in RECURRENT},
}
_DRAWS = {"rand", "randn", "rand_like", "randn_like", "normal", "bernoulli", "uniform"}

# SPDX-License-Identifier: Apache-2.0
"""The noisy mean: the only place where this backend releases anything about the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dualdp import AccountingError, _validate
from dualdp.randomness import counter

from .gradients import wide
from .rules.base import Tensor

_STATE_WORDS = 624  # of the Mersenne twister behind torch's CPU generator
_STATE_OFFSET = 24  # bytes of bookkeeping before them in its saved state


def noisy_mean(
    grads: Mapping[str, Tensor], plan: Any, step: int, *, layout: Sequence[Any] | None = None
) -> dict[str, Tensor]:
    """Add the noise of a step to a clipped sum and divide by the expected batch size.

    Args:
        grads: name -> SUM of clipped gradients of one logical batch, for every trainable parameter.
        plan: `PrivacyPlan`.
        step: index of the release; never use one twice with other gradients.
        layout: `dualdp.port.match(...)` draws portable noise in the JAX model's shapes and order.

    Returns:
        Name -> (sum + noise) / expected_batch_size, float32 or wider.

    Raises:
        AccountingError: the step is past the plan.
        ValueError: `layout` lacks a parameter.

    Guarantees:
        Noise of standard deviation `plan.noise_stddev(step)`, independent over parameters and
            steps.  [test_noise_has_the_planned_stddev]
        All 64 bits of the step's key count.  [test_noise_depends_on_the_whole_key]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    step = _validate.integer("step", step)
    if plan.num_steps is not None and step >= plan.num_steps:
        raise AccountingError(
            f"step={step} is past the plan's num_steps={plan.num_steps}. Plan more steps, or "
            "num_steps=None for an open-ended run."
        )
    _validate.choice("noise", plan.noise, _SOURCES)
    draw = _SOURCES[plan.noise](plan.step_key("noise", step), grads, layout)
    stddev, size = plan.noise_stddev(step), plan.expected_batch_size_at(step)
    noised = {}
    for index, (name, total) in enumerate(grads.items()):
        total = total.to(wide(total.dtype))
        noised[name] = draw(index, name, total).mul_(stddev).add_(total).div_(size)
    return noised


Draw = Callable[[int, str, Tensor], Tensor]


def _fast(key: Any, grads: Mapping[str, Tensor], layout: Any) -> Draw:
    """Normals of torch's own generator, keyed by us."""
    generators: dict[torch.device, torch.Generator] = {}

    def draw(index: int, name: str, like: Tensor) -> Tensor:
        if like.device not in generators:
            generators[like.device] = keyed_generator(key, like.device, len(generators))
        source = generators[like.device]
        return torch.empty_like(like, memory_format=torch.contiguous_format).normal_(
            generator=source
        )

    return draw


def keyed_generator(key: Any, device: torch.device, stream: int = 0) -> torch.Generator:
    """A generator that depends on all 64 bits of the key.

    Torch's CPU generator keeps 32 bits of its seed, so that keys of different steps would soon
    collide; its state is filled with the key's own words instead.
    """
    key = counter.fold_in(key, stream)
    generator = torch.Generator(device)
    generator.manual_seed((int(key[0]) << 32) | int(key[1]))
    if device.type == "cpu":
        state = generator.get_state().numpy()
        words = state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS].view(np.uint64)
        words[:] = counter.bits(key, (_STATE_WORDS,))
        generator.set_state(torch.from_numpy(state))
    return generator


def _portable(key: Any, grads: Mapping[str, Tensor], layout: Any) -> Draw:
    """The normals that JAX draws: leaf i from `fold_in(key, i)`."""
    leaves = {leaf.torch_name: leaf for leaf in layout or ()}
    missing = sorted(set(grads) - set(leaves)) if layout is not None else []
    if missing:
        raise ValueError(
            f"layout lacks the parameters {missing}. Expected dualdp.port.match(model, params) of "
            "this model."
        )

    def draw(index: int, name: str, like: Tensor) -> Tensor:
        dtype = np.float64 if like.dtype == torch.float64 else np.float32
        leaf = leaves.get(name)
        if leaf is None:
            normals = counter.normal(counter.fold_in(key, index), tuple(like.shape), dtype=dtype)
        else:
            drawn = counter.normal(
                counter.fold_in(key, leaf.jax_index), leaf.jax_shape, dtype=dtype
            )
            normals = leaf.to_torch(drawn)
        return torch.from_numpy(np.ascontiguousarray(normals)).to(like.device)

    return draw


_SOURCES: dict[str, Callable[..., Draw]] = {"fast": _fast, "portable": _portable}

# SPDX-License-Identifier: Apache-2.0
"""The noisy mean: the only place where this backend releases anything about the data."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from dualdp import AccountingError
from dualdp_jax import compat
from dualdp_jax.rules.product import widen


class Release(NamedTuple):
    """The numbers of one release, as data for a jitted function.

    Attributes:
        key: (2,) uint32, secret.
        noise_stddev: of the noise in the sum, gradient units.
        expected_batch_size: what the noisy sum is divided by.
    """

    key: Any
    noise_stddev: Any
    expected_batch_size: Any


def release_at(plan: Any, step: int) -> Release:
    """The numbers of the release of a step, computed on the host.

    The key is a keyed hash of the step, which no traced program should hold: it would end in
    compilation caches. So it is computed here and handed over as data.

    Raises:
        TypeError: the step is traced.
        AccountingError: the step is past the plan.
    """
    if compat.is_traced(step):
        raise TypeError(
            "step is traced, but the key of a step is computed on the host. Call noisy_mean "
            "outside jit, or use the transformation add_noise(plan) inside."
        )
    step = int(step)
    if plan.num_steps is not None and not 0 <= step < plan.num_steps:
        raise AccountingError(
            f"step={step} is past the plan's num_steps={plan.num_steps}. Plan more steps, or "
            "num_steps=None for an open-ended run."
        )
    compat.check_counter_layout()
    return Release(
        plan.step_key("noise", step),
        np.float64(plan.noise_stddev(step)),
        np.float64(plan.expected_batch_size_at(step)),
    )


def noisy_mean(grads: Any, plan: Any, step: int) -> Any:
    """Add the noise of a step to a clipped sum and divide by the expected batch size.

    Args:
        grads: pytree, the SUM of clipped gradients of one logical batch.
        plan: `PrivacyPlan`.
        step: index of the release, a Python integer; never use one twice with other gradients.

    Returns:
        Pytree like `grads`, float32 or wider: (sum + noise) / expected_batch_size.

    Guarantees:
        Noise of standard deviation `plan.noise_stddev(step)`, independent over leaves and steps.
            [test_noise_has_the_planned_stddev]
        With noise="portable" the same normals as torch's: leaf i of `jax.tree.leaves(grads)` gets
            `fold_in(plan.step_key("noise", step), i)`.  [test_noise_is_the_counter_generator]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    return noised_mean(grads, release_at(plan, step))


def noised_mean(grads: Any, release: Release) -> Any:
    """`noisy_mean` as a pure function that may be traced."""
    key = compat.wrap_key(release.key)
    leaves, treedef = jax.tree.flatten(grads)

    def noised(index: int, leaf: Any) -> Any:
        leaf = widen(leaf)
        normal = jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)
        stddev, size = (value.astype(leaf.dtype) for value in release[1:])
        return (leaf + stddev * normal) / size

    return jax.tree.unflatten(treedef, [noised(i, leaf) for i, leaf in enumerate(leaves)])

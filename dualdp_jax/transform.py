# SPDX-License-Identifier: Apache-2.0
"""The noisy mean as an optax transformation, for loops that are jitted or scanned as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp_jax.noise import Release, noised_mean, release_at


class AddNoiseState(NamedTuple):
    """Attributes: step: index of the next release, int32 ()."""

    step: Any


def add_noise(plan: Any) -> optax.GradientTransformation:
    """Transformation of clipped SUMS to noisy means; it comes first in `optax.chain`.

    The key of a step is a keyed hash, so a compiled program asks the host for it by a callback, a
    pure function of the step. A table of keys would need no callback, but it would put the secret
    into the optimizer's state (and so into checkpoints) or into the compiled program (and so into
    compilation caches). The callback costs tens of microseconds a step.

    The transformation does no accounting: call `engine.record(num_steps=k)` before the steps run.

    Args:
        plan: `PrivacyPlan`; a step past its num_steps is an error when it runs.

    Returns:
        `optax.GradientTransformation` whose state is the step.

    Guarantees:
        The same noise as `noisy_mean(sums, plan, step)`.  [test_add_noise_is_noisy_mean]
        The state holds no key.  [test_add_noise_keeps_the_key_on_the_host]
    """

    def init(params: Any) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(sums: Any, state: AddNoiseState, params: Any = None) -> tuple[Any, AddNoiseState]:
        del params
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(sums))

        def ask_host(step: Any) -> Release:
            key, *scalars = release_at(plan, int(step))
            return Release(key, *(np.asarray(value, dtype) for value in scalars))

        shapes = Release(
            jax.ShapeDtypeStruct((2,), np.uint32), *[jax.ShapeDtypeStruct((), dtype)] * 2
        )
        release = jax.pure_callback(ask_host, shapes, state.step)
        return noised_mean(sums, release), AddNoiseState(state.step + 1)

    return optax.GradientTransformation(init, update)

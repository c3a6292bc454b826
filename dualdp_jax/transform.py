# SPDX-License-Identifier: Apache-2.0
"""The noisy mean as an optax transformation, for loops that are jitted or scanned as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dualdp_jax.noise import Release, noised_mean, release_at, release_shapes


class AddNoiseState(NamedTuple):
    """Attributes: step: index of the next release, int32 ()."""

    step: Any


def add_noise(plan: Any) -> optax.GradientTransformation:
    """Transformation of clipped SUMS to noisy means; it comes first in `optax.chain`.

    The key of a step is a keyed hash, so a compiled program asks the host for it by a callback, a
    pure function of the step. A table of keys would need no callback, but it would put the secret
    into the optimizer's state (and so into checkpoints) or into the compiled program (and so into
    compilation caches). The callback costs tens of microseconds a step; secure noise comes through
    it as a whole.

    The transformation does no accounting: call `engine.record(num_steps=k)` before the steps run.

    Args:
        plan: `PrivacyPlan`; a step past its num_steps is an error when it runs.

    Returns:
        `optax.GradientTransformation` whose state is the step.

    Raises:
        ValueError: the plan's max_grad_norm is learned, which only the engine's ledger knows.

    Guarantees:
        The same noise as `noisy_mean(sums, plan, step)`.  [test_add_noise_is_noisy_mean]
        The state holds no key.  [test_add_noise_keeps_the_key_on_the_host]
    """
    if plan.is_adaptive:
        raise ValueError(
            "The plan's max_grad_norm is adaptive: its next value is known once a step is sealed. "
            "Use PrivacyEngine.make_private, or noisy_mean(..., max_grad_norm=)."
        )

    def init(params: Any) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(sums: Any, state: AddNoiseState, params: Any = None) -> tuple[Any, AddNoiseState]:
        del params
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sums)

        def ask_host(step: Any) -> Release:
            return release_at(plan, int(step), like=like)

        release = jax.pure_callback(ask_host, release_shapes(plan, like), state.step)
        return noised_mean(sums, release), AddNoiseState(state.step + 1)

    return optax.GradientTransformation(init, update)

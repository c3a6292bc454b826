# SPDX-License-Identifier: Apache-2.0
"""The noisy mean as an optax transformation, for loops that are jitted or scanned as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from dualdp import run_registry
from dualdp_jax import compat
from dualdp_jax.noise import mean_on_host, traced_mean

_SOURCE = "add_noise(plan)"


class AddNoiseState(NamedTuple):
    """Attributes: step: index of the next release, int32 ()."""

    step: Any


def add_noise(plan: Any) -> optax.GradientTransformation:
    """Transformation of clipped SUMS to noisy means; it comes first in `optax.chain`.

    Inside `jit` it asks the host for the key of its step by a callback. A table of keys would need
    no callback, but it would put the secret into the optimizer's state (and so into checkpoints) or
    into the compiled program (and so into compilation caches). The callback costs tens of
    microseconds a step; secure noise comes through it as a whole.

    A plan gives its noise to one transformation, and that hands out a step once: leaves are told
    apart by their place in one tree, so a second `add_noise(plan)` would repeat the noise of the
    first, as would a second `init`, which begins at step 0, or one object in two places. Call
    `update` outside `shard_map`, whose devices would each ask. Plans with a seed are for tests and
    comparisons, and without a ledger repeat what they are asked for.

    The transformation does no accounting: set up the run by `engine.make_loader(plan=...)`, and
    call `engine.record(num_steps=k)` before the steps run. A step that is not on record by then is
    an error, and inside `jit` nan.

    Args:
        plan: `PrivacyPlan`; a step past its num_steps, or handed out before, is an error when it
            runs.

    Returns:
        `optax.GradientTransformation` whose state is the step.

    Raises:
        AccountingError: something else in this process has the plan's noise.
        ValueError: the plan's max_grad_norm is learned, which only the engine's ledger knows.

    Guarantees:
        The same noise as `noisy_mean(sums, plan, step)`.  [test_add_noise_is_noisy_mean]
        In one process no two sums get the same noise of it, unless the plan has a seed.
            [test_a_plan_gives_its_noise_to_one_add_noise, test_add_noise_hands_out_a_step_once]
        What no ledger records is not released.
            [test_a_step_that_is_not_on_record_gets_nan_inside_jit]
        The state holds no key.  [test_add_noise_keeps_the_key_on_the_host]
    """
    if plan.is_adaptive:
        raise ValueError(
            "The plan's max_grad_norm is adaptive: its next value is known once a step is sealed. "
            "Use PrivacyEngine.make_private, or noisy_mean(..., max_grad_norm=)."
        )
    caller = object()
    run_registry.reserve(plan, _SOURCE, caller)

    def init(params: Any) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(sums: Any, state: AddNoiseState, params: Any = None) -> tuple[Any, AddNoiseState]:
        del params
        is_traced = compat.is_traced((sums, state.step)) or compat.in_trace()
        mean = traced_mean if is_traced else mean_on_host
        return mean(sums, plan, state.step, _SOURCE, caller), AddNoiseState(state.step + 1)

    return optax.GradientTransformation(init, update)

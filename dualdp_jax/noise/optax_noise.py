# SPDX-License-Identifier: Apache-2.0
"""Noisy mean as an optax transformation, for loops that are jitted or scanned as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from dualdp.plan.plan import require_plan
from dualdp.randomness import run_registry
from dualdp_jax.noise.noise import claimed_mean, refuse_adaptive

_SOURCE = "add_noise(plan)"


class AddNoiseState(NamedTuple):
    """State of `add_noise`: `step` is the index of the next release, int32 ()."""

    step: Any


def add_noise(plan: Any) -> optax.GradientTransformation:
    """Return a transformation of clipped SUMS to noisy means; put it first in `optax.chain`.

    Inside `jit` a callback gets the key of the step from the host. A table of keys would need no
    callback, but it would put the secret into the optimizer's state (and so into checkpoints) or
    into the compiled program (and so into compilation caches). The callback costs tens of
    microseconds a step; with noise="secure" it returns the noise itself. Correlated noise of a band
    or a buffered Toeplitz strategy takes t + 1 draws at step t there.

    A plan allows one transformation, which draws the noise of each step once. Noise depends on the
    step and the index of the leaf in its tree, so a second `add_noise(plan)` would repeat the noise
    of the first, as would a second `init` (at step 0), or one transformation of two trees. Call
    `update` outside `shard_map`, where every device would run the callback. Plans with a seed are
    for tests and comparisons; without a ledger they may repeat noise.

    The transformation does no accounting: set up the run by `engine.make_loader(plan=...)`, and
    call `engine.record(num_steps=k)` before the steps run. A step that is not on record by then is
    an error, and inside `jit` nan.

    Args:
        plan: `PrivacyPlan`; a step past its num_steps, or drawn before, is an error at run time.

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
    require_plan(plan)
    refuse_adaptive(plan)
    caller = object()
    run_registry.reserve(plan, _SOURCE, caller)

    def init(params: Any) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(sums: Any, state: AddNoiseState, params: Any = None) -> tuple[Any, AddNoiseState]:
        del params
        mean = claimed_mean(sums, plan, state.step, _SOURCE, caller)
        return mean, AddNoiseState(state.step + 1)

    return optax.GradientTransformation(init, update)

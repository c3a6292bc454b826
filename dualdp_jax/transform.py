# SPDX-License-Identifier: Apache-2.0
"""The noisy mean as an optax transformation, for loops that are jitted or scanned as a whole."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dualdp import AccountingError
from dualdp_jax.noise import Release, noised_mean, release_at, release_shapes

_taken: set[str] = set()  # SHA-256 of the keys whose noise an add_noise of this process has
_lock = threading.Lock()  # callbacks come from XLA's threads


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

    A plan gives its noise to one transformation, and that hands out a step once: leaves are told
    apart by their place in one tree, so a second `add_noise(plan)` would repeat the noise of the
    first, as would a second `init`, which begins at step 0, or one object in two places. Call
    `update` outside `shard_map`, whose devices would each ask. Plans with a seed are for tests and
    comparisons, and repeat what they are asked for.

    The transformation does no accounting: call `engine.record(num_steps=k)` before the steps run.

    Args:
        plan: `PrivacyPlan`; a step past its num_steps, or handed out before, is an error when it
            runs.

    Returns:
        `optax.GradientTransformation` whose state is the step.

    Raises:
        AccountingError: another transformation of this process has the plan's noise.
        ValueError: the plan's max_grad_norm is learned, which only the engine's ledger knows.

    Guarantees:
        The same noise as `noisy_mean(sums, plan, step)`.  [test_add_noise_is_noisy_mean]
        In one process no two sums get the same noise of it, unless the plan has a seed.
            [test_a_plan_gives_its_noise_to_one_add_noise, test_add_noise_hands_out_a_step_once]
        The state holds no key.  [test_add_noise_keeps_the_key_on_the_host]
    """
    if plan.is_adaptive:
        raise ValueError(
            "The plan's max_grad_norm is adaptive: its next value is known once a step is sealed. "
            "Use PrivacyEngine.make_private, or noisy_mean(..., max_grad_norm=)."
        )

    is_seeded = plan.root.require_secret().seed is not None
    if not is_seeded:
        _take(plan.root.sha256)
    handed_out: set[int] = set()  # a set, since steps that need not wait may overtake each other

    def init(params: Any) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(sums: Any, state: AddNoiseState, params: Any = None) -> tuple[Any, AddNoiseState]:
        del params
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sums)

        def ask_host(step: Any) -> Release:
            step = int(step)
            with _lock:
                if not is_seeded and step in handed_out:
                    raise AccountingError(
                        f"The noise of step={step} was handed out before; the difference of the "
                        "two releases would show gradients without noise. Expected one init and "
                        "one update a step; make a new plan for a new run."
                    )
                release = release_at(plan, step, like=like)
                handed_out.add(step)
            return release

        release = jax.pure_callback(ask_host, release_shapes(plan, like), state.step)
        return noised_mean(sums, release), AddNoiseState(state.step + 1)

    return optax.GradientTransformation(init, update)


def _take(sha256: str) -> None:
    """Take the noise of a plan for one transformation."""
    with _lock:
        if sha256 in _taken:
            raise AccountingError(
                "add_noise(plan) came twice for one plan, and both would draw the same noise. "
                "Expected one transformation around all parameters, such as "
                "optax.chain(add_noise(plan), optax.multi_transform(...)), or a new plan for a "
                "new run."
            )
        _taken.add(sha256)

# SPDX-License-Identifier: Apache-2.0
"""`adam_bc`: AdamW with the noise of the gradient taken out of its second moment, for optax."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dualdp import adam
from dualdp_jax.compat import PyTree
from dualdp_jax.rules.arrays import widen

_D = adam.DEFAULTS


class AdamBCState(NamedTuple):
    """State of `adam_bc`.

    Attributes:
        count: scalar int32, number of updates.
        mu: pytree like the parameters, average of the noisy gradients, float32 or wider.
        nu_corrected: pytree like the parameters, average of their squares without the noise.
    """

    count: PyTree
    mu: PyTree
    nu_corrected: PyTree


def adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = _D["b1"],
    b2: float = _D["b2"],
    *,
    floor: float = _D["floor"],
    eps: float = _D["eps"],
    weight_decay: float = _D["weight_decay"],
    mask: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with DP bias correction of the second moment.

    `PrivacyEngine` passes the noise of each step. In a loop of your own, call `update(grads, state,
    params, noise_stddev=plan.noise_stddev(t) / plan.expected_batch_size_at(t))` on the noisy mean
    of step t; nothing may change the gradient between.

    Args:
        learning_rate: number or optax schedule.
        b1: decay of the average of the gradients, in [0, 1).
        b2: decay of the average of the squares, in [0, 1).
        floor: smallest second moment that is divided by, squared gradient units.
        eps: number added to the root of the second moment, gradient units.
        weight_decay: number >= 0, times the learning rate, as in `optax.adamw`.
        mask: pytree of bools or function, the parameters that decay, as in `optax.adamw`.

    Raises:
        TypeError: a setting that is no number.
        ValueError: a setting out of range.

    Guarantees:
        The textbook formula, whose noise is each step's own.
            [test_both_stacks_are_the_textbook_loop]
        Without noise and floor it is optax.adamw.  [test_without_noise_and_floor_it_is_adamw]
        An engine whose noisy mean was changed on its way to it refuses to begin.
            [test_what_changes_the_gradient_before_it_is_refused]

    Source: Tang, Shpilevskiy and Lecuyer 2024, Algorithm 1 (arXiv 2312.14334).

    >>> import jax.numpy as jnp
    >>> optimizer = adam_bc(0.1)
    >>> params = jnp.array(0.0)
    >>> grads, state = jnp.array(0.5), optimizer.init(params)
    >>> updates, state = optimizer.update(grads, state, params, noise_stddev=0.3)
    >>> round(float(updates), 4)  # - 0.1 * 0.5 / sqrt(0.25 - 0.09)
    -0.125
    """
    settings = {"b1": b1, "b2": b2, "floor": floor, "eps": eps}
    if not any(isinstance(value, jax.Array) for value in (*settings.values(), weight_decay)):
        adam.check_settings(**settings, weight_decay=weight_decay)  # others: inject_hyperparams
    return optax.chain(
        _scale_by_adam_bc(settings),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _scale_by_adam_bc(settings: dict[str, float]) -> optax.GradientTransformationExtraArgs:
    """Transformation of noisy means to directions."""

    def init(params: PyTree) -> AdamBCState:
        mu, nu = (jax.tree.map(lambda p: jnp.zeros_like(widen(p)), params) for _ in range(2))
        return AdamBCState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: PyTree,
        state: AdamBCState,
        params: PyTree = None,
        *,
        noise_stddev: jax.Array | float | None = None,
        noisy_mean: PyTree = None,
        **_: PyTree,
    ) -> tuple[PyTree, AdamBCState]:
        if noise_stddev is None:
            raise TypeError(
                "adam_bc came without noise_stddev. Expected the optimizer of make_private, and "
                "what wraps it to pass it on (MultiSteps does not); or in a loop of your own "
                "update(grads, state, params, noise_stddev=plan.noise_stddev(t) / "
                "plan.expected_batch_size_at(t))"
            )
        known = [*map(id, jax.tree.leaves(noisy_mean))]  # leaves of the engine's mean themselves
        if known and any(id(leaf) not in known for leaf in jax.tree.leaves(grads)):
            raise ValueError(
                "adam_bc got gradients that another transformation has changed, so that their "
                "noise is unknown. Expected it first in the chain: what comes before it behind it."
            )
        count = optax.safe_increment(state.count)

        def updated(grad: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            grad = widen(grad)
            stddev = jnp.asarray(noise_stddev, grad.dtype)
            return adam.adam_bc(grad, mu, nu, count, stddev, **settings, xp=jnp)

        found = jax.tree.map(updated, grads, state.mu, state.nu_corrected)
        directions, mu, nu = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), found
        )
        return directions, AdamBCState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)

# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the parameters, for evaluation.

It is computed from released parameters, so it costs no privacy.

Source: De et al. 2022, section 3.3 (parameter averaging).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dualdp import _validate
from dualdp_jax.compat import nodes_of
from dualdp_jax.rules.arrays import widen


class EmaState(NamedTuple):
    """State of an optimizer with an average of the parameters.

    Attributes:
        inner: pytree, state of the optimizer itself.
        average: pytree like the parameters, float32 or wider.
        count: scalar int32, number of updates averaged.
    """

    inner: Any
    average: Any
    count: Any


def with_ema(
    optimizer: optax.GradientTransformation, decay: float = 0.999
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that also averages the parameters it makes; `engine.ema` reads them.

    After update t = 0, 1, ... the average is d * average + (1 - d) * parameters with
    d = min(decay, (1 + t) / (10 + t)), from the first parameters on.

    Args:
        optimizer: optax transformation, whole: the average is of the parameters plus its updates.
        decay: float in [0, 1).

    Raises:
        ValueError: decay is no such number.

    >>> import jax.numpy as jnp, optax
    >>> optimizer = with_ema(optax.sgd(1.0), decay=0.5)
    >>> params = jnp.array(1.0)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.array(1.0), state, params)
    >>> float(params + updates), round(float(state.average), 3)  # d = 1 / 10
    (0.0, 0.1)
    """
    decay = _validate.probability("decay", decay)
    if decay == 1:
        raise ValueError("decay=1 would keep the first parameters. Expected a number in [0, 1).")

    def init(params: Any) -> EmaState:
        average = jax.tree.map(lambda p: jnp.array(widen(p)), params)
        return EmaState(optimizer.init(params), average, jnp.zeros((), jnp.int32))

    inside = optax.with_extra_args_support(optimizer)

    def update(
        grads: Any, state: EmaState, params: Any = None, **extra: Any
    ) -> tuple[Any, EmaState]:
        if params is None:
            raise ValueError("with_ema averages parameters. Expected update(grads, state, params).")
        updates, inner = inside.update(grads, state.inner, params, **extra)
        factor = jnp.minimum(decay, (1 + state.count) / (10 + state.count))

        def mixed(average: Any, param: Any) -> Any:
            return average + (1 - factor).astype(average.dtype) * (widen(param) - average)

        average = jax.tree.map(mixed, state.average, optax.apply_updates(params, updates))
        return updates, EmaState(inner, average, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def average_in(opt_state: Any) -> Any:
    """Return the average in an optimizer's state, a pytree like the trained parameters."""
    found = nodes_of(opt_state, EmaState)
    if len(found) != 1:
        raise ValueError(
            f"The state holds {len(found)} averages of the parameters. Expected one: "
            "make_private(optimizer=dpj.with_ema(optimizer, decay=0.999), ...)."
        )
    return found[0].average

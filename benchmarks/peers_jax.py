# SPDX-License-Identifier: Apache-2.0
"""Other JAX libraries, used as in their documentation."""

from __future__ import annotations

from typing import Any

from benchmarks import systems_jax
from benchmarks.systems import Prepared, Setting, System


def jax_privacy(setting: Setting) -> Prepared:
    """Return `jax_privacy.clipping.clipped_grad` of the loss of one example."""
    from jax_privacy import clipping

    problem = systems_jax.Problem(setting)
    clipped = clipping.clipped_grad(
        problem.loss,
        l2_clip_norm=setting.max_grad_norm,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        return_grad_norms=True,
    )

    def gradient(params: Any, *batch: Any) -> Any:
        sums, aux = clipped(params, *batch)
        return sums, aux.grad_norms

    return problem.prepared(gradient, systems_jax.by_hand(setting))


SYSTEMS: dict[str, System] = {"jax_privacy": jax_privacy}

# SPDX-License-Identifier: Apache-2.0
"""JAX systems of the suite of fine-tuning, each a jitted program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dualdp_tools.bench import finetuning, systems, systems_jax
from dualdp_tools.bench.systems import LOOP, NON_PRIVATE, Prepared, Setting


def adam_bc(setting: Setting) -> Prepared:
    """Return `clipped_grad_sum`, `add_noise` and `adam_bc`, which is told the noise."""
    import dualdp.jax as dpj

    stddev = systems.NOISE_MULTIPLIER * setting.max_grad_norm / setting.n
    optimizer = dpj.adam_bc(systems.LEARNING_RATE)
    return systems_jax.dualdp(setting, "auto", optimizer=optimizer, noise_stddev=stddev)


def adafest(setting: Setting) -> Prepared:
    """Return `sparse_noisy_mean` in the place of `add_noise`."""
    import dualdp.jax as dpj

    problem, plan = systems_jax.Problem(setting), setting.plan()
    leaves = jax.tree_util.tree_leaves_with_path(problem.params)
    path, leaf = max(leaves, key=lambda pair: len(pair[1]))
    settings: dict[str, Any] = {
        "table": jax.tree_util.keystr(path, simple=True, separator="/"),
        "threshold": finetuning.THRESHOLD,
        "map_share": finetuning.MAP_SHARE,
    }

    def update(params: Any, step: Any, batch: Any) -> Any:
        sums = dpj.clipped_grad_sum(
            problem.loss, params, *batch, max_grad_norm=setting.max_grad_norm, method="auto"
        )
        counts = dpj.contribution_map(batch[0], len(leaf), mask=None)
        found = dpj.sparse_noisy_mean(sums.grads, counts, plan, step, **settings)
        moved = jax.tree.map(lambda p, g: p - systems.LEARNING_RATE * g, params, found.grads)
        return moved, step + 1

    program = systems_jax.Program(update, problem.params, jnp.zeros((), jnp.int32))
    return replace(systems_jax.dualdp(setting, "auto"), update=program)


_dualdp = partial(systems_jax.dualdp, method="auto")
_adamw = optax.adamw(systems.LEARNING_RATE)
#: Kind -> name -> system.
SYSTEMS: dict[str, dict[str, Callable[..., Prepared]]] = {
    "optimizers": {
        NON_PRIVATE: partial(systems_jax.non_private, optimizer=_adamw),
        systems.AUTO: partial(_dualdp, optimizer=_adamw),
        finetuning.ADAM_BC: adam_bc,
        LOOP: systems_jax.loop,
    },
    "sparse": {
        NON_PRIVATE: systems_jax.non_private,
        systems.AUTO: _dualdp,
        finetuning.SPARSE: adafest,
        LOOP: systems_jax.loop,
    },
}

# SPDX-License-Identifier: Apache-2.0
"""A run of a small model whose weights are split over a mesh, from given parameters."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dualdp_jax as dpj
from dualdp.plan.plan import PrivacyPlan
from tests.dualdp_jax.workers import launch
from tests.dualdp_jax.workers.models import mesh_of

#: Where the axes of each array go: as ColwiseParallel and RowwiseParallel cut them.
SPECS = {
    "body_0": {"kernel": P(None, "model"), "bias": P("model")},
    "body_2": {"kernel": P("model", None), "bias": P()},
}


def loss_fn(params, x, y):
    """Cross entropy of one example."""
    first, second = params["body_0"], params["body_2"]
    hidden = jnp.tanh(x @ first["kernel"] + first["bias"])
    logits = hidden @ second["kernel"] + second["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def train(given: str, plan: str) -> tuple[dict[str, list], float]:
    """Flat parameters and epsilon at the end of the planned run."""
    mesh, arrays = mesh_of((2, 2), ("data", "model")), np.load(given)
    params = {
        layer: {
            name: jax.device_put(arrays[f"{layer}.{name}"], NamedSharding(mesh, spec))
            for name, spec in specs.items()
        }
        for layer, specs in SPECS.items()
    }
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        params=params,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.2, momentum=0.9),
        data=(arrays["x"], arrays["y"]),
        plan=PrivacyPlan.from_json(plan),
        data_sharding=NamedSharding(mesh, P("data")),
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    assert state.params["body_0"]["kernel"].sharding.spec == SPECS["body_0"]["kernel"]
    ended = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state.params)
    return ended, engine.get_epsilon()


if __name__ == "__main__":
    with jax.enable_x64(True):
        launch.say(train(*sys.argv[4:]))

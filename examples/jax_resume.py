# SPDX-License-Identifier: Apache-2.0
"""A run that is killed after its checkpoint, and resumed: what was released stays accounted.

The second half is trained twice, with other batches and other noise, so the ledger beside the
checkpoint has all releases of both.
"""

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import dualdp
import dualdp.jax as dpj

STEPS = 6 if "--toy" in sys.argv else 100
DELTA = 1e-5


def loss_fn(params, x, y):
    """Squared error of ONE example."""
    return (jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 8)).astype(np.float32)
    run = {"loss_fn": loss_fn, "optimizer": optax.adam(1e-2), "data": (x, np.sin(x.sum(1)))}
    params = {
        "hidden": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
        "out": jnp.asarray(rng.normal(size=16), jnp.float32),
    }
    plan = dualdp.PrivacyPlan(
        num_examples=1000,
        expected_batch_size=100,
        num_steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=DELTA,
    )
    path = Path(tempfile.mkdtemp()) / "digits.ckpt"

    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(params=params, plan=plan, **run)
    for batch in loader.remaining():
        state, _ = step(state, batch)
        if batch.step == STEPS // 2:
            dpj.save_checkpoint(path, state=state, engine=engine)
    engine.detach()  # the second half is forgotten, as if the machine had gone down

    like = dpj.TrainState.create(params, run["optimizer"])
    resumed, engine = dpj.load_checkpoint(path, like=like)
    step, resumed, loader = engine.resume(params=params, **run)
    for batch in loader.remaining():
        resumed, _ = step(resumed, batch)

    releases, epsilon = len(engine.ledger), engine.get_epsilon(delta=DELTA)
    print(f"{STEPS} steps of {releases} releases, epsilon {epsilon:.2f}")
    assert releases == STEPS + STEPS - (STEPS // 2 + 1)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A small JAX run that goes on from its last checkpoint, if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualdp_jax as dpj
from tests.kill import notes

EVERY = 3  # steps between two checkpoints


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(notes.NUM_EXAMPLES, 6)).astype(np.float32)
    return x, rng.integers(0, 3, notes.NUM_EXAMPLES)


def params() -> dict[str, Any]:
    """The model before the first step."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"hidden": draw(6, 16), "bias": jnp.zeros(16), "head": draw(16, 3)}


def loss_fn(params: Any, x: Any, y: Any, key: Any) -> Any:
    """Loss of one example, with dropout."""
    hidden = jnp.tanh(x @ params["hidden"] + params["bias"])
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape) / 0.8
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], y)


def watch_noise(folder: str) -> None:
    """Note every release before its bits are drawn."""
    notes.watch_noise(folder, "dualdp_jax.training.step")


def main(folder: str, die: tuple[str, int] | None = None) -> None:
    """Train to the plan's end in a folder that `notes.prepare` made.

    Args:
        folder: holds plan, checkpoint and notes.
        die: where the process kills itself, see `notes.die_at`.
    """
    # Every start would compile anew, and most kills would hit the compiler.
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    notes.die_at(die)
    path = Path(folder, "run.safetensors")
    run = {"loss_fn": loss_fn, "params": params(), "optimizer": optax.adam(0.01), "data": data()}
    if path.exists():
        like = dpj.TrainState.create(params(), optax.adam(0.01))
        state, engine = dpj.load_checkpoint(path, like=like)
        epsilon = engine.get_epsilon(delta=engine.plan.delta)
        notes.write(folder, resumed=engine.ledger.position, epsilon=epsilon)
        step, state, loader = engine.resume(**run, needs_key=True)
    else:
        engine = dpj.PrivacyEngine()
        step, state, loader = engine.make_private(**run, needs_key=True, plan=notes.plan(folder))
        dpj.save_checkpoint(path, state=state, engine=engine)
        notes.write(folder, started=True)
    watch_noise(folder)
    for batch in loader.remaining():
        state, _ = step(state, batch)
        if state.step % EVERY == 0:
            dpj.save_checkpoint(path, state=state, engine=engine)
    arrays = {name: np.asarray(leaf) for name, leaf in state.params.items()}
    notes.finish(folder, arrays, engine.ledger)

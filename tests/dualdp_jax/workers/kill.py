# SPDX-License-Identifier: Apache-2.0
"""A run of several processes that goes on from its last checkpoint; one of them may kill itself.

Every process notes each release before its noise is drawn, as in `tests.kill`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

import dualdp_jax as dpj
from dualdp_jax.checkpoint.sharded import load_sharded_checkpoint, save_sharded_checkpoint
from dualdp_jax.parallel.mesh import whole
from tests.dualdp_jax.workers import launch
from tests.dualdp_jax.workers.models import arguments, mesh_of, mlp
from tests.kill import notes
from tests.kill.train_jax import EVERY, watch_noise


def main(folder, rank, kind):
    path = Path(folder, f"run.{kind}")
    save = save_sharded_checkpoint if kind == "folder" else dpj.save_checkpoint
    load = load_sharded_checkpoint if kind == "folder" else dpj.load_checkpoint
    params, loss, data = mlp()
    data = tuple(part[: notes.NUM_EXAMPLES] for part in data)
    given = arguments((params, loss, data), mesh_of((jax.device_count(),)))
    if path.exists():
        like = dpj.TrainState.create(given["params"], given["optimizer"])
        state, engine = load(path, like=like)
        if rank == 0:
            epsilon = engine.get_epsilon(delta=engine.plan.delta)
            notes.write(folder, resumed=engine.ledger.position, epsilon=epsilon)
        step, state, loader = engine.resume(**given)
    else:
        engine = dpj.PrivacyEngine()
        step, state, loader = engine.make_private(plan=notes.plan(folder), **given)
        save(path, state=state, engine=engine)
    watch_noise(folder)
    for batch in loader.remaining():
        state, _ = step(state, batch)
        if (batch.step + 1) % EVERY == 0:
            save(path, state=state, engine=engine)
    arrays = {name: whole(leaf) for name, leaf in state.params.items()}
    if rank == 0:
        notes.finish(folder, arrays, engine.ledger)
    engine.detach()


if __name__ == "__main__":
    rank, processes, address, folder, kind, victim, place, count = sys.argv[1:9]
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).parent / f"compiled{rank}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    launch.connect(address, int(processes), int(rank), seconds=10)
    if rank == victim:
        notes.die_at((place, int(count)))
    begun = time.monotonic()
    try:
        main(folder, int(rank), kind)
    except Exception as error:
        launch.say({"error": str(error), "seconds": time.monotonic() - begun})
        raise
    launch.say({"error": None})

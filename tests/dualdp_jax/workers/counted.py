# SPDX-License-Identifier: Apache-2.0
"""Private steps on a mesh: the collectives in XLA's programs, and the bytes that a process sent."""

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

from tests.distributed.wire import bytes_sent
from tests.dualdp_jax.workers.launch import say

SIZES = (16, 256, 256, 256, 256, 8)
STEPS = 4
#: What a case may say, and what holds where it does not.
USUAL = {"shards": 1, "method": "auto", "physical_batch_size": None}
BYTES = {"pred": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")


def num_parameters():
    return sum(i * o for i, o in zip(SIZES, SIZES[1:], strict=False))


def collectives(folder, before):
    """(kind, bytes of the result) of every collective in programs that were compiled since."""
    found = []
    for path in sorted(folder.glob("*after_optimizations.txt")):
        if path.name not in before:
            for line in COLLECTIVE.finditer(path.read_text()):
                sizes = ARRAY.findall(line.group(1))
                size = sum(
                    BYTES[t] * math.prod(map(int, filter(None, d.split(",")))) for t, d in sizes
                )
                found.append((path.name.split(".")[1], line.group(2).replace("-", "_"), size))
    return found


def counted(case, folder):
    """Bytes that this process sent in each step, the collectives of a step, its chunks."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import dualdp
    import dualdp_jax as dpj

    rng, shards = np.random.default_rng(0), case["shards"]
    shape = (len(jax.devices()) // shards, shards)
    mesh = jax.make_mesh(shape, ("copy", "shard"), axis_types=(AxisType.Auto,) * 2)
    params = {
        f"w{i}": rng.normal(size=sizes).astype("f") / 16
        for i, sizes in enumerate(zip(SIZES, SIZES[1:], strict=False))
    }
    where = NamedSharding(mesh, P("shard" if shards > 1 else None))
    params = {
        name: jax.make_array_from_callback(p.shape, where, lambda index, p=p: p[index])
        for name, p in params.items()
    }

    def loss(params, x, y):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return -jax.nn.log_softmax(x)[y]

    plan = dualdp.PrivacyPlan(
        num_examples=64,
        expected_batch_size=16,
        num_steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-5,
        sampler="shuffle",
        physical_batch_size=case["physical_batch_size"],
        seed=1,
    )
    step, state, loader = dpj.PrivacyEngine().make_private(
        loss_fn=loss,
        params=params,
        optimizer=optax.sgd(0.1),
        data=(rng.normal(size=(64, 16)).astype("f"), rng.integers(0, 8, 64)),
        plan=plan,
        method=case["method"],
        data_sharding=NamedSharding(mesh, P(("copy", "shard"))),
        checks=0,
    )
    known = {path.name for path in folder.iterdir()}
    sent, chunks, before = [], 0, bytes_sent()
    for batch in loader.remaining():
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        sent.append(bytes_sent() - before)
        before, chunks = bytes_sent(), chunks + len(batch.chunks)
    return {"sent": sent, "chunks": chunks / STEPS, "collectives": collectives(folder, known)}


def main():
    rank, processes, address, text = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] += f" --xla_dump_to={folder} --xla_dump_hlo_as_text"
        import jax

        if int(processes) > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(address, int(processes), int(rank))
        say([counted(USUAL | case, Path(folder)) for case in json.loads(text)])


if __name__ == "__main__":
    main()

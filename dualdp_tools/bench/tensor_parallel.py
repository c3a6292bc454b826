# SPDX-License-Identifier: Apache-2.0
"""Suite of tensor parallelism: clipped sums by processes of which each holds pieces of the layers.

Each process has one thread, and all compute on the same batch. The clipped sum must be that of the
loop on the whole model before it is timed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dualdp_tools.bench import gate, systems, workloads
from dualdp_tools.bench.measure import Timing, empty_row, ratio_rows
from dualdp_tools.bench.results import Row
from dualdp_tools.bench.session import Session
from dualdp_tools.bench.systems import AUTO, LOOP, NON_PRIVATE, Setting

PROCESSES = 2
ROUNDS = {"quick": 3, "cpu": 30}
# Options of the MLP and examples; its last layer stays whole on every process.
SIZES: dict[str, tuple[dict[str, int], int]] = {"quick": ({"width": 64}, 8), "cpu": ({}, 256)}


def tensor_parallel(session: Session) -> Iterator[list[Row]]:
    """Measure the clipped sum and the non-private step of a model cut in two (PyTorch)."""
    if session.stack.name != "torch" or session.device != "cpu" or not session.wanted("mlp"):
        return
    import torch

    options, n = SIZES[session.size_key]
    n, rounds = session.batch or n, ROUNDS[session.size_key]
    workload = workloads.create("mlp", **options)
    workload = replace(workload, options={**workload.options, "processes": PROCESSES})
    if earlier := session.earlier_rows("tensor-parallel", workload):
        yield earlier
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (options, n, rounds, folder), nprocs=PROCESSES)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    base = empty_row(session.stack, "tensor-parallel", workload, n, quantity="gradient")
    yield ratio_rows(base, {name: Timing(tuple(each)) for name, each in seconds.items()})


def _measure(rank: int, options: dict[str, int], n: int, rounds: int, folder: str) -> None:
    """Time both steps in one of the processes; the first writes the seconds of each round."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from dualdp_tools.bench import systems_torch

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    stack = systems.stack("torch")
    setting = gate.calibrate(stack, Setting(workloads.create("mlp", **options), n))
    batch = stack.load(setting, *setting.workload.batch(n))
    loop = stack.systems[LOOP](setting)
    assert loop.read is not None
    truth = loop.read(loop.gradient(batch))

    def cut(model: torch.nn.Module) -> None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    kind: Any = partial(systems_torch.Problem, change=cut)
    private = systems_torch.dualdp(setting, "auto", kind=kind)
    sums, norms = private.gradient(batch)
    whole = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in sums.items()}
    slack = gate.KINKS * n * setting.max_grad_norm
    gate.check(AUTO, systems_torch.read((whole, norms)), truth, slack)
    calls = {NON_PRIVATE: systems_torch.non_private(setting, kind=kind), AUTO: private}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, system in calls.items():
            dist.barrier()
            start = time.perf_counter()
            system.gradient(batch)
            dist.barrier()
            seconds[name] += [time.perf_counter() - start] if turn else []  # the first warms up
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()

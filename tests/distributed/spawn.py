# SPDX-License-Identifier: Apache-2.0
"""Processes of one group that are forked from one which has imported torch already."""

import datetime
import importlib
import multiprocessing
import os
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  which every optimizer imports; here it is done once for all
import torch.distributed as dist

import dualdp_torch  # noqa: F401
from tests import preload

LIMIT = 30  # seconds that a collective may take


def together(target, size, folder, *words, timeout=150, dies=None):
    """Call `target(folder, *words)` in so many processes of one gloo group.

    Args:
        target: a function of a module.
        size: number of processes.
        folder: for the store, what processes print and what they save.
        *words: further arguments.
        timeout: seconds for all of them; then all are killed.
        dies: rank that is expected to kill itself.

    Returns:
        What each process returned, by rank; None for one that died.
    """
    folder = Path(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload.MODULES)
    store = folder / f"store{time.monotonic_ns()}"
    children = [
        context.Process(target=_work, args=(target, rank, size, store, words), daemon=True)
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            child.kill()
            child.join()
    codes = [child.exitcode for child in children]
    expected = [-9 if rank == dies else 0 for rank in range(size)]
    said = [Path(f"{store}-{rank}.txt").read_text()[-3000:] for rank in range(size)]
    assert codes == expected, f"{target.__name__}{words} ended with {codes}:\n{said}"
    kept = [Path(f"{store}-{rank}.pt") for rank in range(size)]
    return [torch.load(p, weights_only=False) if p.exists() else None for p in kept]


def checks(folder, module):
    """Name -> "passed", or how a check of a module's CHECKS failed, which ends the list."""
    found = {}
    for name, check in importlib.import_module(f"tests.distributed.{module}").CHECKS.items():
        try:
            with pytest.MonkeyPatch.context() as patch:
                check(patch, folder)
            found[name] = "passed"
        except BaseException:  # noqa: BLE001 - `pytest.raises` fails by one that is no Exception
            return found | {name: traceback.format_exc()}
    return found


def _work(target, rank, size, store, words):
    """One process: output goes to a file, what the target returns to another."""
    out = os.open(f"{store}-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    torch.save(target(store.parent, *words), f"{store}-{rank}.pt")
    dist.destroy_process_group()

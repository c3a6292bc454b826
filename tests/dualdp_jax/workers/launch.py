# SPDX-License-Identifier: Apache-2.0
"""Starts the programs of this folder, and kills what is left of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[3]
_MARK = "report: "


def start(
    name: str, *arguments: object, devices: int, quickly: bool = True, **streams: Any
) -> subprocess.Popen[str]:
    """One process of a program, on so many virtual devices; compiled `quickly`, as the suite is."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    if quickly:
        flags += " " + os.environ.get("XLA_FLAGS", "")
    command = [sys.executable, "-m", f"tests.dualdp_jax.workers.{name}", *map(str, arguments)]
    # XLA's devices on a CPU share a pool of threads, which wait in collectives: of as few as the
    # machine has processors all may wait, and none works.
    settings = {"NPROC": "32", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **settings, "XLA_FLAGS": flags}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, **streams
    )


def reports(
    name: str,
    *arguments: object,
    processes: int,
    devices: int,
    seconds: float,
    quickly: bool = True,
) -> Any:
    """What each process of a program says; see `say`.

    Raises:
        AssertionError: one of them says nothing, or takes longer.
    """
    address = f"localhost:{free_port()}"
    started = [
        start(name, rank, processes, address, *arguments, devices=devices, quickly=quickly)
        for rank in range(processes)
    ]
    until = time.monotonic() + seconds
    try:
        wait = lambda: max(until - time.monotonic(), 0.1)  # noqa: E731
        return [report(process.communicate(timeout=wait())[0]) for process in started]
    finally:
        end(started)


def end(started: list[subprocess.Popen[str]]) -> None:
    """Kill what still runs."""
    for process in started:
        process.kill()
        process.communicate()


def connect(address: str, processes: int, rank: int, seconds: int = 20) -> None:
    """Become one of so many processes, of which one that is lost is noticed after `seconds`."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        processes,
        rank,
        initialization_timeout=60,
        heartbeat_timeout_seconds=seconds,
        shutdown_timeout_seconds=seconds,
    )


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def report(text: str) -> Any:
    """What `say` said."""
    lines = [line for line in text.splitlines() if line.startswith(_MARK)]
    assert len(lines) == 1, text
    return json.loads(lines[0].removeprefix(_MARK))


def say(found: Any) -> None:
    """Tell the test."""
    print(_MARK + json.dumps(found), flush=True)


def checked(checks: list[Callable[[], Any]]) -> dict[str, str]:
    """Name of each check -> "held", or what went wrong."""
    found = {}
    for check in checks:
        try:
            check()
            found[check.__name__] = "held"
        except Exception:  # noqa: BLE001
            found[check.__name__] = traceback.format_exc()
    return found

# SPDX-License-Identifier: Apache-2.0
"""Kernel times and facts of a step by the frameworks' profilers, in tables by stack."""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dualdp_tools.bench.systems import Prepared

CALLS = 5
MIB = 2**20
#: Kernel -> (seconds per step, calls per step).
Kernels = Mapping[str, tuple[float, float]]
# An operation of a compiled program: its name, shape, and the path of its primitive.
_OPERATION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\S+) (?:.*?)metadata=\{op_name=\"([^\"]*)\"")
_AROUND = ("while", "conditional", "call")  # their time is that of the operations inside


def torch_kernels(step: Callable[[], Any], gradient: Any) -> Kernels:
    """Return the operators of a PyTorch step with their own times."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(CALLS):
            step()
    return {
        event.key: (
            (event.self_cpu_time_total + event.self_device_time_total) / 1e6 / CALLS,
            event.count / CALLS,
        )
        for event in profile.key_averages()
    }


def jax_kernels(step: Callable[[], Any], gradient: Any) -> Kernels:
    """Return the operations of a compiled JAX step, by primitive and shape, from XLA's trace."""
    import jax

    step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                step()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    events = [
        event
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if "hlo_op" in dict(event.stats) and not event.name.startswith(_AROUND)
    ]
    names = _primitives(gradient)
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for event in events:
        name = names.get(event.name, re.sub(r"\.\d+$", "", event.name))
        seconds[name] += event.duration_ns / 1e9 / CALLS
        calls[name] += 1 / CALLS
    return {name: (seconds[name], calls[name]) for name in seconds}


def _primitives(gradient: Any) -> dict[str, str]:
    """Operation of a compiled program -> its primitive and the shape of its result."""
    program = getattr(gradient, "program", None)
    if program is None:  # a system of several programs
        return {}
    matches = map(_OPERATION.match, program.compiled.as_text().splitlines())
    found = [match.groups() for match in matches if match]
    return {name: f"{path.rsplit('/', 1)[-1]} {shape.split('{')[0]}" for name, shape, path in found}


def torch_facts(prepared: Prepared, batch: Any) -> dict[str, float]:
    """Return the seconds of the first call, and the peak memory of a later one."""
    start = time.perf_counter()
    prepared.gradient(batch)
    first = time.perf_counter() - start
    return {"first call, s": first, "peak, MiB": (prepared.memory(batch) or 0) / MIB}


def jax_facts(prepared: Prepared, batch: Any) -> dict[str, float]:
    """Return the seconds to trace and lower, and to compile, and XLA's count of bytes."""
    program = getattr(prepared.gradient, "program", None)
    if program is None:
        return {}
    traced, compiled = program.build_seconds(prepared.gradient.params, *batch)
    memory = program.compiled.memory_analysis()
    return {
        "tracing, s": traced,
        "compiling, s": compiled,
        "temporary, MiB": memory.temp_size_in_bytes / MIB,
        "outputs, MiB": memory.output_size_in_bytes / MIB,
    }


#: Stack -> tracer: (step, the system's gradient) -> kernels.
TRACERS: dict[str, Callable[[Callable[[], Any], Any], Kernels]] = {
    "torch": torch_kernels,
    "jax": jax_kernels,
}
#: Stack -> function to the facts of a whole system.
FACTS: dict[str, Callable[[Prepared, Any], dict[str, float]]] = {
    "torch": torch_facts,
    "jax": jax_facts,
}

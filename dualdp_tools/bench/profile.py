# SPDX-License-Identifier: Apache-2.0
"""Kernel times of a private step, compared with those of the non-private step.

`python -m benchmarks profile --backend torch --workload gpt` writes
`results/profiles/gpt-torch.md`, which explains the ratio of a row of the speed table. Tracing slows
calls down, so the shares are meaningful, not the milliseconds.
"""

from __future__ import annotations

import platform
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dualdp_tools.bench import gate, layers, measure, results, suites, workloads
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.systems import NON_PRIVATE, Prepared, Setting, Stack

MOST = 18  # number of kernels shown
CALLS = 3  # traced steps; reading a trace takes longer than they do
#: Kernel -> (seconds per step, calls per step).
Kernels = Mapping[str, tuple[float, float]]
# An operation of a compiled program: its name, shape, and the path of its primitive.
_OPERATION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\S+) (?:.*?)metadata=\{op_name=\"([^\"]*)\"")
_AROUND = ("while", "conditional", "call")  # their time is that of the operations inside


def profile(
    stack: Stack,
    workload: str,
    system: str,
    *,
    batch: int | None = None,
    device: str = "cpu",
) -> str:
    """Return the page of one workload; raise a ValueError on an unknown workload or system."""
    stack.choose([system])
    machine = stack.use_device(device)
    points = {name: (options, n) for name, options, n in suites.speed_table(stack.name, device)}
    options, n = points.get(workload, ({}, 32))
    n = batch or n
    if workload in points:
        model = workloads.create(workload, **options)
    else:
        model = layers.create(workload, device)
    setting = gate.calibrate(stack, Setting(model, n, device=device))
    data = stack.load(setting, *model.batch(n))
    prepared = {name: stack.systems[name](setting) for name in (NON_PRIVATE, system)}

    def step(one: Prepared) -> Any:
        return stack.wait(one.gradient(data))

    steps = {name: partial(step, one) for name, one in prepared.items()}
    timings = measure.interleave(steps, Protocol(patience=3.0))
    trace = {"torch": torch_kernels, "jax": jax_kernels}[stack.name]
    kernels = {name: trace(steps[name], one.gradient) for name, one in prepared.items()}
    ratio = timings[system].median / timings[NON_PRIVATE].median
    taken = prepared[system].chosen(data)
    rounds = min(len(timing.seconds) for timing in timings.values())
    return "\n".join(
        [
            f"# {workload}, {n} examples, {stack.name}: {ratio:.2f} times the non-private step",
            "",
            f"`python -m benchmarks {command(workload, stack.name, device)}` on {machine} "
            f"({platform.system()}). Steps are medians of {rounds} interleaved rounds without "
            "tracing.",
            "",
            "| system | step, ms |",
            "|---|---:|",
            *(f"| {name} | {timing.median * 1e3:.2f} |" for name, timing in timings.items()),
            *([f"\n`{system}` takes {taken}."] if taken else []),
            "",
            "Kernels by their own time, under tracing, in percent of the non-private step; those "
            "that cost most more come first.",
            "",
            *_table(kernels[NON_PRIVATE], kernels[system], system),
            "",
        ]
    )


def torch_kernels(step: Callable[[], Any], gradient: Any) -> Kernels:
    """Return the operators of a PyTorch step with their own times."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(CALLS):
            step()
    events = trace.key_averages()
    if any(event.self_device_time_total for event in events):  # of the operators on a GPU
        cpu = torch.autograd.DeviceType.CPU
        times = {
            event: event.self_device_time_total for event in events if event.device_type == cpu
        }
    else:
        times = {event: event.self_cpu_time_total for event in events}
    return {event.key: (time / 1e6 / CALLS, event.count / CALLS) for event, time in times.items()}


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
    names = {}  # operation -> its primitive and the shape of its result
    if hasattr(gradient, "compiled"):  # not a system of several programs
        matches = map(_OPERATION.match, gradient.compiled.as_text().splitlines())
        for name, shape, primitive in (match.groups() for match in matches if match):
            names[name] = f"{primitive.rsplit('/', 1)[-1]} {shape.split('{')[0]}"
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    planes = list(data.planes)
    planes = [plane for plane in planes if plane.name.startswith("/device:GPU")] or planes
    lines = (line for plane in planes for line in plane.lines)
    for event in (event for line in lines for event in line.events):
        if "hlo_op" in dict(event.stats) and not event.name.startswith(_AROUND):
            name = names.get(event.name, re.sub(r"\.\d+$", "", event.name))
            seconds[name] += event.duration_ns / 1e9 / CALLS
            calls[name] += 1 / CALLS
    return {name: (seconds[name], calls[name]) for name in seconds}


def _table(base: Kernels, found: Kernels, system: str) -> list[str]:
    """Markdown rows of kernels, by their additional time."""
    whole = sum(seconds for seconds, _ in base.values())
    total = sum(seconds for seconds, _ in found.values())
    kernels = {
        name: (*base.get(name, (0.0, 0.0)), *found.get(name, (0.0, 0.0)))
        for name in sorted(base.keys() | found.keys())
    }
    ordered = sorted(kernels.items(), key=lambda item: item[1][0] - item[1][2])
    rows = [
        f"| kernel | non-private | calls | {system} | calls | more |",
        "|---|---|---|---|---|---|",
        f"| all | 100.0 | | {100 * total / whole:.1f} | | {100 * (total / whole - 1):+.1f} |",
    ]
    for rank, (name, (before, calls, now, ours)) in enumerate(ordered):
        if rank < MOST or before > 0.05 * whole:
            rows.append(
                f"| `{name}` | {100 * before / whole:.1f} | {calls:g} | {100 * now / whole:.1f} "
                f"| {ours:g} | {100 * (now - before) / whole:+.1f} |"
            )
    return rows


def path_of(workload: str, stack: str, device_type: str = "cpu") -> Path:
    """Return the path of a workload's page, relative to the folder of results."""
    return Path("profiles") / f"{workload}-{results.table_name(stack, device_type)}.md"


def command(workload: str, stack: str, device_type: str = "cpu") -> str:
    """Return the arguments that write a workload's page."""
    device = "" if device_type == "cpu" else f" --device {device_type}"
    return f"profile --backend {stack} --workload {workload}{device}"


def write(
    page: str, workload: str, stack: str, folder: Path | None = None, device_type: str = "cpu"
) -> Path:
    """Write a page and return its path."""
    path = path_of(workload, stack, device_type)
    path = (folder or results.FOLDER / path.parent) / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path

# SPDX-License-Identifier: Apache-2.0
"""Where the time of a private step goes, kernel by kernel, beside the non-private step's.

`python -m benchmarks profile --backend torch --workload lstm` writes
`results/profiles/<workload>-<backend>.md`: what stands between a row of the speed table and its
goal. Tracing slows calls down, so the shares count, not the milliseconds.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import measure, results, suites, workloads
from benchmarks.measure import Protocol
from benchmarks.systems import NON_PRIVATE, Prepared, Setting, Stack

FOLDER = results.FOLDER / "profiles"
MOST = 18  # kernels that are shown
CALLS = 5
#: Kernel -> (seconds per step, calls per step).
Kernels = Mapping[str, tuple[float, float]]


def torch_kernels(step: Callable[[], Any]) -> Kernels:
    """The operators of a PyTorch step by the time they take themselves."""
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


#: Stack -> its tracer.
TRACERS: dict[str, Callable[[Callable[[], Any]], Kernels]] = {"torch": torch_kernels}


def profile(stack: Stack, workload: str, system: str, device: str, command: str) -> str:
    """The page of one workload.

    Raises:
        ValueError: the stack has no tracer, or no system of that name.
    """
    if stack.name not in TRACERS:
        raise ValueError(f"backend={stack.name!r} has no tracer. Expected one of {list(TRACERS)}.")
    stack.choose([system])
    points = {name: (options, n) for name, options, n in suites.SPEED[stack.name]}
    options, n = points.get(workload, ({}, 32))
    model = workloads.create(workload, **options)
    setting = measure.calibrate(stack, Setting(model, n, device=device))
    batch = stack.load(setting, *model.batch(n))
    steps = {
        name: _step(stack, stack.systems[name](setting), batch) for name in (NON_PRIVATE, system)
    }
    timings = measure.interleave(steps, Protocol(rounds=9))
    kernels = {name: TRACERS[stack.name](step) for name, step in steps.items()}
    ratio = timings[system].median / timings[NON_PRIVATE].median
    title = f"{workload}, {n} examples, {stack.name}: {ratio:.2f} times the non-private step"
    return "\n".join(
        [
            f"# {title}",
            "",
            f"`{command}` on {stack.device(device)} ({platform.system()}); "
            f"{timings[system].median * 1e3:.1f} ms against "
            f"{timings[NON_PRIVATE].median * 1e3:.1f} ms, medians of {measure_rounds(timings)} "
            "interleaved rounds without tracing. Kernels by their own time, under tracing, in "
            "percent of the non-private step; those that cost most more come first.",
            "",
            *_table(kernels[NON_PRIVATE], kernels[system], system),
            "",
        ]
    )


def measure_rounds(timings: Mapping[str, measure.Timing]) -> int:
    """The fewest rounds of any system."""
    return min(len(timing.seconds) for timing in timings.values())


def _step(stack: Stack, prepared: Prepared, batch: Any) -> Callable[[], Any]:
    return lambda: stack.wait(prepared.gradient(batch))


def _table(base: Kernels, found: Kernels, system: str) -> list[str]:
    """Markdown rows, by how much more time a kernel takes."""
    whole = sum(seconds for seconds, _ in base.values())
    none = (0.0, 0.0)
    names = sorted(
        base.keys() | found.keys(),
        key=lambda name: base.get(name, none)[0] - found.get(name, none)[0],
    )
    total = sum(seconds for seconds, _ in found.values())
    rows = [
        f"| kernel | non-private | calls | {system} | calls | more |",
        "|---|---|---|---|---|---|",
        f"| all | 100.0 | | {100 * total / whole:.1f} | | {100 * (total / whole - 1):+.1f} |",
    ]
    shown = names[:MOST] + [n for n in names[MOST:] if base.get(n, none)[0] > 0.05 * whole]
    for name in shown:
        (before, calls), (now, ours) = base.get(name, none), found.get(name, none)
        more = 100 * (now - before) / whole
        rows.append(
            f"| `{name}` | {100 * before / whole:.1f} | {calls:g} | {100 * now / whole:.1f} "
            f"| {ours:g} | {more:+.1f} |"
        )
    return rows


def write(page: str, workload: str, backend: str, folder: Path | None = None) -> Path:
    """Write a page and return its path."""
    path = (folder or FOLDER) / f"{workload}-{backend}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path

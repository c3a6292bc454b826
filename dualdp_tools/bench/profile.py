# SPDX-License-Identifier: Apache-2.0
"""Kernel times of a private step, compared with those of the non-private step.

`python -m benchmarks profile --backend torch --workload gpt` writes
`results/profiles/gpt-torch.md`, which explains the ratio of a row of the speed table. Tracing slows
calls down, so the shares are meaningful, not the milliseconds.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dualdp_tools.bench import gate, layers, measure, results, suites, traces, workloads
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.systems import NON_PRIVATE, Prepared, Setting, Stack
from dualdp_tools.bench.traces import Kernels

FOLDER = results.FOLDER / "profiles"
MOST = 18  # number of kernels shown


def profile(
    stack: Stack,
    workload: str,
    system: str,
    *,
    batch: int | None = None,
    device: str = "cpu",
    command: str = "",
) -> str:
    """Return the page of one workload.

    Raises:
        ValueError: the stack has no tracer, or no system of that name.
    """
    if stack.name not in traces.TRACERS:
        known = list(traces.TRACERS)
        raise ValueError(f"backend={stack.name!r} has no tracer. Expected one of {known}.")
    stack.choose([system])
    points = {name: (options, n) for name, options, n in suites.SPEED[stack.name]}
    options, n = points.get(workload, ({}, 32))
    n = batch or n
    if workload in points:
        model = workloads.create(workload, **options)
    else:
        model = layers.create(workload, device)
    setting = gate.calibrate(stack, Setting(model, n, device=device))
    data = stack.load(setting, *model.batch(n))
    prepared = {name: stack.systems[name](setting) for name in (NON_PRIVATE, system)}
    facts = {name: traces.FACTS[stack.name](one, data) for name, one in prepared.items()}
    steps = {name: partial(_step, stack, one, data) for name, one in prepared.items()}
    timings = measure.interleave(steps, Protocol(patience=3.0))
    trace = traces.TRACERS[stack.name]
    kernels = {name: trace(steps[name], one.gradient) for name, one in prepared.items()}
    ratio = timings[system].median / timings[NON_PRIVATE].median
    taken = prepared[system].chosen(data)
    rounds = min(len(timing.seconds) for timing in timings.values())
    return "\n".join(
        [
            f"# {workload}, {n} examples, {stack.name}: {ratio:.2f} times the non-private step",
            "",
            f"`{command}` on {stack.device(device)} ({platform.system()}). Steps are medians of "
            f"{rounds} interleaved rounds without tracing.",
            "",
            *_summary(timings, facts),
            *([f"\n`{system}` takes {taken}."] if taken else []),
            "",
            "Kernels by their own time, under tracing, in percent of the non-private step; those "
            "that cost most more come first.",
            "",
            *_table(kernels[NON_PRIVATE], kernels[system], system),
            "",
        ]
    )


def _step(stack: Stack, prepared: Prepared, batch: Any) -> Any:
    return stack.wait(prepared.gradient(batch))


def _summary(
    timings: Mapping[str, measure.Timing], facts: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Markdown rows of the measurements of each whole system."""
    names = list(dict.fromkeys(name for known in facts.values() for name in known))
    rows = [f"| system | step, ms | {' | '.join(names)} |", f"|---|---:|{'---:|' * len(names)}"]
    for system, timing in timings.items():
        known = facts[system]
        cells = " | ".join(f"{known[name]:.3g}" if name in known else "" for name in names)
        rows.append(f"| {system} | {timing.median * 1e3:.2f} | {cells} |")
    return rows


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


def path_of(workload: str, stack: str) -> Path:
    """Return the path of a workload's page, relative to the folder of results."""
    return Path("profiles") / f"{workload}-{stack}.md"


def write(page: str, workload: str, backend: str, folder: Path | None = None) -> Path:
    """Write a page and return its path."""
    path = (folder or FOLDER) / path_of(workload, backend).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path

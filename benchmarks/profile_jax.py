# SPDX-License-Identifier: Apache-2.0
"""Where a jitted step spends its time and memory: XLA's own trace, beside the non-private step.

`python -m benchmarks.profile_jax cifar10 --batch 64` writes one page.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from benchmarks import systems_jax, workloads
from benchmarks.systems import NON_PRIVATE, Setting
from benchmarks.systems_jax import Program

STACK = systems_jax.STACK
ROUNDS = 20
ROWS = 14
LINE = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\S+) (?:.*?)metadata=\{op_name=\"([^\"]*)\"")


def build_seconds(program: Program, arguments: Any) -> tuple[float, float]:
    """Seconds to trace and lower, and to compile."""
    start = time.perf_counter()
    lowered = program.function.lower(*arguments)
    middle = time.perf_counter()
    program.compiled = lowered.compile()
    return middle - start, time.perf_counter() - middle


def operations(program: Program) -> dict[str, tuple[str, str]]:
    """Name of an operation to its shape and to what of the program it is."""
    found = {}
    for line in program.compiled.as_text().splitlines():
        if match := LINE.match(line):
            name, shape, path = match.groups()
            found[name] = (shape.split("{")[0], path.removeprefix("jit(gradient)/"))
    return found


def microseconds(step: Any, batch: Any) -> Counter[str]:
    """Microseconds of each operation in one step; loops hold those of their bodies too."""
    for _ in range(3):
        jax.block_until_ready(step(batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(ROUNDS):
                jax.block_until_ready(step(batch))
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    total: Counter[str] = Counter()
    for plane in data.planes:
        for event in (event for line in plane.lines for event in line.events):
            if "hlo_op" in dict(event.stats):
                total[event.name] += event.duration_ns / 1e3 / ROUNDS
    return total


def page(name: str, n: int, systems: list[str], **options: int) -> str:
    """The report as Markdown."""
    workload = workloads.create(name, **options)
    setting = Setting(workload, n)
    batch = STACK.load(setting, *workload.batch(n))
    lines = [
        f"# {name}, batch {n}, jax {jax.__version__}",
        "",
        "| system | tracing, s | compiling, s | temporary, MiB | outputs, MiB | step, ms |",
        "|---|---|---|---|---|---|",
    ]
    tables = []
    for system in systems:
        step = STACK.systems[system](setting).gradient
        program = step.program
        traced, compiled = build_seconds(program, (step.params, *batch))
        memory = program.compiled.memory_analysis()
        spent, known = microseconds(step, batch), operations(program)
        start = time.process_time()
        for _ in range(ROUNDS):
            jax.block_until_ready(step(batch))
        milliseconds = (time.process_time() - start) * 1e3 / ROUNDS
        sizes = (memory.temp_size_in_bytes / 2**20, memory.output_size_in_bytes / 2**20)
        lines.append(
            f"| {system} | {traced:.1f} | {compiled:.1f} | {sizes[0]:.1f} | {sizes[1]:.1f} | "
            f"{milliseconds:.2f} |"
        )
        tables += ["", f"## {system}", "", "| operation | us | result | part of the program |"]
        tables += ["|---|---|---|---|"]
        for operation, cost in spent.most_common(ROWS):
            shape, path = known.get(operation, ("", ""))
            tables.append(f"| {operation} | {cost:.0f} | {shape} | {path} |")
    return "\n".join([*lines, "", "Steps in CPU time; operations in wall time, traced.", *tables])


def main() -> None:
    """Write one page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_jax")
    parser.add_argument("workload", choices=sorted(workloads.WORKLOADS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--system", action="append", default=None)
    parser.add_argument("--option", action="append", default=[], help="size, such as image=32")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/profiles"))
    given = parser.parse_args()
    options = {key: int(value) for key, value in (item.split("=") for item in given.option)}
    systems = given.system or [NON_PRIVATE, "dualdp:auto"]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{given.workload}-jax.md"
    path.write_text(page(given.workload, given.batch, systems, **options) + "\n")
    print(path)


if __name__ == "__main__":
    main()

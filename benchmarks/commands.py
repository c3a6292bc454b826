# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: measure, store and report."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import accounting, measure, reports, results, suites, systems
from benchmarks.results import Row

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LIMIT = 900  # seconds of one row
COMMAND = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])

app = typer.Typer(
    help="Measure speed, memory and accounting; every command writes and shows a results file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Quick = Annotated[bool, typer.Option("--quick/--full", help="Toy sizes: shows that all runs.")]
Out = Annotated[Path, typer.Option(help="Folder of the results file.")]
Threads = Annotated[int, typer.Option(help="Processors, the same for every system.", min=1)]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Compute = Annotated[str, typer.Option(help="float32 or bfloat16.")]


def limit_threads(threads: int) -> None:
    """Restrict this process to some processors, before any framework starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if sys.platform == "linux":
        # glibc returns large blocks to the kernel at once; the next step then allocates them
        # again, page by page, which takes up to half of its time, at random.
        libc = ctypes.CDLL(None)
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)


@app.command("row", hidden=True)
def measure_row(
    text: str,
    device: Device = "cpu",
    compute: Compute = "float32",
    rounds: int = 15,
    threads: Threads = 2,
) -> None:
    """Measure one row, given and printed as JSON."""
    limit_threads(threads)
    warnings.filterwarnings("ignore")  # peers warn at every call
    row = Row(**json.loads(text))
    stack = systems.stack(row.stack)
    stack.use_device(device)
    setting = measure.setting_of(row, device, compute)
    protocol = replace(measure.Protocol(), rounds=rounds, memory=row.suite != "first-batch")
    try:
        row = measure.measure(stack, row, setting, protocol)
    except Exception as error:  # whatever a system raises is the reason in its row
        row = replace(row, error=f"{type(error).__name__}: {' '.join(str(error).split())[:240]}")
    print(json.dumps(asdict(row)))


def in_own_process(row: Row, options: list[str]) -> Row:
    """Return the row, measured in a process of its own; one that dies or hangs gets an error."""
    command = [sys.executable, "-m", "benchmarks", "row", json.dumps(asdict(row)), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return replace(row, error=f"not measured: more than {LIMIT} s")
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return replace(row, error=f"the process ended with {done.returncode}: {last[:240]}")
    return Row(**json.loads(done.stdout.strip().splitlines()[-1]))


def run(
    suite: str,
    stacks: list[str],
    workloads: list[str] | None,
    names: list[str] | None,
    device: str,
    compute: str,
    rounds: int,
    threads: int,
    quick: bool,
    out: Path,
) -> None:
    """Measure the rows of a suite, write the results after each, and show the report."""
    todo = [
        row
        for stack in stacks
        for row in suites.rows(suite, stack, workloads=workloads, systems=names, quick=quick)
    ]
    options = ["--device", device, "--compute", compute, "--threads", str(threads)]
    options += ["--rounds", str(3 if quick else rounds)]
    name = systems.stack(stacks[0]).use_device(device)
    done: list[Row] = []
    for row in todo:
        done.append(in_own_process(row, options))
        typer.echo(reports.line(done[-1]), err=True)
        made = results.collect(suite, done, device=name, threads=threads, command=COMMAND)
        written = results.write(made, out)
    typer.echo(reports.markdown(results.read(written)))
    typer.echo(written)


Stacks = Annotated[list[str], typer.Option("--stack", help="torch, jax; or both.")]
Names = Annotated[list[str] | None, typer.Option(help="Only these.")]


@app.command()
def speed(
    stack: Stacks = ["torch", "jax"],  # noqa: B006
    workload: Names = None,
    system: Names = None,
    rounds: int = 15,
    threads: Threads = 2,
    quick: Quick = False,
    out: Out = results.FOLDER,
) -> None:
    """Clipped sum and whole step of every system, time and memory over the non-private ones."""
    run("speed", stack, workload, system, "cpu", "float32", rounds, threads, quick, out)


@app.command("first-batch")
def first_batch(
    stack: Stacks = ["torch", "jax"],  # noqa: B006
    workload: Names = None,
    system: Names = None,
    threads: Threads = 2,
    quick: Quick = False,
    out: Out = results.FOLDER,
) -> None:
    """Seconds of the first call of a process: checks, tracing and compilation included."""
    run("first-batch", stack, workload, system, "cpu", "float32", 3, threads, quick, out)


@app.command()
def gpu(
    stack: Stacks = ["jax", "torch"],  # noqa: B006
    workload: Names = None,
    system: Names = None,
    device: Device = "cuda",
    compute: Compute = "float32",
    rounds: int = 15,
    threads: Threads = 16,
    quick: Quick = False,
    out: Out = results.FOLDER,
) -> None:
    """Speed and memory at sizes that fill a GPU."""
    run("gpu", stack, workload, system, device, compute, rounds, threads, quick, out)


@app.command("accounting")
def measure_accounting(
    threads: Threads = 2, quick: Quick = False, out: Out = results.FOLDER
) -> None:
    """Time and tightness of the accountants beside dp-accounting's and Opacus'."""
    limit_threads(threads)
    rows = list(accounting.rows(quick=quick))
    name = results.processor()
    made = results.collect("accounting", rows, device=name, threads=threads, command=COMMAND)
    written = results.write(made, out)
    typer.echo(reports.markdown(results.read(written)))
    typer.echo(written)


@app.command()
def report(
    file: Annotated[
        list[Path] | None, typer.Argument(help="Results files; all if left out.")
    ] = None,
    readme: Annotated[Path | None, typer.Option(help="Write this page's speed table.")] = None,
) -> None:
    """Show the tables of results files, and write that of the README."""
    paths = file or sorted(results.FOLDER.glob("*.json"))
    found = [results.read(path) for path in paths]
    for one in found:
        typer.echo(reports.markdown(one))
    if readme is not None:
        reports.update(readme, [one for one in found if one.suite == "speed"])


def main() -> None:
    """Run the command line; report a bad argument in one line without a traceback."""
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"benchmarks: {error}", err=True, fg="red")
        raise SystemExit(2) from None

# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: measure, write a results file, show it as tables and figures."""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import profile as profiles
from benchmarks import report as reports
from benchmarks import results, suites, systems, workloads
from benchmarks.measure import Protocol
from benchmarks.results import Row
from benchmarks.suites import Session

QUICK = Protocol(rounds=5, warmup=1, patience=1.0)
QUICK_FOLDER = Path("out/benchmarks")
BACKENDS = ["torch", "jax"]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MODULES = {"accounting": "epsilon", "noise": "noise"}  # suites that need no workload: quantity

app = typer.Typer(
    help="Measure speed, memory and accounting; every command writes and shows a results file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)

Quick = Annotated[bool, typer.Option("--quick/--full", help="Toy sizes: shows that all runs.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results file and its report.")]
Threads = Annotated[int, typer.Option(help="Processors, the same for every system.", min=1)]


def limit_threads(threads: int) -> int:
    """Give this process that many processors, before any framework starts its own threads."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))[:threads]
        os.sched_setaffinity(0, allowed)
        threads = len(allowed)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler is chatty
    keep_freed_memory()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    return threads


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for every system alike.

    glibc hands large blocks back to the kernel at once; the next step then pays for getting them
    again, page by page, at random up to half of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)


def follow(title: str, steps: Iterable[list[Row]]) -> list[Row]:
    """Collect the rows of a suite, saying where it is."""
    rows: list[Row] = []
    with console.status(title) as status:
        for found in steps:
            rows += found
            status.update(f"{title}: {reports.point_name(found[-1])} done" if found else title)
    return rows


def module_rows(suite: str, quick: bool) -> list[Row]:
    """Rows of the module of that name; one row with the reason where it cannot be imported."""
    try:
        module = importlib.import_module(f"benchmarks.{suite}")
    except ModuleNotFoundError as error:
        row = Row(suite=suite, stack="core", workload=suite, system="dualdp",
                  quantity=MODULES[suite], error=systems.reason(error))  # fmt: skip
        return [row]
    return follow(suite, module.measure(quick=quick))


def finish(
    rows: list[Row], *, device: str, threads: int, quick: bool, out: Path | None, suffix: str
) -> None:
    """Write the results file, its tables and figures, and show them."""
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    found = results.collect(rows, device=device, threads=threads, command=command)
    folder = out or (QUICK_FOLDER if quick else results.FOLDER)
    path = results.write(found, folder, suffix)
    for table in reports.tables(found):
        table.show()
    written = reports.write(found, path.with_suffix(""))
    typer.echo("\n".join(str(name) for name in (path, *written)))


def measuring(names: list[str], suffix: str) -> Callable[..., None]:
    """The command that runs these suites."""

    def command(
        backend: Annotated[list[str] | None, typer.Option(help="torch, jax; or both.")] = None,
        workload: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
        system: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
        batch: Annotated[int | None, typer.Option(help="This batch size only.", min=1)] = None,
        rounds: Annotated[int | None, typer.Option(help="Interleaved rounds.", min=3)] = None,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        threads: Threads = 2,
        quick: Quick = False,
        out: Out = None,
    ) -> None:
        threads = limit_threads(threads)
        warnings.filterwarnings("ignore")  # peers warn at every call
        protocol = QUICK if quick else Protocol()
        if rounds is not None:
            protocol = Protocol(rounds, protocol.warmup, protocol.patience)
        sessions = {
            name: Session(
                systems.stack(name), system, workload, batch, protocol, device=device, quick=quick
            )
            for name in backend or BACKENDS
        }
        rows: list[Row] = []
        for suite in names:
            if suite in MODULES:
                rows += module_rows(suite, quick)
                continue
            for name, session in sessions.items():
                rows += follow(f"{suite} {name}", suites.SUITES[suite](session))
        machine = next(iter(sessions.values())).stack.device(device)
        finish(rows, device=machine, threads=threads, quick=quick, out=out, suffix=suffix)

    return command


for _name, _suite in suites.SUITES.items():
    app.command(_name, help=_suite.__doc__)(measuring([_name], f"-{_name}"))
app.command("all", help="Every suite on both stacks.")(measuring(list(results.SUITES), ""))


def measuring_module(suite: str) -> Callable[..., None]:
    """The command that runs the module of that name."""

    def command(quick: Quick = False, threads: Threads = 2, out: Out = None) -> None:
        threads = limit_threads(threads)
        rows = module_rows(suite, quick)
        device = results.processor()
        finish(rows, device=device, threads=threads, quick=quick, out=out, suffix=f"-{suite}")

    return command


app.command("accounting", help="Time and tightness of the accountants.")(
    measuring_module("accounting")
)
app.command("noise", help="Cost of each mode's noise.")(measuring_module("noise"))


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="A results file.")],
    out: Annotated[Path | None, typer.Option(help="Folder; beside the file if left out.")] = None,
) -> None:
    """Tables and figures of a results file."""
    found = results.read(file)
    for table in reports.tables(found):
        table.show()
    for path in reports.write(found, out or file.with_suffix("")):
        typer.echo(path)


@app.command("profile")
def profile_workloads(
    workload: Annotated[list[str], typer.Option(help="Which workloads.")],
    backend: Annotated[str, typer.Option(help="torch.")] = "torch",
    system: Annotated[str, typer.Option(help="Beside the non-private step.")] = "dualdp:auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Threads = 2,
    out: Out = None,
) -> None:
    """Where the time of a private step goes, as a page for each workload."""
    limit_threads(threads)
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    for name in workload:
        page = profiles.profile(systems.stack(backend), name, system, device, command)
        typer.echo(page)
        typer.echo(profiles.write(page, name, backend, out))


@app.command("workloads")
def list_workloads() -> None:
    """The workloads and their numbers of trained parameters."""
    for name in workloads.WORKLOADS:
        typer.echo(f"{name:12} {workloads.create(name).parameters:>12,}")


def main() -> None:
    """Run the command line; a bad argument is one sentence, not a traceback."""
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"benchmarks: {error}", err=True, fg="red")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

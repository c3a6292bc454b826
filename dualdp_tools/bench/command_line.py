# SPDX-License-Identifier: Apache-2.0
"""`dualdp bench`, in a checkout also `python -m benchmarks`: measure, store and report."""

from __future__ import annotations

import ctypes
import gc
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dualdp_tools.bench import (
    accounting,
    marks,
    noise,
    results,
    suites,
    systems,
    workloads,
)
from dualdp_tools.bench import profile as profiles
from dualdp_tools.bench import readme as readmes
from dualdp_tools.bench import report as reports
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.results import Row
from dualdp_tools.bench.session import Session

QUICK_FOLDER = Path("out/benchmarks")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
#: Suites without workloads.
MODULES = {"accounting": accounting.measure, "noise": noise.measure}

app = typer.Typer(
    help="Measure speed, memory and accounting; every command writes and shows a results file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)

Quick = Annotated[bool, typer.Option("--quick/--full", help="Toy sizes: shows that all runs.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results file and its report.")]
Threads = Annotated[int, typer.Option(help="Processors, the same for every system.", min=1)]
Resume = Annotated[
    Path | None, typer.Option(help="The .partial.json of a run that was stopped: go on with it.")
]


def limit_threads(threads: int) -> int:
    """Restrict this process to some processors, before any framework starts its threads."""
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
    """Make the C library keep freed memory, for all systems alike."""
    # glibc returns large blocks to the kernel at once; the next step then allocates them again,
    # page by page, which takes up to half of its time, at random.
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        _call_libc("mallopt", option, 2**31 - 1)


def release_memory() -> None:
    """Give freed memory back to the kernel, and to the other stack on a GPU."""
    gc.collect()  # a system that failed may be in a cycle
    _call_libc("malloc_trim", 0)
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _call_libc(name: str, *arguments: int) -> None:
    """Call a function of the C library, where there is one."""
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function(*arguments)


def command_text() -> str:
    """Return the command line of this process."""
    ours = Path(sys.argv[0]).name == "dualdp"
    return shlex.join([*(["dualdp"] if ours else ["python", "-m", "benchmarks"]), *sys.argv[1:]])


def progress(title: str, steps: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Yield the rows of a suite while showing how far it is and for how long it has run."""
    start = time.perf_counter()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title)
        for number, found in enumerate(steps, 1):
            last = f", the last {reports.point_name(found[-1])}" if found else ""
            bar.update(task, description=f"{title}: {number} points done{last}")
            yield found
    console.print(f"{title}: {time.perf_counter() - start:.0f} s")


def steps_of(names: list[str], sessions: list[Session], quick: bool) -> Iterator[list[Row]]:
    """Yield the rows of these suites, one point at a time."""
    for suite in names:
        if suite in MODULES:
            yield from progress(suite, MODULES[suite](quick=quick))
            continue
        for session in sessions:
            yield from progress(f"{suite} {session.stack.name}", suites.SUITES[suite](session))


def keep(run: results.RunFile, steps: Iterable[list[Row]]) -> Path:
    """Write the rows as they come; on an interrupt, print the partial file and how to resume."""
    try:
        for rows in steps:
            if rows:
                run.add(rows)
            release_memory()
    except BaseException:
        if run.partial is not None:
            typer.secho(
                f"Stopped after {len(run.results.rows)} rows, kept in {run.partial}: show them "
                f"with `report {run.partial}`, go on with --resume {run.partial}",
                err=True,
                fg="yellow",
            )
        raise
    return run.finish()


def show(found: results.Results, folder: Path) -> list[Path]:
    """Print the tables of a results file, and write them with their figures; return the paths."""
    for table in reports.tables(found):
        table.show()
    return reports.write(found, folder)


def measure(
    names: list[str],
    suffix: str,
    sessions: list[Session],
    *,
    device: str,
    threads: int,
    quick: bool,
    out: Path | None,
    resume: Path | None = None,
) -> None:
    """Run suites, write their results file, and show it."""
    device_type = sessions[0].device if sessions else "cpu"
    now = results.collect(
        [], device=device, threads=threads, command=command_text(), device_type=device_type
    )
    if resume is not None:
        stopped = results.read(resume)
        results.check_same(stopped, now, resume)
        # Suites without workloads are quick, and begin again.
        earlier = tuple(row for row in stopped.rows if row.suite not in MODULES)
        sessions = [replace(session, earlier=earlier) for session in sessions]
        now = replace(now, took=stopped.took)
    folder = out or (QUICK_FOLDER if quick else results.FOLDER)
    path = keep(results.RunFile(now, folder, suffix), steps_of(names, sessions, quick))
    typer.echo("\n".join(map(str, (path, *show(results.read(path), path.with_suffix(""))))))


def suite_command(names: list[str], suffix: str) -> Callable[..., None]:
    """Return the command that runs these suites on the stacks."""

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
        resume: Resume = None,
    ) -> None:
        threads = limit_threads(threads)
        warnings.filterwarnings("ignore")  # peers warn at every call
        protocol = Protocol(rounds=rounds) if rounds is not None else None
        stacks = [systems.stack(name) for name in backend or systems.installed()]
        devices = [stack.use_device(device) for stack in stacks]
        measure(
            names,
            "-".join([suffix, *(backend or ())]),
            [Session(stack, system, workload, batch, protocol, device, quick) for stack in stacks],
            device=devices[0],
            threads=threads,
            quick=quick,
            out=out,
            resume=resume,
        )

    return command


for _name, _suite in suites.SUITES.items():
    app.command(_name, help=_suite.__doc__)(suite_command([_name], f"-{_name}"))
app.command("all", help="Every suite on both stacks.")(
    suite_command([*suites.SUITES, *MODULES], "")
)


def module_command(suite: str) -> Callable[..., None]:
    """Return the command that runs a suite without workloads."""

    def command(quick: Quick = False, threads: Threads = 2, out: Out = None) -> None:
        threads, device = limit_threads(threads), results.processor()
        measure([suite], f"-{suite}", [], device=device, threads=threads, quick=quick, out=out)

    return command


app.command("accounting", help="Time and tightness of the accountants.")(
    module_command("accounting")
)
app.command("noise", help="Cost of each mode's noise.")(module_command("noise"))


@app.command()
def report(
    file: Annotated[list[Path] | None, typer.Argument(help="Results files.")] = None,
    out: Annotated[Path | None, typer.Option(help="Beside the files if left out.")] = None,
    readme: Annotated[
        list[Path] | None, typer.Option(help="Write this page's tables between their markers.")
    ] = None,
) -> None:
    """Show and write the tables and figures of results files, and those of a README.

    Without a file: those of the newest committed run of each stack.
    """
    files = file or list(readmes.newest(results.FOLDER).values())
    if not files:
        raise ValueError(f"There is no run in {results.FOLDER}. Name a results file.")
    for path in files:
        folder = path.with_suffix("") if out is None else out / path.stem
        for written in show(results.read(path), folder):
            typer.echo(written)
    for page in readme or ():
        readmes.update(page, files)
        typer.echo(page)


@app.command("profile")
def profile_workloads(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Workloads or layers; those marked in the newest run if left out."),
    ] = None,
    backend: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    system: Annotated[str, typer.Option(help="Beside the non-private step.")] = systems.AUTO,
    batch: Annotated[int | None, typer.Option(help="The speed table's if left out.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Threads = 2,
    out: Out = None,
) -> None:
    """Write a page for each workload about the time of a private step, by kernel."""
    limit_threads(threads)
    warnings.filterwarnings("ignore")
    stack = systems.stack(backend)
    for name in workload or marked(backend, device):
        with console.status(f"Tracing {name} ..."):
            page = profiles.profile(stack, name, system, batch=batch, device=device)
        typer.echo(page)
        typer.echo(profiles.write(page, name, backend, out, device))


def marked(stack: str, device_type: str = "cpu") -> list[str]:
    """Return the workloads that are marked in a stack's newest committed run on a device."""
    path = readmes.newest(results.FOLDER).get(results.table_name(stack, device_type))
    rows = results.read(path).rows if path else []
    rows = [row for row in rows if row.stack == stack]
    return sorted({row.workload for row in rows if marks.reasons(row, rows, device_type)})


@app.command("workloads")
def list_workloads() -> None:
    """List the workloads and their numbers of trained parameters."""
    for name in workloads.WORKLOADS:
        typer.echo(f"{name:12} {workloads.create(name).parameters:>12,}")


def main() -> None:
    """Run the command line; report a bad argument in one line without a traceback."""
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"benchmarks: {error}", err=True, fg="red")
        raise SystemExit(2) from None

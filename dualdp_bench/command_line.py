# SPDX-License-Identifier: Apache-2.0
"""`dualdp bench`, in a checkout also `python -m benchmarks`: measure, keep, show."""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dualdp_bench import marks, results, suites, systems, workloads
from dualdp_bench import profile as profiles
from dualdp_bench import readme as readmes
from dualdp_bench import report as reports
from dualdp_bench.measure import Protocol
from dualdp_bench.results import Row
from dualdp_bench.session import Session

QUICK_FOLDER = Path("out/benchmarks")
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
Resume = Annotated[
    Path | None, typer.Option(help="The .partial.json of a run that was stopped: go on with it.")
]


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
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Between points: what each leaves behind would add up to all that the machine has."""
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Any:
    """A function of the C library, or None where it has no such."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def command_text() -> str:
    """The command of this process, as it can be typed again."""
    ours = Path(sys.argv[0]).name == "dualdp"
    return shlex.join([*(["dualdp"] if ours else ["python", "-m", "benchmarks"]), *sys.argv[1:]])


def follow(title: str, steps: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Hand on the rows of a suite, saying where it is and how long it took."""
    start = time.perf_counter()
    with console.status(title) as status:
        for found in steps:
            status.update(f"{title}: {reports.point_name(found[-1])} done" if found else title)
            yield found
    console.print(f"{title}: {time.perf_counter() - start:.0f} s")


def module_steps(suite: str, quick: bool) -> Iterator[list[Row]]:
    """Rows of the module of that name; one row with the reason where it cannot be imported."""
    try:
        module = importlib.import_module(f"dualdp_bench.{suite}")
    except ModuleNotFoundError as error:
        row = Row(suite=suite, stack="core", workload=suite, system="dualdp",
                  quantity=MODULES[suite], error=systems.reason(error))  # fmt: skip
        yield [row]
        return
    yield from follow(suite, module.measure(quick=quick))


def steps_of(names: list[str], sessions: list[Session], quick: bool) -> Iterator[list[Row]]:
    """The rows of these suites, a point at a time."""
    for suite in names:
        if suite in MODULES:
            yield from module_steps(suite, quick)
            continue
        for session in sessions:
            yield from follow(f"{suite} {session.stack.name}", suites.SUITES[suite](session))


def keep(run: results.Run, steps: Iterable[list[Row]]) -> Path:
    """Write the rows as they come; a run that is stopped says what it leaves and how to go on."""
    try:
        for rows in steps:
            if rows:
                run.add(rows)
            give_back_freed_memory()
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


def finish(path: Path) -> None:
    """Show the tables of a results file, and write them with its figures."""
    found = results.read(path)
    for table in reports.tables(found):
        table.show()
    written = reports.write(found, path.with_suffix(""))
    typer.echo("\n".join(str(name) for name in (path, *written)))


def resumed(resume: Path | None, now: results.Results) -> tuple[tuple[Row, ...], float]:
    """Rows and seconds of a run that goes on; the suites that need no workload begin again."""
    if resume is None:
        return (), 0.0
    earlier = results.read(resume)
    results.check_same(earlier, now, resume)
    return tuple(row for row in earlier.rows if row.suite not in MODULES), earlier.took


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
        resume: Resume = None,
    ) -> None:
        threads = limit_threads(threads)
        warnings.filterwarnings("ignore")  # peers warn at every call
        protocol = Protocol(rounds=rounds) if rounds is not None else None
        stacks = [systems.stack(name) for name in backend or systems.installed()]
        machine = stacks[0].device(device)
        now = results.collect([], device=machine, threads=threads, command=command_text())
        earlier, took = resumed(resume, now)
        sessions = [
            Session(
                stack,
                system,
                workload,
                batch,
                protocol,
                device=device,
                quick=quick,
                earlier=earlier,
            )
            for stack in stacks
        ]
        folder = out or (QUICK_FOLDER if quick else results.FOLDER)
        run = results.Run(replace(now, took=took), folder, "-".join([suffix, *(backend or ())]))
        finish(keep(run, steps_of(names, sessions, quick)))

    return command


for _name, _suite in suites.SUITES.items():
    app.command(_name, help=_suite.__doc__)(measuring([_name], f"-{_name}"))
app.command("all", help="Every suite on both stacks.")(measuring([*suites.SUITES, *MODULES], ""))


def measuring_module(suite: str) -> Callable[..., None]:
    """The command that runs the module of that name."""

    def command(quick: Quick = False, threads: Threads = 2, out: Out = None) -> None:
        threads = limit_threads(threads)
        machine = results.processor()
        now = results.collect([], device=machine, threads=threads, command=command_text())
        folder = out or (QUICK_FOLDER if quick else results.FOLDER)
        finish(keep(results.Run(now, folder, f"-{suite}"), module_steps(suite, quick)))

    return command


app.command("accounting", help="Time and tightness of the accountants.")(
    measuring_module("accounting")
)
app.command("noise", help="Cost of each mode's noise.")(measuring_module("noise"))


@app.command()
def report(
    file: Annotated[list[Path] | None, typer.Argument(help="Results files.")] = None,
    out: Annotated[Path | None, typer.Option(help="Beside the files if left out.")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Write the tables of this README between their markers.")
    ] = None,
) -> None:
    """Tables and figures of results files again, and those of a README.

    Without a file: of the newest committed run of each stack.
    """
    files = file or list(readmes.newest(results.FOLDER).values())
    if not files:
        raise ValueError(f"There is no run in {results.FOLDER}. Name a results file.")
    for path in files:
        found = results.read(path)
        for table in reports.tables(found):
            table.show()
        folder = path.with_suffix("") if out is None else out / path.stem
        for written in reports.write(found, folder):
            typer.echo(written)
    if readme is not None:
        readmes.update(readme, files)
        typer.echo(readme)


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
    """Where the time of a private step goes, as a page for each workload."""
    limit_threads(threads)
    warnings.filterwarnings("ignore")
    stack = systems.stack(backend)
    for name in workload or marked(backend):
        page_command = f"python -m benchmarks profile --backend {backend} --workload {name}"
        page = profiles.profile(
            stack, name, system, batch=batch, device=device, command=page_command
        )
        typer.echo(page)
        typer.echo(profiles.write(page, name, backend, out))


def marked(stack: str) -> list[str]:
    """The workloads that the newest committed run of a stack marks."""
    path = readmes.newest(results.FOLDER).get(stack)
    rows = results.read(path).rows if path else []
    return sorted({row.workload for row in rows if marks.reasons(row, rows) and row.stack == stack})


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

# SPDX-License-Identifier: Apache-2.0
"""Results files: measurements, machine, versions and commit, written atomically.

A file is JSON: the fields of `Results`, whose `rows` hold the fields of `Row`. A quantity that was
not measured is null and `error` or `note` says why; figures and tables come from the file alone.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import dualdp
from dualdp import _validate

SCHEMA = 2
PARTIAL = ".partial"
CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "results"
FOLDER = CHECKOUT if CHECKOUT.is_dir() else Path("out/benchmarks")
SUITES = (
    "run", "layers", "memory", "checks", "correlated", "checkpoints", "frozen", "compiled", "views",
    "finetuning", "tensor-parallel", "accounting", "end-to-end", "scale", "noise",
)  # fmt: skip
STACKS = ("torch", "jax", "core")
DEVICE_TYPES = ("cpu", "cuda")
PACKAGES = (
    "numpy", "scipy", "torch", "jax", "jaxlib", "flax", "optax", "opacus",
    "backpack-for-pytorch", "jax-privacy", "dp-accounting", "prv-accountant",
    "opake-dpsgd", "transformers", "peft",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurement of one system at one point."""

    suite: str  # one of `SUITES`
    stack: str  # one of `STACKS`
    workload: str  # name of the workload, layer or accounting problem
    system: str
    # "gradient" (one clipped sum), "update" (noise and optimizer included), "epoch", "step",
    # "largest batch", "slope", "epsilon", ...
    quantity: str
    options: dict[str, Any] = field(default_factory=dict)  # sizes, as given to the builder
    batch: int | None = None  # examples per step
    seconds: float | None = None  # median over the rounds
    spread: float | None = None  # interquartile range of the seconds
    rounds: int | None = None
    first: float | None = None  # seconds of the first call with compilation, or first epoch
    ratio: float | None = None  # to the non-private step of the same stack in the same run
    memory: int | None = None  # peak bytes beyond the allocations before the step
    memory_ratio: float | None = None  # to that of the non-private step
    axis: str | None = None  # size that was varied: "batch", "width", "rate", ...
    at: float | None = None  # position of this point on its axis
    value: float | None = None  # of a quantity other than time
    error: str | None = None  # why this system has no number here
    note: str | None = None  # information needed to interpret the number


@dataclass(frozen=True, kw_only=True)
class Results:
    """Rows of one run of the benchmarks, with commit, machine, versions and command."""

    commit: str
    dirty: bool
    date: str
    device: str
    threads: int
    versions: dict[str, str]
    command: str
    rows: list[Row]
    took: float = 0.0  # seconds, including those of a resumed run
    schema: int = SCHEMA
    device_type: str = "cpu"  # one of `DEVICE_TYPES`; a file without it is of a CPU


def _is(value: Any, kind: Any) -> bool:
    """True if a JSON value fits an annotation made of plain types, unions, dicts and lists."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, option) for option in get_args(kind))
    plain = get_origin(kind) or kind
    if plain is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, plain) and (plain is not int or not isinstance(value, bool))


def _check_fields(where: str, data: Any, kind: type) -> None:
    """Raise unless `data` has exactly the fields of a dataclass, with values of their types."""
    if not isinstance(data, dict):
        raise ValueError(
            f"{where} is {type(data).__name__}. Expected an object of {kind.__name__}."
        )
    names = [entry.name for entry in fields(kind)]
    wrong = sorted(set(data) ^ set(names))
    if wrong:
        raise ValueError(f"{where} lacks or adds the fields {wrong}. Expected exactly {names}.")
    for name, annotation in get_type_hints(kind).items():
        if not _is(data[name], annotation):
            raise ValueError(f"{where} has {name}={data[name]!r}. Expected {annotation}.")


def validate(data: Any) -> None:
    """Raise a ValueError that names the wrong field unless parsed JSON fits the schema."""
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema={data.get('schema')!r} cannot be read. Expected {SCHEMA}; "
            "run the benchmark again."
        )
    _check_fields("The results file", data, Results)
    if data["device_type"] not in DEVICE_TYPES:
        raise ValueError(f"device_type={data['device_type']!r}. Expected one of {DEVICE_TYPES}.")
    for index, row in enumerate(data["rows"]):
        where = f"Row {index}"
        _check_fields(where, row, Row)
        for name, table in (("suite", SUITES), ("stack", STACKS)):
            if row[name] not in table:
                raise ValueError(f"{where} has {name}={row[name]!r}. Expected one of {table}.")
        for name in ("seconds", "spread", "first", "ratio", "memory", "memory_ratio"):
            number = row[name]
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise ValueError(
                    f"{where} has {name}={number!r}. Expected a finite number >= 0 or null."
                )
        measured = any(row[name] is not None for name in ("seconds", "value", "memory"))
        if not measured and not row["error"]:
            raise ValueError(
                f"{where} ({row['system']} on {row['workload']}) has neither a number nor an "
                "error. Say in `error` why there is none."
            )


def _git(*arguments: str) -> str:
    """Output of a git command, or "" outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def processor() -> str:
    """Return the processor's name, with family and model, since clouds shorten the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    found = {name.strip(): value.strip() for name, _, value in pairs}
    name = found.get("model name") or platform.processor() or platform.machine()
    kind = ", ".join(
        f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found
    )
    return f"{name} ({kind})" if kind else name


def collect(
    rows: Iterable[Row], *, device: str, threads: int, command: str, device_type: str = "cpu"
) -> Results:
    """Return the rows with the commit, versions and other circumstances of this process."""
    versions = {"python": platform.python_version(), "dualdp": dualdp.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return Results(
        commit=_git("rev-parse", "HEAD") or "none",
        dirty=bool(_git("status", "--porcelain", "--untracked-files=no")),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=device,
        device_type=device_type,
        threads=threads,
        versions=versions,
        command=command,
        rows=list(rows),
    )


def table_name(stack: str, device_type: str) -> str:
    """Return the name of a stack's tables and pages: "torch" on a CPU, "torch-cuda" on a GPU."""
    return stack if device_type == "cpu" else f"{stack}-{device_type}"


def slug(text: str) -> str:
    """Return the text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write(results: Results, folder: Path = FOLDER, suffix: str = "") -> Path:
    """Write `<date>-<device><suffix>.json` into the folder and return its path."""
    data = asdict(results)
    validate(data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.date[:10]}-{slug(results.device)}{suffix}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(unfinished, path)
    return path


class RunFile:
    """Rows of a run, written to a partial file after every point until the run is complete."""

    def __init__(self, start: Results, folder: Path, suffix: str) -> None:
        self.results, self._folder, self._suffix = start, folder, suffix
        self._began = time.monotonic() - start.took
        self.partial = write(start, folder, f"{suffix}{PARTIAL}") if start.rows else None

    def add(self, rows: list[Row]) -> None:
        """Add the rows of a point and write the partial file."""
        self.partial = self._write([*self.results.rows, *rows], PARTIAL)

    def _write(self, rows: list[Row], ending: str) -> Path:
        took = round(time.monotonic() - self._began, 3)
        self.results = replace(self.results, rows=rows, took=took)
        return write(self.results, self._folder, f"{self._suffix}{ending}")

    def finish(self) -> Path:
        """Write the complete file, delete the partial one, and return the path."""
        path = self._write(self.results.rows, "")
        if self.partial is not None:
            self.partial.unlink()
        return path


def check_same(earlier: Results, now: Results, path: Path) -> None:
    """Raise a ValueError if a resumed run was measured under other circumstances."""
    for name in ("commit", "dirty", "device", "threads", "versions"):
        was, is_now = getattr(earlier, name), getattr(now, name)
        if was != is_now:
            raise ValueError(
                f"{path} is of {name}={was!r}, but here it is {is_now!r}. Expected the same: the "
                "rows of one file are compared with each other. Start anew without --resume."
            )


def read(path: Path) -> Results:
    """Read a results file back; raise a ValueError about its first fault if it is not one."""
    try:
        with _validate.file_errors("read", path, "a results file that this package wrote"):
            data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}. Expected a file this package wrote."
        ) from None
    if isinstance(data, dict):
        data = {"device_type": "cpu"} | data
    validate(data)
    return Results(**{**data, "rows": [Row(**row) for row in data["rows"]]})

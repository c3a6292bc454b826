# SPDX-License-Identifier: Apache-2.0
"""Results files: rows of one suite, with machine, versions and command; the last run is kept.

A file is JSON: the fields of `Results`, whose `rows` hold those of `Row`. What was not measured
is null, and `error` says why.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import dualdp

FOLDER = Path(__file__).parent / "results"
PACKAGES = (
    *("numpy", "scipy", "torch", "jax", "jaxlib", "flax", "optax", "opacus"),
    *("backpack-for-pytorch", "jax-privacy", "dp-accounting", "opake-dpsgd", "prv-accountant"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one workload, beside the non-private step of the same process.

    Times are medians over interleaved rounds; a spread is the interquartile range of a ratio.
    """

    suite: str  # "speed", "first-batch", "accounting", "gpu"
    stack: str  # "torch", "jax" or "core"
    workload: str  # name of the workload, or of the accounting problem
    system: str
    options: dict[str, Any] = field(default_factory=dict)  # sizes, as given to the builder
    batch: int | None = None  # examples per step
    rounds: int | None = None
    seconds: float | None = None  # of the non-private gradient; in "accounting" of the system
    sum: float | None = None  # time of one clipped sum / non-private gradient
    sum_spread: float | None = None
    step_seconds: float | None = None  # of the non-private whole step: loader, gradient, optimizer
    step: float | None = None  # time of a whole private step / of the non-private one
    step_spread: float | None = None
    first: float | None = None  # seconds of the first call, with all that it compiles and checks
    plain_first: float | None = None  # the same of the non-private gradient
    memory: int | None = None  # peak bytes of one clipped sum
    plain_memory: int | None = None  # the same of the non-private gradient
    value: float | None = None  # epsilon, or noise multiplier
    note: str | None = None
    error: str | None = None  # why there is no number


@dataclass(frozen=True, kw_only=True)
class Results:
    """Rows of one run of a suite, with its circumstances."""

    suite: str
    commit: str
    date: str
    device: str
    threads: int
    versions: dict[str, str]
    command: str
    rows: list[Row]


def processor() -> str:
    """Return the processor's name, with family and model, since clouds shorten the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    found = {name.strip(): value.strip() for name, _, value in pairs}
    name = found.get("model name") or platform.processor() or platform.machine()
    kind = [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found]
    return f"{name} ({', '.join(kind)})" if kind else name


def collect(suite: str, rows: list[Row], *, device: str, threads: int, command: str) -> Results:
    """Return the rows with commit, date and versions of this process."""
    versions = {"python": platform.python_version(), "dualdp": dualdp.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return Results(
        suite=suite,
        commit=found.stdout.strip() or "none",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=device,
        threads=threads,
        versions=versions,
        command=command,
        rows=rows,
    )


def write(results: Results, folder: Path = FOLDER) -> Path:
    """Write `<suite>-<stacks>-<device>.json` in place of the last run, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stacks = "-".join(dict.fromkeys(row.stack for row in results.rows)) or "none"
    device = re.sub(r"[^a-z0-9]+", "-", results.device.lower()).strip("-")
    path = folder / f"{results.suite}-{stacks}-{device}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(results), indent=1) + "\n")
    os.replace(unfinished, path)
    return path


def read(path: Path) -> Results:
    """Read a results file.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        data = json.loads(path.read_text())
        return Results(**{**data, "rows": [Row(**row) for row in data["rows"]]})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is no results file ({error}). Expected one of `python -m benchmarks`."
        ) from None

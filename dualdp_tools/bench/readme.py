# SPDX-License-Identifier: Apache-2.0
"""Speed tables of Markdown pages, written between markers from results files.

A marker is a pair of comments on lines of their own: `<!-- benchmarks:torch -->` and
`<!-- /benchmarks:torch -->` hold every system of the stack, with remarks, and `speed` in the place
of `benchmarks` holds the three fastest. `torch-cuda` is the table of runs on a GPU. The text
between the comments is replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from dualdp_tools.bench import marks, profile, report, results
from dualdp_tools.bench.results import DEVICE_TYPES, PARTIAL, Results, Row, table_name
from dualdp_tools.bench.systems import AUTO, NON_PRIVATE, STACKS

# Packages named above a table, for each stack: the framework, then the peers.
NAMES = {
    "torch": {
        "torch": "PyTorch",
        "opacus": "Opacus",
        "backpack-for-pytorch": "BackPACK",
        "opake-dpsgd": "opake",
    },
    "jax": {"jax": "JAX", "jax-privacy": "jax_privacy"},
}
TABLES = [table_name(stack, kind) for kind in DEVICE_TYPES for stack in STACKS]
QUANTITY = (
    "Time ± its quartile range / peak memory of one clipped gradient sum, as multiples of the "
    "non-private step's"
)


def newest(folder: Path) -> dict[str, Path]:
    """Return name of a table (of `TABLES`) -> newest complete file that has it."""
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        if PARTIAL in path.name:
            continue
        file = results.read(path)
        for stack in {row.stack for row in file.rows if row.suite == "run"}:
            table = table_name(stack, file.device_type)
            found[table] = max(found.get(table, ("", path)), (file.date, path))
    return {table: found[table][1] for table in TABLES if table in found}


def section(stack: str, path: Path, page: Path) -> str:
    """Return the table of all systems of one stack, with remarks, figure and links, for a page."""
    found, rows = _read(stack, path)
    beside = path.with_suffix("")
    to = partial(os.path.relpath, start=page.parent)
    explain = partial(
        marks.remark, rows=found.rows, folder=to(path.parent), device_type=found.device_type
    )
    table = report.pivot("", rows, _cell, explain)
    for column, point in enumerate(table.header[1:], start=1):
        if others := _fastest(rows, point):
            line = next(line for line in table.lines if line[0] == others[0].system)
            line[column] = re.sub(r"^[\d.]+", r"**\g<0>**", line[column])
    remarks = [f"- {remark}" for remark in table.remarks]
    return "\n".join(
        [
            f"{_circumstances(found, stack)} {QUANTITY}:",
            "",
            *table.markdown().splitlines()[2 : 4 + len(table.lines)],
            "",
            *([*remarks, ""] if remarks else []),
            f"![{stack}: time and memory]({to(beside / f'run-{stack}.png')})",
            "",
            f"[All systems, with noise and optimizer, and spread]({to(beside / 'report.md')}); "
            f"`{found.command}`",
        ]
    )


def summary(stack: str, path: Path, page: Path) -> str:
    """Return the table of dualdp and the next two systems of each point, for a page.

    A time that is marked (see `marks`) is a link to the page that explains it.
    """
    found, rows = _read(stack, path)
    to = partial(os.path.relpath, start=page.parent)
    lines = []
    for point in dict.fromkeys(map(report.point_name, rows)):
        plain = next(r for r in rows if (r.system, report.point_name(r)) == (NON_PRIVATE, point))
        fastest = _fastest(rows, point)
        cells = [point, _cell(plain)]
        others = [row for row in fastest if row.system != AUTO][:2]
        for row in [*(row for row in fastest if row.system == AUTO), *others]:
            cell = _cell(row)
            explained = path.parent / profile.path_of(row.workload, stack, found.device_type)
            if marks.reasons(row, found.rows, found.device_type) and explained.exists():
                cell = re.sub(r"^[\d.]+", rf"[\g<0>]({to(explained)})", cell)
            if row is fastest[0]:
                cell = re.sub(r"^\S+", r"**\g<0>**", cell)
            cells.append(cell if row.system == AUTO else f"{row.system} {cell}")
        lines.append(f"| {' | '.join([*cells, *[''] * (5 - len(cells))])} |")
    return "\n".join(
        [
            _circumstances(found, stack),
            "",
            "|  | non-private | dualdp | next | third |",
            "| --- | ---: | ---: | ---: | ---: |",
            *lines,
        ]
    )


def _read(stack: str, path: Path) -> tuple[Results, list[Row]]:
    """Results of a file, and its rows of one stack's speed table; of dualdp only the default."""
    found = results.read(path)
    rows = [
        row
        for row in found.rows
        if (row.suite, row.stack, row.quantity) == ("run", stack, "gradient")
        and (row.system == AUTO or not row.system.startswith(marks.OURS))
    ]
    if not rows:
        raise ValueError(f"{path} has no rows of `run` on {stack}. Expected a file of that suite.")
    return found, rows


def _fastest(rows: Iterable[Row], point: str) -> list[Row]:
    """Timed private systems of a point, the fastest first."""
    here = [r for r in rows if r.system != NON_PRIVATE and report.point_name(r) == point]
    return sorted((row for row in here if row.seconds), key=lambda row: row.seconds or 0)


def _cell(row: Row) -> str:
    """Time and peak memory, as multiples of the non-private step's for other systems."""
    if row.system == NON_PRIVATE or not row.ratio:
        memory = "?" if row.memory is None else report.bytes_text(row.memory)
        return f"{report.time_text(row.seconds or 0)} / {memory}"
    memory = "?" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
    return f"{report.ratio_text(row)} / {memory}"


def _circumstances(found: Results, stack: str) -> str:
    """Sentence with the versions of framework and peers, the machine, date and commit."""
    known = [
        f"{name} {found.versions[package]}"
        for package, name in NAMES[stack].items()
        if package in found.versions
    ]
    beside = f" beside {', '.join(known[1:])}" if known[1:] else ""
    return (
        f"{known[0]}{beside}; {found.device}, {found.threads} threads, {found.date[:10]}, "
        f"commit {found.commit[:9]}."
    )


#: First word of a marker -> function that writes the text between its comments.
WRITERS: dict[str, Callable[[str, Path, Path], str]] = {"benchmarks": section, "speed": summary}


def update(page: Path, files: Iterable[Path]) -> None:
    """Rewrite the tables of a page; those of a GPU are left out of a page without their markers."""
    text = page.read_text()
    by_path = {path: results.read(path) for path in files}
    for path, found in sorted(by_path.items(), key=lambda pair: pair[1].date):  # the newest is last
        for stack in STACKS:
            if ("run", stack, "gradient") in {(r.suite, r.stack, r.quantity) for r in found.rows}:
                table = table_name(stack, found.device_type)
                kind = "speed" if f"<!-- speed:{table} -->" in text else "benchmarks"
                if found.device_type == "cpu" or f"<!-- {kind}:{table} -->" in text:
                    text = put(text, f"{kind}:{table}", WRITERS[kind](stack, path, page))
    page.write_text(text)


def put(text: str, marker: str, body: str) -> str:
    """Return the text with `body` between the two comments of a marker, which must be there."""
    first, last = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, found, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not found or not end:
        raise ValueError(
            f"The page has no pair of markers {first} and {last}. Put both where the table goes."
        )
    return f"{before}{first}\n\n{body}\n\n{last}{after}"

# SPDX-License-Identifier: Apache-2.0
"""The speed tables of a README, written between markers from results files, never by hand.

A page that wants them has, for each stack, two comments on lines of their own:
`<!-- benchmarks:torch -->` and `<!-- /benchmarks:torch -->`. What stands between them is replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from dualdp_bench import marks, report, results
from dualdp_bench.results import PARTIAL, Results, Row
from dualdp_bench.systems import AUTO, NON_PRIVATE, STACKS

# Packages that a table is about, for each stack: ours first, then the peers.
NAMES = {
    "torch": {"torch": "PyTorch", "opacus": "Opacus", "backpack-for-pytorch": "BackPACK"},
    "jax": {"jax": "JAX", "jax-privacy": "jax_privacy"},
}


def newest(folder: Path) -> dict[str, Path]:
    """Stack -> the newest complete file with a speed table of it."""
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        if PARTIAL in path.name:
            continue
        file = results.read(path)
        for stack in {row.stack for row in file.rows if row.suite == "run"}:
            found[stack] = max(found.get(stack, ("", path)), (file.date, path))
    return {stack: found[stack][1] for stack in STACKS if stack in found}


def section(stack: str, path: Path, page: Path) -> str:
    """The table of one stack with its circumstances, figure and links, for a page.

    Raises:
        ValueError: the file has no speed table of the stack.
    """
    found = results.read(path)
    rows = [row for row in found.rows if _is_shown(row, stack)]
    if not rows:
        raise ValueError(f"{path} has no rows of `run` on {stack}. Expected a file of that suite.")
    beside = path.with_suffix("")
    to = partial(os.path.relpath, start=page.parent)
    explain = partial(marks.remark, rows=found.rows, folder=to(path.parent))
    table = report.pivot("", rows, _cell, explain)
    _embolden(table, rows)
    remarks = [f"- {remark}" for remark in table.remarks]
    return "\n".join(
        [
            f"{_versions(found, stack)}; {found.device}, {found.threads} threads, "
            f"{found.date[:10]}, commit {found.commit[:9]}. Time ± its quartile range / peak "
            "memory of one clipped gradient sum, as multiples of the non-private step's:",
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


def _is_shown(row: Row, stack: str) -> bool:
    """Whether a row is of the speed table; of ours only what people get who choose nothing."""
    ours = row.system.startswith(marks.OURS) and row.system != AUTO
    this = (row.suite, row.stack, row.quantity) == ("run", stack, "gradient")
    return this and not ours


def _cell(row: Row) -> str:
    """Time and peak memory; for all but the non-private step as multiples of it."""
    if row.system == NON_PRIVATE or not row.ratio:
        memory = "?" if row.memory is None else report.bytes_text(row.memory)
        return f"{report.time_text(row.seconds or 0)} / {memory}"
    memory = "?" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
    return f"{report.ratio_text(row)} / {memory}"


def _embolden(table: report.Table, rows: Iterable[Row]) -> None:
    """The fastest private system of each point in bold."""
    private = [row for row in rows if row.system != NON_PRIVATE and row.seconds]
    for place, point in enumerate(table.header[1:], start=1):
        here = [row for row in private if report.point_name(row) == point]
        if here:
            best = min(here, key=lambda row: row.seconds or 0).system
            line = next(line for line in table.lines if line[0] == best)
            line[place] = re.sub(r"^[\d.]+", r"**\g<0>**", line[place])


def _versions(found: Results, stack: str) -> str:
    """The framework, and the peers beside it."""
    here = NAMES[stack].items()
    known = [
        f"{name} {found.versions[package]}" for package, name in here if package in found.versions
    ]
    return known[0] + (f" beside {', '.join(known[1:])}" if known[1:] else "")


def update(page: Path, files: Iterable[Path]) -> None:
    """Write the sections of a page anew.

    Args:
        page: with a pair of markers for each stack of the files.
        files: results files.

    Raises:
        ValueError: a pair of markers is missing.
    """
    text = page.read_text()
    for path in files:
        for stack in STACKS:
            if any(_is_shown(row, stack) for row in results.read(path).rows):
                text = put(text, stack, section(stack, path, page))
    page.write_text(text)


def put(text: str, stack: str, body: str) -> str:
    """The text with this body between the markers of a stack.

    Raises:
        ValueError: there are none.
    """
    first, last = f"<!-- benchmarks:{stack} -->", f"<!-- /benchmarks:{stack} -->"
    before, found, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not found or not end:
        raise ValueError(
            f"The page has no pair of markers {first} and {last}. Put both where the table goes."
        )
    return f"{before}{first}\n\n{body}\n\n{last}{after}"

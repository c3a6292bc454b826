# SPDX-License-Identifier: Apache-2.0
"""Reports of results files in Markdown, and the speed table of the README."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.results import Results, Row
from benchmarks.systems import NON_PRIVATE, OURS, STACKS

_MARKERS = re.compile(r"(<!-- speed -->\n).*?(<!-- /speed -->)", re.DOTALL)


def time_text(seconds: float | None) -> str:
    """Return seconds with a suitable unit."""
    if seconds is None:
        return "not known"
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "µs")
    return f"{seconds / units[unit]:.3g} {unit}"


def _ratio(value: float | None, spread: float | None) -> str:
    return "" if value is None else f"{value:.2f} ± {spread or 0:.2f}"


def _memory(row: Row) -> str:
    known = row.memory is not None and row.plain_memory
    return f"{row.memory / row.plain_memory:.2f}" if known else ""


def point(row: Row) -> str:
    """Return the text of a workload with its sizes."""
    sizes = ", ".join(f"{key} {value}" for key, value in row.options.items())
    batch = f", B {row.batch}" if row.batch else ""
    return f"{row.workload}{batch}" + (f" ({sizes})" if sizes else "")


def line(row: Row) -> str:
    """Return one row as a line of text."""
    if row.error:
        return f"{row.stack} {row.workload} {row.system}: {row.error}"
    if row.suite == "accounting":
        return f"{row.workload} {row.system}: {row.value} in {time_text(row.seconds)}"
    return (
        f"{row.stack} {row.workload} {row.system}: sum {_ratio(row.sum, row.sum_spread)} of "
        f"{time_text(row.seconds)}, step {_ratio(row.step, row.step_spread)}, memory "
        f"{_memory(row)}, first {time_text(row.first)}"
    )


def _table(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)) + "\n"


def circumstances(results: Results) -> str:
    """Return machine, versions and command as text."""
    packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return (
        f"{results.device}, {results.threads} threads, {results.date}, commit {results.commit}; "
        f"{packages}. Command: `{results.command}`"
    )


def markdown(results: Results) -> str:
    """Return the report of a results file."""
    parts = [f"## {results.suite}", circumstances(results)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        groups.setdefault((row.stack, point(row)), []).append(row)
    for (stack, name), rows in groups.items():
        parts.append(f"### {stack}: {name}")
        if results.suite == "accounting":
            cells = [
                [r.system, f"{r.value}", time_text(r.seconds), r.error or r.note or ""]
                for r in rows
            ]
            parts.append(_table(["system", "value", "time", "remark"], cells))
            continue
        header = ["system", "clipped sum", "whole step", "peak memory", "first call", "remark"]
        parts.append(_table(header, [_cells(row) for row in rows]))
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    """Ratios of a system; of the non-private step, with which each row begins, its own numbers."""
    remark = row.error or row.note or ""
    if row.system == NON_PRIVATE:
        memory = "" if row.memory is None else f"{row.memory / 2**20:.3g} MiB"
        return [
            *(row.system, time_text(row.seconds), time_text(row.step_seconds), memory),
            *(time_text(row.first), remark),
        ]
    first = "" if row.first is None else f"{time_text(row.first)} ({time_text(row.plain_first)})"
    sums, steps = _ratio(row.sum, row.sum_spread), _ratio(row.step, row.step_spread)
    return [row.system, sums, steps, _memory(row), first, remark]


def speed_table(files: list[Results]) -> str:
    """Return one table, a line a workload: our sum and whole step, and the best peer's sum."""
    measured = [row for results in files for row in results.rows if row.sum]
    columns = [(f"{stack}: clipped sum", "best peer's", "whole step") for stack in STACKS]
    lines = []
    for name in dict.fromkeys(row.workload for row in measured):
        of_stack = [[r for r in measured if (r.stack, r.workload) == (s, name)] for s in STACKS]
        batches = dict.fromkeys(str(row.batch) for rows in of_stack for row in rows)
        cells = [f"{name}, {' and '.join(batches)}"]
        for rows in of_stack:
            ours = next((row for row in rows if row.system == OURS), None)
            peers = [row for row in rows if row.system not in (OURS, NON_PRIVATE)]
            best = min(peers, key=lambda row: row.sum or 0.0, default=None)
            cells += [
                f"{ours.sum:.2f}" if ours else "",
                f"{best.sum:.2f} ({best.system})" if best else "",
                f"{ours.step:.2f}" if ours and ours.step else "",
            ]
        lines.append(cells)
    where = dict.fromkeys(f"{r.device}, {r.threads} threads, {r.date}, {r.commit}" for r in files)
    return f"{_table(['examples per step', *sum(columns, ())], lines)}\n{'; '.join(where)}.\n"


def update(page: Path, files: list[Results]) -> None:
    """Write the speed table between the markers of a page."""
    text = page.read_text()
    if not _MARKERS.search(text):
        raise ValueError(f"{page} has no place for the table. Expected <!-- speed --> markers.")
    page.write_text(_MARKERS.sub(lambda m: f"{m[1]}\n{speed_table(files)}\n{m[2]}", text))

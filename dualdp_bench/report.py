# SPDX-License-Identifier: Apache-2.0
"""A results file as tables, for the terminal and in Markdown; they are never edited by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import rich
from rich.table import Table as RichTable
from rich.text import Text

from dualdp_bench import marks
from dualdp_bench.measure import TAKES
from dualdp_bench.results import Results, Row
from dualdp_bench.systems import NON_PRIVATE

Cell = Callable[[Row], str]
Explain = Callable[[Row], str | None]


@dataclass
class Table:
    """One table: a title, the systems as columns, the points as lines, remarks under it."""

    title: str
    header: list[str]
    lines: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table in Markdown."""
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, rule, *self.lines)]
        remarks = ["", *(f"- {remark}" for remark in self.remarks)] if self.remarks else []
        return "\n".join([f"### {self.title}", "", *lines, *remarks, ""])

    def show(self) -> None:
        """The table in the terminal."""
        table = RichTable(title=self.title, title_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", overflow="fold")
        for line in self.lines:
            table.add_row(*line)
        rich.print(table)
        for remark in self.remarks:
            rich.print(Text(f"  {remark}"))


def time_text(seconds: float) -> str:
    """Seconds with a unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bytes_text(count: float) -> str:
    """Bytes with a unit that suits them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def point_name(row: Row) -> str:
    """Workload and batch, for a column."""
    if row.quantity == "slope":
        return f"{row.workload} by {row.axis}"
    if row.axis is not None:
        return f"{row.axis} {row.at:g}"
    shown = row.batch is not None and row.suite != "memory"
    return f"{row.workload}, B {row.batch}" if shown else row.workload


def sizes_text(row: Row) -> str:
    """The sizes of the workload that stay the same along its axis."""
    fixed = [f"{key} {value}" for key, value in row.options.items() if key != row.axis]
    return f"{row.workload}: {', '.join(fixed)}" if fixed else ""


def ratio_text(row: Row) -> str:
    """How many times the non-private step, ± the quartile range."""
    return f"{row.ratio:.2f} ± {row.spread / row.seconds * row.ratio:.2f}"


def _ratio(row: Row) -> str:
    """The time of the non-private step; for all others how many times that, with the spread."""
    if row.system == NON_PRIVATE or not row.ratio:
        return time_text(row.seconds)
    return ratio_text(row)


def _memory(row: Row) -> str:
    if row.memory is None:
        return "not known"
    plain = row.system == NON_PRIVATE or row.memory_ratio is None
    return bytes_text(row.memory) if plain else f"{row.memory_ratio:.2f}"


def _value(row: Row) -> str:
    return f"{row.value:.4g}"


def _accounting(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:.5g}"
    return value if row.seconds is None else f"{value} in {time_text(row.seconds)}"


def _seconds(row: Row) -> str:
    return time_text(row.seconds)


def _first(row: Row) -> str:
    """Nothing is known of the first epoch without the others."""
    return time_text(row.first) if row.first else "not known"


def _noise(row: Row) -> str:
    return f"{row.value:.2f} ({row.ratio:.2f})"


_MARKED = (_ratio, _seconds)  # cells of times, which may need an explanation
_TIMES = "time over the non-private step's, ± its quartile range"
_PEAKS = "peak memory over the non-private step's"
# Suite -> what its tables show: (title, quantity, cell).
_SHOWN: dict[str, list[tuple[str, str, Cell]]] = {
    "run": [
        (f"Clipped gradient sum: {_TIMES}", "gradient", _ratio),
        (f"With noise and optimizer: {_TIMES}", "update", _ratio),
        (f"Clipped gradient sum: {_PEAKS}", "gradient", _memory),
    ],
    "layers": [(_TIMES, "gradient", _ratio), (_PEAKS, "gradient", _memory)],
    "memory": [("largest batch", "largest batch", _value)],
    "end-to-end": [
        ("time per epoch", "epoch", _seconds),
        ("time of the first epoch, with all that is compiled or proved once", "epoch", _first),
    ],
    "checks": [
        (f"A step of the engine, noise and optimizer included: {_TIMES}", "step", _ratio),
        ("What spot checks cost on average, % of a step without them", "share of checks", _value),
    ],
    "scale": [
        (_TIMES, "gradient", _ratio),
        ("exponent of the cost along one axis", "slope", _value),
    ],
    "accounting": [("epsilon and the time it takes", "epsilon", _accounting)],
    "noise": [("ns per number (over the generator of its precision)", "noise", _noise)],
}


def pivot(title: str, rows: list[Row], cell: Cell, explain: Explain) -> Table:
    """One line per system, one column per point; a reason where there is no number.

    Args:
        title: of the table.
        rows: what it shows.
        cell: a row's text.
        explain: row -> the remark that it needs, or None.
    """
    systems = sorted({row.system: None for row in rows}, key=lambda name: name != NON_PRIVATE)
    points = list(dict.fromkeys(map(point_name, rows)))
    found = {(row.system, point_name(row)): row for row in rows}
    table = Table(title, ["", *points])
    remarks: dict[str, list[str]] = {}  # text -> the systems that it is about; in their order

    def text(row: Row | None) -> str:
        if row is None:
            return ""
        remark = row.error or explain(row)
        if not remark:
            return cell(row)
        about = remarks.setdefault(remark, [])
        about += [row.system] if row.error and row.system not in about else []
        mark = f"({list(remarks).index(remark) + 1})"
        return mark if row.error else f"{cell(row)} {mark}"

    for system in systems:
        table.lines.append([system, *(text(found.get((system, point))) for point in points)])
        taken = [_taken(found.get((system, point))) for point in points]
        if cell is _ratio and any(taken):
            table.lines.append([f"{system} takes", *taken])
    if len(points) > max(len(systems), 8):  # rather long than wide
        grid = zip(table.header, *table.lines, strict=True)
        table.header, *table.lines = [list(cells) for cells in grid]
    table.remarks = list(filter(None, dict.fromkeys(map(sizes_text, rows))))
    for number, (remark, about) in enumerate(remarks.items(), start=1):
        table.remarks.append(f"({number}) {': '.join(filter(None, [', '.join(about), remark]))}")
    return table


def _taken(row: Row | None) -> str:
    """The ways that a system chose for the layers of a point of `layers`."""
    if row is None or row.suite != "layers" or not (row.note or "").startswith(TAKES):
        return ""
    return str(row.note).removeprefix(TAKES)


def _table_of(row: Row) -> tuple[str, str]:
    """Rows with the same answer share a table: all of a suite, or one per swept workload."""
    swept = row.axis is not None and row.quantity != "slope"
    return (row.stack, f"{row.workload} {sizes_text(row)} {row.axis}" if swept else "")


def tables(results: Results, folder: str = "..") -> list[Table]:
    """Every table of a results file.

    Args:
        results: the file.
        folder: where the results lie, seen from the page that shows the tables.
    """
    made = []
    explain = partial(marks.remark, rows=results.rows, folder=folder)
    for suite, shown in _SHOWN.items():
        for title, quantity, cell in shown:
            rows = [row for row in results.rows if (row.suite, row.quantity) == (suite, quantity)]
            for stack, swept in dict.fromkeys(map(_table_of, rows)):
                chosen = [row for row in rows if _table_of(row) == (stack, swept)]
                if cell is _memory and all(row.memory is None for row in chosen):
                    continue
                name = f"{stack}, {chosen[0].workload}" if swept else stack
                marked = explain if cell in _MARKED else lambda row: None
                made.append(pivot(f"{name}: {title}", chosen, cell, marked))
    return made


def circumstances(results: Results) -> str:
    """Machine, versions and command in two lines."""
    packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    state = " with uncommitted changes" if results.dirty else ""
    took = f" ({results.took / 60:.0f} minutes)" if results.took else ""
    return (
        f"{results.device}, {results.threads} threads, {results.date[:10]}, "
        f"commit {results.commit[:12]}{state}; {packages}.\n\nCommand: `{results.command}`{took}"
    )


def write(results: Results, folder: Path) -> list[Path]:
    """Write `report.md` and, where matplotlib is, the figures into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    if importlib.util.find_spec("matplotlib"):
        from dualdp_bench import figures

        pictures = figures.draw(results, folder)
    links = "\n".join(f"![{path.stem}]({path.name})\n" for path in pictures)
    body = "\n".join(table.markdown() for table in tables(results))
    report = folder / "report.md"
    report.write_text(f"# Benchmarks\n\n{circumstances(results)}\n\n{body}\n{links}")
    return [report, *pictures]

# SPDX-License-Identifier: Apache-2.0
"""Tables of a results file, for the terminal and in Markdown."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import rich
from rich.table import Table as RichTable
from rich.text import Text

from dualdp_tools.bench import marks
from dualdp_tools.bench.measure import TAKES
from dualdp_tools.bench.results import Results, Row
from dualdp_tools.bench.systems import NON_PRIVATE

Cell = Callable[[Row], str]
Explain = Callable[[Row], str | None]


@dataclass
class Table:
    """Table with a title, systems and points as its two axes, and remarks."""

    title: str
    header: list[str]
    lines: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, rule, *self.lines)]
        remarks = ["", *(f"- {remark}" for remark in self.remarks)] if self.remarks else []
        return "\n".join([f"### {self.title}", "", *lines, *remarks, ""])

    def show(self) -> None:
        """Print the table to the terminal."""
        table = RichTable(title=self.title, title_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", overflow="fold")
        for line in self.lines:
            table.add_row(*line)
        rich.print(table)
        for remark in self.remarks:
            rich.print(Text(f"  {remark}"))


def time_text(seconds: float) -> str:
    """Return seconds with a suitable unit."""
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "µs")
    return f"{seconds / units[unit]:.3g} {unit}"


def bytes_text(count: float) -> str:
    """Return bytes with a suitable unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def point_name(row: Row) -> str:
    """Return the text of a point: workload and batch, or the position on the axis."""
    if row.quantity == "slope":
        return f"{row.workload} by {row.axis}"
    if row.axis is not None:
        return f"{row.axis} {row.at:g}"
    shown = row.batch is not None and row.suite != "memory"
    return f"{row.workload}, B {row.batch}" if shown else row.workload


def sizes_text(row: Row) -> str:
    """Return the sizes of the workload that are constant along its axis."""
    fixed = [f"{key} {value}" for key, value in row.options.items() if key != row.axis]
    return f"{row.workload}: {', '.join(fixed)}" if fixed else ""


def ratio_text(row: Row) -> str:
    """Return the time as a multiple of the non-private step's, ± the quartile range."""
    return f"{row.ratio:.2f} ± {row.spread / row.seconds * row.ratio:.2f}"


def _ratio(row: Row) -> str:
    """Time of the non-private step; for other systems the multiple of that, with its spread."""
    is_plain = row.system == NON_PRIVATE or not row.ratio
    return time_text(row.seconds) if is_plain else ratio_text(row)


def _memory(row: Row) -> str:
    """Peak memory of the non-private step; for other systems the multiple of that."""
    if row.memory is None:
        return "not known"
    is_plain = row.system == NON_PRIVATE or row.memory_ratio is None
    return bytes_text(row.memory) if is_plain else f"{row.memory_ratio:.2f}"


def _value(row: Row) -> str:
    return f"{row.value:.4g}"


def _accounting(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:.5g}"
    return value if row.seconds is None else f"{value} in {time_text(row.seconds)}"


def _seconds(row: Row) -> str:
    return time_text(row.seconds)


def _first(row: Row) -> str:
    return time_text(row.first) if row.first else "not known"


def _noise(row: Row) -> str:
    return f"{row.value:.2f} ({row.ratio:.2f})"


_MARKED = (_ratio, _seconds)  # cells of times, which may need an explanation
_TIMES = "time over the non-private step's, ± its quartile range"
_PEAKS = "peak memory over the non-private step's"
# Suite -> its tables: (title, quantity, cell).
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
    "correlated": [
        (f"A step of the engine, noise and optimizer included: {_TIMES}", "step", _ratio),
    ],
    "checkpoints": [
        (f"A step with and without activation checkpoints: {_TIMES}", "step", _ratio),
        (f"A step with and without activation checkpoints: {_PEAKS}", "step", _memory),
    ],
    "frozen": [
        (f"A step of adapters over a frozen base: {_TIMES}", "step", _ratio),
        (f"A step of adapters over a frozen base: {_PEAKS}", "step", _memory),
        ("All weights, MiB", "weights", _value),
    ],
    "compiled": [
        (f"A clipped gradient sum, eager and compiled: {_TIMES}", "gradient", _ratio),
        ("Private over non-private, both compiled", "over compiled", _value),
    ],
    "views": [
        (f"Clipped gradient sum of examples with 8 views each: {_TIMES}", "gradient", _ratio),
        (f"Clipped gradient sum of examples with 8 views each: {_PEAKS}", "gradient", _memory),
    ],
    "finetuning": [
        (f"A step with noise and optimizer: {_TIMES}", "update", _ratio),
        (f"Its clipped gradient sum: {_PEAKS}", "update", _memory),
        ("Loss on new rows after the same steps, noise multiplier and C", "loss", _value),
    ],
    "tensor-parallel": [
        (f"Clipped gradient sum of a model cut in two: {_TIMES}", "gradient", _ratio),
    ],
    "scale": [
        (_TIMES, "gradient", _ratio),
        ("exponent of the cost along one axis", "slope", _value),
    ],
    "accounting": [("epsilon and the time it takes", "epsilon", _accounting)],
    "noise": [("ns per number (over the generator of its precision)", "noise", _noise)],
}


def pivot(title: str, rows: list[Row], cell: Cell, explain: Explain) -> Table:
    """Return a table with one line per system and one column per point."""
    systems = sorted({row.system: None for row in rows}, key=lambda name: name != NON_PRIVATE)
    points = list(dict.fromkeys(map(point_name, rows)))
    found = {(row.system, point_name(row)): row for row in rows}
    table = Table(title, ["", *points])
    remarks: dict[str, list[str]] = {}  # text -> systems it applies to, in order
    for system in systems:
        line, chosen = [system], [f"{system} takes"]
        for point in points:
            row = found.get((system, point))
            is_chosen = row is not None and row.suite == "layers" and cell is _ratio
            note = (row.note or "") if is_chosen else ""
            chosen.append(note.removeprefix(TAKES) if note.startswith(TAKES) else "")
            remark = row and (row.error or explain(row))
            text = "" if row is None or row.error else cell(row)
            if remark:
                about = remarks.setdefault(remark, [])
                about += [system] if row.error and system not in about else []
                mark = f"({list(remarks).index(remark) + 1})"
                text = f"{text} {mark}" if text else mark
            line.append(text)
        table.lines += [line, chosen] if any(chosen[1:]) else [line]
    if len(points) > max(len(systems), 8):  # transposed: long rather than wide
        grid = zip(table.header, *table.lines, strict=True)
        table.header, *table.lines = [list(cells) for cells in grid]
    table.remarks = list(filter(None, dict.fromkeys(map(sizes_text, rows))))
    for number, (remark, about) in enumerate(remarks.items(), start=1):
        table.remarks.append(f"({number}) {': '.join(filter(None, [', '.join(about), remark]))}")
    return table


def tables(results: Results, folder: str = "..") -> list[Table]:
    """Return every table of a file; `folder` is the path from the page to the results."""
    made = []
    explain = partial(
        marks.remark, rows=results.rows, folder=folder, device_type=results.device_type
    )
    for suite, shown in _SHOWN.items():
        for title, quantity, cell in shown:
            groups: dict[tuple[str, str], list[Row]] = {}  # by stack and swept workload
            for row in results.rows:
                if (row.suite, row.quantity) == (suite, quantity):
                    swept = row.axis is not None and row.quantity != "slope"
                    name = f"{row.workload} {sizes_text(row)} {row.axis}" if swept else ""
                    groups.setdefault((row.stack, name), []).append(row)
            for (stack, swept), rows in groups.items():
                if cell is _memory and all(row.memory is None for row in rows):
                    continue
                name = f"{stack}, {rows[0].workload}" if swept else stack
                marked = explain if cell in _MARKED else lambda row: None
                made.append(pivot(f"{name}: {title}", rows, cell, marked))
    return made


def circumstances(results: Results) -> str:
    """Return machine, versions and command as text."""
    packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    state = " with uncommitted changes" if results.dirty else ""
    took = f" ({results.took / 60:.0f} minutes)" if results.took else ""
    return (
        f"{results.device}, {results.threads} threads, {results.date[:10]}, "
        f"commit {results.commit[:12]}{state}; {packages}.\n\nCommand: `{results.command}`{took}"
    )


def write(results: Results, folder: Path) -> list[Path]:
    """Write `report.md` and, if matplotlib is installed, the figures; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    if importlib.util.find_spec("matplotlib"):
        from dualdp_tools.bench import figures

        pictures = figures.draw(results, folder)
    links = "\n".join(f"![{path.stem}]({path.name})\n" for path in pictures)
    body = "\n".join(table.markdown() for table in tables(results))
    report = folder / "report.md"
    report.write_text(f"# Benchmarks\n\n{circumstances(results)}\n\n{body}\n{links}")
    return [report, *pictures]

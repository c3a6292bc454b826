# SPDX-License-Identifier: Apache-2.0
"""The figures of a results file: bars of ratios, lines over batch size and over model size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

from benchmarks.results import Results, Row, slug  # noqa: E402
from benchmarks.systems import LOOP, NON_PRIVATE  # noqa: E402

OURS = "dualdp:"
# One colour per system in every figure: ours blue, the non-private step black, peers by name.
_BLUES = ("#0b3d91", "#2e6fd0", "#6ea0e8", "#a5c5f2", "#cfe0f9")
_OTHERS = ("#c44e52", "#dd8452", "#937860", "#55a868", "#8172b3", "#da8bc3", "#8c8c8c")


def colours(systems: Iterable[str]) -> dict[str, str]:
    """System -> colour."""
    blues, others = iter(_BLUES * 3), iter(_OTHERS * 3)
    chosen = {}
    for name in systems:
        if name == NON_PRIVATE:
            chosen[name] = "black"
        else:
            chosen[name] = next(blues if name.startswith(OURS) else others)
    return chosen


def _systems(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.system for row in rows))


def _label(row: Row) -> str:
    return f"{row.workload}\nB {row.batch}"


def _layer(row: Row) -> str:
    """Panel of a single layer or of one sweep of the toy network."""
    if row.workload != "toy_cnn":
        return f"{row.workload} by {row.axis}"
    return f"{row.options['depth']} convs, kernel {row.options['kernel']}, by {row.axis}"


def bars(rows: list[Row], value: Callable[[Row], float | None], title: str) -> Figure | None:
    """One group of bars per point: how many times the non-private step, on a log axis."""
    rows = [row for row in rows if row.system != NON_PRIVATE and value(row)]
    if not rows:
        return None
    points, systems = list(dict.fromkeys(map(_label, rows))), _systems(rows)
    paint = colours(systems)
    figure, axes = plt.subplots(figsize=(max(5.0, 1.6 * len(points) + 2), 3.6))
    width = 0.85 / len(systems)
    for index, system in enumerate(systems):
        found = {_label(row): value(row) for row in rows if row.system == system}
        places = [points.index(point) + (index + 0.5) * width - 0.425 for point in found]
        axes.bar(places, list(found.values()), width, label=system, color=paint[system])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xticks(range(len(points)), points, fontsize=8)
    axes.set_ylabel(title)
    _finish(figure, axes)
    return figure


def lines(rows: list[Row], panel: Callable[[Row], str], label: str) -> Figure | None:
    """Small multiples: seconds of every system along an axis, both scales logarithmic."""
    rows = [row for row in rows if row.seconds]
    panels = list(dict.fromkeys(map(panel, rows)))
    if not panels:
        return None
    paint = colours(_systems(rows))
    columns = min(len(panels), 4)
    height = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        height, columns, figsize=(3.4 * columns + 1, 3.2 * height), squeeze=False
    )
    for axes, name in zip(grid.flat, panels, strict=False):
        chosen = [row for row in rows if panel(row) == name]
        for system in paint:
            points = sorted((row.at, row.seconds) for row in chosen if row.system == system)
            places, seconds = zip(*points, strict=True) if points else ((), ())
            style = {"color": paint[system], "linewidth": 2 if system.startswith(OURS) else 1}
            axes.plot(places, seconds, marker="o", markersize=3, label=system, **style)
        axes.set(title=name, xlabel=chosen[0].axis, ylabel=label, xscale="log", yscale="log")
        axes.minorticks_off()
        ticks = sorted({row.at for row in chosen})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    _finish(figure, grid.flat[0])
    return figure


def _finish(figure: Figure, axes: Axes) -> None:
    """One legend beside the figure."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    figure.set_layout_engine("constrained")


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw every figure the results have rows for, and return the files."""
    paths = []
    for stack in dict.fromkeys(row.stack for row in results.rows):
        rows = [row for row in results.rows if row.stack == stack and row.system != LOOP]

        def chosen(suite: str, *quantities: str, rows: list[Row] = rows) -> list[Row]:
            return [row for row in rows if row.suite == suite and row.quantity in quantities]

        speed, single = chosen("run", "gradient"), chosen("layers", "gradient")
        made = {
            "speed": bars(speed, lambda row: row.ratio, f"{stack}: time / non-private"),
            "memory": bars(speed, lambda row: row.memory_ratio, f"{stack}: peak / non-private"),
            "layers": lines(single, _layer, "seconds"),
            "epochs": lines(
                chosen("end-to-end", "epoch"),
                lambda row: row.workload,
                "seconds per epoch",
            ),
            "scale": lines(
                chosen("scale", "gradient"),
                lambda row: f"{row.workload} by {row.axis}",
                "seconds",
            ),
        }
        for name, figure in made.items():
            if figure is not None:
                paths.append(folder / f"{name}-{slug(stack)}.png")
                figure.savefig(paths[-1], dpi=110)
                plt.close(figure)
    return paths

# SPDX-License-Identifier: Apache-2.0
"""The figures of a results file: bars of ratios; lines over batch, model size and epochs."""

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

from dualdp_bench.marks import OURS  # noqa: E402
from dualdp_bench.results import Results, Row, slug  # noqa: E402
from dualdp_bench.systems import AUTO, LOOP, NON_PRIVATE  # noqa: E402

EPOCHS = 20  # of the cumulative curve
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


def _dashes(system: str, paint: Iterable[str]) -> str:
    """Solid, but for those of ours that must share a blue with another."""
    ours = [name for name in paint if name.startswith(OURS)]
    return "--" if system in ours[len(_BLUES) :] else "-"


def _systems(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.system for row in rows))


def _label(row: Row) -> str:
    return f"{row.workload}\nB {row.batch}"


def _layer(row: Row) -> str:
    """Panel of a single layer or of one sweep of the toy network."""
    if row.workload != "toy_cnn":
        return f"{row.workload} by {row.axis}"
    return f"{row.options['depth']} convs, kernel {row.options['kernel']}, by {row.axis}"


def bars(rows: list[Row], stack: str) -> Figure | None:
    """Time above, memory below, as multiples of the non-private step's on a log axis.

    One group of bars per point, one bar per system.
    """
    rows = [row for row in rows if row.system != NON_PRIVATE and row.ratio]
    if not rows:
        return None
    points, paint = list(dict.fromkeys(map(_label, rows))), colours(_systems(rows))
    size = (max(5.0, 1.6 * len(points) + 2), 5.6)
    figure, (above, below) = plt.subplots(2, 1, figsize=size, sharex=True)
    _groups(above, rows, lambda row: row.ratio, paint)
    _groups(below, rows, lambda row: row.memory_ratio, paint)
    above.set_ylabel(f"{stack}: time / non-private")
    below.set_ylabel("peak memory / non-private")
    below.set_xticks(range(len(points)), points, fontsize=8)
    _finish(figure, above)
    return figure


def _groups(
    axes: Axes, rows: list[Row], value: Callable[[Row], float | None], paint: dict[str, str]
) -> None:
    points = list(dict.fromkeys(map(_label, rows)))
    width = 0.85 / len(paint)
    for index, (system, colour) in enumerate(paint.items()):
        found = {_label(row): value(row) for row in rows if row.system == system and value(row)}
        places = [points.index(point) + (index + 0.5) * width - 0.425 for point in found]
        axes.bar(places, list(found.values()), width, label=system, color=colour)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def cumulative(rows: list[Row]) -> Figure | None:
    """Seconds since nothing was there, epoch after epoch, at each workload's largest batch.

    As in Fig. 4 of the Opacus paper: what is compiled once makes a first epoch slow.
    """
    rows = [row for row in rows if row.seconds and row.first]
    largest = {
        row.workload: max(r.batch for r in rows if r.workload == row.workload) for row in rows
    }
    if not largest:
        return None
    paint, epochs = colours(_systems(rows)), range(1, EPOCHS + 1)
    figure, grid = plt.subplots(
        1, len(largest), figsize=(3.4 * len(largest) + 1, 3.4), squeeze=False
    )
    for axes, (workload, n) in zip(grid.flat, largest.items(), strict=True):
        for row in (row for row in rows if (row.workload, row.batch) == (workload, n)):
            seconds = [row.first + (epoch - 1) * row.seconds for epoch in epochs]
            wide = 2 if row.system == AUTO else 1
            axes.plot(epochs, seconds, label=row.system, color=paint[row.system], linewidth=wide)
        axes.set(title=f"{workload}, B {n}", xlabel="epoch", ylabel="seconds in all", yscale="log")
    _finish(figure, grid.flat[0])
    return figure


def lines(
    rows: list[Row],
    panel: Callable[[Row], str],
    label: str,
    value: Callable[[Row], float | None] = lambda row: row.seconds,
) -> Figure | None:
    """Small multiples: a number of every system along an axis, both scales logarithmic."""
    rows = [row for row in rows if value(row)]
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
            points = sorted((row.at, value(row)) for row in chosen if row.system == system)
            places, values = zip(*points, strict=True) if points else ((), ())
            style = {"color": paint[system], "linestyle": _dashes(system, paint)}
            wide = 2 if system == AUTO else 1
            axes.plot(
                places, values, marker="o", markersize=3, label=system, linewidth=wide, **style
            )
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
        everything = [row for row in results.rows if row.stack == stack]
        rows = [row for row in everything if row.system != LOOP]

        def chosen(suite: str, *quantities: str, rows: list[Row] = rows) -> list[Row]:
            return [row for row in rows if row.suite == suite and row.quantity in quantities]

        # The loop is one of the strategies that Rochette et al. compare.
        swept = [row for row in chosen("layers", "gradient", rows=everything) if row.axis]
        epochs = chosen("end-to-end", "epoch")
        made = {
            "run": bars(chosen("run", "gradient"), stack),
            "layers": lines(swept, _layer, "seconds"),
            "layers-memory": lines(
                swept, _layer, "peak / non-private", lambda row: row.memory_ratio
            ),
            "epochs": lines(epochs, lambda row: row.workload, "seconds per epoch"),
            "first-epochs": cumulative(epochs),
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

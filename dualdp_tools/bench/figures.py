# SPDX-License-Identifier: Apache-2.0
"""Figures of a results file: bars of ratios; lines over batch, model size and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

from dualdp_tools.bench.marks import OURS  # noqa: E402
from dualdp_tools.bench.results import Results, Row, slug  # noqa: E402
from dualdp_tools.bench.systems import AUTO, LOOP, NON_PRIVATE  # noqa: E402

EPOCHS = 20  # length of the cumulative curve
# One colour per system in every figure: ours blue, the non-private step black, peers by name.
_BLUES = ("#0b3d91", "#2e6fd0", "#6ea0e8", "#a5c5f2", "#cfe0f9")
_OTHERS = ("#c44e52", "#dd8452", "#937860", "#55a868", "#8172b3", "#da8bc3", "#8c8c8c")


def styles(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return system -> label, colour and line; dashes for ours that share a colour with another."""
    blues, others, made = iter(_BLUES * 3), iter(_OTHERS * 3), {}
    for name in dict.fromkeys(row.system for row in rows):
        shared = sum(other.startswith(OURS) for other in made) >= len(_BLUES)
        is_ours = name.startswith(OURS)
        made[name] = {
            "label": name,
            "color": "black" if name == NON_PRIVATE else next(blues if is_ours else others),
            "linestyle": "--" if is_ours and shared else "-",
            "linewidth": 2 if name == AUTO else 1,
        }
    return made


def _label(row: Row) -> str:
    return f"{row.workload}\nB {row.batch}"


def _layer(row: Row) -> str:
    """Panel of a single layer or of one sweep of the toy network."""
    if row.workload != "toy_cnn":
        return f"{row.workload} by {row.axis}"
    return f"{row.options['depth']} convs, kernel {row.options['kernel']}, by {row.axis}"


def bars(rows: list[Row], stack: str) -> Figure | None:
    """Return bars of time (top) and memory (bottom) over the non-private step's, on a log axis.

    One group of bars per point, one bar per system.
    """
    rows = [row for row in rows if row.system != NON_PRIVATE and row.ratio]
    if not rows:
        return None
    points = list(dict.fromkeys(map(_label, rows)))
    size = (max(5.0, 1.6 * len(points) + 2), 5.6)
    figure, both = plt.subplots(2, 1, figsize=size, sharex=True)
    shown = {f"{stack}: time / non-private": "ratio", "peak memory / non-private": "memory_ratio"}
    for axes, (label, name) in zip(both, shown.items(), strict=True):
        drawn = styles(rows)
        width = 0.85 / len(drawn)
        for index, (system, style) in enumerate(drawn.items()):
            found = {_label(row): getattr(row, name) for row in rows if row.system == system}
            found = {point: value for point, value in found.items() if value}
            at = [points.index(point) + (index + 0.5) * width - 0.425 for point in found]
            axes.bar(at, list(found.values()), width, label=system, color=style["color"])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_ylabel(label)
    both[1].set_xticks(range(len(points)), points, fontsize=8)
    return _with_legend(figure, both[0])


def cumulative(rows: list[Row]) -> Figure | None:
    """Return cumulative seconds by epoch from the start, at each workload's largest batch.

    As in Fig. 4 of the Opacus paper: compilation makes a first epoch slow.
    """
    rows = [row for row in rows if row.seconds and row.first]
    largest: dict[str, int] = {}
    for row in rows:
        largest[row.workload] = max(row.batch, largest.get(row.workload, 0))
    if not largest:
        return None
    drawn, epochs, size = styles(rows), range(1, EPOCHS + 1), (3.4 * len(largest) + 1, 3.4)
    figure, grid = plt.subplots(1, len(largest), figsize=size, squeeze=False)
    for axes, (workload, n) in zip(grid.flat, largest.items(), strict=True):
        for row in (row for row in rows if (row.workload, row.batch) == (workload, n)):
            seconds = [row.first + (epoch - 1) * row.seconds for epoch in epochs]
            axes.plot(epochs, seconds, **drawn[row.system] | {"linestyle": "-"})
        axes.set(title=f"{workload}, B {n}", xlabel="epoch", ylabel="seconds in all", yscale="log")
    return _with_legend(figure, grid.flat[0])


def lines(
    rows: list[Row], panel: Callable[[Row], str], label: str, name: str = "seconds"
) -> Figure | None:
    """Return small multiples: the field `name` of every system along an axis, on log-log axes."""
    rows = [row for row in rows if getattr(row, name)]
    panels = list(dict.fromkeys(map(panel, rows)))
    if not panels:
        return None
    columns = min(len(panels), 4)
    height = math.ceil(len(panels) / columns)
    size = (3.4 * columns + 1, 3.2 * height)
    figure, grid = plt.subplots(height, columns, figsize=size, squeeze=False)
    for axes, title in zip(grid.flat, panels, strict=False):
        chosen = [row for row in rows if panel(row) == title]
        for system, style in styles(rows).items():
            points = sorted((row.at, getattr(row, name)) for row in chosen if row.system == system)
            at, values = zip(*points, strict=True) if points else ((), ())
            axes.plot(at, values, marker="o", markersize=3, **style)
        axes.set(title=title, xlabel=chosen[0].axis, ylabel=label, xscale="log", yscale="log")
        axes.minorticks_off()
        ticks = sorted({row.at for row in chosen})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    return _with_legend(figure, grid.flat[0])


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    """Figure with one legend beside it."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    figure.set_layout_engine("constrained")
    return figure


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw every figure for which the results have rows, and return the files."""
    paths = []
    for stack in dict.fromkeys(row.stack for row in results.rows):
        rows = [row for row in results.rows if row.stack == stack]

        def chosen(suite: str, quantity: str, rows: list[Row] = rows) -> list[Row]:
            return [row for row in rows if (row.suite, row.quantity) == (suite, quantity)]

        # Of `layers` with the loop: it is one of the strategies that Rochette et al. compare.
        swept = [row for row in chosen("layers", "gradient") if row.axis]
        rows = [row for row in rows if row.system != LOOP]
        epochs = chosen("end-to-end", "epoch", rows)
        scaled = chosen("scale", "gradient", rows)
        made = {
            "run": bars(chosen("run", "gradient", rows), stack),
            "layers": lines(swept, _layer, "seconds"),
            "layers-memory": lines(swept, _layer, "peak / non-private", "memory_ratio"),
            "epochs": lines(epochs, lambda row: row.workload, "seconds per epoch"),
            "first-epochs": cumulative(epochs),
            "scale": lines(scaled, lambda row: f"{row.workload} by {row.axis}", "seconds"),
        }
        for name, figure in made.items():
            if figure is not None:
                paths.append(folder / f"{name}-{slug(stack)}.png")
                figure.savefig(paths[-1], dpi=110)
                plt.close(figure)
    return paths

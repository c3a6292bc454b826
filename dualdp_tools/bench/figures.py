# SPDX-License-Identifier: Apache-2.0
"""Figures of a results file: bars of ratios; lines over batch, model size and epochs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
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
# Six colours that colour-blind readers tell apart (Okabe & Ito).
_OTHERS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00")
#: Library or system -> its colour in every figure; dualdp's methods take the four in turn.
COLORS = {
    NON_PRIVATE: "#000000",
    AUTO: "#0072B2",
    **dict(zip(("vmap(grad)", "opacus", "loop", "backpack"), _OTHERS, strict=True)),
    "jax_privacy": _OTHERS[1],
}
#: Line, marker and hatch of a library's first system, its second, ...
_VARIANTS = (("-", "o", ""), ("--", "s", "////"), (":", "^", "...."), ("-.", "D", "xxxx"))
REFERENCES = (NON_PRIVATE, AUTO)


def styles(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return system -> label, colour, line, marker and hatch, in at most six colours.

    Systems of one library share a colour, and a seventh library that of another; dualdp's methods
    have their own, of which `families` puts four into a figure.
    """
    counts: Counter[str] = Counter()
    free, made = itertools.cycle(_OTHERS), {}
    for name in dict.fromkeys(row.system for row in rows):
        key = name if name.startswith(OURS) else name.partition(":")[0]
        color = COLORS.get(key) or next(free)
        line, marker, hatch = _VARIANTS[counts[color] % len(_VARIANTS)]
        counts[color] += 1
        made[name] = {
            "label": name,
            "color": color,
            "linestyle": line,
            "marker": marker,
            "hatch": hatch,
            "linewidth": 2 if name == AUTO else 1,
        }
    return made


def families(rows: list[Row]) -> dict[str, list[Row]]:
    """Return suffix of a figure's name -> its rows: other systems, then four methods at a time."""

    def of(systems: Iterable[str]) -> list[Row]:
        return [row for row in rows if row.system in systems]

    found = list(dict.fromkeys(row.system for row in rows))
    methods = [name for name in found if name.startswith(OURS) and name != AUTO]
    made = {"": of(set(found) - set(methods))}
    for start in range(0, len(methods), len(_OTHERS)):
        chosen = methods[start : start + len(_OTHERS)]
        made[f"-methods{start // len(_OTHERS) + 1}"] = of({*REFERENCES, *chosen})
    return made


def _label(row: Row) -> str:
    return f"{row.workload}\nB {row.batch}"


def _swept(row: Row) -> str:
    """Panel of one sweep of a layer or network."""
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
            look = {name: style[name] for name in ("label", "color", "hatch")}
            axes.bar(at, list(found.values()), width, edgecolor="white", linewidth=0, **look)
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
            axes.plot(epochs, seconds, markevery=5, markersize=4, **_line(drawn[row.system]))
        axes.set(title=f"{workload}, B {n}", xlabel="epoch", ylabel="seconds in all", yscale="log")
    return _with_legend(figure, grid.flat[0])


def lines(
    rows: list[Row], panel: Callable[[Row], str], label: str, name: str = "seconds"
) -> Figure | None:
    """Return small multiples: the field `name` of every system along an axis, on log-log axes."""
    rows = [row for row in rows if getattr(row, name)]
    compared = [row for row in rows if row.system not in REFERENCES]
    panels = list(dict.fromkeys(map(panel, compared or rows)))
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
            axes.plot(at, values, markersize=4, **_line(style))
        axes.set(title=title, xlabel=chosen[0].axis, ylabel=label, xscale="log", yscale="log")
        low, high = axes.get_ylim()
        if high < 5 * low:  # small differences look small
            axes.set_ylim(math.sqrt(low * high / 5), math.sqrt(low * high * 5))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        ticks = sorted({row.at for row in chosen})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    return _with_legend(figure, grid.flat[0])


def _line(style: dict[str, Any]) -> dict[str, Any]:
    """Style of a line, which has no hatch."""
    return {name: value for name, value in style.items() if name != "hatch"}


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
        made: dict[str, tuple[list[Row], Callable[[list[Row]], Figure | None]]] = {
            "run": (chosen("run", "gradient", rows), partial(bars, stack=stack)),
            "layers": (swept, partial(lines, panel=_swept, label="seconds")),
            "layers-memory": (
                swept,
                partial(lines, panel=_swept, label="peak / non-private", name="memory_ratio"),
            ),
            "epochs": (
                epochs,
                partial(lines, panel=lambda row: row.workload, label="seconds per epoch"),
            ),
            "first-epochs": (epochs, cumulative),
            "scale": (scaled, partial(lines, panel=_swept, label="seconds")),
        }
        figures = (
            (f"{name}-{slug(stack)}{suffix}", make(shown))
            for name, (found, make) in made.items()
            for suffix, shown in families(found).items()
        )
        for name, figure in figures:
            if figure is not None:
                paths.append(folder / f"{name}.png")
                figure.savefig(paths[-1], dpi=110)
                plt.close(figure)
    return paths

# SPDX-License-Identifier: Apache-2.0
"""`dualdp plot`: figure of a run's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dualdp import _validate
from dualdp.log import UNPROTECTED, read_log

#: Column -> (title, unit); other columns show under their own name.
KNOWN = {
    "epsilon": ("Privacy spent", "$\\varepsilon$"),
    "accuracy": ("Accuracy", "share"),
    "loss": ("Loss", "nats"),
    "clip_fraction": ("Clipped examples", "share"),
    "clipped_fraction": ("Clipped examples", "share"),
    "median_norm": ("Median gradient norm", "gradient units"),
    "signal_to_noise": ("Signal / noise", "ratio of norms"),
}
#: Colour-blind safe palette of Okabe & Ito; dashes distinguish the lines in print.
STYLES = {
    False: {"color": "#0072B2", "linestyle": "-", "label": "covered by $\\varepsilon$, or public"},
    True: {"color": "#D55E00", "linestyle": "--", "label": "\u2020 from private data, unprotected"},
}
COLUMN = 3.4  # inches, of a page with two columns
_SMOOTH = 15  # longer logs are drawn thin, with a running mean over a fifteenth of the points


def plot(
    log: Annotated[Path, typer.Argument(help="CSV file of dualdp.log.RunLog.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write; LOG.png without it.")] = None,
) -> None:
    """Draw every column of a run's log against the step."""
    target = out or log.with_suffix(".png")
    _validate.new_file("out", target)
    picture(read_log(log)).savefig(target)
    typer.echo(f"wrote {target}")


def picture(columns: Mapping[str, Sequence[float]]) -> Any:
    """Return a figure of one column's width, with a panel for each column of the log except `step`.

    Columns that epsilon does not cover are dashed, and marked by a dagger.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "dualdp plot needs matplotlib. Run: pip install 'dualdp[demo]'"
        ) from error
    shown = [name for name in columns if name != "step"]
    wide = min(2, len(shown))
    deep = -(-len(shown) // wide)
    figure = Figure(figsize=(COLUMN, 1.15 * deep + 0.3), dpi=300, layout="constrained")
    grid = figure.subplots(deep, wide, squeeze=False, sharex=True)
    for name, axes in zip(shown, grid.flat, strict=False):
        _panel(axes, name, columns["step"], columns[name])
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for index, axes in enumerate(grid.flat[: len(shown)]):
        if index + wide >= len(shown):
            axes.set_xlabel("step", fontsize=7)
            axes.tick_params(labelbottom=True)
    by_label = {str(line.get_label()): line for axes in figure.axes for line in axes.lines[-1:]}
    handles, names = list(by_label.values()), list(by_label)
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=6, frameon=False)
    return figure


def _panel(axes: Any, name: str, steps: Sequence[float], values: Sequence[float]) -> None:
    """Panel of one log column; long columns are drawn thin, with a running mean."""
    bare = name.removeprefix(UNPROTECTED)
    title, unit = KNOWN.get(bare, (bare.replace("_", " "), ""))
    style = STYLES[bare != name]
    smooth = _running_mean(values)
    if smooth is not None and bare != "epsilon":
        axes.plot(steps, values, color=style["color"], linewidth=0.5, alpha=0.35)
    shown = values if smooth is None or bare == "epsilon" else smooth
    axes.plot(steps, shown, linewidth=1.1, marker="." if len(steps) == 1 else None, **style)
    axes.set_title(title + ("\u2020" if bare != name else ""), fontsize=7, pad=2)
    axes.set_ylabel(unit, fontsize=7, labelpad=2)
    axes.tick_params(labelsize=6, length=2, pad=1.5)
    axes.spines[["top", "right"]].set_visible(False)


def _running_mean(values: Sequence[float]) -> np.ndarray[Any, Any] | None:
    """Centred running mean, or None for a short column."""
    half = len(values) // _SMOOTH // 2
    if half < 1:
        return None
    window = np.ones(2 * half + 1)
    sums, counts = (np.convolve(x, window, "same") for x in (values, np.ones(len(values))))
    return np.asarray(sums / counts)

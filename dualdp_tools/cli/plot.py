# SPDX-License-Identifier: Apache-2.0
"""`dualdp plot`: figure of a run's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dualdp import _validate
from dualdp.log import UNPROTECTED, read_log

#: Colour-blind safe palette of Okabe & Ito; dashes distinguish the lines in print.
STYLES = {
    False: {"color": "#0072B2", "linestyle": "-", "label": "covered by epsilon, or public"},
    True: {"color": "#D55E00", "linestyle": "--", "label": "from private data, unprotected"},
}


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
    """Return a figure with a panel for each column, dashed where epsilon does not cover it."""
    from matplotlib.figure import Figure

    shown = [name for name in columns if name != "step"]
    figure = Figure(figsize=(7, 1.5 * len(shown) + 0.5), dpi=150, layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    marker = "." if len(columns["step"]) == 1 else None
    lines = {}
    for name, axes in zip(shown, panels, strict=True):
        bare = name.removeprefix(UNPROTECTED)
        (line,) = axes.plot(columns["step"], columns[name], marker=marker, **STYLES[bare != name])
        lines[line.get_label()] = line
        axes.set_ylabel(bare.replace("_", " "))
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2)
    return figure

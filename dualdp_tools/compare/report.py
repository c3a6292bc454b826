# SPDX-License-Identifier: Apache-2.0
"""Output files of `dualdp compare`: `compare.json` and `compare.png`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dualdp_tools.compare.experiment import (
    TRAINING_TOLERANCE,
    Experiment,
    GradientRow,
    Point,
    Timing,
)

#: Stack -> its line; colour-blind safe palette of Okabe & Ito.
STYLES: dict[str, dict[str, Any]] = {
    "torch": {"color": "#D55E00", "linewidth": 4.5, "alpha": 0.45, "label": "PyTorch"},
    "jax": {"color": "#0072B2", "linewidth": 1.5, "linestyle": "--", "label": "JAX"},
    "switched": {
        "color": "#009E73",
        "linewidth": 1.5,
        "linestyle": ":",
        "label": "PyTorch, then JAX",
    },
}
FORMAT = "dualdp_compare"
PACKAGES = ("dualdp", "numpy", "torch", "jax", "flax", "optax")


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder, created if missing; raise an OSError if it cannot be written."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"out={os.fspath(path)!r} can't be written ({error.strerror}). Expected a folder that "
            "exists or can be made; choose another."
        ) from error
    return folder


def write(
    folder: Path,
    experiment: Experiment,
    gradients: Sequence[GradientRow],
    points: Sequence[Point],
    timings: Sequence[Timing],
    *,
    agree: bool,
) -> list[Path]:
    """Write compare.json and compare.png, or neither, and return their paths."""
    data: dict[str, Any] = {
        FORMAT: 1,
        "agree": agree,
        "versions": {name: version(name) for name in PACKAGES},
        "settings": asdict(experiment.settings),
        "plan": json.loads(experiment.plan.to_json()),
        "gradients": [asdict(row) for row in gradients],
        "training": [asdict(point) for point in points],
        "seconds_per_step": [asdict(timing) for timing in timings],
    }
    with tempfile.TemporaryDirectory(dir=folder) as name:
        written = [Path(name) / "compare.json", Path(name) / "compare.png"]
        written[0].write_text(json.dumps(data, indent=1))
        picture(experiment, points).savefig(written[1])
        return [path.replace(folder / path.name) for path in written]


def picture(experiment: Experiment, points: Sequence[Point]) -> Any:
    """Return a figure of accuracy, epsilon and the parameter difference against steps."""
    from matplotlib.figure import Figure

    steps = [point.step for point in points]
    figure = Figure(figsize=(9, 3), dpi=160, layout="constrained")
    accuracy, epsilon, difference = figure.subplots(1, 3)
    for stack, style in STYLES.items():
        shown = [point for point in points if stack in point.epsilon]
        if shown:
            at = [point.step for point in shown]
            accuracy.plot(at, [100 * point.accuracy[stack] for point in shown], **style)
            epsilon.plot(at, [point.epsilon[stack] for point in shown], **style)
    accuracy.set(title="Held-out accuracy", xlabel="step", ylabel="%")
    accuracy.legend(frameon=False, loc="lower right")
    epsilon.set(
        title=f"Spent epsilon of one example (delta = {experiment.plan.delta:g})", xlabel="step"
    )
    # A log axis has no zero, so zero is drawn at 1e-17.
    drawn = [max(point.difference, 1e-17) for point in points]
    difference.semilogy(steps, drawn, color="#000000", linewidth=1.5)
    apart = {point.step: point.switched for point in points if point.switched is not None}
    if apart:
        values = [max(value, 1e-17) for value in apart.values()]
        difference.semilogy(list(apart), values, color=STYLES["switched"]["color"], linestyle=":")
    settings = experiment.settings
    tolerance = TRAINING_TOLERANCE[settings.dtype]
    difference.axhline(tolerance, color="#999999", linewidth=1, linestyle=":")
    difference.annotate(
        "tolerance", (steps[0], tolerance), (0, -11), textcoords="offset points", color="#666666"
    )
    difference.set(title="Parameters, PyTorch vs JAX", xlabel="step", ylabel="relative difference")
    for axes in (accuracy, epsilon, difference):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"One DP-SGD run on two stacks: digits, {settings.model}, {settings.dtype}", fontsize=10
    )
    return figure

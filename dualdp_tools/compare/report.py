# SPDX-License-Identifier: Apache-2.0
"""Output files of `dualdp compare`: `compare.json` and `compare.png`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dualdp_tools.compare.experiment import TRAINING_TOLERANCE, Experiment

#: Stack -> its line; colour-blind safe palette of Okabe & Ito.
STYLES: dict[str, dict[str, Any]] = {
    "torch": {"label": "PyTorch", "color": "#D55E00", "linewidth": 4.5, "alpha": 0.45},
    "jax": {"label": "JAX", "color": "#0072B2", "linewidth": 1.5, "linestyle": "--"},
    "switched": {"label": "PyTorch, then JAX", "color": "#009E73", "linestyle": ":"},
}
PACKAGES = ("dualdp", "numpy", "torch", "jax", "flax", "optax")


def write(folder: Path, experiment: Experiment, *, agree: bool) -> list[Path]:
    """Write compare.json and compare.png, or neither, and return their paths."""
    data: dict[str, Any] = {
        "dualdp_compare": 1,  # the format
        "agree": agree,
        "versions": {name: version(name) for name in PACKAGES},
        "settings": asdict(experiment.settings),
        "plan": json.loads(experiment.plan.to_json()),
        "gradients": experiment.gradients,
        "training": experiment.points,
        "seconds_per_step": experiment.timings,
    }
    with tempfile.TemporaryDirectory(dir=folder) as name:
        written = [Path(name) / "compare.json", Path(name) / "compare.png"]
        written[0].write_text(json.dumps(data, indent=1))
        picture(experiment).savefig(written[1])
        return [path.replace(folder / path.name) for path in written]


def picture(experiment: Experiment) -> Any:
    """Return a figure of accuracy, epsilon and the parameter difference against steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=160, layout="constrained")
    accuracy, epsilon, difference = figure.subplots(1, 3)
    points, settings = experiment.points, experiment.settings
    steps = [point["step"] for point in points]
    for stack, style in STYLES.items():
        shown = [point for point in points if stack in point["epsilon"]]
        at = [point["step"] for point in shown]
        if shown:
            accuracy.plot(at, [100 * point["accuracy"][stack] for point in shown], **style)
            epsilon.plot(at, [point["epsilon"][stack] for point in shown], **style)
    accuracy.set(title="Held-out accuracy", xlabel="step", ylabel="%")
    accuracy.legend(frameon=False, loc="lower right")
    epsilon.set(title=f"Epsilon at delta = {experiment.plan.delta:g}", xlabel="step")
    # A log axis has no zero, so zero is drawn at 1e-17; nan is not drawn.
    apart = [max(point["difference"], 1e-17) for point in points]
    moved = [np.nan if p["switched"] is None else max(p["switched"], 1e-17) for p in points]
    difference.semilogy(steps, apart, color="#000000", linewidth=1.5)
    difference.semilogy(steps, moved, color=STYLES["switched"]["color"], linestyle=":")
    tolerance = TRAINING_TOLERANCE[settings.dtype]
    difference.axhline(tolerance, color="#999999", linewidth=1, linestyle=":", label="tolerance")
    difference.legend(frameon=False)
    difference.set(title="Parameters, PyTorch vs JAX", xlabel="step", ylabel="relative difference")
    for axes in (accuracy, epsilon, difference):
        axes.spines[["top", "right"]].set_visible(False)
    title = f"One DP-SGD run on two stacks: digits, {settings.model}, {settings.dtype}"
    figure.suptitle(title, fontsize=10)
    return figure

# SPDX-License-Identifier: Apache-2.0
"""What `dualdp compare` leaves behind: `compare.json` and `compare.png`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualdp.demo.experiment import TRAINING_TOLERANCE, Experiment, GradientRow, Point, Timing

COLORS = {
    "torch": "#D55E00",
    "jax": "#0072B2",
    "switched": "#009E73",
}  # Okabe & Ito: told apart by everyone
FORMAT = "dualdp_compare"


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made where it is missing, and proved to take files.

    Raises:
        OSError: it cannot be made or written.
    """
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
) -> tuple[Path, Path]:
    """Write both files, each in one move, so that nothing half-written is ever seen.

    Args:
        folder: from `writable_folder`.
        experiment: what ran.
        gradients: its first table.
        points: its second.
        timings: its third.
        agree: the verdict.

    Returns:
        Paths of compare.json and compare.png.
    """
    data: dict[str, Any] = {
        FORMAT: 1,
        "agree": agree,
        "versions": versions(),
        "settings": asdict(experiment.settings),
        "plan": json.loads(experiment.plan.to_json()),
        "gradients": [asdict(row) for row in gradients],
        "training": [asdict(point) for point in points],
        "seconds_per_step": [asdict(timing) for timing in timings],
    }
    text = json.dumps(data, indent=1)
    figure = picture(experiment, points)
    return (
        _in_one_move(folder / "compare.json", lambda path: path.write_text(text)),
        _in_one_move(folder / "compare.png", lambda path: figure.savefig(path, format="png")),
    )


def _in_one_move(path: Path, save: Callable[[Path], object]) -> Path:
    """Save under another name, then rename."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(descriptor)
    try:
        save(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def versions() -> dict[str, str]:
    """Versions of what computed the numbers."""
    from importlib.metadata import version

    names = ("dualdp", "numpy", "torch", "jax", "flax", "optax")
    return {name: version(name) for name in names}


def picture(experiment: Experiment, points: Sequence[Point]) -> Any:
    """Accuracy and epsilon against steps for both stacks, and their difference on a log axis."""
    from matplotlib.figure import Figure

    settings = experiment.settings
    steps = [point.step for point in points]
    figure = Figure(figsize=(9, 3), dpi=160, layout="constrained")
    accuracy, epsilon, difference = figure.subplots(1, 3)
    styles = {
        "torch": {"linewidth": 4.5, "alpha": 0.45, "label": "PyTorch"},
        "jax": {"linewidth": 1.5, "linestyle": "--", "label": "JAX"},
        "switched": {"linewidth": 1.5, "linestyle": ":", "label": "PyTorch, then JAX"},
    }
    for stack, style in styles.items():
        there = [point for point in points if stack in point.epsilon]
        if not there:
            continue
        shown, where = {"color": COLORS[stack], **style}, [point.step for point in there]
        accuracy.plot(where, [100 * point.accuracy[stack] for point in there], **shown)
        epsilon.plot(where, [point.epsilon[stack] for point in there], **shown)
    accuracy.set(title="Held-out accuracy", xlabel="step", ylabel="%")
    accuracy.legend(frameon=False, loc="lower right")
    epsilon.set(title=f"Spent epsilon (delta = {experiment.plan.delta:g})", xlabel="step")
    # An exact zero has no place on a log axis; it is drawn at the smallest positive float.
    drawn = [max(point.difference, 1e-17) for point in points]
    difference.semilogy(steps, drawn, color="#000000", linewidth=1.5)
    apart = {point.step: point.switched for point in points if point.switched is not None}
    if apart:
        values = [max(value, 1e-17) for value in apart.values()]
        difference.semilogy(list(apart), values, color=COLORS["switched"], linestyle=":")
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

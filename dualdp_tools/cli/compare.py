# SPDX-License-Identifier: Apache-2.0
"""`dualdp compare`: one private experiment on PyTorch and JAX, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from dualdp_tools.compare.experiment import Experiment, GradientRow, Point, Timing


def compare(
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")],
    steps: Annotated[int, typer.Option(help="Noise releases.")] = 400,
    batch_size: Annotated[int, typer.Option(help="Expected size of a logical batch.")] = 256,
    target_epsilon: Annotated[float, typer.Option(help="Epsilon at delta = 1e-4.")] = 8.0,
    model: Annotated[str, typer.Option(help="cnn or mlp.")] = "cnn",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the plan and of the initial weights.")] = 0,
    switch_at: Annotated[
        int | None, typer.Option(help="A third run goes from PyTorch to JAX after so many steps.")
    ] = None,
) -> None:
    """Train one network on handwritten digits under DP-SGD, on both stacks, from one plan.

    Compares per-sample gradients, batches, noise and epsilon, and times a step of each stack.
    Exits with 1 if the stacks disagree beyond the stated tolerance.
    """
    console = Console()
    from dualdp_tools.compare import report
    from dualdp_tools.compare.experiment import Experiment, ExperimentOptions

    settings = ExperimentOptions(
        steps=steps,
        batch_size=batch_size,
        target_epsilon=target_epsilon,
        model=model,
        dtype=dtype,
        seed=seed,
        switch_at=switch_at,
    )
    folder = report.writable_folder(out)
    with console.status("Loading PyTorch, JAX and the digits ..."):
        experiment = Experiment(settings)
    with console.status("Comparing per-sample gradients ..."):
        gradients = experiment.compare_gradients()
    console.print(_gradient_table(gradients))
    points = _train(console, experiment)
    with console.status("Timing private and plain steps in turn ..."):
        timings = experiment.time_steps()
    console.print(_timing_table(timings))
    faults = _disagreements(experiment, gradients, points)
    paths = report.write(folder, experiment, gradients, points, timings, agree=not faults)
    for path in paths:
        console.print(f"wrote {path}")
    if faults:
        for fault in faults:
            console.print(f"[bold red]The stacks disagree:[/] {fault}")
        raise typer.Exit(1)
    console.print("[bold green]The stacks agree.[/]")


def _gradient_table(rows: Sequence[GradientRow]) -> Table:
    """Table 1: per-sample gradients."""
    table = Table(
        title="1. Per-sample gradients, PyTorch vs JAX, on the same weights",
        caption="relative: norm of an example's difference / norm of its gradient",
    )
    for name in ("PyTorch", "JAX", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("largest |difference|", "largest relative"):
        table.add_column(name, justify="right")
    for row in rows:
        names = row.torch_name, row.jax_path, "x".join(map(str, row.shape))
        table.add_row(*names, f"{row.largest:.1e}", f"{row.relative:.1e}")
    return table


def _train(console: Console, experiment: Experiment) -> list[Point]:
    """Table 2, live, with a progress bar: the same plan on both stacks."""
    plan = experiment.plan
    table = Table(
        title=f"2. One plan, two runs: noise multiplier {plan.noise_multiplier_at(0):.3f}, "
        f"sample rate {plan.sample_rate:.3f}, C {plan.max_grad_norm_at(0):g}",
        caption=f"epsilon: of one {plan.unit} at delta = {plan.delta:g}; loss, accuracy: on data "
        "held out; parameters differ by: norm of the difference / norm on JAX, of the parameter "
        "where it is largest",
    )
    for name in ("step", "epsilon", "loss torch", "loss jax", "acc. torch", "acc. jax"):
        table.add_column(name, justify="right")
    table.add_column("parameters differ by", justify="right")
    if experiment.settings.switch_at is not None:
        table.add_column("switched", justify="right")
    progress = Progress(
        TextColumn("training on both stacks"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task("", total=experiment.settings.steps)
    points: list[Point] = []
    stacks = ("torch", "jax")
    with Live(Group(table, progress), console=console, refresh_per_second=4):
        for step, point in experiment.train():
            progress.update(task, completed=step)
            if point is None:
                continue
            points.append(point)
            table.add_row(
                str(point.step),
                f"{point.epsilon['torch']:.3f}",
                *(f"{point.loss[stack]:.4f}" for stack in stacks),
                *(f"{point.accuracy[stack]:.1%}" for stack in stacks),
                f"{point.difference:.1e}",
                *([] if point.switched is None else [f"{point.switched:.1e}"]),
            )
    return points


def _timing_table(timings: Sequence[Timing]) -> Table:
    """Table 3: time of a private and a non-private step."""
    table = Table(
        title="3. Time per step, interleaved rounds (median)",
        caption="ratio: private / non-private; in brackets, half of the rounds lie between",
    )
    table.add_column("stack")
    for name in ("non-private", "private", "ratio"):
        table.add_column(name, justify="right")
    for timing in timings:
        low, high = timing.spread
        table.add_row(
            timing.stack,
            f"{timing.plain * 1e3:.1f} ms",
            f"{timing.private * 1e3:.1f} ms",
            f"{timing.ratio:.2f} ({low:.2f} - {high:.2f})",
        )
    return table


def _disagreements(
    experiment: Experiment, gradients: Sequence[GradientRow], points: Sequence[Point]
) -> list[str]:
    """One sentence for each difference beyond the tolerance."""
    from dualdp_tools.compare.experiment import TRAINING_TOLERANCE

    tolerance = TRAINING_TOLERANCE[experiment.settings.dtype]
    faults = [
        f"the per-sample gradients of {row.torch_name} (JAX: {row.jax_path}) differ by "
        f"{row.relative:.1e} of their norm, {row.excess:.1f} times what is tolerated."
        for row in gradients
        if not row.excess <= 1
    ]
    faults += [
        f"after step {point.step} the parameters differ by {point.difference:.1e}, most at "
        f"{point.parameter}; tolerated is {tolerance:.0e}."
        for point in points
        if not point.difference <= tolerance
    ][:1]
    faults += [
        f"after step {point.step} the run that changed stacks differs by {point.switched:.1e} from "
        f"the one on JAX; tolerated is {tolerance:.0e}."
        for point in points
        if point.switched is not None and not point.switched <= tolerance
    ][:1]
    faults += [
        f"after step {point.step} epsilon is {point.epsilon}."
        for point in points
        if len(set(point.epsilon.values())) > 1
    ][:1]
    return faults

# SPDX-License-Identifier: Apache-2.0
"""`dualdp compare`: one private experiment on PyTorch and JAX, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer import Option

from dualdp_tools.cli.common import columns, with_options
from dualdp_tools.compare.options import ExperimentOptions

if TYPE_CHECKING:
    from dualdp_tools.compare.experiment import Experiment

Folder = Annotated[Path, Option(file_okay=False, writable=True, help="For both files.")]


@with_options
def compare(settings: ExperimentOptions, out: Folder) -> None:
    """Train one network on handwritten digits under DP-SGD, on both stacks, from one plan.

    Compares per-sample gradients, batches, noise and epsilon, and times a step of each stack;
    writes compare.json and compare.png. Exits with 1 if the stacks disagree beyond the stated
    tolerance.
    """
    console = Console()
    with console.status("Loading PyTorch, JAX and the digits ..."):
        from dualdp_tools.compare import report
        from dualdp_tools.compare.experiment import Experiment

        experiment = Experiment(settings)
        out.mkdir(parents=True, exist_ok=True)
    with console.status("Comparing per-sample gradients ..."):
        experiment.compare_gradients()
    console.print(_gradient_table(experiment))
    for _ in track(experiment.train(), "training on both stacks", settings.steps, console=console):
        pass
    console.print(_training_table(experiment))
    with console.status("Timing private and plain steps in turn ..."):
        experiment.time_steps()
    console.print(_timing_table(experiment))
    faults = experiment.disagreements()
    for path in report.write(out, experiment, agree=not faults):
        console.print(f"wrote {path}")
    for fault in faults:
        console.print(f"[bold red]The stacks disagree:[/] {fault}")
    if faults:
        raise typer.Exit(1)
    console.print("[bold green]The stacks agree.[/]")


def _gradient_table(experiment: Experiment) -> Table:
    """Table 1: per-sample gradients."""
    table = Table(
        *columns("PyTorch", "JAX", "shape", "largest |difference|", "largest relative", words=3),
        title="1. Per-sample gradients, PyTorch vs JAX, on the same weights",
        caption="relative: norm of an example's difference / norm of its gradient",
    )
    for row in experiment.gradients:
        names = row["torch_name"], row["jax_path"], "x".join(map(str, row["shape"]))
        table.add_row(*names, f"{row['largest']:.1e}", f"{row['relative']:.1e}")
    return table


def _training_table(experiment: Experiment) -> Table:
    """Table 2: the same plan on both stacks."""
    plan = experiment.plan
    switched = [] if experiment.settings.switch_at is None else ["switched"]
    names = ("step", "epsilon", "loss torch", "loss jax", "acc. torch", "acc. jax")
    table = Table(
        *columns(*names, "parameters differ by", *switched),
        title=f"2. One plan, two runs: noise multiplier {plan.noise_multiplier_at(0):.3f}, "
        f"sample rate {plan.sample_rate:.3f}, C {plan.max_grad_norm_at(0):g}",
        caption=f"epsilon: of one {plan.unit} at delta = {plan.delta:g}; loss, accuracy: on data "
        "held out; parameters differ by: norm of the difference / norm on JAX, of the parameter "
        "where it is largest",
    )
    for point in experiment.points:
        losses = (f"{point['loss'][stack]:.4f}" for stack in ("torch", "jax"))
        accuracies = (f"{point['accuracy'][stack]:.1%}" for stack in ("torch", "jax"))
        start = str(point["step"]), f"{point['epsilon']['torch']:.3f}", *losses, *accuracies
        apart = (point["difference"], point["switched"])
        table.add_row(*start, *(f"{value:.1e}" for value in apart if value is not None))
    return table


def _timing_table(experiment: Experiment) -> Table:
    """Table 3: time of a private and a non-private step."""
    table = Table(
        *columns("stack", "non-private", "private", "ratio", words=1),
        title="3. Time per step, interleaved rounds (median)",
        caption="ratio: private / non-private; in brackets, half of the rounds lie between",
    )
    for row in experiment.timings:
        times = (f"{row[kind] * 1e3:.1f} ms" for kind in ("plain", "private"))
        low, high = row["spread"]
        table.add_row(row["stack"], *times, f"{row['ratio']:.2f} ({low:.2f} - {high:.2f})")
    return table

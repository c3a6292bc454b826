# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate`: noise multiplier, number of steps or sampling rate for a target epsilon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dualdp import BatchSizeComparison, PrivacyPlan, compare_batch_sizes, correlated
from dualdp.accountants import solve
from dualdp_tools.cli import common

TargetEpsilon = Annotated[
    float, typer.Option("--target-epsilon", "--epsilon", help="The epsilon to stay within.")
]
Advise = Annotated[
    bool,
    typer.Option("--advise", help="Compare independent and correlated noise for this run instead."),
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        "--compare-batch-sizes",
        metavar="EPOCHS",
        help="Compare batch sizes instead, at these numbers of epochs, such as 1,10,100.",
    ),
]
Noise = Annotated[float | None, typer.Option(help="Known noise: then the steps are looked for.")]


def calibrate(
    target_epsilon: TargetEpsilon,
    delta: common.Delta,
    noise_multiplier: Noise = None,
    sample_rate: common.SampleRate = None,
    steps: common.Steps = None,
    num_examples: common.NumExamples = None,
    batch_size: common.BatchSize = None,
    epochs: common.Epochs = None,
    accountant: common.Name = "pld",
    sampler: common.Sampler = "poisson",
    relation: common.Relation = "add_or_remove",
    group_size: common.GroupSize = 1,
    unit: common.Unit = "example",
    max_batch_size: common.MaxBatchSize = None,
    approximate: common.Approximate = False,
    as_json: common.Json = False,
    plot: common.Plot = None,
    advise: Advise = False,
    batch_sizes: BatchSizes = None,
) -> None:
    """Compute the noise multiplier, or (with --noise-multiplier) the steps or the rate."""
    protects = common.protected(unit, group_size)
    target: dict[str, Any] = {"target_epsilon": target_epsilon, "target_delta": delta}
    setting: dict[str, Any] = {
        "sampler": sampler,
        "accountant": accountant,
        "neighboring_relation": relation,
        "group_size": group_size,
    }
    if batch_sizes is not None:
        taken = {
            "--noise-multiplier": noise_multiplier,
            "--sample-rate": sample_rate,
            "--steps": steps,
            "--batch-size": batch_size,
            "--epochs": epochs,
            "--max-batch-size": max_batch_size,
            "--advise": advise or None,
        }
        extra = [name for name, value in taken.items() if value is not None]
        if num_examples is None or extra:
            raise ValueError(
                f"--compare-batch-sizes came {f'with {extra[0]}' if extra else 'alone'}. "
                "Expected --num-examples beside it, and no batch size, noise or length of one "
                "run: it compares them."
            )
        with common.working("Comparing"):
            compared = compare_batch_sizes(
                num_examples=num_examples, epochs=_numbers(batch_sizes), **target, **setting
            )
        if plot is not None:
            _draw_batch_sizes(plot, compared, protects)
        _show_batch_sizes(compared, protects, as_json=as_json)
        return
    if advise:
        if num_examples is None or batch_size is None or noise_multiplier is not None:
            raise ValueError(
                "--advise compares runs with one epsilon. Give --num-examples, --batch-size, "
                "and --steps or --epochs, and no --noise-multiplier."
            )
        _, number = common.run_length(None, steps, num_examples, batch_size, epochs)
        with common.working("Comparing"):
            plan = PrivacyPlan.calibrate(
                target_epsilon=target_epsilon,
                delta=delta,
                num_examples=num_examples,
                expected_batch_size=batch_size,
                num_steps=number,
                max_grad_norm=1.0,
                accountant=accountant,
                neighboring_relation=relation,
                unit=unit,
                rows_per_unit=None if unit == "example" else 1,
            )
            advice = correlated.advise(plan)
        _show_advice(advice, as_json=as_json)
        return
    options = {
        **setting,
        "num_examples": num_examples,
        "max_batch_size": max_batch_size,
        "approximate": approximate,
    }
    known_rate = sample_rate is not None or batch_size is not None
    known_steps = steps is not None or epochs is not None
    with common.working("Searching"):
        if noise_multiplier is None:
            rate, number = common.run_length(sample_rate, steps, num_examples, batch_size, epochs)
            noise_multiplier = solve.get_noise_multiplier(
                **target, sample_rate=rate, num_steps=number, **options
            )
        elif known_rate and not known_steps:
            rate, _ = common.run_length(sample_rate, 0, num_examples, batch_size, None)
            number = solve.get_num_steps(
                **target, noise_multiplier=noise_multiplier, sample_rate=rate, **options
            )
        elif known_steps and not known_rate:
            rate, number = common.run_length(1.0, steps, None, None, epochs)
            rate = solve.get_sample_rate(
                **target, noise_multiplier=noise_multiplier, num_steps=number, **options
            )
        else:
            raise ValueError(
                "Nothing is left to look for. Leave out one of --noise-multiplier, the rate "
                "and the steps."
            )
    bounds = common.epsilon_by_steps(
        delta=delta, noise_multiplier=noise_multiplier, sample_rate=rate, **options
    )
    record: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "sample_rate": rate,
        "num_steps": number,
        "epsilon": bounds(number)[1],
        "certified": accountant != "gdp",
        "target_epsilon": target_epsilon,
        "delta": delta,
        "accountant": accountant,
        "sampler": sampler,
        "neighboring_relation": relation,
        "protects": protects,
    }
    if plot is not None:
        common.draw(plot, bounds, number, f"target epsilon = {target_epsilon:g}, {protects}")
        record["plot"] = str(plot)
    common.show(record, as_json=as_json, title="Calibrated")


def _show_advice(advice: correlated.Advice, *, as_json: bool) -> None:
    """Print the options, the least error first, and the verdict."""
    if as_json:
        options = [option._asdict().items() for option in advice.options]
        rows = [{name: value for name, value in items if name != "plan"} for items in options]
        typer.echo(json.dumps({"options": rows, "verdict": advice.verdict}, indent=2))
        return
    table = Table(
        title=f"Noise at epsilon = {advice.epsilon:.4g} of one {advice.options[0].plan.unit}, "
        f"delta = {advice.delta:g}",
        caption="error: noise in the model, per coordinate, for max_grad_norm = 1 and learning "
        "rate 1; computed, not measured",
    )
    for name in ("noise", "sampler", "noise multiplier", "error", "to DP-SGD"):
        table.add_column(name, justify="left" if name in ("noise", "sampler") else "right")
    for o in advice.options:
        numbers = f"{o.noise_multiplier:.4g}", f"{o.error:.3g}", f"{o.relative_error:.2f}"
        table.add_row(o.name, o.sampler, *numbers)
    Console().print(table)
    typer.echo(advice.verdict)


def _numbers(text: str) -> list[float]:
    """Numbers from a comma-separated list."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--compare-batch-sizes={text!r} is no list of numbers. Expected epochs such as "
            "1,10,100."
        ) from None


def _show_batch_sizes(found: BatchSizeComparison, protects: str, *, as_json: bool) -> None:
    """Print the batch sizes of each number of epochs, and the verdict."""
    if as_json:
        rows = [option._asdict() for option in found.options]
        typer.echo(json.dumps({"options": rows, "verdict": found.verdict}, indent=2))
        return
    table = Table(
        title=f"Batch sizes at epsilon = {found.epsilon:.4g} of one {protects}, "
        f"delta = {found.delta:g}",
        caption="noise: in the averaged gradient, per coordinate, for max_grad_norm = 1; "
        "of sum: in the sum of all; relative: to full batches and as many steps",
    )
    heads = "epochs", "batch size", "steps", "sample rate", "noise multiplier"
    for name in (*heads, "noise", "of sum", "relative", "gradients"):
        table.add_column(name, justify="right")
    for o in found.options:
        run = f"{o.epochs:g}", str(o.batch_size), str(o.num_steps), f"{o.sample_rate:.3g}"
        noises = f"{o.noise_multiplier:.4g}", f"{o.noise:.3g}", f"{o.noise_of_sum:.3g}"
        table.add_row(*run, *noises, f"{o.relative_noise:.2f}", f"{o.gradients:.3g}")
    Console().print(table)
    typer.echo(found.verdict)


def _draw_batch_sizes(path: Path, found: BatchSizeComparison, protects: str) -> None:
    """Plot the noise of a step, and relative to full batches, against the batch size."""
    figure = common.new_figure(path, figsize=(10, 4.2))
    columns = {
        "noise": "noise of a step, for max_grad_norm = 1",
        "relative_noise": "noise over that of full batches for as many steps",
    }
    for axes, (name, label) in zip(figure.subplots(1, 2), columns.items(), strict=True):
        for epochs, enough in found.smallest_enough.items():
            options = [o for o in found.options if o.epochs == epochs]
            sizes = [o.batch_size for o in options]
            (line,) = axes.loglog(
                sizes, [getattr(o, name) for o in options], label=f"epochs: {epochs:g}"
            )
            if enough is not None:
                axes.plot(enough.batch_size, getattr(enough, name), "o", color=line.get_color())
        axes.set(xlabel="batch size", ylabel=label)
        if name == "relative_noise":
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"epsilon = {found.epsilon:g} of one {protects}, delta = {found.delta:g}; "
        "circles: the smallest batch size of the advice"
    )
    figure.savefig(path, dpi=110)

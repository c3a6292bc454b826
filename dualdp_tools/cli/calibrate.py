# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate`: noise multiplier, number of steps or sampling rate for a target epsilon."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dualdp import PrivacyPlan, correlated
from dualdp.accountants import solve
from dualdp_tools.cli import common

TargetEpsilon = Annotated[
    float, typer.Option("--target-epsilon", "--epsilon", help="The epsilon to stay within.")
]
Advise = Annotated[
    bool,
    typer.Option("--advise", help="Compare independent and correlated noise for this run instead."),
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
) -> None:
    """Compute the noise multiplier, or (with --noise-multiplier) the steps or the rate."""
    with common.reported_errors():
        protects = common.protected(unit, group_size)
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
        options: dict[str, Any] = {
            "sampler": sampler,
            "accountant": accountant,
            "neighboring_relation": relation,
            "group_size": group_size,
            "num_examples": num_examples,
            "max_batch_size": max_batch_size,
            "approximate": approximate,
        }
        target: dict[str, Any] = {"target_epsilon": target_epsilon, "target_delta": delta}
        known_rate = sample_rate is not None or batch_size is not None
        known_steps = steps is not None or epochs is not None
        with common.working("Searching"):
            if noise_multiplier is None:
                rate, number = common.run_length(
                    sample_rate, steps, num_examples, batch_size, epochs
                )
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
    rows = [option._asdict() | {"plan": None} for option in advice.options]
    if as_json:
        for row in rows:
            del row["plan"]
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

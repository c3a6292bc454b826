# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate`: the noise, the steps or the rate for a budget."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dualdp.accountants import calibrate as core
from dualdp.cli import epsilon as cli

TargetEpsilon = Annotated[float, typer.Option("--epsilon", help="The budget.")]
Noise = Annotated[float | None, typer.Option(help="Known noise: then the steps are looked for.")]


def calibrate(
    target_epsilon: TargetEpsilon,
    delta: cli.Delta,
    noise_multiplier: Noise = None,
    sample_rate: cli.SampleRate = None,
    steps: cli.Steps = None,
    num_examples: cli.NumExamples = None,
    batch_size: cli.BatchSize = None,
    epochs: cli.Epochs = None,
    accountant: cli.Name = "pld",
    sampler: cli.Sampler = "poisson",
    relation: cli.Relation = "add_or_remove",
    group_size: cli.GroupSize = 1,
    max_batch_size: cli.MaxBatchSize = None,
    approximate: cli.Approximate = False,
    as_json: cli.Json = False,
    plot: cli.Plot = None,
) -> None:
    """Find what is missing: the noise multiplier, or (with --noise-multiplier) steps or rate."""
    with cli.reported():
        common: dict[str, Any] = {
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
        if noise_multiplier is None:
            rate, number = cli.run_length(sample_rate, steps, num_examples, batch_size, epochs)
            noise_multiplier = core.get_noise_multiplier(
                **target, sample_rate=rate, num_steps=number, **common
            )
        elif known_rate and not known_steps:
            rate, _ = cli.run_length(sample_rate, 0, num_examples, batch_size, None)
            number = core.get_num_steps(
                **target, noise_multiplier=noise_multiplier, sample_rate=rate, **common
            )
        elif known_steps and not known_rate:
            rate, number = cli.run_length(1.0, steps, None, None, epochs)
            rate = core.get_sample_rate(
                **target, noise_multiplier=noise_multiplier, num_steps=number, **common
            )
        else:
            raise ValueError(
                "Nothing is left to look for. Leave out one of --noise-multiplier, the rate and "
                "the steps."
            )
        bounds = cli.spending(
            delta=delta, noise_multiplier=noise_multiplier, sample_rate=rate, **common
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
        }
        if plot is not None:
            cli.draw(plot, bounds, number, f"target epsilon = {target_epsilon:g}")
            record["plot"] = str(plot)
        cli.show(record, as_json=as_json, title="Calibrated")

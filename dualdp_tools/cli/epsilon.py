# SPDX-License-Identifier: Apache-2.0
"""`dualdp epsilon`: privacy cost of a run."""

from __future__ import annotations

from typing import Any

from dualdp_tools.cli import common


def epsilon(
    noise_multiplier: common.NoiseMultiplier,
    delta: common.Delta,
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
) -> None:
    """Print the epsilon of a run of equal steps, with its certified lower bound."""
    protects = common.protected(unit, group_size)
    rate, number = common.run_length(sample_rate, steps, num_examples, batch_size, epochs)
    bounds = common.epsilon_by_steps(
        accountant,
        delta,
        approximate=approximate,
        neighboring_relation=relation,
        group_size=group_size,
        noise_multiplier=noise_multiplier,
        sample_rate=rate,
        sampler=sampler,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
    )
    with common.working("Accounting"):
        lower, spent = bounds(number)
    record: dict[str, Any] = {
        "epsilon": spent,
        "lower_bound": lower,
        "certified": accountant != "gdp",
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "sample_rate": rate,
        "num_steps": number,
        "accountant": accountant,
        "sampler": sampler,
        "neighboring_relation": relation,
        "protects": protects,
    }
    if plot is not None:
        title = f"One {protects}: delta = {delta:g}, {accountant}, {sampler}, {relation}"
        common.draw(plot, bounds, number, title)
        record["plot"] = str(plot)
    common.show(record, as_json=as_json, title="Privacy spent")

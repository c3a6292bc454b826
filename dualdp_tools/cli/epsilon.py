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
    as_json: common.Json = False,
) -> None:
    """Print the epsilon of a run of equal steps."""
    protects = common.protected(unit, group_size)
    rate, number = common.run_length(sample_rate, steps, num_examples, batch_size, epochs)
    setting: dict[str, Any] = {
        "sampler": sampler,
        "accountant": accountant,
        "neighboring_relation": relation,
        "group_size": group_size,
        "num_examples": num_examples,
        "max_batch_size": max_batch_size,
    }
    with common.working("Accounting"):
        record = common.record_of(noise_multiplier, rate, number, delta, setting, protects)
    common.show(record, as_json=as_json, title="Privacy spent")

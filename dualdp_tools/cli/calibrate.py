# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate`: noise multiplier, number of steps or sampling rate for a target epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dualdp import _validate
from dualdp.accountants import solve
from dualdp_tools.cli import common, tables

TABLES = ("batch-sizes", "noise", "units")
TargetEpsilon = Annotated[
    float, typer.Option("--target-epsilon", "--epsilon", help="The epsilon to stay within.")
]
Kind = Annotated[
    str | None, typer.Option("--table", help=f"Compare runs instead: {', '.join(TABLES)}.")
]
Counts = Annotated[
    Path | None, typer.Option(help="For --table units: text file, the rows of each user.")
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
    as_json: common.Json = False,
    table: Kind = None,
    counts: Counts = None,
) -> None:
    """Compute the noise multiplier, or (with --noise-multiplier) the steps or the rate."""
    protects = common.protected(unit, group_size)
    if table is not None:
        run = tables.Run(target_epsilon, delta, num_examples or 1, relation, accountant)
        with common.working("Comparing"):
            found = _table(table, run, num_examples, batch_size, steps, epochs, counts)
        found.show(as_json=as_json)
        return
    setting: dict[str, Any] = {
        "target_epsilon": target_epsilon,
        "target_delta": delta,
        "sampler": sampler,
        "accountant": accountant,
        "neighboring_relation": relation,
        "group_size": group_size,
        "num_examples": num_examples,
        "max_batch_size": max_batch_size,
    }
    known_rate = sample_rate is not None or batch_size is not None
    known_steps = steps is not None or epochs is not None
    with common.working("Searching"):
        if noise_multiplier is None:
            rate, number = common.run_length(sample_rate, steps, num_examples, batch_size, epochs)
            noise_multiplier = solve.get_noise_multiplier(
                sample_rate=rate, num_steps=number, **setting
            )
        elif known_rate and not known_steps:
            rate, _ = common.run_length(sample_rate, 0, num_examples, batch_size, None)
            number = solve.get_num_steps(
                noise_multiplier=noise_multiplier, sample_rate=rate, **setting
            )
        elif known_steps and not known_rate:
            rate, number = common.run_length(1.0, steps, None, None, epochs)
            rate = solve.get_sample_rate(
                noise_multiplier=noise_multiplier, num_steps=number, **setting
            )
        else:
            raise ValueError(
                "Nothing is left to look for. Leave out one of --noise-multiplier, the rate "
                "and the steps."
            )
    record = common.record_of(
        noise_multiplier, rate, number, delta, setting, protects, target_epsilon=target_epsilon
    )
    common.show(record, as_json=as_json, title="Calibrated")


def _table(
    kind: str,
    run: tables.Run,
    num_examples: int | None,
    batch_size: int | None,
    steps: int | None,
    epochs: float | None,
    counts: Path | None,
) -> tables.Comparison:
    """One comparison, after checking that it has what it needs."""
    _validate.choice("table", kind, TABLES)
    if kind == "batch-sizes":
        if num_examples is None or batch_size is not None or steps is not None:
            raise ValueError(
                "--table batch-sizes compares batch sizes. Expected --num-examples, --epochs (1, "
                "10 and 100 if left out), and no --batch-size or --steps."
            )
        return tables.batch_sizes(run, [1.0, 10.0, 100.0] if epochs is None else [epochs])
    if num_examples is None or batch_size is None:
        raise ValueError(
            f"--table {kind} compares runs of one length. Expected --num-examples, --batch-size, "
            "and --steps or --epochs."
        )
    _, number = common.run_length(None, steps, num_examples, batch_size, epochs)
    if kind == "noise":
        return tables.noise(run, batch_size, number)
    if counts is None:
        raise ValueError(
            "--table units needs --counts. Expected a text file with the number of rows of each "
            "user."
        )
    with _validate.file_errors("read", counts, "a text file of integers"):
        rows = np.array(counts.read_text().split(), dtype=np.int64)
    return tables.units(run, float(batch_size), number, rows)

# SPDX-License-Identifier: Apache-2.0
"""`dualdp epsilon`: privacy cost of a run."""

from __future__ import annotations

from dualdp_tools.cli.common import Json, NoiseMultiplier, Run, show, with_run, working


@with_run
def epsilon(run: Run, noise_multiplier: NoiseMultiplier, as_json: Json = False) -> None:
    """Print the epsilon of a run of equal steps."""
    with working("Accounting"):
        record = run.record(run.numbers(noise_multiplier))
    show(record, as_json=as_json, title="Privacy spent")

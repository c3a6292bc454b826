# SPDX-License-Identifier: Apache-2.0
"""`dualdp epsilon`: privacy cost of a run."""

from __future__ import annotations

from dualdp_tools.cli.common import Json, NoiseMultiplier, Run, with_options


@with_options
def epsilon(run: Run, noise_multiplier: NoiseMultiplier, as_json: Json = False) -> None:
    """Print the epsilon of a run of equal steps."""
    run.show(run.numbers(noise_multiplier), title="Privacy spent", as_json=as_json)

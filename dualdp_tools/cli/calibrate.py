# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate`: noise multiplier, number of steps or sampling rate for a target epsilon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dualdp import _validate
from dualdp.accountants import solve
from dualdp_tools.cli import common, tables

TABLES: dict[str, Callable[..., tables.Comparison]] = {
    "batch-sizes": tables.batch_sizes,
    "noise": tables.noise,
    "units": tables.units,
}
TargetEpsilon = Annotated[float, Option(help="The epsilon to stay within.")]
Noise = Annotated[float | None, Option(help="Known noise: then the steps are looked for.")]
Kind = Annotated[str | None, Option(help=f"Compare runs instead: {', '.join(TABLES)}.")]
Counts = Annotated[Path | None, Option(help="Of --table units: text file, rows of each user.")]


@common.with_options
def calibrate(
    run: common.Run,
    target_epsilon: TargetEpsilon,
    noise_multiplier: Noise = None,
    as_json: common.Json = False,
    table: Kind = None,
    counts: Counts = None,
) -> None:
    """Compute the noise multiplier, or (with --noise-multiplier) the steps or the rate."""
    if table is not None:
        compared: dict[str, Any] = {"counts": counts} if table == "units" else {}
        with common.working("Comparing"):
            kind = _validate.choice("table", table, TABLES)
            found = TABLES[kind](run, target_epsilon, **compared)
        title = f"{table} at epsilon = {target_epsilon:g}, delta = {run.delta:g}"
        found.show(title=title.capitalize(), as_json=as_json)
        return
    numbers = run.numbers(noise_multiplier, num_missing=1)
    known = {name: value for name, value in numbers.items() if value is not None}
    if known == numbers:
        raise ValueError(
            "Nothing is left to look for. Leave out one of --noise-multiplier, the rate "
            "and the steps."
        )
    (wanted,) = set(numbers) - set(known)
    with common.working("Searching"):
        target = {"target_epsilon": target_epsilon, "target_delta": run.delta}
        search: Callable[..., float] = getattr(solve, f"get_{wanted}")
        numbers[wanted] = search(**target, **known, **run.setting)
    run.show(numbers, title="Calibrated", as_json=as_json, target_epsilon=target_epsilon)

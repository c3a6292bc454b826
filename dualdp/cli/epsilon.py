# SPDX-License-Identifier: Apache-2.0
"""`dualdp epsilon`: what a run costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dualdp import _validate, accountants, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import gdp

NoiseMultiplier = Annotated[float, typer.Option(help="Noise standard deviation / max_grad_norm.")]
SampleRate = Annotated[float | None, typer.Option(help="Expected batch size / number of examples.")]
Steps = Annotated[int | None, typer.Option(help="Number of noise releases.")]
NumExamples = Annotated[int | None, typer.Option(help="Number of examples, instead of a rate.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size, with --num-examples.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data, instead of --steps.")]
Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta).")]
Name = Annotated[str, typer.Option(help="pld (certified), rdp, or gdp (see --approximate).")]
Sampler = Annotated[str, typer.Option(help=f"One of {', '.join(sorted(mechanisms.SAMPLERS))}.")]
Relation = Annotated[str, typer.Option(help=f"One of {', '.join(mechanisms.RELATIONS)}.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="For truncated_poisson: the cut.")]
Approximate = Annotated[bool, typer.Option(help="Allow gdp, which is no bound.")]
GroupSize = Annotated[int, typer.Option(help="Examples of one user.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[Path | None, typer.Option(help="Write a picture: epsilon against steps.")]


def epsilon(
    noise_multiplier: NoiseMultiplier,
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    num_examples: NumExamples = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    accountant: Name = "pld",
    sampler: Sampler = "poisson",
    relation: Relation = "add_or_remove",
    group_size: GroupSize = 1,
    max_batch_size: MaxBatchSize = None,
    approximate: Approximate = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Print the epsilon that a run of equal steps costs, with its certified lower bound."""
    with reported():
        rate, number = run_length(sample_rate, steps, num_examples, batch_size, epochs)
        bounds = spending(
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
        }
        if plot is not None:
            draw(plot, bounds, number, f"delta = {delta:g}, {accountant}, {sampler}, {relation}")
            record["plot"] = str(plot)
        show(record, as_json=as_json, title="Privacy spent")


def spending(
    accountant: str,
    delta: float,
    *,
    approximate: bool,
    neighboring_relation: str,
    group_size: int,
    **step: Any,
) -> Callable[[int], tuple[float, float]]:
    """Number of equal steps -> (lower bound, certified epsilon or the approximation asked for)."""
    if accountant == "gdp" and not approximate:
        raise AccountingError(f"{gdp.REFUSAL} On the command line: --approximate.")

    def bounds(count: int) -> tuple[float, float]:
        account = accountants.create(
            accountant, neighboring_relation=neighboring_relation, group_size=group_size
        )
        account.step(num_steps=count, **step)
        lower, estimate, upper = account.epsilon_bounds(delta=delta)
        return float(lower), float(estimate if accountant == "gdp" else upper)

    return bounds


def run_length(
    sample_rate: float | None,
    steps: int | None,
    num_examples: int | None,
    batch_size: int | None,
    epochs: float | None,
) -> tuple[float, int]:
    """(sample_rate, num_steps) from either way of saying them."""
    if sample_rate is None:
        if num_examples is None or batch_size is None:
            raise ValueError(
                "The sampling rate is missing. Give --sample-rate, or --num-examples and "
                "--batch-size."
            )
        examples = _validate.integer("num_examples", num_examples, minimum=1)
        sample_rate = _validate.integer("batch_size", batch_size, minimum=1) / examples
    elif batch_size is not None:
        raise ValueError("--sample-rate and --batch-size both say the rate. Give one of them.")
    if (steps is None) == (epochs is None):
        raise ValueError("The length of the run is unclear. Give one of --steps and --epochs.")
    if steps is not None:
        return _validate.sample_rate(sample_rate), _validate.integer("steps", steps)
    if num_examples is None or batch_size is None:
        raise ValueError("--epochs needs --num-examples and --batch-size. Or give --steps.")
    number = mechanisms.num_steps_of(
        epochs=float(epochs or 0.0), num_examples=num_examples, batch_size=batch_size
    )
    return _validate.sample_rate(sample_rate), number


class reported:  # noqa: N801  (reads as a word in `with reported():`)
    """Turns a wrong argument into one line on stderr and exit code 2."""

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        """Report arguments that were refused; let everything else pass."""
        if isinstance(error, ValueError | TypeError | OSError):
            typer.echo(f"dualdp: {error}", err=True)
            raise typer.Exit(2) from error


def show(record: dict[str, Any], *, as_json: bool, title: str) -> None:
    """Print a record as JSON or as a table of two columns."""
    if as_json:
        finite = {k: None if v in (float("inf"),) else v for k, v in record.items()}
        typer.echo(json.dumps(finite, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for key, value in record.items():
        table.add_row(key, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console().print(table)


def draw(path: Path, bounds: Any, num_steps: int, title: str) -> None:
    """Write epsilon and its lower bound against the number of steps."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot={str(path)!r} lies in no existing folder. Create it first.")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib. Run: pip install 'dualdp[demo]'") from error
    counts = sorted({max(1, round(num_steps * i / 40)) for i in range(1, 41)}) if num_steps else [0]
    rows = [bounds(count) for count in counts]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(counts, [row[1] for row in rows], label="epsilon")
    if any(row[0] > 0 for row in rows):
        axes.plot(counts, [row[0] for row in rows], "--", label="lower bound")
    axes.set(xlabel="steps", ylabel="epsilon", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)

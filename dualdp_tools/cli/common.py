# SPDX-License-Identifier: Apache-2.0
"""Options, errors and output that several commands share."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import progress
from rich.console import Console
from rich.table import Table

from dualdp import _validate, accountants, mechanisms

NoiseMultiplier = Annotated[float, typer.Option(help="Noise standard deviation / max_grad_norm.")]
SampleRate = Annotated[float | None, typer.Option(help="Expected batch size / number of examples.")]
Steps = Annotated[int | None, typer.Option(help="Number of noise releases.")]
NumExamples = Annotated[int | None, typer.Option(help="Number of examples, instead of a rate.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size, with --num-examples.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data, instead of --steps.")]
Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta).")]
Name = Annotated[str, typer.Option(help="pld, or rdp.")]
Sampler = Annotated[str, typer.Option(help=f"One of {', '.join(sorted(mechanisms.SAMPLERS))}.")]
Relation = Annotated[str, typer.Option(help=f"One of {', '.join(mechanisms.RELATIONS)}.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="For truncated_poisson: the cut.")]
GroupSize = Annotated[int, typer.Option(help="Most examples of one user, where rows are drawn.")]
Unit = Annotated[str, typer.Option(help="What is drawn: example, or user with all its rows.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

#: Neighboring relation -> the two data sets that it compares, for a unit of privacy.
RELATIONS = {
    "add_or_remove": "the data with and without any one {}",
    "replace": "the data with any one {} and with another in its place",
    "zero_out": "the data with any one {} and with an empty one in its place",
}
PROTECTED = {"example": "example", "user": "user with all rows"}
#: Name of a number that `show` prints -> its meaning.
MEANINGS = {
    "protects": "epsilon is that of any one of these",
    "target_epsilon": "what was asked for; epsilon is not above it",
    "delta": "probability left out of that comparison; below 1 / examples",
    "noise_multiplier": "noise standard deviation / max_grad_norm",
    "sample_rate": "expected batch size / number of examples",
    "num_steps": "noisy gradient sums that are released",
    "accountant": "pld and rdp give upper bounds, pld the smaller",
    "sampler": "the run must draw its batches in this way",
}


@contextmanager
def working(title: str, pieces: int | None = None) -> Iterator[Callable[[], None]]:
    """Show on a terminal that work goes on: the time so far, and the share of `pieces` done.

    Yields:
        A function to call after each piece.
    """
    console = Console(stderr=True)
    columns = [progress.TextColumn(title), progress.TimeElapsedColumn()]
    if pieces:
        columns += [progress.BarColumn(), progress.TimeRemainingColumn()]
    with progress.Progress(
        progress.SpinnerColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=pieces)
        yield lambda: bar.advance(task)


def made(option: str, name: str) -> Any:
    """Return what the user's function "module:function" returns; without arguments."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{option}={name!r} names no function ({error}). Expected package.module:function, "
            "found from the working directory."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    _validate.takes(f"{option}={name!r}", function, "no arguments")
    return function()


def record_of(
    noise_multiplier: float,
    sample_rate: float,
    num_steps: int,
    delta: float,
    setting: Mapping[str, Any],
    protects: str,
    **asked: float,
) -> dict[str, Any]:
    """Return what `show` prints of a run of equal steps: its epsilon first, then its settings."""
    account = accountants.create(
        setting["accountant"],
        neighboring_relation=setting["neighboring_relation"],
        group_size=setting["group_size"],
    )
    account.step(
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        sampler=setting["sampler"],
        num_examples=setting["num_examples"],
        max_batch_size=setting["max_batch_size"],
    )
    return {
        "epsilon": float(account.get_epsilon(delta=delta)),
        **asked,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "num_steps": num_steps,
        "accountant": setting["accountant"],
        "sampler": setting["sampler"],
        "neighboring_relation": setting["neighboring_relation"],
        "protects": protects,
    }


def run_length(
    sample_rate: float | None,
    steps: int | None,
    num_examples: int | None,
    batch_size: int | None,
    epochs: float | None,
) -> tuple[float, int]:
    """Return (sample_rate, num_steps) from rates and steps, or from sizes and epochs."""
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
        return _validate.probability("sample_rate", sample_rate), _validate.integer("steps", steps)
    if num_examples is None or batch_size is None:
        raise ValueError("--epochs needs --num-examples and --batch-size. Or give --steps.")
    number = mechanisms.num_steps_of(
        epochs=float(epochs or 0.0), num_examples=num_examples, batch_size=batch_size
    )
    return _validate.probability("sample_rate", sample_rate), number


def protected(unit: str, group_size: int) -> str:
    """Return in words whom epsilon protects."""
    _validate.choice("unit", unit, PROTECTED)
    if group_size == 1:
        return PROTECTED[unit]
    if unit != "example":
        raise ValueError(
            f"group_size={group_size} came with unit={unit!r}. Expected one of the two: users are "
            "drawn, or examples of which a user has a few."
        )
    return f"user with at most {group_size} examples"


def factor(epsilon: float) -> str:
    """Return e^epsilon as text, rounded up to four digits.

    >>> factor(1.51564), factor(4118.4), factor(math.inf)
    ('4.553', 'e^4119', 'inf')
    """
    if epsilon > 700:
        return "inf" if epsilon == math.inf else f"e^{math.ceil(epsilon)}"
    exact = math.exp(epsilon)
    unit = 10.0 ** (math.floor(math.log10(exact)) - 3)
    return f"{math.ceil(exact / unit) * unit:.4g}"


def show(record: dict[str, Any], *, as_json: bool, title: str) -> None:
    """Print a record as JSON, or as a table with the meaning of each number."""
    if as_json:
        finite = {name: None if value == math.inf else value for name, value in record.items()}
        typer.echo(json.dumps(finite, indent=2))
        return
    meanings = MEANINGS | {
        "epsilon": f"any outcome is at most {factor(record['epsilon'])} times as likely on "
        "neighboring data",
        "neighboring_relation": RELATIONS[record["neighboring_relation"]].format(
            record["protects"]
        ),
    }
    table = Table(title=title, show_header=False)
    for name, value in record.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(name, text, meanings.get(name, ""))
    Console().print(table)

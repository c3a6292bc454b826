# SPDX-License-Identifier: Apache-2.0
"""`dualdp scale`: forecast of traffic, memory and time of a step on many accelerators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dualdp import _validate
from dualdp_tools import scaling
from dualdp_tools.cli.common import Json

#: Columns of the table: title -> function from a row of `rows` to its text.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "billion weights": lambda row: f"{row['parameters'] / 1e9:.3g}",
    "devices": lambda row: f"{row['accelerators']:,}",
    "method": lambda row: str(row["method"]),
    "shards": lambda row: f"{row['shards']:,}",
    "batch x chunks": lambda row: f"{row['physical_batch_size']} x {row['chunks']}",
    "GB held": lambda row: f"{sum(row['memory'].values()) / 1e9:.1f}",
    "GB sent": lambda row: _three_digits(row["sent"] / 1e9),
    "step seconds": lambda row: _three_digits(sum(row["seconds"].values())),
    "of them sending": lambda row: _three_digits(row["seconds"]["exposed"]),
    "speed": lambda row: f"{row['speed']:.2f}" if row["speed"] else "-",
}
#: Title -> its meaning; the others say it.
MEANINGS = {
    "method": "how gradients are clipped; plain is training without privacy",
    "shards": "devices that share one copy of the weights; 1: each has a copy",
    "batch x chunks": "examples a device works on at once x such batches in a step",
    "GB held": "most memory in use on a device; too big: not even one example fits",
    "GB sent": "by each device in a step",
    "of them sending": "seconds in which a device only sends and waits",
    "speed": "1 is that of training without privacy, at its own best batch",
}
_FACTS = 3  # leading columns with a value even if nothing fits


def scale(
    parameters: Annotated[
        str, typer.Option(help=f"Billions, of {', '.join(map(str, scaling.MODELS))}.")
    ] = ",".join(map(str, scaling.MODELS)),
    accelerators: Annotated[str, typer.Option(help="Numbers of accelerators.")] = "8,64,512,4096",
    method: Annotated[str, typer.Option(help=f"Of {', '.join(scaling.METHODS)}.")] = "book_keeping",
    hardware: Annotated[str, typer.Option(help=f"One of {', '.join(scaling.HARDWARE)}.")] = "h100",
    batch_size: Annotated[
        int, typer.Option(help="Expected batch size, over all accelerators.")
    ] = 8192,
    positions: Annotated[int, typer.Option(help="Tokens of one example.")] = 1024,
    sharding: Annotated[str, typer.Option(help=f"One of {', '.join(scaling.SHARDINGS)}.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="Of forward and backward: bfloat16 or float32.")
    ] = "bfloat16",
    noise: Annotated[str, typer.Option(help="fast or secure.")] = "fast",
    stack: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown instead of a table.")
    ] = False,
) -> None:
    """Forecast a private step of a transformer on many accelerators; lists are comma-separated."""
    positions = _validate.integer("positions", positions, minimum=1)
    chosen = _validate.choice("hardware", hardware, scaling.HARDWARE)
    jobs = [
        scaling.Job(
            replace(_model(billions), positions=positions),
            ranks=_number("accelerators", count),
            hardware=scaling.HARDWARE[chosen],
            expected_batch_size=batch_size,
            sharding=sharding,
            precision=precision,
            noise=noise,
            stack=stack,
        )
        for billions in parameters.split(",")
        for count in accelerators.split(",")
    ]
    found = [row for job in jobs for row in rows(job, method.split(","))]
    lines = [_cells(row) for row in found]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif markdown:
        head, *body = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, *lines)]
        typer.echo("\n".join([head, "|" + "---|" * len(COLUMNS), *body]))
    else:
        title = f"One step on {hardware}, {batch_size} examples of {positions} tokens"
        table = Table(title=title, box=None, pad_edge=False, collapse_padding=True)
        for name in COLUMNS:
            table.add_column("\n".join(name.rsplit(" ", 1)), justify="right", no_wrap=True)
        for cells in lines:
            table.add_row(*cells)
        Console().print(table)
        typer.echo("\n" + "\n".join(f"{name:16s} {text}" for name, text in MEANINGS.items()))


def _number(name: str, text: str) -> int:
    """Positive integer from a command-line argument."""
    try:
        return _validate.integer(name, int(text), minimum=1)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no positive integer. Expected such as 64.") from None


def _model(billions: str) -> scaling.Transformer:
    """Preset model with this number of parameters."""
    known = {str(size): model for size, model in scaling.MODELS.items()}
    return known[_validate.choice("parameters", billions.strip(), known)]


def rows(job: scaling.Job, methods: Iterable[str]) -> list[dict[str, Any]]:
    """Return one forecast per method as plain data, without results if nothing fits."""
    plain = scaling.forecast("plain", job)
    made = []
    for method in methods:
        row: dict[str, Any] = {
            "parameters": job.model.num_parameters,
            "accelerators": job.ranks,
            "method": method,
        }
        if (found := scaling.forecast(method, job)) is not None:
            row |= {
                "shards": found.shards,
                "physical_batch_size": found.physical_batch_size,
                "chunks": found.chunks,
                "memory": found.memory,
                "sent": found.sent,
                "seconds": asdict(found.time),
                "speed": plain.time.total / found.time.total if plain else None,
            }
        made.append(row)
    return made


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _cells(row: dict[str, Any]) -> list[str]:
    """Texts of a row, dashes if nothing fits."""
    texts = list(COLUMNS.values())
    if "sent" in row:
        return [text(row) for text in texts]
    facts = [text(row) for text in texts[:_FACTS]]
    return [*facts, "too big", *("-" for _ in texts[_FACTS + 1 :])]

# SPDX-License-Identifier: Apache-2.0
"""`dualdp port`: conversion of a checkpoint to the other backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dualdp import _validate
from dualdp.port import STACKS
from dualdp_tools.cli.common import made, working


def port(
    checkpoint: Annotated[Path, typer.Argument(help="A file of save_checkpoint.")],
    to: Annotated[str, typer.Option(help="torch or jax.")],
    like: Annotated[
        str,
        typer.Option(
            help="module:factory; the factory takes nothing and returns (model, optimizer) for "
            "torch, a dualdp.jax.TrainState for jax."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The new file; CHECKPOINT.torch or .jax by default.")
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option(help="JSON table for names that differ: torch name -> jax path.")
    ] = None,
) -> None:
    """Write the other stack's checkpoint of a run, with its plan, its step and its ledger."""
    from dualdp.port import checkpoint as write

    target = out or Path(f"{os.fspath(checkpoint)}.{to}")
    with working("Converting"):
        _validate.choice("to", to, STACKS)
        _validate.new_file("out", target)
        write(checkpoint, target, to=to, like=made("like", like), mapping=_table(mapping))
    typer.echo(f"wrote {target}")


def _table(path: Path | None) -> dict[str, Any] | None:
    """Mapping from the user's JSON file; a pair [path, layout] becomes a tuple."""
    if path is None:
        return None
    expected = 'a JSON table of names, {"torch name": "jax path"}'
    try:
        with _validate.file_errors("read", path, expected):
            table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Expected {expected}.") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds {_validate.kind(table)}. Expected {expected}.")
    return {name: tuple(to) if isinstance(to, list) else to for name, to in table.items()}

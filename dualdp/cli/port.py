# SPDX-License-Identifier: Apache-2.0
"""`dualdp port`: a checkpoint of one stack as one of the other."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dualdp.cli.epsilon import reported


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
        Path | None,
        typer.Option(help="JSON table for names that differ: torch name -> jax path."),
    ] = None,
) -> None:
    """Write the other stack's checkpoint of a run, with its plan, its step and its ledger."""
    from dualdp.port import checkpoint as write

    target = out or Path(f"{os.fspath(checkpoint)}.{to}")
    with reported():
        write(checkpoint, target, to=to, like=_made(like), mapping=_table(mapping))
    typer.echo(f"wrote {target}")


def _made(name: str) -> Any:
    """What the user's factory makes."""
    module, _, factory = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"like={name!r} can't be imported ({error}). Expected module:factory, found from here."
        ) from error
    finally:
        sys.path.pop(0)
    return make()


def _table(path: Path | None) -> dict[str, Any] | None:
    """The user's table; a pair [path, layout] is a tuple."""
    if path is None:
        return None
    table = json.loads(path.read_text())
    return {name: tuple(to) if isinstance(to, list) else to for name, to in table.items()}

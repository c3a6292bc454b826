# SPDX-License-Identifier: Apache-2.0
"""`dualdp port`: conversion of a checkpoint to the other backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dualdp import _validate
from dualdp.port import STACKS
from dualdp.port import checkpoint as write
from dualdp_tools.cli.common import made, working


def port(
    checkpoint: Annotated[Path, Argument(help="A file of save_checkpoint.")],
    to: Annotated[str, Option(help="torch or jax.")],
    like: Annotated[str, Option(help="module:factory, a function without arguments.")],
    out: Annotated[Path | None, Option(help="New file; CHECKPOINT.torch or .jax.")] = None,
) -> None:
    """Write the other stack's checkpoint of a run, with its plan, its step and its ledger.

    The factory of --like returns (model, optimizer) for torch, a dualdp.jax.TrainState for jax.
    """
    target = out or Path(f"{checkpoint}.{to}")
    with working("Converting"):
        _validate.choice("to", to, STACKS)
        _validate.new_file("out", target)
        write(checkpoint, target, to=to, like=made("like", like))
    typer.echo(f"wrote {target}")

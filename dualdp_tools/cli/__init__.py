# SPDX-License-Identifier: Apache-2.0
"""Command line with one file per command."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from dualdp_tools.cli.audit import audit
from dualdp_tools.cli.calibrate import calibrate
from dualdp_tools.cli.compare import compare
from dualdp_tools.cli.epsilon import epsilon
from dualdp_tools.cli.plot import plot
from dualdp_tools.cli.port import port
from dualdp_tools.cli.verify import verify


class Commands(TyperGroup):
    """Commands that report a bad argument in one line, without a traceback, and exit with 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
            typer.secho(f"dualdp: {error}", err=True, fg="red")
            raise typer.Exit(2) from error


app = typer.Typer(
    name="dualdp",
    cls=Commands,
    help="Differentially private training on PyTorch and JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (compare, epsilon, calibrate, audit, verify, plot, port):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()

# SPDX-License-Identifier: Apache-2.0
"""Command line with one file per command."""

from __future__ import annotations

import typer

from dualdp_tools.cli.audit import audit
from dualdp_tools.cli.bench import FORWARD, bench
from dualdp_tools.cli.calibrate import calibrate
from dualdp_tools.cli.compare import compare
from dualdp_tools.cli.epsilon import epsilon
from dualdp_tools.cli.plot import plot
from dualdp_tools.cli.port import port
from dualdp_tools.cli.scale import scale
from dualdp_tools.cli.verify import verify

app = typer.Typer(
    name="dualdp",
    help="Differentially private training on PyTorch and JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (compare, epsilon, calibrate, audit, verify, plot, port, scale):
    app.command()(command)
app.command(context_settings=FORWARD)(bench)


def main() -> None:
    """Run the command line; report a bad argument in one line without a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"dualdp: {error}", err=True, fg="red")
        raise SystemExit(2) from None

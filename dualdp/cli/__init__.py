# SPDX-License-Identifier: Apache-2.0
"""The command line: one file per command."""

from __future__ import annotations

import typer

from dualdp.cli.audit import audit
from dualdp.cli.bench import FORWARD, bench
from dualdp.cli.calibrate import calibrate
from dualdp.cli.compare import compare
from dualdp.cli.epsilon import epsilon
from dualdp.cli.plot import plot
from dualdp.cli.port import port
from dualdp.cli.scale import scale
from dualdp.cli.verify import verify

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
    """Run the command line; a bad argument is one sentence, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"dualdp: {error}", err=True, fg="red")
        raise SystemExit(2) from None

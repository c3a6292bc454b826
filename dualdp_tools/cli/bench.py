# SPDX-License-Identifier: Apache-2.0
"""`dualdp bench`: the benchmarks of `dualdp_tools.bench` on the user's machine."""

from __future__ import annotations

import importlib

import typer

#: Forwards all arguments, --help included, to the command line of the benchmarks.
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure speed, memory and accounting; `dualdp bench --help` lists the commands."""
    command_line = importlib.import_module("dualdp_tools.bench.command_line")
    command_line.app(args=context.args, prog_name="dualdp bench")

# SPDX-License-Identifier: Apache-2.0
"""`dualdp bench`: the benchmarks of `dualdp_bench`, on the user's machine."""

from __future__ import annotations

import importlib

import typer

#: All that follows belongs to the command line of the benchmarks, its --help too.
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure speed, memory and accounting here; `dualdp bench --help` says what there is."""
    command_line = importlib.import_module("dualdp_bench.command_line")
    command_line.app(args=context.args, prog_name="dualdp bench")

# SPDX-License-Identifier: Apache-2.0
"""`dualdp plot`: a picture of a log."""

from typer.testing import CliRunner

from dualdp_tools.cli import app
from tests.dualdp.test_log import logged


def test_plot_draws_a_log(tmp_path):
    logged(tmp_path / "run.csv", unprotected_loss=0.5, unprotected_median_norm=2.0)
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "run.csv")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

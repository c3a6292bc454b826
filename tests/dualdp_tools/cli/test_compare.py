# SPDX-License-Identifier: Apache-2.0
"""`dualdp compare`: bad options are found before anything is written."""

import pytest
from typer.testing import CliRunner

from dualdp_tools.cli import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--switch-at 3 --steps 3", "dualdp: switch_at=3 is not within the run. Expected 1 to 2"),
        ("--batch-size 5000", "dualdp: expected_batch_size=5000.0 is out of range. Expected a"),
        ("--dtype float16", "'float16' is not one of 'float32', 'float64'"),
    ],
)
def test_bad_options_leave_nothing(tmp_path, options, message):
    done = CliRunner().invoke(
        app, ["compare", "--out", str(tmp_path / "out"), *options.split()], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out" / "compare.json").exists()

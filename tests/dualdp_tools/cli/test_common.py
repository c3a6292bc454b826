# SPDX-License-Identifier: Apache-2.0
"""What the commands share: factors in words, progress on terminals."""

import math

from dualdp_tools.cli import common


def test_a_factor_is_never_rounded_below_e_to_the_epsilon():
    for epsilon in (0.0, 1e-9, 0.5, 1.51564, 3.0, 20.0, 699.9):
        said = float(common.factor(epsilon))
        assert math.exp(epsilon) <= said <= 1.0011 * math.exp(epsilon)
    assert common.factor(4118.4) == "e^4119"
    assert common.factor(math.inf) == "inf"


def test_progress_is_for_terminals(monkeypatch, capsys):
    with common.working("Counting"):
        pass
    assert capsys.readouterr() == ("", ""), "a file or a pipe gets nothing"
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for a terminal
    with common.working("Counting"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "Counting" in err

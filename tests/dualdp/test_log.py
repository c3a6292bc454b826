# SPDX-License-Identifier: Apache-2.0
"""The log of a run: true numbers, and what is not private says so."""

import numpy as np
import pytest

import dualdp
from dualdp.log import RunLog, read_log
from tests.dualdp.plan.test_plan import make


def logged(path, steps=5, **columns):
    ledger = dualdp.Ledger(make())
    with RunLog(path, ledger) as log:
        for step in range(steps):
            ledger.record(step)
            log.write(accuracy=step / 10, **columns)
    return ledger


def test_a_log_holds_steps_and_epsilon(tmp_path):
    ledger = logged(tmp_path / "run.csv", unprotected_loss=np.float32(0.5))
    columns = read_log(tmp_path / "run.csv")
    assert list(columns) == ["step", "epsilon", "accuracy", "unprotected_loss"]
    assert columns["step"] == [1, 2, 3, 4, 5]
    assert columns["epsilon"] == [ledger.plan.epsilon(step) for step in range(1, 6)]
    assert columns["accuracy"] == [0, 0.1, 0.2, 0.3, 0.4]


def test_columns_keep_their_place_in_any_order(tmp_path):
    with RunLog(tmp_path / "run.csv", dualdp.Ledger(make())) as log:
        log.write(accuracy=0.1, rate=5.0)
        log.write(rate=6.0, accuracy=0.2)
    columns = read_log(tmp_path / "run.csv")
    assert (columns["accuracy"], columns["rate"]) == ([0.1, 0.2], [5.0, 6.0])


def test_unprotected_columns_are_noted(tmp_path):
    ledger = logged(tmp_path / "run.csv", unprotected_loss=0.5, unprotected_norm=float("nan"))
    notes = [r["note"] for r in dualdp.Ledger.read(ledger.to_json()) if "note" in r]
    assert notes == [{"unprotected": ["unprotected_loss", "unprotected_norm"]}]
    assert "note" not in logged(tmp_path / "other.csv").to_json()


def test_secure_runs_log_no_unprotected(tmp_path):
    ledger = dualdp.Ledger(make(noise="secure"))
    with RunLog(tmp_path / "run.csv", ledger) as log:
        assert set(log.write(unprotected_loss=1.0, accuracy=0.5)) == {"step", "epsilon", "accuracy"}
    assert "unprotected" not in (tmp_path / "run.csv").read_text() + ledger.to_json()


def test_bad_rows_are_refused(tmp_path):
    log = RunLog(tmp_path / "run.csv", dualdp.Ledger(make()))
    with pytest.raises(ValueError, match=r"Columns \['step'\] came. Expected other names"):
        log.write(step=1)
    with pytest.raises(TypeError, match="accuracy='high' is a str"):
        log.write(accuracy="high")
    log.write(accuracy=1.0)
    with pytest.raises(ValueError, match=r"\['loss'\] came after rows with \['accuracy'\]"):
        log.write(loss=1.0)
    log.close()
    assert read_log(tmp_path / "run.csv")["accuracy"] == [1.0]
    with pytest.raises(FileExistsError, match="run.csv exists. Expected a new path"):
        RunLog(tmp_path / "run.csv", dualdp.Ledger(make()))
    for text in ("", "a,b\n1,2\n", "step,epsilon\n", "step,epsilon\n1,x\n"):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(ValueError, match=r"bad.csv is no log of a run"):
            read_log(tmp_path / "bad.csv")

# SPDX-License-Identifier: Apache-2.0
"""The log of a run: true numbers, and what is not private says so."""

import numpy as np

import dualdp
from dualdp.log import RunLog, read_log
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused


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
    path, ledger = tmp_path / "run.csv", dualdp.Ledger(make())
    log = RunLog(path, ledger)
    words = r"Columns \['step'\] came. Expected other names"
    refused(lambda: log.write(step=1), ValueError, words)
    refused(lambda: log.write(accuracy="high"), TypeError, "accuracy='high' is a str")
    log.write(accuracy=1.0, rate=5.0)
    words = r"\['loss'\] came after rows with \['accuracy', 'rate'\]"
    refused(lambda: log.write(loss=1.0), ValueError, words)
    log.write(rate=6.0, accuracy=0.2)  # columns keep their place
    log.close()
    columns = read_log(path)
    assert (columns["accuracy"], columns["rate"]) == ([1.0, 0.2], [5.0, 6.0])
    words = "run.csv exists. Expected a new path"
    refused(lambda: RunLog(path, ledger), FileExistsError, words)
    for text in ("", "a,b\n1,2\n", "step,epsilon\n", "step,epsilon\n1,x\n"):
        path.write_text(text)
        refused(lambda: read_log(path), ValueError, "run.csv is no log of a run")

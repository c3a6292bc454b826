# SPDX-License-Identifier: Apache-2.0
"""Mistakes with plans, accounting, ledgers, logs and files: each is answered by one sentence."""

import numpy as np
import pytest

import dualdp
from dualdp import AccountingError, Ledger, checkpoint
from dualdp.ledger.verify import verify
from dualdp.log import RunLog
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused, untidy


@pytest.fixture
def at(tmp_path):
    return untidy(tmp_path)


def test_mistakes_of_accounting():
    run = {"sample_rate": 0.1, "num_steps": 3}
    epsilon = lambda **given: dualdp.get_epsilon(delta=1e-5, **(run | given))  # noqa: E731
    refused(lambda: epsilon(noise_multiplier=np.ones(2)), TypeError, "is a NumPy array")
    words = "There is no argument .epochs"
    refused(lambda: epsilon(noise_multiplier=1.0, epochs=3), TypeError, words)
    tiny = {"target_epsilon": 1.0, "target_delta": 1e-300}
    noise = lambda: dualdp.get_noise_multiplier(**tiny, **run)  # noqa: E731
    refused(noise, AccountingError, "below 1e-150")


def test_mistakes_of_schedules():
    refused(lambda: make(noise_multiplier="linear"), TypeError, "is a str")
    words = r"noise_multiplier\(0\)=None"
    refused(lambda: make(noise_multiplier=lambda step: None), TypeError, words)
    words = r"noise_multiplier takes \(\), but is called with \(step\)"
    refused(lambda: make(noise_multiplier=lambda: 1.0), TypeError, words)


def test_mistakes_of_ledgers(at):
    plan = make()
    words = "can't be made: its folder does not exist"
    refused(lambda: Ledger(plan, path=at / "no" / "ledger"), FileNotFoundError, words)
    words = "exists. Expected a new path.*load_checkpoint goes on"
    refused(lambda: Ledger(plan, path=at / "folder"), FileExistsError, words)
    refused(lambda: Ledger(plan).record("0"), TypeError, "step='0' is a str")
    refused(lambda: Ledger.read(at / "no"), FileNotFoundError, "no does not exist. Ex")
    refused(lambda: verify(at / "folder"), IsADirectoryError, "folder is a folder")
    refused(lambda: verify(plan), TypeError, "is a PrivacyPlan. Expected a path")


def test_mistakes_of_logs(at):
    ledger = Ledger(make())
    words = "its folder does not exist. Expected a new path"
    refused(lambda: RunLog(at / "no" / "log", ledger), FileNotFoundError, words)
    words = "ledger is a PrivacyPlan. Expected engine.ledger"
    refused(lambda: RunLog(at / "log", ledger.plan), TypeError, words)
    with RunLog(at / "log", ledger) as log:
        words = "loss=.* is a NumPy array. Expected a number"
        refused(lambda: log.write(loss=np.ones(2)), TypeError, words)


def test_mistakes_of_files(at):
    words = "is a folder. Expected the name of a file"
    refused(lambda: checkpoint.write(at / "folder", {}, {}), IsADirectoryError, words)
    words = "lies in no existing folder. Make it first"
    refused(lambda: checkpoint.write(at / "no" / "run", {}, {}), FileNotFoundError, words)

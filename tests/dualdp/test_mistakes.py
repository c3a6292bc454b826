# SPDX-License-Identifier: Apache-2.0
"""Mistakes with plans, accounting, ledgers, logs and files, in a table."""

from types import SimpleNamespace

import numpy as np
import pytest

import dualdp
from dualdp import AccountingError, Ledger, PrivacyPlan, checkpoint
from dualdp.ledger.verify import verify
from dualdp.log import RunLog
from tests.mistakes import refused, untidy

RATE = {"noise_multiplier": 1.0, "sample_rate": 0.1, "num_steps": 3, "delta": 1e-5}
TARGET = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "num_steps": 3}


def plan(**changes):
    sizes = {"num_examples": 24, "expected_batch_size": 6, "num_steps": 4}
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-5, "seed": 1}
    return PrivacyPlan(**{**sizes, **numbers, **changes})


def epsilon(**changes):
    return dualdp.get_epsilon(**{**RATE, **changes})


def noise(**changes):
    return dualdp.get_noise_multiplier(**{**TARGET, **changes})


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """Things that rows share; `at` is an untidy folder."""
    at = untidy(tmp_path_factory.mktemp("mistakes"))
    return SimpleNamespace(at=at, ledger=Ledger(plan()))


def written(log, *rows):
    with log:
        for row in rows:
            log.write(**row)


#: Mistake -> (call with the kit, error, words).
MISTAKES = {
    # accounting
    "vector": (lambda k: epsilon(noise_multiplier=np.ones(2)), TypeError, "is a NumPy array"),
    "epochs here": (lambda k: epsilon(epochs=3), TypeError, "There is no argument .epochs"),
    "a tiny delta": (lambda k: noise(target_delta=1e-300), AccountingError, "below 1e-150"),
    # plans
    "schedule as text": (lambda k: plan(noise_multiplier="linear"), TypeError, "is a str"),
    "schedule of nothing": (
        lambda k: plan(noise_multiplier=lambda step: None),
        TypeError,
        r"noise_multiplier\(0\)=None",
    ),
    "schedule without a step": (
        lambda k: plan(noise_multiplier=lambda: 1.0),
        TypeError,
        r"noise_multiplier takes \(\), but is called with \(step\)",
    ),
    # ledgers
    "ledger nowhere": (
        lambda k: Ledger(plan(), path=k.at / "no" / "ledger"),
        FileNotFoundError,
        "can't be made: its folder does not exist",
    ),
    "folder as ledger": (
        lambda k: Ledger(plan(), path=k.at / "folder"),
        FileExistsError,
        "exists. Expected a new path.*load_checkpoint goes on",
    ),
    "step as text": (lambda k: Ledger(plan()).record("0"), TypeError, "step='0' is a str"),
    "no ledger": (lambda k: Ledger.read(k.at / "no"), FileNotFoundError, "no does not exist. Ex"),
    "folder read": (lambda k: verify(k.at / "folder"), IsADirectoryError, "folder is a folder"),
    "plan verified": (lambda k: verify(plan()), TypeError, "is a PrivacyPlan. Expected a path"),
    # logs
    "log nowhere": (
        lambda k: RunLog(k.at / "no" / "log", k.ledger),
        FileNotFoundError,
        "its folder does not exist. Expected a new path",
    ),
    "log of a plan": (
        lambda k: RunLog(k.at / "log", plan()),
        TypeError,
        "ledger is a PrivacyPlan. Expected engine.ledger",
    ),
    "two losses": (
        lambda k: written(RunLog(k.at / "log1", k.ledger), {"loss": np.ones(2)}),
        TypeError,
        "loss=.* is a NumPy array. Expected a number",
    ),
    # files of checkpoints
    "written to a folder": (
        lambda k: checkpoint.write(k.at / "folder", {}, {}),
        IsADirectoryError,
        "is a folder. Expected the name of a file",
    ),
    "written nowhere": (
        lambda k: checkpoint.write(k.at / "no" / "run", {}, {}),
        FileNotFoundError,
        "lies in no existing folder. Make it first",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered(mistake, kit):
    call, error, words = MISTAKES[mistake]
    refused(lambda: call(kit), error, words)

# SPDX-License-Identifier: Apache-2.0
"""Mistakes with plans, accounting, ledgers, logs and files, in a table."""

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest

import dualdp
from dualdp import AccountingError, Ledger, PrivacyPlan, accountants, checkpoint, schedules
from dualdp._validate import file_errors
from dualdp.ledger.verify import verify
from dualdp.log import RunLog, progress, read_log
from tests.mistakes import is_a_sentence_of_ours, refused, untidy

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


def on_a_closed_ledger(kit):
    made = Ledger(plan(), path=kit.at / "closed")
    made.close()
    made.record(0)


def after_close(kit):
    log = RunLog(kit.at / "closed.csv", kit.ledger)
    log.close()
    log.write(accuracy=1.0)


#: Mistake -> (call with the kit, error, words).
MISTAKES = {
    # accounting
    "noise as text": (lambda k: epsilon(noise_multiplier="1"), TypeError, "='1' is a str"),
    "no delta": (lambda k: epsilon(delta=None), TypeError, "^delta=None. Expected a number"),
    "percent": (lambda k: epsilon(sample_rate=10), ValueError, "expected_batch_size / num_exa"),
    "negative delta": (lambda k: epsilon(delta=-1e-5), ValueError, "delta=-1e-05 is not a prob"),
    "half a step": (lambda k: epsilon(num_steps=1.5), TypeError, "num_steps=1.5 is a float"),
    "noise of each step": (lambda k: epsilon(noise_multiplier=[1, 2]), TypeError, "is a list"),
    "vector": (lambda k: epsilon(noise_multiplier=np.ones(2)), TypeError, "is a NumPy array"),
    "epochs here": (lambda k: epsilon(epochs=3), TypeError, "no argument 'epochs'.*group_size"),
    "sampler": (lambda k: epsilon(sampler="uniform"), ValueError, "one of balls_in_bins, fix"),
    "no sampler": (lambda k: epsilon(sampler=None), TypeError, "^sampler=None. Expected one of"),
    "gdp": (lambda k: epsilon(accountant="gdp"), ValueError, "gdp_epsilon gives the number"),
    "relation": (lambda k: epsilon(neighboring_relation="x"), ValueError, "add_or_remove, repl"),
    "target of 0": (lambda k: noise(target_epsilon=0), ValueError, "target_epsilon=0 is out of"),
    "infinite target": (lambda k: noise(target_epsilon=np.inf), ValueError, "finite number > 0"),
    "rate out of reach": (
        lambda k: dualdp.get_sample_rate(
            target_epsilon=1.0, target_delta=1e-5, num_steps=10, noise_multiplier=0.0
        ),
        AccountingError,
        "is out of reach: no sampling rate",
    ),
    "a tiny delta": (lambda k: noise(target_delta=1e-300), AccountingError, "below 1e-150"),
    "accountant": (lambda k: accountants.create("moments"), ValueError, "one of pld, prv, rdp"),
    "compose": (lambda k: accountants.create("pld").compose(3), TypeError, "event=3 is an int"),
    "no accountant": (lambda k: accountants.register("x", dict), TypeError, "lacks step, compo"),
    "no state": (lambda k: accountants.create("pld").load_state_dict({}), ValueError, "state_dic"),
    # plans
    "examples as text": (lambda k: plan(num_examples="24"), TypeError, "num_examples='24' is a s"),
    "the data": (lambda k: plan(num_examples=[1, 2]), TypeError, "is a list. Expected an integ"),
    "no examples": (lambda k: plan(num_examples=0), ValueError, "num_examples=0 is out of range"),
    "a batch too large": (lambda k: plan(expected_batch_size=25), ValueError, "exceeds num_exam"),
    "delta of 0": (lambda k: plan(delta=0), ValueError, "delta=0 is out of range.*between 0 and"),
    "delta of 1": (lambda k: plan(delta=1), ValueError, "delta=1 is out of range"),
    "clipping": (lambda k: plan(clipping="none"), ValueError, "one of automatic, flat, per_lay"),
    "noise": (lambda k: plan(noise="gaussian"), ValueError, "one of fast, portable, secure"),
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
    "schedule below 0": (
        lambda k: plan(noise_multiplier=lambda step: 1.0 - step),
        ValueError,
        "=-1.0 at step 2 is out of range",
    ),
    "words in a schedule": (
        lambda k: schedules.Linear("1", 2.0, over=3),
        TypeError,
        "initial='1' is a str",
    ),
    "schedule of an open end": (
        lambda k: plan(num_steps=None, noise_multiplier=lambda step: 1.0),
        ValueError,
        "Expected num_steps",
    ),
    "no cut": (lambda k: plan(sampler="truncated_poisson"), ValueError, "max_batch_size=None"),
    "guessed noise": (lambda k: plan(noise="secure"), ValueError, "seed=1 with noise='secure'"),
    "seed as text": (lambda k: plan(seed="abc"), TypeError, "seed='abc' is a str"),
    "both": (
        lambda k: PrivacyPlan.calibrate(noise_multiplier=1.0, target_epsilon=1.0),
        ValueError,
        "came together. Expected one of the two",
    ),
    "past the plan": (lambda k: plan().epsilon(step=9), ValueError, "past the plan's num_steps=4"),
    "an open end": (lambda k: plan(num_steps=None).epsilon(), ValueError, "Pass step="),
    "a path for a plan": (
        lambda k: PrivacyPlan.from_json(str(k.at / "plan.json")),
        ValueError,
        "Expected what PrivacyPlan.to_json wrote",
    ),
    "batches without a seed": (
        lambda k: plan(seed=None).batch_indices(0),
        ValueError,
        "has no seed.*Expected the loader of make_private",
    ),
    "batch of no step": (lambda k: plan().batch_indices("0"), TypeError, "step='0' is a str"),
    # ledgers
    "ledger of no plan": (lambda k: Ledger({}), TypeError, "plan is a dict. Expected a dualdp.Pr"),
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
    "number as ledger": (lambda k: Ledger(plan(), path=3), TypeError, "ledger=3 is an int"),
    "skipped": (lambda k: Ledger(plan()).record(1), AccountingError, "Expected step=0; a step is"),
    "step as text": (lambda k: Ledger(plan()).record("0"), TypeError, "step='0' is a str"),
    "closed ledger": (on_a_closed_ledger, ValueError, "closed is closed, so a release would not"),
    "no ledger": (lambda k: Ledger.read(k.at / "no"), FileNotFoundError, "no does not exist. Ex"),
    "folder read": (lambda k: verify(k.at / "folder"), IsADirectoryError, "folder is a folder"),
    "plan verified": (lambda k: verify(plan()), TypeError, "is a PrivacyPlan. Expected a path"),
    # logs
    "log nowhere": (
        lambda k: RunLog(k.at / "no" / "log", k.ledger),
        FileNotFoundError,
        "its folder does not exist. Expected a new path",
    ),
    "log over a file": (lambda k: RunLog(k.at / "file", k.ledger), FileExistsError, "overwritten"),
    "log of a plan": (
        lambda k: RunLog(k.at / "log", plan()),
        TypeError,
        "ledger is a PrivacyPlan. Expected engine.ledger",
    ),
    "bar of None": (lambda k: next(progress([1], None)), TypeError, "ledger is None. Expected"),
    "two losses": (
        lambda k: written(RunLog(k.at / "log1", k.ledger), {"loss": np.ones(2)}),
        TypeError,
        "loss=.* is a NumPy array. Expected a number",
    ),
    "new column": (
        lambda k: written(RunLog(k.at / "log2", k.ledger), {"a": 1.0}, {"b": 1.0}),
        ValueError,
        "Expected the same in every row",
    ),
    "closed log": (after_close, ValueError, "The log is closed"),
    "no log": (lambda k: read_log(k.at / "no"), FileNotFoundError, "no does not exist. Expected"),
    "folder as log": (lambda k: read_log(k.at / "folder"), IsADirectoryError, "is a folder"),
    "text as log": (lambda k: read_log(k.at / "file"), ValueError, "it has no rows.*RunLog"),
    # files of checkpoints
    "no checkpoint": (lambda k: checkpoint.read(k.at / "no"), FileNotFoundError, "does not exist"),
    "folder as checkpoint": (lambda k: checkpoint.read(k.at / "folder"), IsADirectoryError, "is a"),
    "text as checkpoint": (lambda k: checkpoint.read(k.at / "file"), ValueError, "no safetensors"),
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


@pytest.mark.parametrize(
    ("verb", "code", "error", "words"),
    [
        ("written", errno.EACCES, PermissionError, "x can't be written .Permission denied.. Expec"),
        ("read", errno.EACCES, PermissionError, "x can't be read .Permission denied.. Expected y"),
        ("written", errno.ENOSPC, OSError, "x can't be written .No space left on device.. Expect"),
    ],
)
def test_errors_of_the_system_become_sentences(verb, code, error, words):
    def call():
        with file_errors(verb, "x", "y"):
            raise OSError(code, os.strerror(code))

    refused(call, error, words)


def test_the_judge_tells_our_sentences_from_raw_errors():
    def answer(call):
        with pytest.raises((OSError, TypeError, ValueError)) as caught:
            call()
        return is_a_sentence_of_ours(caught.value)

    assert answer(lambda: plan(delta=2))
    assert not answer(lambda: open("/nowhere/at/all"))  # noqa: SIM115
    assert not answer(lambda: plan(noise_multiplier=lambda step: float("x")))  # a user's function
    with pytest.raises(AssertionError):
        refused(lambda: int("x"), ValueError, "invalid literal")

# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at random instants and go on: no release is missing from the record."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

import dualdp
from dualdp import checkpoint
from dualdp.ledger.verify import verify
from tests.dualdp.plan.test_plan import make

EVERY = 15  # steps between two checkpoints
PLAN = {"num_steps": 90, "noise_multiplier": 1.3, "accountant": "rdp"}

# JAX, which other tests bring into this process, warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def train(folder: Path, most: int | None = None) -> None:
    """Release steps from the last checkpoint on, and note each of them.

    All that are left; or at most `most`, and then wait for the kill, so that a fast machine does
    not end the run before it.
    """
    path = folder / "run"
    if path.exists():
        ledger = checkpoint.open_run(checkpoint.read(path)[1], path)
    else:
        for left in folder.glob("run.ledger*"):  # of a start without a checkpoint: no release
            left.unlink()
        ledger = dualdp.Ledger(make(**PLAN))
        save(path, ledger)
    notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    stop = ledger.end if most is None else min(ledger.position + most, ledger.end)
    while ledger.position < stop:
        release = ledger.record(ledger.position)
        os.write(notes, b"%d\n" % release.step)  # here its noise would be drawn
        if ledger.position % EVERY == 0:
            save(path, ledger)
    while most is not None:
        signal.pause()


def save(path: Path, ledger: dualdp.Ledger) -> None:
    """Write a checkpoint."""
    facts = {"stack": "none", "settings": {}, "trained": [], "parameters": []}
    checkpoint.write(path, {"a": np.zeros(3)}, checkpoint.describe_run(ledger, path, **facts))


def start(folder: Path, most: int | None = None) -> int:
    """Train in a fork; its process id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            train(folder, most)
            status = 0
        finally:
            os._exit(status)
    return child


def released(folder: Path) -> list[int]:
    """Steps whose noise may have been drawn."""
    path = folder / "notes"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(folder: Path, most: int, seconds: float) -> None:
    """Start or go on for some steps, and kill some time after the first of their releases."""
    before, child = len(released(folder)), start(folder, most)
    limit = time.monotonic() + 2 * seconds + 0.1  # a run that is done releases nothing
    while len(released(folder)) == before and time.monotonic() < limit:
        time.sleep(0.0002)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL


def renyi_epsilon(releases, delta):
    """Epsilon of (step, noise, rate) lines by integer orders alone, with nothing of dualdp.

    Mironov et al. 2019, equation 8 of the binomial sum; Canonne et al. 2020, proposition 12.
    """
    bounds = []
    for order in range(2, 65):
        k = np.arange(order + 1)
        chosen = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        spent = 0.0
        for (noise, q), count in Counter((noise, rate) for _, noise, rate in releases).items():
            terms = chosen + k * np.log(q) + (order - k) * np.log1p(-q)
            spent += count * logsumexp(terms + k * (k - 1) / (2 * noise**2)) / (order - 1)
        bounds.append(spent + np.log1p(-1 / order) - np.log(delta * order) / (order - 1))
    return min(bounds)


@pytest.mark.slow
def test_no_kill_loses_a_release(tmp_path):
    """What is on record covers what was released, step by step, after each of 50 kills."""
    (whole := tmp_path / "whole").mkdir()
    began = time.monotonic()
    assert wait(start(whole)) == 0
    pace = (time.monotonic() - began) / PLAN["num_steps"]  # scales instants, decides nothing
    rng = np.random.default_rng(1)
    for run in range(5):
        (folder := tmp_path / f"{run}").mkdir()
        for kills in range(1, 11):
            most = int(rng.integers(1, 41))
            kill(folder, most, float(rng.uniform(0, 1.2 * pace * most)))
            has_begun = (folder / "run").exists()
            lines = dualdp.Ledger.read(folder / "run.ledger") if has_begun else []
            on_record = Counter(line["r"][0] for line in lines if "r" in line)
            made = Counter(released(folder))
            assert not made - on_record
            assert on_record.total() - made.total() <= kills
        assert wait(start(folder)) == 0
        found = verify(folder / "run.ledger")
        assert found.passed, found.findings
        assert found.is_whole
        assert len(found.releases) >= len(released(folder)) >= PLAN["num_steps"]
        expected = renyi_epsilon(found.releases, found.plan.delta)
        assert 0.98 * expected < found.epsilons["rdp"] < 1.0001 * expected
        assert 0.6 * expected < found.epsilons["pld"] < expected

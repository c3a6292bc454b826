# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at random instants and go on: no release is missing from the record."""

import math
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


def train(folder: Path) -> None:
    """Release steps up to the plan's end, from the last checkpoint on, and note each of them."""
    path = folder / "run"
    if path.exists():
        ledger = checkpoint.open_run(checkpoint.read(path)[1], path)
    else:
        for left in folder.glob("run.ledger*"):  # of a start without a checkpoint: no release
            left.unlink()
        ledger = dualdp.Ledger(make(**PLAN))
        save(path, ledger)
    notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while ledger.position < ledger.end:
        release = ledger.record(ledger.position)
        os.write(notes, b"%d\n" % release.step)  # here its noise would be drawn
        if ledger.position % EVERY == 0:
            save(path, ledger)


def save(path: Path, ledger: dualdp.Ledger) -> None:
    """Write a checkpoint."""
    facts = {"stack": "none", "settings": {}, "trained": [], "parameters": []}
    checkpoint.write(path, {"a": np.zeros(3)}, checkpoint.describe_run(ledger, path, **facts))


def start(folder: Path) -> int:
    """Train in a fork; its process id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            train(folder)
            status = 0
        finally:
            os._exit(status)
    return child


def released(folder: Path) -> list[int]:
    """Steps whose noise may have been drawn."""
    path = folder / "notes"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def epsilon_of_lines(text: str, delta: float) -> float:
    """Epsilon of a ledger's releases by whole Renyi orders, and by nothing of this library.

    The library's own is up to 2 % less, since it also takes orders between them.

    Source: Mironov et al. 2019, section 3.3; Canonne et al. 2020, proposition 12.
    """
    orders = np.arange(2, 256)
    total = np.zeros(len(orders))
    lines = [line[6 : line.index("]")].split(",") for line in text.splitlines() if "r" in line[:3]]
    for (noise, rate), count in Counter((float(n), float(q)) for _, n, q in lines).items():
        for i, a in enumerate(orders.tolist()):
            k = np.arange(a + 1)
            terms = gammaln(a + 1) - gammaln(k + 1) - gammaln(a - k + 1) + k * math.log(rate)
            terms += (a - k) * math.log1p(-rate) + (k * k - k) / (2 * noise**2)
            total[i] += count * float(logsumexp(terms)) / (a - 1)
    spent = total + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return float(spent.min())


def test_no_kill_loses_a_release(tmp_path):
    """50 kills: what is on record covers what was released, step by step, each time."""
    rng, kills, runs = np.random.default_rng(1), 0, 0
    while kills < 50:
        runs += 1
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        for killed in range(1, 11):
            if not _is_killed(folder, float(rng.uniform(0, 0.03))):
                break
            kills += 1
            if (folder / "run").exists():
                text = (folder / "run.ledger").read_text()
                record = dualdp.Ledger.resume(text, plan=make(**PLAN), step=0)
                on_record = Counter(entry["step"] for entry in record.entries)
                made = Counter(released(folder))
                assert not made - on_record
                assert on_record.total() - made.total() <= killed
        _finish(folder)
    assert runs <= 30  # most kills hit a run that had begun


def _is_killed(folder, seconds):
    """Start or go on, and kill some time after the first release; False if it was done."""
    before, child = len(released(folder)), start(folder)
    while len(released(folder)) == before and not os.waitid(
        os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(0.0002)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _finish(folder):
    """Go on to the end; epsilon is that of all lines."""
    assert os.waitstatus_to_exitcode(os.waitpid(start(folder), 0)[1]) == 0
    text = (folder / "run.ledger").read_text()
    found = verify(text)
    assert found.passed, found.findings
    assert found.is_whole
    assert len(found.releases) >= len(released(folder)) >= PLAN["num_steps"]
    ours, spent = epsilon_of_lines(text, 1e-5), found.epsilons
    assert spent["pld"] < spent["rdp"]
    assert 0.98 * ours < spent["rdp"] <= ours * (1 + 1e-9)

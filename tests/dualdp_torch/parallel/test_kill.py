# SPDX-License-Identifier: Apache-2.0
"""A rank that dies stops the others; from the checkpoint the run goes on as if nothing had been."""

import re

import pytest
import torch

from dualdp.ledger.ledger import Ledger
from tests.distributed import killed, models
from tests.distributed.spawn import together
from tests.kill import notes
from tests.kill.driver import epsilon_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("killed ranks"),  # which share the run that nobody killed
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # of JAX, for every fork
]
STEPS = 8


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """What each of two ranks learns when none dies."""
    folder = tmp_path_factory.mktemp("twins") / "run"
    notes.prepare(folder, notes.new_plan(STEPS))
    return together(killed.train, 2, folder)


def truth(folder):
    """Epsilon of all that was released: rank 0 draws the bits of each release."""
    releases = [line for line in notes.read(folder) if "step" in line]
    return epsilon_of(notes.plan(str(folder)), len(releases))


def assert_stopped(survivor):
    assert re.search(r"lost another process at (step|the |save)", survivor["stopped"])
    assert "start them again from the last checkpoint" in survivor["stopped"]


@pytest.mark.parametrize(
    "die", [(0, "record", 4), (0, "write", 1), (1, "reduce", 4), (1, "noised", 6)], ids=str
)
def test_a_killed_rank_stops_the_others(die, twins, tmp_path):
    """And the restart is bitwise the run that nobody killed, at the same price."""
    folder = tmp_path / "run"
    notes.prepare(folder, notes.new_plan(STEPS))
    left = together(killed.train, 2, folder, die, dies=die[0])
    assert_stopped(left[1 - die[0]])
    before = truth(folder)
    ranks = together(killed.train, 2, folder)
    for rank, twin in zip(ranks, twins, strict=True):
        assert rank["resumed"][1] >= before > 0
        assert models.distance(rank["parameters"], twin["parameters"]) == 0
        assert rank["epsilon"] == ranks[0]["epsilon"] >= truth(folder) >= twin["epsilon"]
        assert rank["releases"] == ranks[0]["releases"] >= STEPS


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path):
    """Sums are added in another order, so parameters agree to rounding; nothing is paid twice."""
    ends = []
    for name, turns in (("alone", [(1, None)]), ("run", [(4, 3), (1, 6), (2, None)])):
        folder = tmp_path / name
        notes.prepare(folder, notes.new_plan(STEPS))
        for size, stop in turns:
            ranks = together(killed.train, size, folder, None, 0.0, stop)
        ends.append(ranks)
    (alone,), ranks = ends
    for rank in ranks:
        assert rank["resumed"][0] == 6
        assert (rank["releases"], rank["epsilon"]) == (STEPS, alone["epsilon"])
        for name, p in rank["parameters"].items():
            torch.testing.assert_close(p, alone["parameters"][name], rtol=1e-4, atol=1e-6)


def test_a_lost_process_stops_a_sharded_run(tmp_path):
    """In the sum of its fourth step; nothing is unaccounted."""
    survivor = together(killed.train_sharded, 2, tmp_path, (1, "shard", 20), dies=1)[0]
    assert_stopped(survivor)
    recorded = [line["r"][0] for line in Ledger.read(tmp_path / "run.ledger") if "r" in line]
    assert [line["step"] for line in notes.read(tmp_path) if "step" in line] == [0, 1, 2]
    assert recorded == [0, 1, 2]

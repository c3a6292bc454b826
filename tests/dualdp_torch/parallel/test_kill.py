# SPDX-License-Identifier: Apache-2.0
"""A rank that dies stops the others; from the checkpoint the run goes on as if nothing had been."""

import functools
import re

import pytest
import torch

from tests.distributed import killed
from tests.distributed.spawn import together
from tests.kill import notes
from tests.kill.driver import epsilon_of

# JAX, which other tests bring into this process, warns of every fork.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("killed ranks"),  # which share the runs that nobody killed
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]
STEPS = 8
BOUND = 10.0  # seconds from the death of a rank to the error on the last of the others


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Number of ranks -> the plan, and what each rank learns when none dies."""

    @functools.cache
    def twins(size):
        run = notes.new_plan(STEPS, noise="portable" if size == 4 else "fast")
        folder = tmp_path_factory.mktemp("twins") / "run"
        notes.prepare(folder, run)
        return run, together(killed.train, size, folder)

    return twins


def same(one, other):
    """Whether two runs have learned the same bits."""
    pairs = [(p, other["parameters"][name]) for name, p in one["parameters"].items()]
    return all(torch.equal(p, q) for p, q in pairs)


def truth(folder):
    """Epsilon of all that was released: rank 0 draws the bits of each release."""
    releases = [line for line in notes.read(folder) if "step" in line]
    return epsilon_of(notes.plan(str(folder)), len(releases))


@pytest.mark.parametrize(
    ("size", "die"),
    [
        (2, (0, "record", 4)),
        (2, (0, "recorded", 4)),
        (2, (0, "write", 1)),
        (2, (1, "reduce", 4)),
        (2, (1, "noise", 5)),
        (2, (1, "noised", 6)),
        (4, (2, "reduce", 5)),
    ],
    ids=str,
)
def test_a_killed_rank_stops_the_others(size, die, undisturbed, tmp_path):
    """And the restart is bitwise the run that nobody killed, at the same price."""
    run, twins = undisturbed(size)
    folder = tmp_path / "run"
    notes.prepare(folder, run)
    left = together(killed.train, size, folder, die, dies=die[0])
    for survivor in left[: die[0]] + left[die[0] + 1 :]:
        assert re.search(r"lost another process at (step|the |save)", survivor["stopped"])
        assert "start them again from the last checkpoint" in survivor["stopped"]
        assert survivor["late"] < BOUND
    before = truth(folder)
    ranks = together(killed.train, size, folder)
    for rank, twin in zip(ranks, twins, strict=True):
        assert rank["resumed"][1] >= before > 0
        assert same(rank, twin)
        assert rank["epsilon"] == ranks[0]["epsilon"] >= truth(folder) >= twin["epsilon"]
        assert rank["releases"] == ranks[0]["releases"] >= STEPS


@pytest.mark.parametrize(("first", "second"), [(4, 1), (1, 2), (2, 4)])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(first, second, tmp_path):
    """Sums are added in another order, so parameters agree to rounding; nothing is paid twice."""
    whole, run = notes.new_plan(6), tmp_path / "run"
    ends = []
    for name, sizes in (("alone", [1]), ("run", [first, second])):
        folder = tmp_path / name
        notes.prepare(folder, whole)
        for size, stop in zip(sizes, (3, None) if name == "run" else (None,), strict=True):
            ends.append(together(killed.train, size, folder, None, 0.0, stop))
    alone, *_, ranks = ends
    for rank in ranks:
        assert rank["resumed"][0] == 3
        assert rank["releases"] == 6
        assert rank["epsilon"] == alone[0]["epsilon"]
        for name, p in rank["parameters"].items():
            torch.testing.assert_close(p, alone[0]["parameters"][name], rtol=1e-4, atol=1e-6)
    assert len(list(run.iterdir())) > 0


def test_a_rank_that_hangs_stops_the_others_after_the_time_limit(tmp_path):
    first, _ = together(killed.hangs, 2, tmp_path)
    assert re.search(r"Rank 0 of 2 lost another process at a test .*start them again", first[0])
    assert killed.PATIENCE <= first[1] < killed.PATIENCE + 3

# SPDX-License-Identifier: Apache-2.0
"""A process of a sharded run dies inside a step: the other stops, and nothing is unaccounted."""

import pytest

from dualdp.ledger.ledger import Ledger
from tests.distributed import sharded_killed as killed
from tests.distributed.spawn import together
from tests.kill import notes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")]
BOUND = 10.0  # seconds from the death of a process to the error on the other


@pytest.mark.parametrize(
    "die", [(1, "gather", 2), (1, "reduce", 3), (1, "noise", 3), (0, "reduce", 2)], ids=str
)
def test_a_lost_process_stops_a_sharded_run(die, tmp_path):
    left = together(killed.train, 2, tmp_path, die, dies=die[0])
    survivor = left[1 - die[0]]
    if die[1] != "gather":  # in the user's own forward, where torch's own error comes
        assert "lost another process" in survivor["stopped"]
        assert "start them again from the last checkpoint" in survivor["stopped"]
    assert survivor["late"] < BOUND
    released = {line["step"] for line in notes.read(tmp_path) if "step" in line}
    lines = Ledger.read(tmp_path / "run.ledger")
    recorded = {line["r"][0] for line in lines if "r" in line}
    assert released <= recorded
    assert die[2] - 1 in released

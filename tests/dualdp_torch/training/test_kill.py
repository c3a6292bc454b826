# SPDX-License-Identifier: Apache-2.0
"""Killed at any instant, a run says no less than it released, and goes on bitwise."""

import pytest

from tests.kill.driver import Trials

# JAX, which other tests bring into this process, warns of every fork.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")]


def test_five_kills_at_random_instants(tmp_path):
    report = Trials("torch", tmp_path, num_steps=40, seed=1).run(5)
    assert report.failures == []
    assert report.kills == 5
    assert report.finished >= 1
    assert len(report.resumes) >= 5


def test_kills_at_every_place_of_a_step(tmp_path):
    """Around the record of a release, and around the file of a checkpoint."""
    places = [("record", 4), ("recorded", 5), ("write", 2), ("written", 2)]
    report = Trials("torch", tmp_path, num_steps=12, seed=1).run_places(places)
    assert report.failures == []
    assert report.finished == len(places)
    assert all(said >= truth > 0 for said, truth in report.resumes)
    assert report.repeated > 0

# SPDX-License-Identifier: Apache-2.0
"""The engine on meshes of 1, 2 and 8 virtual devices is the engine on one device."""

import pytest

from tests.dualdp_jax.workers import launch, mesh

pytestmark = pytest.mark.xdist_group("meshes")  # which share what one process reports


@pytest.fixture(scope="module")
def report():
    """What the checks found; one process makes all of a kind, since starting takes the time."""
    found = {}

    def of(kind):
        if kind not in found:
            given = {"processes": 1, "devices": 8, "seconds": 500, "quickly": kind != "optimized"}
            (found[kind],) = launch.reports("mesh", kind, **given)
        return found[kind]

    return of


def names(kind):
    return [check.__name__ for check in mesh.CHECKS[kind]]


@pytest.mark.slow
@pytest.mark.parametrize("name", names("fast"))
def test_a_run_on_eight_devices_is_that_of_one(report, name):
    assert report("fast")[name] == "held"


@pytest.mark.slow
@pytest.mark.parametrize("name", names("slow"))
def test_on_meshes(report, name):
    assert report("slow")[name] == "held"


@pytest.mark.slow
@pytest.mark.parametrize("name", names("optimized"))
def test_compiled_programs_move_no_more_than_they_must(report, name):
    assert report("optimized")[name] == "held"


@pytest.mark.slow
def test_a_sharded_checkpoint_loads_on_other_meshes(report):
    assert report("slow")["checkpoints_load_on_other_meshes"] == "held"


@pytest.mark.slow
def test_an_interrupted_sharded_save_leaves_the_older_one(report):
    assert report("slow")["an_interrupted_sharded_save_leaves_the_older_one"] == "held"

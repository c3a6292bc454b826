# SPDX-License-Identifier: Apache-2.0
"""Calls on several devices, by `jit` and inside `shard_map`."""

import pytest

from tests.dualdp_jax.workers import launch, spread


@pytest.fixture(scope="module")
def report():
    """What the checks on several devices found."""
    (found,) = launch.reports("spread", "all", processes=1, devices=4, seconds=500)
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("spread")
@pytest.mark.parametrize("name", [check.__name__ for check in spread.CHECKS])
def test_on_several_devices(report, name):
    assert report[name] == "held"


@pytest.mark.slow
def test_a_shard_map_with_its_defaults():
    """74: the gradient of a replicated parameter was summed over the devices."""
    (found,) = launch.reports("spread", "fast", processes=1, devices=4, seconds=200)
    assert found == {check.__name__: "held" for check in spread.FAST}

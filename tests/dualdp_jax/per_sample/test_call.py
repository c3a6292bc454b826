# SPDX-License-Identifier: Apache-2.0
"""Calls on four devices, by `jit` and inside `shard_map` (known_failures 74 and 78)."""

import pytest

from tests.dualdp_jax.workers import launch, spread

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spread")]


@pytest.fixture(scope="module")
def report():
    """What the checks on several devices found."""
    (found,) = launch.reports("spread", processes=1, devices=4, seconds=500)
    return found


@pytest.mark.parametrize("name", [check.__name__ for check in spread.CHECKS])
def test_on_several_devices(report, name):
    assert report[name] == "held"

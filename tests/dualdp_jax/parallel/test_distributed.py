# SPDX-License-Identifier: Apache-2.0
"""Two real processes with `jax.distributed` and gloo are one run."""

import pytest

from tests.dualdp_jax.workers import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["runs", "words"])
def test_two_processes_are_one_run(kind, tmp_path):
    found = launch.reports("pair", kind, tmp_path, processes=2, devices=2, seconds=280)
    assert len(found) == 2
    for report in found:
        assert len(report) > 5
        assert {name: word for name, word in report.items() if word != "held"} == {}

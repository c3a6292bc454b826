# SPDX-License-Identifier: Apache-2.0
"""Tests of one case go to one worker, which compiles its programs once."""

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("case", [SimpleNamespace(name="of_groups")], ids=["of_groups"])
def test_workers_know_the_groups(case, request):
    """pytest 9.2 with pytest-xdist 3.8 forgets them without a word."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("no workers")
    assert request.node.nodeid.endswith(f"@{case.name}")

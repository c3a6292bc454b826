# SPDX-License-Identifier: Apache-2.0
"""The fast tier has a few cases of each test, the slow tier the others."""

import pytest

from tests import tiers


@pytest.mark.parametrize("count", [1, 3, 4, 100])
def test_a_few_cases_are_fast(count):
    kept = [place for place in range(count) if tiers.is_kept(place, count)]
    assert len(kept) == min(count, tiers.MOST)
    assert kept[0] == 0
    assert kept[-1] >= count - count / tiers.MOST - 1


@pytest.mark.parametrize("case", range(2 * tiers.MOST))
def test_every_case_is_in_one_tier(case, request):
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == (case % 2 == 1)

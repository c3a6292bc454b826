# SPDX-License-Identifier: Apache-2.0
"""Covering sets hold every pair of values, in few cases."""

from itertools import combinations, product

import pytest

from tests.pairwise import pairwise

FACTORS = (tuple("abcdefg"), (1, 2, 3, 4), ("on", "off"), ("x", "y", "z"))


def pairs(cases):
    """(number of a factor, value, number of another, value) of all cases."""
    return {
        (i, case[i], j, case[j]) for case in cases for i, j in combinations(range(len(case)), 2)
    }


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_two_values_meet(count):
    factors = FACTORS[:count]
    cases = pairwise(*factors)
    assert len(cases) <= 7 * 4 + 4
    assert pairs(cases) == pairs(product(*factors))
    assert cases == sorted(set(cases), key=[*product(*factors)].index)


def test_values_that_exclude_each_other_do_not_meet():
    never = {("a", 1), (4, "z")}
    found = pairs(pairwise(*FACTORS, never=never))
    barred = {(0, "a", 1, 1), (1, 4, 3, "z")}
    assert found == pairs(product(*FACTORS)) - barred

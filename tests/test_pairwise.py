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
@pytest.mark.parametrize("is_reversed", [False, True])
def test_every_two_values_meet(count, is_reversed):
    factors = FACTORS[:count][:: -1 if is_reversed else 1]
    cases = pairwise(*factors)
    assert pairs(cases) == pairs(product(*factors))
    assert cases == sorted(set(cases), key=[*product(*factors)].index)


def test_the_cases_are_few_and_always_the_same():
    cases = pairwise(*FACTORS)
    assert 7 * 4 <= len(cases) <= 7 * 4 + 4  # of 168
    assert cases == pairwise(*FACTORS)


def test_two_factors_are_their_product():
    assert pairwise("ab", "xyz") == [*product("ab", "xyz")]


def test_values_that_exclude_each_other_do_not_meet():
    never = {("a", 1), (4, "z")}
    found = pairs(pairwise(*FACTORS, never=never))
    barred = {(0, "a", 1, 1), (1, 4, 3, "z")}
    assert found == pairs(product(*FACTORS)) - barred


@pytest.mark.parametrize("left_out", range(28))
def test_no_case_of_the_two_longest_factors_is_spare(left_out):
    cases = pairwise(*FACTORS[:3])
    assert len(cases) == 28
    assert pairs(cases[:left_out] + cases[left_out + 1 :]) != pairs(cases)

# SPDX-License-Identifier: Apache-2.0
"""The one root finder: what it returns was evaluated."""

import math

from dualdp.accountants.search import last_within, smallest_scale


def test_a_search_evaluates_what_it_returns():
    asked = []

    def spent(noise):
        asked.append(noise)
        return 3 / noise if noise else math.inf

    for target in (1e-3, 0.7, 3.0, 90.0):
        asked.clear()
        found = smallest_scale(spent, target, 1e-5)
        assert found in asked
        assert len(asked) == len(set(asked)) < 25
        assert 3 / found <= target <= 3 / found * (1 + 1e-9)
    assert smallest_scale(lambda noise: 0.0, 1.0, 1e-5) == 0
    assert smallest_scale(lambda noise: 1e-9 / noise if noise else math.inf, 1e9, 0.1) < 1e-8


def test_whole_numbers_are_found_to_the_last():
    """The largest that is affordable, for every budget up to a hundred."""
    for budget in range(1, 100):
        asked = []

        def height(k, budget=budget, asked=asked):
            asked.append(k)
            return math.log(k / (budget + 0.5))

        assert last_within(1, 1000, height, whole=True) == budget
        assert len(asked) < 40

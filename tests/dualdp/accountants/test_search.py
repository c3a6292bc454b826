# SPDX-License-Identifier: Apache-2.0
"""The one root finder: what it returns was evaluated."""

import math

from dualdp.accountants.search import smallest_scale


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

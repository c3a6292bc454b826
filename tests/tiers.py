# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are fast."""

from collections import defaultdict

import pytest

MOST = 3  # cases of one test in the fast tier
MARKED = (
    "tests/dualdp/",
    "tests/dualdp_tools/",
    "tests/benchmarks/",
    "tests/grid/",
    "tests/backends/",
    "tests/property/",
    "tests/docs/",
    "tests/peers/",
)  # as written


def thin_out(items):
    """Mark all but `MOST` cases of every test slow; those that stay are spread evenly."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None and not item.nodeid.startswith(MARKED):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        for place, item in enumerate(cases):
            if not is_kept(place, len(cases)):
                item.add_marker(pytest.mark.slow)


def is_kept(place, count):
    """Whether case `place` of `count` is one of at most `MOST`, the first among them."""
    return count <= MOST or place * MOST % count < MOST


def first(count, values):
    """Return the values of a parameter, all but the first `count` marked slow."""
    values = list(values)
    return values[:count] + [pytest.param(v, marks=pytest.mark.slow) for v in values[count:]]

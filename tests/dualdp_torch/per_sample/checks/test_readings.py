# SPDX-License-Identifier: Apache-2.0
"""What a number of a loop may mean for one example."""

import pytest

from dualdp_torch.per_sample.checks.readings import as_count, as_multiple


@pytest.mark.parametrize(
    ("value", "n", "rows", "count", "multiple"),
    [
        (20, 20, 1, 1, 1),
        (60, 20, 1, 60, 3),
        (0.05, 20, 1, 1, 1),
        (40, 20, 2, 2, 2),
        (-100, 20, 1, -100, -100),  # the index of ignored labels
        (-1, 1, 1, -1, -1),  # a size that torch finds
        (-40.0, 20, 1, -40.0, -40.0),
    ],
)
def test_counts_and_multiples_of_examples_are_read_for_one(value, n, rows, count, multiple):
    assert (as_count(value, n, rows), as_multiple(value, n, rows)) == (count, multiple)

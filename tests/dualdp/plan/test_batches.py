# SPDX-License-Identifier: Apache-2.0
"""Logical to physical batches: nothing lost, nothing doubled, one shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualdp.plan.batches import num_physical_batches, physical_batches


@given(drawn=st.integers(0, 50), size=st.none() | st.integers(1, 60))
def test_batches_lose_nothing(drawn, size):
    indices = np.arange(drawn) * 3
    batches = list(physical_batches(indices, size))
    assert len(batches) == num_physical_batches(drawn, size)
    rows = max(drawn, 1) if size is None else size
    assert all(part.shape == mask.shape == (rows,) for part, mask in batches)
    kept = np.concatenate([part[mask] for part, mask in batches])
    np.testing.assert_array_equal(kept, indices)


def test_an_empty_draw_is_one_masked_batch():
    for size, rows in ((None, 1), (4, 4)):
        ((indices, mask),) = physical_batches(np.array([], np.int64), size)
        assert indices.tolist() == [0] * rows
        assert not mask.any()


def test_a_bad_size_is_refused():
    with pytest.raises(ValueError, match="physical_batch_size=0 is out of range"):
        next(physical_batches(np.arange(3), 0))

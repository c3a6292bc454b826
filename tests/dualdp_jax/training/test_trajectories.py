# SPDX-License-Identifier: Apache-2.0
"""Seeded runs end where they ended before noise was drawn anew for every release."""

import json

import numpy as np
import pytest

from tests.fixtures import make_trajectory_jax as trajectory

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


@pytest.mark.parametrize("dtype", trajectory.DTYPES)
@pytest.mark.parametrize("name", trajectory.RUNS)
def test_a_seeded_run_keeps_its_numbers(name, dtype):
    """The model is smooth, so rounding does not grow over the steps."""
    expected = json.loads(trajectory.PATH.read_text())[f"{name}-{dtype}"]
    for path, numbers in trajectory.end_of(name, dtype).items():
        np.testing.assert_allclose(numbers, expected[path], rtol=0, atol=TOLERANCE[dtype])

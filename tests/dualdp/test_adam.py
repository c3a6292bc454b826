# SPDX-License-Identifier: Apache-2.0
"""Adam without the noise in its second moment; `tests/backends/test_adam_bc.py` has both stacks."""

import numpy as np
import pytest

from dualdp import adam

SETTINGS = {"b1": 0.8, "b2": 0.9, "floor": 1e-6, "eps": 1e-4}


def test_one_step_is_adam_of_the_papers_formula():
    grad, zero = np.array([0.3, -0.2]), np.zeros(2)
    direction, first, second = adam.adam_bc(grad, zero, zero, 1.0, 0.1, **SETTINGS, xp=np)
    np.testing.assert_allclose(first, 0.2 * grad)
    np.testing.assert_allclose(second, 0.1 * (grad**2 - 0.01))
    np.testing.assert_allclose(direction, grad / (np.sqrt(grad**2 - 0.01) + 1e-4), rtol=1e-12)


def test_the_floor_holds_where_the_noise_is_larger():
    grad, zero = np.array([0.05]), np.zeros(1)
    direction, *_ = adam.adam_bc(grad, zero, zero, 1.0, 0.1, **SETTINGS, xp=np)
    assert direction == pytest.approx(0.05 / (1e-3 + 1e-4))


def test_without_noise_every_coordinate_moves_alike():
    first, second, grad = np.zeros(2), np.zeros(2), np.array([0.1, 0.001])
    for count in range(1, 200):
        direction, first, second = adam.adam_bc(
            grad, first, second, float(count), 0.0, **SETTINGS, xp=np
        )
        np.testing.assert_allclose(direction, 1, rtol=0.2)

# SPDX-License-Identifier: Apache-2.0
"""When two sets of per-sample gradients are equal: per example and parameter, to rounding.

‖a - b‖ <= relative * ‖b‖ + floor * ‖whole gradient of the example‖. The floor is for parameters
whose gradient is itself the rounding error of a cancellation.
"""

import numpy as np
from scipy import linalg

from dualdp.plan.clipping import MARGIN

RELATIVE = {"float32": 1e-5, "float64": 1e-10}
FLOOR = {"float32": 1e-7, "float64": 1e-14}


def norms(grads):
    """(n, *shape) -> (n,) L2 norms, float64."""
    grads = np.asarray(grads, np.float64)
    return np.sqrt(np.square(grads).sum(tuple(range(1, grads.ndim))))


def whole_norms(grads):
    """{name: (n, *shape)} -> (n,) L2 norms of the whole gradients."""
    return np.sqrt(sum(norms(grad) ** 2 for grad in grads.values()))


def factors_of(lengths, max_grad_norm, dtype="float32"):
    """(n,) flat clip factors, float64, with the margin of sums in `dtype`."""
    bound = max_grad_norm / (1 + MARGIN[dtype])
    return np.minimum(1.0, bound / np.maximum(lengths, 1e-300))


def clipped_sum(grads, max_grad_norm, dtype="float32"):
    """{name: (n, *shape)} -> {name: shape}: gradients scaled to norm at most C, and summed."""
    factors = factors_of(whole_norms(grads), max_grad_norm, dtype)
    return {name: np.einsum("n,n...->...", factors, grad) for name, grad in grads.items()}


def assert_grads_close(ours, truth, dtype):
    """Same names, same shapes, same numbers."""
    assert list(sorted(ours)) == list(sorted(truth))
    whole = whole_norms(truth) if truth else 0
    for name, expected in truth.items():
        assert ours[name].shape == expected.shape, name
        assert ours[name].dtype == np.dtype(dtype), name
        assert np.isfinite(ours[name]).all(), name
        difference = norms(ours[name].astype(np.float64) - expected)
        allowed = RELATIVE[dtype] * norms(expected) + FLOOR[dtype] * whole
        worst = np.max(difference - allowed, initial=-np.inf)
        assert worst <= 0, f"{name}: off by {difference} where {allowed} is allowed"


def assert_sum_close(ours, truth, parts, dtype):
    """A sum of gradients, judged by the size of its parts: {name: shape}, {name: (n, *shape)}."""
    assert list(sorted(ours)) == list(sorted(truth))
    for name, expected in truth.items():
        assert ours[name].shape == expected.shape, name
        assert ours[name].dtype == np.dtype(dtype), name
        difference = np.linalg.norm(ours[name].astype(np.float64) - expected)
        size = norms(parts[name]).sum() + FLOOR[dtype] / RELATIVE[dtype] * whole_norms(parts).sum()
        assert difference <= 2 * RELATIVE[dtype] * size, name


def lower_toeplitz(column):
    """(n,) -> (n, n) lower triangular matrix of a filter with this first column."""
    return linalg.toeplitz(column, np.zeros(len(column)))

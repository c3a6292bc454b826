# SPDX-License-Identifier: Apache-2.0
"""Products with lower-triangular Toeplitz matrices, which are filters over the steps.

A filter is a rational function of the shift x: numerator_0 + numerator_1 x + ... over the
denominator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft

Vector = NDArray[np.float64]


def impulse(n: int) -> Vector:
    """Return (n,) 1, 0, 0, ..., the first column of the identity."""
    column = np.zeros(n)
    column[:1] = 1.0
    return column


def filtered(numerator: ArrayLike, denominator: ArrayLike, values: Vector) -> Vector:
    """Return (n,) the product of the filter's matrix with `values`, O(n) for each coefficient."""
    from scipy.signal import lfilter  # half a second that `import dualdp` does without

    return np.asarray(lfilter(numerator, denominator, values)) if len(values) else values


def transposed(numerator: ArrayLike, denominator: ArrayLike, values: Vector) -> Vector:
    """Return (n,) the product of the transposed matrix with `values`: the filter in reverse."""
    return filtered(numerator, denominator, values[::-1])[::-1]


def convolved(one: Vector, other: Vector) -> Vector:
    """Return (n,) the first column of the product of the matrices with these first columns."""
    n = len(one)
    size = fft.next_fast_len(max(2 * n - 1, 1), real=True)
    return np.asarray(fft.irfft(fft.rfft(one, size) * fft.rfft(other, size), size)[:n])

# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits bundled with scikit-learn: real data without a download.

Source: Alpaydin & Kaynak 1998, "Optical recognition of handwritten digits" (UCI); 1,797 images of
8 x 8 pixels, 16 grey levels, 10 classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_HELD_OUT = 360


class Split(NamedTuple):
    """Images (n, 8, 8) in [-0.5, 1.5] and labels (n,) int64."""

    x: NDArray[np.float64]
    y: NDArray[np.int64]


def load() -> tuple[Split, Split]:
    """Return (training, held-out): 1,437 and 360 digits, shuffled by a fixed permutation."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    # The scaling is a public constant: statistics of the training data would cost epsilon.
    x = data.images[order] / 8.0 - 0.5
    y = data.target[order].astype(np.int64)
    return Split(x[:-NUM_HELD_OUT], y[:-NUM_HELD_OUT]), Split(x[-NUM_HELD_OUT:], y[-NUM_HELD_OUT:])

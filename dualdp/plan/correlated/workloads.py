# SPDX-License-Identifier: Apache-2.0
"""Workloads A: the sums of noisy gradients by whose error a strategy is judged.

SGD has moved by row t of A (G + C^-1 z) after step t, so row t of A C^-1 z is the noise in its
parameters. A is lower triangular and Toeplitz, and given by its first column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate
from dualdp.plan.correlated.filters import convolved

Array = NDArray[np.float64]
MOST_STEPS = 10**7


def workload(num_steps: int, *, momentum: float = 0.0) -> Array:
    """Return the workload of SGD at a constant rate, for `workload=` of the errors and `optimise`.

    Args:
        num_steps: number of steps, n.
        momentum: float in [0, 1), heavy ball.

    Returns:
        (n,) first column of A, 1 + momentum + ... + momentum^j.

    >>> workload(4, momentum=0.5)
    array([1.   , 1.5  , 1.75 , 1.875])
    """
    n = _validate.integer("num_steps", num_steps, maximum=MOST_STEPS)
    beta = _validate.real("momentum", momentum)
    if not 0 <= beta < 1:
        raise ValueError(f"momentum={momentum!r} is out of range. Expected a number in [0, 1).")
    return np.cumsum(np.asarray(beta ** np.arange(n), dtype=np.float64))


def checked_workload(workload: ArrayLike | None, n: int) -> Array:
    """Return the first column (n,) of a workload of n steps; None is that of prefix sums."""
    if workload is None:
        return np.ones(n)
    column = numbers("workload", workload)
    if column.shape != (n,):
        raise ValueError(
            f"workload has shape {column.shape}. Expected ({n},), its first column, for "
            f"num_steps={n}."
        )
    return column


def row_errors(inverse: Array, workload: ArrayLike | None) -> Array:
    """Return (n,) squared norms of the rows of A C^-1, from the first column of C^-1."""
    if workload is None:
        return np.cumsum(np.cumsum(inverse) ** 2)
    return np.cumsum(convolved(checked_workload(workload, len(inverse)), inverse) ** 2)


def numbers(name: str, values: ArrayLike) -> Array:
    """Return a float64 array of finite numbers; raise on anything else."""
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "fiu":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(values).__name__}. Expected numbers.") from error
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds a number that is not finite. Expected finite numbers.")
    return array

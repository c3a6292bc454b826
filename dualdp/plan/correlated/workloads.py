# SPDX-License-Identifier: Apache-2.0
"""Workloads A: the sums of noisy gradients by whose error a strategy is judged.

SGD has moved by row t of A (G + C^-1 z) after step t, so row t of A C^-1 z is the noise in its
parameters. A is given by its first column, or whole where it is not Toeplitz.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate
from dualdp.plan.correlated.filters import convolved, matrix

Array = NDArray[np.float64]
MOST_STEPS = 10**7
#: Most steps of a workload that is given as a matrix.
_MOST_ROWS = 4096


def workload(
    num_steps: int, *, momentum: float = 0.0, learning_rates: ArrayLike | None = None
) -> Array:
    """Return the workload of SGD, for `workload=` of the errors and of `optimise`.

    Args:
        num_steps: number of steps, n.
        momentum: float in [0, 1), heavy ball.
        learning_rates: (n,) rate of each step, up to a common factor; None for a constant rate.

    Returns:
        (n,) first column of A, 1 + momentum + ... + momentum^j; with learning rates the (n, n)
        lower-triangular A[t, s] = sum of rate_i momentum^(i - s) over s <= i <= t.

    >>> workload(4, momentum=0.5)
    array([1.   , 1.5  , 1.75 , 1.875])
    """
    n = _validate.integer("num_steps", num_steps, maximum=MOST_STEPS)
    beta = _validate.real("momentum", momentum)
    if not 0 <= beta < 1:
        raise ValueError(f"momentum={momentum!r} is out of range. Expected a number in [0, 1).")
    velocity = np.asarray(beta ** np.arange(n), dtype=np.float64)
    if learning_rates is None:
        return np.cumsum(velocity)
    rates = numbers("learning_rates", learning_rates)
    if rates.shape != (n,):
        raise ValueError(
            f"learning_rates has shape {rates.shape}. Expected ({n},), a rate for each step."
        )
    _require_few_rows("learning_rates", n)
    return np.cumsum(rates[:, None] * matrix(velocity), axis=0)


def checked_workload(workload: ArrayLike | None, n: int) -> Array | None:
    """Return a workload of n steps: its first column (n,), a matrix (n, n), or None."""
    if workload is None:
        return None
    a = numbers("workload", workload)
    if a.shape not in ((n,), (n, n)):
        raise ValueError(
            f"workload has shape {a.shape}. Expected ({n},), its first column, or ({n}, {n}), for "
            f"num_steps={n}."
        )
    if a.ndim == 2:
        _require_few_rows("workload", n)
        if np.triu(a, 1).any():
            raise ValueError(
                "workload is not lower triangular. Expected row t to sum gradients of steps <= t."
            )
    return a


def row_errors(inverse: Array, workload: Array | None) -> Array:
    """Return (n,) squared norms of the rows of A C^-1, from the first column of C^-1."""
    if workload is not None and workload.ndim == 2:
        product = workload @ matrix(inverse)
        return np.asarray((product**2).sum(axis=1))
    column = np.cumsum(inverse) if workload is None else convolved(workload, inverse)
    return np.cumsum(column**2)


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


def _require_few_rows(name: str, n: int) -> None:
    if n > _MOST_ROWS:
        raise ValueError(
            f"{name} of {n} steps needs a matrix. Expected at most {_MOST_ROWS} steps, or a "
            "workload by its first column."
        )

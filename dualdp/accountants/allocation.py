# SPDX-License-Identifier: Apache-2.0
"""Balls-in-bins (random allocation of one step out of t), by a deterministic bound.

One epoch: every example draws one of t steps. With the noise of all steps seen at once, the pair is
P = mean_i N(e_i, s^2 I_t) against Q = N(0, s^2 I_t), with the likelihood ratio under Q
    X = (1/t) sum_i Y_i,   Y_i = e^{(2 x_i - 1) / (2 s^2)} independent, E Y_i = 1.
delta = E_Q(X - e^eps)_+ (remove) and E_Q(1 - e^eps X)_+ (add) are convex in X. So a mean-preserving
spread of each Y_i onto a linear grid bounds both from above, at every epsilon: the spread X is the
likelihood ratio of a dominating pair. Its law is ONE power of a Fourier transform.

Source: the pair is that of Chua et al. 2024 (arXiv 2412.16802), Theorem 3.1, also for steps that
depend on earlier outputs; the bound by convex order is ours.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.special import ndtr

from dualdp.accountants.cells import NDTR_ERROR, U, quantile
from dualdp.accountants.compose import fft_error
from dualdp.accountants.families import Atoms

Array = npt.NDArray[Any]

_MAX_POINTS = 1 << 21


@functools.lru_cache(maxsize=32)
def one_epoch(sigma: float, bins: int, tail: float) -> Atoms:
    """Dominating pair of one epoch of `bins` steps, as atoms at losses log X.

    Args:
        sigma: noise multiplier, > 0.
        bins: t >= 2.
        tail: mass that may be cut off and counted as infinite loss.

    Returns:
        P- and Q-masses with absolute error bounds for each; what was cut off is at infinity.
    """
    z = quantile(tail / (2 * bins))
    log_top = (1 + 2 * z * sigma) / (2 * sigma * sigma)
    top = math.exp(min(log_top, 690.0))
    spread = math.sqrt(math.expm1(min(sigma**-2, 600.0)))
    step = max(0.03 * spread * min(1.0, bins / 30), 3 * top / _MAX_POINTS)
    leak = math.log(2 / tail)
    for _ in range(20):
        values, single, tilted, lost_q, lost_p = _coordinate(sigma, step, top)
        end = _reach(values, single, tilted, bins, leak)
        if end / step < _MAX_POINTS - 8:
            break
        step = 1.02 * end / (_MAX_POINTS - 8)
    size = 1 << math.ceil(math.log2(end / step + 8))
    p, p_error = _power(tilted, single, bins - 1, size)
    q, q_error = _power(single, single, bins - 1, size)
    ratio = np.arange(size) * (step / bins)
    with np.errstate(divide="ignore"):
        loss = np.log(ratio)
    wrapped = math.exp(-leak) * (1 + 1e-9)
    return Atoms(
        p,
        q,
        loss=loss,
        p_error=np.full(size, p_error),
        q_error=np.full(size, q_error),
        spread=wrapped,
        left_p=lost_p + (bins - 1) * lost_q + wrapped,
        left_q=bins * lost_q + wrapped,
    )


def _coordinate(sigma: float, step: float, top: float) -> tuple[Array, Array, Array, float, float]:
    """Grid values v_j, Q-masses of the spread Y, v_j times them, (Q, P) masses above the grid.

    A cell [v_j, v_{j+1}) with masses m0 of Q and m1 of P (E[Y; cell] = m1) puts
    (m1 - v_j m0) / step on v_{j+1} and the rest on v_j: mass and mean are kept.
    """
    count = math.ceil(top / step)
    values = np.arange(count + 1) * step
    with np.errstate(divide="ignore"):
        z0 = sigma * np.log(values) + 0.5 / sigma
    masses, tails = [], []
    for z in (z0, z0 - 1 / sigma):
        tail = ndtr(-np.abs(z))
        falling = np.where(z[:-1] > 0, tail[:-1] - tail[1:], tail[1:] - tail[:-1])
        across = (z[:-1] <= 0) & (z[1:] > 0)
        masses.append(np.maximum(np.where(across, (1 - tail[:-1]) - tail[1:], falling), 0.0))
        tails.append(float(tail[-1] if z[-1] > 0 else 1 - tail[-1]) * (1 + NDTR_ERROR))
    m0, m1 = masses
    up = np.clip((m1 - values[:-1] * m0) / step, 0.0, m0)
    single = np.zeros(count + 1)
    single[1:] = up
    single[:-1] += m0 - up
    return values, single, single * values, tails[0], tails[1]


def _reach(values: Array, single: Array, tilted: Array, bins: int, leak: float) -> float:
    """Z with P(sum >= z) <= e^-leak under both measures, by Chernoff's bound.

    Blocks of 64 values count as their largest: 64 times fewer exponentials, and still a bound.
    """
    starts = np.arange(0, values.size, 64)
    values = values[np.minimum(starts + 63, values.size - 1)]
    single, tilted = np.add.reduceat(single, starts), np.add.reduceat(tilted, starts)
    best = math.inf
    for theta in np.geomspace(0.1, 60.0, 24) / values[-1]:
        weights = np.exp(theta * values)
        one, other = float(single @ weights), float(tilted @ weights)
        log_sum = (bins - 1) * math.log(one) + max(math.log(one), math.log(other))
        best = min(best, (log_sum + leak) / theta)
    return best


def _power(first: Array, other: Array, power: int, size: int) -> tuple[Array, float]:
    """(size,) cyclic convolution of `first` with `power` copies of `other`, and each entry's error.

    The error is bounded as in `compose._Product`.
    """
    one, many = fft.rfft(first, size), fft.rfft(other, size)
    error = fft_error(size) + 16 * U
    size_one, size_many = np.abs(one), np.abs(many)
    with np.errstate(divide="ignore"):
        log_many = power * np.log(np.maximum(size_many, 1e-300))
        major = np.exp(power * np.log(size_many + error)) * (size_one + error * max(first.sum(), 1))
    product = one * np.exp(log_many + 1j * power * np.angle(many))
    mass = fft.irfft(product, n=size)
    modulus = np.abs(product)
    difference = np.maximum(major - modulus, 0.0) + fft_error(size) * major + 64 * U * major
    return np.maximum(mass, 0.0), 2 * float(difference.sum()) / size

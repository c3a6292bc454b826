# SPDX-License-Identifier: Apache-2.0
"""Textbook accounting in 40 digits: one and two steps of the subsampled Gaussian, by definition."""

import mpmath as mp

mp.mp.dps = 40


def _cut(sigma, rate, epsilon):
    """x where the loss of (1-q) N(0) + q N(1) against N(0) passes epsilon, or None."""
    ratio = 1 + mp.expm1(epsilon) / rate
    return sigma**2 * mp.log(ratio) + mp.mpf(1) / 2 if ratio > 0 else None


def one_step(sigma, rate, epsilon, direction="remove"):
    """delta of one step at any real epsilon: E_P(1 - e^{eps - L})_+."""
    sigma, rate, epsilon = mp.mpf(sigma), mp.mpf(rate), mp.mpf(epsilon)
    grow = mp.e**epsilon
    if direction == "remove":
        cut = _cut(sigma, rate, epsilon)
        if cut is None:
            return 1 - grow
        above0, above1 = _above(cut, sigma), _above(cut - 1, sigma)
        return (1 - rate) * above0 + rate * above1 - grow * above0
    cut = _cut(sigma, rate, -epsilon)
    if cut is None:
        return mp.mpf(0)
    below0, below1 = _above(-cut, sigma), _above(1 - cut, sigma)
    return below0 - grow * ((1 - rate) * below0 + rate * below1)


def _above(x, sigma):
    return mp.erfc(x / sigma / mp.sqrt(2)) / 2


def two_steps(first, second, epsilon, direction="remove"):
    """delta of two different steps: the second's delta at epsilon minus the first's loss."""
    sigma, rate = map(mp.mpf, first)

    def loss(x):
        return mp.log(1 - rate + rate * mp.e ** ((2 * x - 1) / (2 * sigma**2)))

    def integrand(x):
        base, shifted = mp.npdf(x, 0, sigma), mp.npdf(x, 1, sigma)
        if direction == "remove":
            weight = (1 - rate) * base + rate * shifted
            return weight * one_step(*second, epsilon - loss(x), direction)
        return base * one_step(*second, epsilon + loss(x), direction)

    knots = [-12 * sigma]
    # the second delta has kinks nowhere, but bends where its cut leaves the real line
    bend = _cut(sigma, rate, epsilon - mp.log1p(-mp.mpf(second[1])) if direction == "remove" else 0)
    inner = sorted({mp.mpf(0), mp.mpf(1), *([bend] if bend is not None else [])})
    knots += [x for x in inner if -12 * sigma < x < 1 + 12 * sigma] + [1 + 12 * sigma]
    pieces = []
    for a, b in zip(knots, knots[1:], strict=False):
        pieces += [a + (b - a) * i / 4 for i in range(4)]
    return mp.quad(integrand, [*pieces, knots[-1]])

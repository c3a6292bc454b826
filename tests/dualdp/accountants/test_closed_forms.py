# SPDX-License-Identifier: Apache-2.0
"""Closed forms against 60 digits: never below the truth, and no further above it than they say."""

import mpmath as mp
import pytest

from tests.dualdp.accountants.test_pld import account

SIGMAS = [0.01, 0.3, 1.0, 1.9, 2.1, 10.0, 1e3, 3e4, 1e6, 1e8, 1e10, 1e12]
DELTAS = [0.1, 1e-5, 1e-10, 1e-15, 1e-100]
RATES = [1e-6, 0.01, 0.5, 0.999]


def normal(x):
    """Distribution function, also where it is 1e-300."""
    return mp.erfc(-x / mp.sqrt(2)) / 2


def gaussian_delta(mu, epsilon):
    """Balle & Wang 2018, Theorem 8."""
    return normal(mu / 2 - epsilon / mu) - mp.e**epsilon * normal(-mu / 2 - epsilon / mu)


def one_step_delta(sigma, rate, epsilon):
    """Of the subsampled Gaussian, by its definition: the mixture against N(0, sigma^2)."""
    mean, growth = 1 / sigma, mp.e**epsilon
    ratio = 1 + (growth - 1) / rate
    cut = sigma * mp.log(ratio) + mean / 2
    return rate * normal(mean - cut) + (1 - rate - growth) * normal(-cut)


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(60):
        yield


def check(epsilon, delta, truth):
    """Epsilon is an upper bound at delta, and delta at it differs by no more than 1e-7."""
    if epsilon == 0:
        assert truth(mp.mpf(0)) <= delta
    else:
        found = truth(mp.mpf(epsilon)) / mp.mpf(delta)
        assert 1 - mp.mpf("1e-7") <= found <= 1


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("delta", DELTAS)
def test_closed_forms_are_never_below_the_truth(sigma, delta):
    mu = 1 / mp.mpf(sigma)
    made = account((sigma, 1.0))
    check(made.get_epsilon(delta=delta), delta, lambda e: gaussian_delta(mu, e))
    for epsilon in (0.0, 0.5 / sigma, 3.0 / sigma, 20.0 / sigma):
        truth = gaussian_delta(mu, mp.mpf(epsilon))
        if truth > mp.mpf("1e-300"):
            assert 1 <= mp.mpf(made.get_delta(epsilon=epsilon)) / truth <= 1 + mp.mpf("1e-7")


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("rate", RATES)
def test_one_subsampled_step_is_never_below_the_truth(sigma, rate):
    made = account((sigma, rate))
    for delta in DELTAS[:-1]:
        truth = lambda e: one_step_delta(mp.mpf(sigma), mp.mpf(rate), e)  # noqa: E731
        check(made.get_epsilon(delta=delta), delta, truth)

# SPDX-License-Identifier: Apache-2.0
"""The best of each family: gradients, independent minima, and published ones."""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.optimize import minimize

from dualdp import correlated
from dualdp.plan.correlated.optimise import optimise
from tests.dualdp.plan.correlated.test_sensitivity import of_entries
from tests.mistakes import refused

SIZES = {"window": "bands", "band": "bands", "blt": "buffers"}


def best(family, size, num_steps, **more):
    return optimise(family=family, num_steps=num_steps, **{SIZES[family]: size}, **more)


def loss(strategy, n, b=1, k=1, workload=None, objective="mean"):
    """Error times squared sensitivity, by the strategy's own methods."""
    error = strategy.mean_error if objective == "mean" else strategy.max_error
    return error(n, workload) * strategy.sensitivity(n, b, k) ** 2


def dense_loss(c, b, k):
    """Mean error of prefix sums times squared sensitivity, by matrices and all patterns."""
    matrix = toeplitz(c, np.zeros(len(c)))
    error = ((np.tri(len(c)) @ np.linalg.inv(matrix)) ** 2).sum() / len(c)
    return error * of_entries(c, b, k, "min_separation") ** 2


@pytest.mark.parametrize(("family", "size"), [("window", 3), ("band", 3), ("blt", 1)])
@pytest.mark.parametrize(("b", "k"), [(1, 1), (4, 2)])
def test_no_search_finds_better(family, size, b, k):
    """Nelder-Mead from random starts, with the loss from its definition."""
    n = 9
    make = {
        "window": lambda x: correlated.window([1, *x]),
        "band": lambda x: correlated.band([1, *x]),
        "blt": lambda x: correlated.blt(decays=[np.clip(x[0], 0, 0.999)], scales=[abs(x[1])]),
    }[family]

    def value(x):
        return dense_loss(make(x).strategy(n), b, k)

    found = best(family, size, n, min_separation=b, max_participations=k)
    ours = dense_loss(found.strategy(n), b, k)
    starts = np.random.default_rng(1).uniform(-1, 1, size=(6, 2))
    options = {"xatol": 1e-9, "fatol": 1e-12, "maxiter": 400}
    least = min(minimize(value, x, method="Nelder-Mead", options=options).fun for x in starts)
    wide = family == "window" and k > 1 and size >= b  # ends at a kink, as the docstring says
    np.testing.assert_allclose(ours, least, rtol=1e-2 if wide else 1e-6)


def test_losses_of_jax_privacy():
    """Minima that jax_privacy 2.0.0 finds in float64; for buffers we may do better."""
    for n, bands, objective, theirs in (
        (100, 4, "mean", 15.336178170715025),
        (100, 4, "max", 28.353116459018203),
        (1000, 16, "mean", 39.41531727284133),
        (1000, 16, "max", 72.82149493884447),
    ):
        ours = loss(best("band", bands, n, objective=objective), n, objective=objective)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    for n, d, b, k, objective, theirs in (
        (1000, 2, 1, 1, "max", 11.030779529978636),
        (1000, 3, 100, 10, "max", 221.54114075745346),
        (500, 2, 50, None, "mean", 132.20821156552043),
    ):
        schema = {"min_separation": b, "max_participations": k}
        found = best("blt", d, n, objective=objective, **schema)
        ours = loss(found, n, b, k, None, objective)
        assert theirs * (1 - 1e-3) < ours < theirs * (1 + 1e-6)


def test_published_buffers():
    """Dvijotham et al. 2024 (arXiv 2404.16706): two buffers at n = 1000, largest error."""
    found = best("blt", 2, 1000, objective="max")
    np.testing.assert_allclose(found.decays, [0.998077, 0.907992], atol=1e-6)
    np.testing.assert_allclose(found.scales, [0.067176, 0.319703], atol=1e-6)
    np.testing.assert_allclose(math.sqrt(loss(found, 1000, objective="max")), 3.32126174, rtol=1e-8)


@pytest.mark.parametrize("family", SIZES)
def test_limits(family):
    """One step, one band; everybody in every step, where nothing beats independent noise."""
    for n, size in ((1, 3), (2, 3), (5, 1)):
        assert loss(best(family, size, n), n) <= loss(correlated.identity(), n) + 1e-12
    assert best(family, 3, 1).strategy(1).tolist() == [1.0]
    n = 12
    always = best(family, 3, n, max_participations=None)
    np.testing.assert_allclose(
        loss(always, n, 1, None), loss(correlated.identity(), n, 1, None), rtol=1e-6
    )


def test_bad_input_is_refused():
    for changed, words in (
        ({"family": "dense"}, "family='dense' is unknown. Expected one of band, blt, window"),
        ({"num_steps": 0}, "num_steps=0 is out of range"),
        ({"bands": None}, "bands=None and buffers=None for family='band'. Expected bands="),
        ({"buffers": 2}, "bands=3 and buffers=2 for family='band'. Expected bands= and not"),
        ({"family": "blt"}, "for family='blt'. Expected buffers= and not"),
        ({"bands": 0}, "bands=0 is out of range"),
        ({"min_separation": 0}, "min_separation=0 is out of range"),
        ({"max_participations": 0}, "max_participations=0 is out of range"),
        ({"objective": "rms"}, "objective='rms' is unknown. Expected one of max, mean"),
        ({"workload": [1.0]}, r"workload has shape \(1,\)"),
        ({"workload": np.zeros(6)}, "workload holds zeros only"),
        ({"workload": np.full(6, np.nan)}, "workload holds a number that is not finite"),
    ):
        given = {"family": "band", "num_steps": 6, "bands": 3, **changed}
        refused(lambda: optimise(**given), ValueError, words)  # noqa: B023


def test_a_workload_of_its_own_is_fitted_best():
    n = 40
    heavy_ball = correlated.workload(n, momentum=0.9)
    for family in SIZES:
        plain, fitted = best(family, 2, n), best(family, 2, n, workload=heavy_ball)
        assert loss(fitted, n, workload=heavy_ball) < loss(plain, n, workload=heavy_ball)
        assert loss(plain, n) < loss(fitted, n)

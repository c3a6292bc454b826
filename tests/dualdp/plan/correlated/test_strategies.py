# SPDX-License-Identifier: Apache-2.0
"""Families and their errors against matrices, published values, and bad input."""

import json
import math

import mpmath
import numpy as np
import pytest
from scipy.linalg import toeplitz

import dualdp
from dualdp import correlated
from dualdp.plan.correlated import strategies
from tests.mistakes import refused

FAMILIES = {
    "identity": correlated.identity(),
    "root": correlated.square_root(),
    "window": correlated.window([1, -0.6, 0.1, -0.2]),
    "bisr": correlated.bisr(bands=5),
    "cgd": correlated.lambda_cgd(0.9),
    "band": correlated.band([0.8, 0.5, -0.3]),
    "blt": correlated.blt(decays=[0.99, 0.4, 0.4, 0.0], scales=[0.05, 0.2, 0.0, 0.3]),
}
each = pytest.mark.parametrize("strategy", FAMILIES.values(), ids=FAMILIES)


def lower(column):
    return toeplitz(column, np.zeros(len(column)))


@each
def test_the_inverse_is_the_inverse(strategy):
    for n in (0, 1, 2, 3, 40):
        c, w = strategy.strategy(n), strategy.inverse(n)
        assert c.shape == w.shape == (n,)
        assert c.dtype == w.dtype == np.float64
        np.testing.assert_allclose(lower(c) @ lower(w), np.eye(n), atol=1e-13)


def test_the_definitions():
    np.testing.assert_allclose(
        correlated.blt(decays=[0.9, 0.5], scales=[0.2, 0.1]).strategy(4),
        [1, 0.3, 0.2 * 0.9 + 0.1 * 0.5, 0.2 * 0.81 + 0.1 * 0.25],
        rtol=1e-15,
    )
    np.testing.assert_array_equal(correlated.band([2, 1]).strategy(3), [2, 1, 0])
    np.testing.assert_array_equal(correlated.window([1, -0.5]).inverse(3), [1, -0.5, 0])
    np.testing.assert_array_equal(correlated.window([1, -0.5, 7]).strategy(2), [1, 0.5])
    assert correlated.lambda_cgd(0.25).weights == (1.0, -0.25)
    root = correlated.square_root().strategy(50)
    np.testing.assert_allclose(lower(root) @ lower(root), np.tri(50), atol=1e-13)
    assert correlated.bisr(bands=4).weights == (1.0, -0.5, -0.125, -0.0625)
    assert correlated.bisr(bands=1) == correlated.lambda_cgd(0) == correlated.identity()
    assert dualdp.correlated is correlated


def test_published_values():
    """Square root at n = 1000 (jax_privacy); BISR with 8 bands, n = 128, min_separation 128 / k."""
    root = correlated.square_root()
    np.testing.assert_array_equal(root.strategy(4), [1, 1 / 2, 3 / 8, 5 / 16])
    np.testing.assert_array_equal(root.inverse(4), [1, -1 / 2, -1 / 8, -1 / 16])
    np.testing.assert_allclose(root.mean_error(1000), 2.9475890127806847, rtol=1e-12)
    np.testing.assert_allclose(root.max_error(1000), 3.2650030806724315, rtol=1e-12)
    np.testing.assert_allclose(root.sensitivity(1000), 1.8069319524189142, rtol=1e-12)
    published = {1: 1.87545777, 2: 3.75230005, 4: 7.68447782, 8: 18.15768736, 16: 53.58368430}
    for k, squared in published.items():
        found = correlated.bisr(bands=8).sensitivity(128, 128 // k, k) ** 2
        np.testing.assert_allclose(found, squared, rtol=1e-9, atol=5e-9)


def test_buffers_close_to_one_are_exact():
    """Decays whose polynomial has no accurate roots; the truth in 50 digits."""
    decays, scales = [1 - 1e-9, 1 - 2e-9, 1 - 1e-6, 0.999], [1e-5, 2e-5, 1e-4, 1e-3]
    n = 300
    with mpmath.workdps(50):
        pairs = [(mpmath.mpf(s), mpmath.mpf(d)) for d, s in zip(decays, scales, strict=True)]
        c = [mpmath.mpf(1), *(sum(s * d**j for s, d in pairs) for j in range(n - 1))]
        w = [mpmath.mpf(1)]
        for j in range(1, n):
            w.append(-sum(c[i] * w[j - i] for i in range(1, j + 1)))
    truth = np.array(w, dtype=float)
    found = correlated.blt(decays=decays, scales=scales)
    np.testing.assert_allclose(found.inverse(n), truth, rtol=1e-9)
    np.testing.assert_allclose(found.strategy(n), [float(x) for x in c], rtol=1e-13)


@each
def test_json_round_trip(strategy):
    data = json.loads(json.dumps(strategies.to_json(strategy)))
    again = strategies.from_json("correlation", data)
    assert again == strategy
    assert hash(again) == hash(strategy)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"family": "windows", "weights": [1.0]},
        {"family": "window", "weights": [1.0], "decays": [0.5]},
        *(
            {"family": "window", "weights": weights}
            for weights in (["1.0"], {1.0: 1}, [math.nan], [0.5], [1.0] * (10**5 + 1))
        ),
        {"family": "blt", "decays": [0.5], "scales": [0.5, 0.5]},
        {"family": "blt", "decays": [0.5] * 257, "scales": [0.5] * 257},
    ],
)
def test_other_data_are_no_strategy(data):
    with pytest.raises(ValueError, match="^correlation is not a stored strategy"):
        strategies.from_json("correlation", data)


def test_bad_input_is_refused():
    window, band, blt = correlated.window, correlated.band, correlated.blt
    one = correlated.identity()
    refused(lambda: window("1"), TypeError, "weights is a str. Expected numbers")
    refused(lambda: one.mean_error(1.5), TypeError, "num_steps=1.5 is a float")
    for call, words in (
        (lambda: window([]), r"weights has shape \(0,\). Expected a list"),
        (lambda: window([1, math.nan]), "weights holds a number that is"),
        (lambda: window([2, 1]), r"weights\[0\]=2.0. Expected 1: divide"),
        (lambda: band([0, 1]), r"weights\[0\]=0.0. Expected a number > 0"),
        (lambda: blt(decays=[1], scales=[1]), "decays hold 1.0. Expected"),
        (lambda: blt(decays=[0.1], scales=[-1]), "scales=-1.0 is out of"),
        (lambda: blt(decays=[0.1], scales=[1, 2]), "1 decays came with 2"),
        (lambda: correlated.bisr(bands=0), "bands=0 is out of range"),
        (lambda: correlated.lambda_cgd(1.1), "lam=1.1 is not a probability"),
        (lambda: one.strategy(-1), "num_steps=-1 is out of range"),
        (lambda: one.sensitivity(9, 1, 0), "max_participations=0"),
        (lambda: correlated.workload(4, momentum=1), "momentum=1 is out of range"),
        (lambda: one.mean_error(4, [1, 1]), r"shape \(2,\). Expected \(4,\), its first column"),
        (lambda: one.mean_error(2, np.ones((2, 2))), r"workload has shape \(2, 2\)"),
        (lambda: one.sensitivity(9, pattern="cyclic"), "unknown. Expected one of fixed, min_sep"),
        (
            lambda: window([1, -2]).strategy(2000),
            r"C of Window\(weights=\(1.0, -2.0\)\) grows past 1e\+100 within 2000 steps",
        ),
        (
            lambda: band([1, 3]).mean_error(10**5),
            r"C\^-1 of Band\(weights=\(1.0, 3.0\)\) grows past",
        ),
    ):
        refused(call, ValueError, words)


@each
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_errors_are_those_of_the_matrices(strategy, momentum):
    n = 30
    inverse = np.linalg.inv(lower(strategy.strategy(n)))
    velocity = momentum ** np.arange(n)
    for workload, a in (
        (correlated.workload(n, momentum=momentum), lower(np.cumsum(velocity))),
        (None, np.tri(n)),
    ):
        rows = ((a @ inverse) ** 2).sum(axis=1)
        np.testing.assert_allclose(strategy.mean_error(n, workload), rows.mean(), rtol=1e-12)
        np.testing.assert_allclose(strategy.max_error(n, workload), rows.max(), rtol=1e-12)

# SPDX-License-Identifier: Apache-2.0
"""Preference losses against the formulas of their papers."""

import math

import numpy as np
import pytest

from dualdp.finetuning import preference

CHOSEN, REJECTED = np.array([-0.7, -2.5, -0.01]), np.array([-1.9, -0.4, -6.0])


def log_sigmoid(z):
    return math.log(1 / (1 + math.exp(-z)))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


#: Name -> options, and the loss of one pair as its paper writes it.
FORMULAS = {
    "dpo": ({"beta": 0.3}, lambda w, r: -log_sigmoid(0.3 * (w - r))),
    "ipo": ({"tau": 0.2}, lambda w, r: (w - r - 1 / 0.4) ** 2),
    "simpo": ({"beta": 2.0, "gamma": 0.7}, lambda w, r: -log_sigmoid(2 * w - 2 * r - 0.7)),
    "orpo": ({"weight": 0.4}, lambda w, r: -w - 0.4 * log_sigmoid(log_odds(w) - log_odds(r))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_the_published_ones(name):
    options, formula = FORMULAS[name]
    found = getattr(preference, name)(CHOSEN, REJECTED, **options, xp=np)
    expected = [formula(w, r) for w, r in zip(CHOSEN, REJECTED, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_formulas_do_not_overflow():
    far = np.array([-2e4, 2e4])
    found = preference.dpo(far, -far, beta=1.0, xp=np)
    np.testing.assert_allclose(found, [4e4, 0.0])

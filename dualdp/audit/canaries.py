# SPDX-License-Identifier: Apache-2.0
"""Empirical lower bound on epsilon from canaries that are inserted into one run.

A lower bound above the claimed epsilon proves a fault. The reverse proves nothing: most faults stay
below it, and `dualdp.testing.check_private_step` finds those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from dualdp import _validate, accountants
from dualdp.accountants.base import bracket, last_within
from dualdp.accountants.pld import gaussian_epsilon
from dualdp.audit.protocol import PrivateStep
from dualdp.audit.statistics import log_likelihood_ratio

Array = NDArray[np.float64]
Inverse = Callable[[float], float]

_SHARES = tuple(2.0**-k for k in range(8))  # candidate shares of canaries with a guess
_LARGEST = 50.0  # mu of the search


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        claimed_epsilon: epsilon of the accounted releases.
        delta: delta of the claim and of the bound.
        epsilon: lower bound on epsilon, at `confidence`.
        is_refuted: bool, True if the claim is false, at the audit's false-alarm rate.
        confidence: probability that the bound is below the truth.
        false_alarm: probability that a correct implementation is refuted.
        num_steps: number of releases of the run.
    """

    claimed_epsilon: float
    delta: float
    epsilon: float
    is_refuted: bool
    confidence: float
    false_alarm: float
    num_steps: int

    @property
    def verdict(self) -> str:
        """Verdict in one sentence."""
        if self.is_refuted:
            return f"REFUTED: the releases show more than epsilon = {self.claimed_epsilon:.3f}."
        return "Not refuted: nothing seen contradicts the claimed epsilon."


def audit(
    step: PrivateStep,
    *,
    num_steps: int = 100,
    num_canaries: int = 1000,
    sample_rate: float = 0.1,
    delta: float = 1e-5,
    confidence: float = 0.95,
    false_alarm: float = 1e-6,
    seed: int | None = None,
) -> Audit:
    """Train with canaries and bound epsilon from below by their scores in the releases.

    Args:
        step: `dualdp.testing.PrivateStep`, the implementation.
        num_steps: number of releases of the run.
        num_canaries: number of canaries; each becomes an example or not, by a fair coin.
        sample_rate: sampling rate of the run.
        delta: delta at which epsilon is claimed and bounded.
        confidence: confidence of the lower bound.
        false_alarm: probability that a correct implementation is refuted.
        seed: int that fixes coins and run, or None.

    Returns:
        `Audit` with claimed epsilon, lower bound and verdict.

    Raises:
        ValueError, TypeError: an argument out of range.

    Source: Mahloujifar et al. 2024, "Auditing f-Differential Privacy in One Run"; the canaries are
        those of Nasr et al. 2023.

    Guarantees:
        A correct implementation is accused with probability at most `false_alarm`.
            [test_the_right_mechanism_is_never_accused]
        The bound is below the truth with probability `confidence`.
            [test_bounds_stay_below_the_truth]
    """
    num_steps = _validate.integer("num_steps", num_steps, minimum=1)
    num_canaries = _validate.integer("num_canaries", num_canaries, minimum=10)
    for name, value in (("sample_rate", sample_rate), ("delta", delta)):
        _validate.open_probability(name, value)
    alpha = 1 - _validate.open_probability("confidence", confidence)
    _validate.open_probability("false_alarm", false_alarm)
    seed = seed if seed is None else _validate.integer("seed", seed)
    included, claims = np.random.default_rng(seed).random(num_canaries) < 0.5, step.claims
    rows = np.flatnonzero(included)
    size = max(1, round(sample_rate * rows.size))
    released = step.releases(
        num_steps, rows=rows, num_canaries=num_canaries, expected_batch_size=size, seed=seed
    )
    seen = np.array([np.ravel(release.canaries) for release in released], dtype=np.float64)
    x = seen.reshape(-1, num_canaries) / claims.max_grad_norm
    scores = log_likelihood_ratio(x, size / rows.size, claims.noise_multiplier)
    account = accountants.create("pld", neighboring_relation=claims.neighboring_relation)
    for event in step.events():
        account.step(**event._asdict(), sampler=claims.sampler)
    claimed = account.get_epsilon(delta=delta)
    epsilons = np.linspace(0.0, max(2 * claimed, 1.0), 60)
    claim = curve_inverse(epsilons, np.array([account.get_delta(epsilon=e) for e in epsilons]))
    halves = sorted({round(share * num_canaries / 2) for share in _SHARES} - {0})
    options = [guesses_at(scores, included, half) for half in halves]
    refuted = any(excess(option, false_alarm / len(options), claim) > 0 for option in options)
    mu = max(largest_refuted(option, alpha / len(options)) for option in options)
    epsilon = gaussian_epsilon(mu, delta)
    return Audit(claimed, delta, epsilon, refuted, confidence, false_alarm, num_steps)


class Guesses(NamedTuple):
    """Guesses of an attacker about some of the canaries, which were included by fair coins."""

    num_canaries: int
    num_guesses: int
    num_correct: int


def guesses_at(scores: Array, included: NDArray[np.bool_], half: int) -> Guesses:
    """Return guesses "in" for the `half` highest scores and "out" for as many of the lowest."""
    sorted_in = included[np.argsort(scores, kind="stable")]
    correct = half - int(sorted_in[:half].sum()) + int(sorted_in[-half:].sum())
    return Guesses(len(scores), 2 * half, correct)


def excess(guesses: Guesses, level: float, inverse: Inverse) -> float:
    """Return by how much a total probability would exceed 1, if guesses as good had one of `level`.

    Let v of the guesses be correct. If v or more are correct with this probability under the
    claimed trade-off function f, a chain of inequalities from v down to 0 gives a lower bound on
    the probability of all outcomes. Above 1 it contradicts the claim, which is refuted at this
    level. `inverse` is the function y -> least x with 1 - f(x) >= y.

    Source: Mahloujifar et al. 2024, theorem 3.2 and its algorithm, for fair coins.
    """
    m, r, v = guesses  # canaries, guesses, correct ones, as in the paper
    if 2 * v <= r:
        return -1.0
    # Sums of i p_i / m and (r - i) p_i / m over i >= v.
    right, wrong = level * v / m, level * (r - v) / m
    for i in range(v - 1, -1, -1):
        needed = max(wrong, inverse(right))
        right += i / (r - i) * (needed - wrong)
        wrong = needed
        if right + wrong > r / m:
            break
    return (right + wrong) * m / r - 1


def gaussian_inverse(mu: float) -> Inverse:
    """Return the inverse trade-off function of N(0, 1) against N(mu, 1)."""
    return lambda y: float(ndtr(ndtri(y) - mu)) if 0 < y < 1 else float(y >= 1)


def curve_inverse(epsilons: Array, deltas: Array) -> Inverse:
    """Return the inverse trade-off function of (epsilon, delta) pairs that hold."""
    grown = np.exp(epsilons)

    def inverse(y: float) -> float:
        least = max(((y - deltas) / grown).max(), (1 - deltas - grown * (1 - y)).max())
        return max(0.0, float(least))

    return inverse


def largest_refuted(guesses: Guesses, level: float) -> float:
    """Return the largest mu at which a mu-GDP mechanism is refuted at a level, 0 for none."""

    def height(mu: float) -> float:
        return -excess(guesses, level, gaussian_inverse(mu))

    refuted, not_refuted = bracket(lambda mu: height(mu) >= 0, 0.0, 1e-3, 2.0, _LARGEST)
    return last_within(refuted, not_refuted, height, width=1e-3) if refuted else 0.0

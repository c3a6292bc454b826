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
from dualdp.audit.statistics import log_likelihood_ratio, smallest

Array = NDArray[np.float64]
Inverse = Callable[[float], float]

_SHARES = tuple(2.0**-k for k in range(8))  # candidate shares of canaries with a guess
_LARGEST = 50.0  # mu of the search
_LEAST = 1e-12  # p-value


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        claimed_epsilon: epsilon of the accounted releases.
        delta: delta of the claim and of the bound.
        epsilon: lower bound on epsilon, at `confidence`.
        p_value: probability of such an observation under the claimed mechanism.
        confidence: probability that the bound is below the truth.
        false_alarm: probability that a correct implementation is refuted.
        num_steps: number of releases of the run.
    """

    claimed_epsilon: float
    delta: float
    epsilon: float
    p_value: float
    confidence: float
    false_alarm: float
    num_steps: int

    @property
    def is_refuted(self) -> bool:
        """True if the claim is false, at the audit's false-alarm rate."""
        return self.p_value < self.false_alarm

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
    p = smallest(p_value(option, claim) for option in options)
    mu = max(largest_refuted(option, alpha / len(options)) for option in options)
    return Audit(claimed, delta, gaussian_epsilon(mu, delta), p, confidence, false_alarm, num_steps)


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


def p_value(guesses: Guesses, inverse: Inverse) -> float:
    """Return P(at least this many correct guesses) for a claimed trade-off function f.

    Let v of the guesses be correct. If v or more are correct with probability t, a chain of
    inequalities from v down to 0 gives a lower bound on the total probability, which is at most 1:
    the p-value is the largest t that allows it. `inverse` is the function y -> least x with
    1 - f(x) >= y.

    Source: Mahloujifar et al. 2024, theorem 3.2 and its algorithm, for fair coins.
    """
    if 2 * guesses.num_correct <= guesses.num_guesses:
        return 1.0

    def height(t: float) -> float:
        return 1.0 - _total_probability(guesses, t, inverse)

    if height(1.0) >= 0:
        return 1.0
    return last_within(1.0, _LEAST, height, width=1e-3) if height(_LEAST) > 0 else _LEAST


def _total_probability(guesses: Guesses, t: float, inverse: Inverse) -> float:
    """Lower bound on the probability of all outcomes, if that of v or more correct ones is t."""
    m, r, v = guesses  # canaries, guesses, correct ones, as in the paper
    right, wrong = t * v / m, t * (r - v) / m  # sums of i p_i / m and (r - i) p_i / m over i >= v
    for i in range(v - 1, -1, -1):
        needed = max(wrong, inverse(right))
        right += i / (r - i) * (needed - wrong)
        wrong = needed
        if right + wrong > r / m:
            break
    return (right + wrong) * m / r


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
        return p_value(guesses, gaussian_inverse(mu)) - level * (1 - 1e-9)

    refuted, not_refuted = bracket(lambda mu: height(mu) > 0, 0.0, 1e-3, 2.0, _LARGEST)
    return last_within(refuted, not_refuted, height, width=1e-3) if refuted else 0.0

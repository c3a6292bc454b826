# SPDX-License-Identifier: Apache-2.0
"""Empirical lower bounds on epsilon from inserted canaries.

A lower bound above the claimed epsilon proves a fault. The reverse proves nothing: most faults stay
below it, and `dualdp.testing.check_private_step` finds those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dualdp import _validate, accountants
from dualdp.audit import lower_bounds
from dualdp.audit.lower_bounds import Array, Guesses
from dualdp.audit.protocol import PrivateStep
from dualdp.audit.statistics import log_likelihood_ratio

_SHARES = tuple(2.0**-k for k in range(8))  # candidate shares of canaries with a guess
_FEWEST = 33  # examples of a repeated run


@dataclass(frozen=True)
class Bound:
    """Lower bound on epsilon, with the p-value of the claim.

    Attributes:
        method: str, statistical method.
        epsilon: lower bound at the audit's confidence.
        p_value: probability of such an observation under the claimed mechanism.
    """

    method: str
    epsilon: float
    p_value: float


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        claimed_epsilon: epsilon of the accounted releases.
        delta: delta of the claim and the bounds.
        bounds: sequence of `Bound`, each at `confidence`.
        confidence: confidence of each bound.
        false_alarm: probability that a correct implementation is refuted.
        num_steps: number of releases of each run.
        settings: mapping of the audit's settings.
    """

    claimed_epsilon: float
    delta: float
    bounds: Sequence[Bound]
    confidence: float
    false_alarm: float
    num_steps: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_refuted(self) -> bool:
        """True if the claim is false, at the audit's false-alarm rate."""
        return any(b.p_value < self.false_alarm / len(self.bounds) for b in self.bounds)

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
    runs: int = 0,
    confidence: float = 0.95,
    false_alarm: float = 1e-6,
    seed: int | None = None,
) -> Audit:
    """Train with canaries and bound epsilon from below by their scores in the releases.

    Args:
        step: `dualdp.testing.PrivateStep`, the implementation.
        num_steps: number of releases of a run.
        num_canaries: number of canaries; each becomes an example or not, by a fair coin.
        sample_rate: sampling rate of a run.
        delta: delta at which epsilon is claimed and bounded.
        runs: number of further runs with and without one canary, for Clopper-Pearson; 0 for none.
        confidence: confidence of each lower bound.
        false_alarm: probability that a correct implementation is refuted.
        seed: int that fixes coins and runs, or None.

    Returns:
        `Audit` with claimed epsilon, lower bounds and verdict.

    Raises:
        ValueError, TypeError: an argument out of range.

    Guarantees:
        A correct implementation is accused with probability at most `false_alarm`.
            [test_the_right_mechanism_is_never_accused]
        Every bound is below the truth with probability `confidence`.
            [test_bounds_stay_below_the_truth]
    """
    num_steps = _validate.integer("num_steps", num_steps, minimum=1)
    num_canaries = _validate.integer("num_canaries", num_canaries, minimum=10)
    runs = _validate.integer("runs", runs)
    _validate.open_probability("sample_rate", sample_rate)
    _validate.open_probability("delta", delta)
    alpha = 1 - _validate.open_probability("confidence", confidence)
    _validate.open_probability("false_alarm", false_alarm)
    seed = seed if seed is None else _validate.integer("seed", seed)
    rng = np.random.default_rng(seed)
    included = rng.random(num_canaries) < 0.5
    size = max(1, round(sample_rate * int(included.sum())))
    scores = _scores(step, included, num_steps, size, seed)
    account = accountants.create("pld", neighboring_relation=step.claims.neighboring_relation)
    for event in step.events():
        account.step(**event._asdict(), sampler=step.claims.sampler)
    claimed = float(account.get_epsilon(delta=delta))
    bounds = _one_run_bounds(scores, included, account, claimed, delta, alpha)
    if runs:
        inside, outside = _repeated(step, runs, num_steps, (size, int(included.sum())), seed)
        limit = false_alarm / (len(bounds) + 1)
        beyond = lower_bounds.clopper_pearson(inside, outside, delta, limit) > claimed
        value = lower_bounds.clopper_pearson(inside, outside, delta, alpha)
        bounds.append(Bound("Clopper-Pearson", value, 0.0 if beyond else 1.0))
    settings = {"num_canaries": num_canaries, "sample_rate": sample_rate, "runs": runs}
    return Audit(claimed, delta, tuple(bounds), confidence, false_alarm, num_steps, settings)


def _scores(step: PrivateStep, included: Any, num_steps: int, size: int, seed: int | None) -> Array:
    """(num_canaries,) log-likelihood ratio of each canary's coordinate over a run.

    `size` is the expected batch size.
    """
    rows = np.flatnonzero(included)
    released = step.releases(
        num_steps, rows=rows, num_canaries=len(included), expected_batch_size=size, seed=seed
    )
    seen = np.array([np.ravel(release.canaries) for release in released], dtype=np.float64)
    x = seen.reshape(-1, len(included)) / step.claims.max_grad_norm
    return log_likelihood_ratio(x, size / len(rows), step.claims.noise_multiplier)


def _one_run_bounds(
    scores: Array, included: Any, account: Any, claimed: float, delta: float, alpha: float
) -> list[Bound]:
    """Bounds of Steinke et al. and Mahloujifar et al., over several numbers of guesses."""
    shares = sorted({2 * round(share * len(scores) / 2) for share in _SHARES} - {0})
    options = [lower_bounds.guesses_at(scores, included, r) for r in shares]
    epsilons = np.linspace(0.0, max(2 * claimed, 1.0), 60)
    deltas = np.array([float(account.get_delta(epsilon=e)) for e in epsilons])
    claim = lower_bounds.curve_inverse(epsilons, deltas)

    def bound(name: str, ps: list[float], p_at: Callable[[Guesses, float], float]) -> Bound:
        value = max(lower_bounds.largest_refuted(g, p_at, alpha / len(options)) for g in options)
        return Bound(name, value, min(1.0, len(options) * min(ps)))

    one_run = partial(lower_bounds.one_run_p_value, delta=delta)

    def f_dp(guesses: Guesses, epsilon: float) -> float:
        inverse = lower_bounds.gaussian_inverse(lower_bounds.mu_of(epsilon, delta))
        return lower_bounds.f_dp_p_value(guesses, inverse)

    return [
        bound("one run", [one_run(g, claimed) for g in options], one_run),
        bound("one run, f-DP", [lower_bounds.f_dp_p_value(g, claim) for g in options], f_dp),
    ]


def _repeated(
    step: PrivateStep, runs: int, num_steps: int, rate: tuple[int, int], seed: int | None
) -> tuple[Array, Array]:
    """Scores of one canary in runs with it, and in runs with another one in its place.

    `rate` is the sampling rate of the claim as a fraction. That of these runs, the same in all of
    them, is at most it, so the claim holds for them.
    """
    size, of = rate
    number = max(_FEWEST, -(-of // size))
    size = size * number // of
    rng = np.random.default_rng(seed)
    scores: tuple[list[float], list[float]] = ([], [])
    for run in range(runs):
        present = bool(rng.random() < 0.5)
        included = np.arange(number + 1) != (number if present else 0)
        own = None if seed is None else seed + 1 + run
        scores[present].append(float(_scores(step, included, num_steps, size, own)[0]))
    return np.array(scores[True]), np.array(scores[False])

# SPDX-License-Identifier: Apache-2.0
"""`check_private_step`: sensitivity, noise, sampler and accounting of a private step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.audit import statistics
from dualdp.audit.protocol import Claims, PrivateStep
from dualdp.plan.accounting import num_batches

Array = NDArray[np.float64]
Taken = NDArray[np.bool_]

FALSE_ALARM = 1e-6
_P_VALUES = 7  # largest number of p-values in a report, which share the false-alarm rate
_TOLERANCE = 1e-4  # of a contribution's norm, relative to C: rounding of float32 factors
_MOST = 1 << 15  # number of coordinates whose noise is kept, equally many of every leaf
_ROUNDING = 1 + 1e-6  # tolerance for the arguments of an accountant
_EMPTY_STEPS, _EMPTY_BATCH = 30, 0.5
_FACTORS = (1.0, 1e6, 1e-3, math.nan, math.inf, 0.0)


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: str, name of the check.
        passed: bool, or None if the check could not be run.
        statistic: float, a p-value if `is_p_value`, else a measured number.
        threshold: float; smaller p-values and larger measured numbers fail.
        is_p_value: bool, kind of the statistic.
        detail: str, one sentence about the observation.
    """

    name: str
    passed: bool | None
    statistic: float = math.nan
    threshold: float = math.nan
    is_p_value: bool = False
    detail: str = ""

    def __str__(self) -> str:
        if self.passed is None:
            return f"not run {self.name:40s}{self.detail}"
        verdict, kind = "pass" if self.passed else "FAIL", "p" if self.is_p_value else "value"
        numbers, limit = f"{kind}={self.statistic:.3g}", f"limit {self.threshold:.3g}"
        return f"{verdict:8s}{self.name:40s}{numbers:17s}{limit:16s}{self.detail}".rstrip()


@dataclass(frozen=True)
class Report:
    """Results of all checks of one implementation.

    Attributes:
        checks: sequence of `Check`, in order.
        false_alarm: probability that a correct implementation fails any of them.
    """

    checks: Sequence[Check]
    false_alarm: float

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.passed is False)

    def __str__(self) -> str:
        head = "All checks passed" if self.passed else f"{len(self.failures)} checks FAILED"
        words = [
            "p: probability that a correct step gives such odd numbers; fails below its limit.",
            "value: what was measured; fails above its limit.",
            f"At most one correct step in {1 / self.false_alarm:,.0f} fails any of the checks.",
        ]
        return "\n".join([head, *map(str, self.checks), *words])


def p_value(name: str, p: float, threshold: float, detail: str = "") -> Check:
    """Return the result of a statistical check; nan fails."""
    p = 0.0 if math.isnan(p) else p
    return Check(name, p >= threshold, p, threshold, is_p_value=True, detail=detail)


def at_most(name: str, value: float, threshold: float, detail: str = "") -> Check:
    """Return the result of an exact check; nan fails."""
    return Check(name, bool(value <= threshold), value, threshold, detail=detail)


@dataclass(frozen=True)
class Setting:
    """Sizes of the test run, and the p-value below which one check fails (`limit`)."""

    num_steps: int
    num_examples: int
    sample_rate: float
    limit: float
    seed: int | None


def check_sensitivity(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Check without noise that one example's contribution is bounded and independent of others."""
    bound = step.claims.max_grad_norm
    others = [k % step.num_examples for k in range(1, 8)]

    def contribution(beside: list[int], factor: float) -> Array:
        """What an example adds to the sum of others, as a float64 vector."""
        rows, ones = [*beside, 0], [1.0] * len(beside)
        with_it, without = step.clipped_sum(rows, [*ones, factor]), step.clipped_sum(beside, ones)
        return np.subtract(with_it, without, dtype=np.float64).ravel()

    few = {factor: contribution(others[:2], factor) for factor in _FACTORS}
    largest = max(map(_norm, few.values())) / bound
    yield at_most(
        "contribution is bounded",
        largest,
        1 + _TOLERANCE,
        "largest contribution / max_grad_norm, with losses of 0 to 1e6 times their size, or nan",
    )
    apart = max(_norm(contribution(others, f) - few[f]) for f in (1.0, 1e6, 1e-3)) / bound
    yield at_most(
        "contribution does not depend on others",
        apart,
        20 * _TOLERANCE,
        "difference beside 2 and beside 7 others / max_grad_norm",
    )


def _norm(vector: Array) -> float:
    """L2 norm, inf for a vector with nan or inf."""
    return float(np.linalg.norm(vector)) if np.isfinite(vector).all() else math.inf


@dataclass(frozen=True)
class Seen:
    """Releases of a run, with correlated noise made independent by a multiplication with C."""

    noise: Array  # (steps, numbers) coordinates with noise only, divided by the claimed stddev
    starts: tuple[int, ...]  # of each parameter in `noise`, after the free canaries, and its end
    taken: Taken  # (steps, examples) participations
    rest: Array  # (steps, examples) the other canaries without the examples, divided by the stddev


def observe(step: PrivateStep, setting: Setting, num_steps: int, rate: float) -> Seen:
    """Run the implementation with examples for the second half of the canaries.

    The first half, which no example moves, has noise only. With correlated noise C^-1 z, releases
    are multiplied by C, which leaves independent z.
    """
    n, claims = setting.num_examples, step.claims
    inside, noise, batches = [], [], []
    starts = np.zeros(1, dtype=np.int64)
    for release in step.releases(
        num_steps,
        rows=n + np.arange(n),
        num_canaries=2 * n,
        expected_batch_size=rate * n,
        seed=setting.seed,
    ):
        canaries = np.ravel(release.canaries)
        share = max(1, _MOST // max(1, len(release.leaves)))
        leaves = [np.ravel(leaf)[:share] for leaf in release.leaves if np.size(leaf)]
        arrays = [canaries[:n], *leaves]
        starts = np.cumsum([0, *map(len, arrays)])
        inside.append(canaries[n:])
        noise.append(np.concatenate(arrays, dtype=np.float64))
        batches.append(np.isin(np.arange(n), release.indices))
    steps = len(inside)
    c, scale = claims.strategy(steps), claims.noise_scale(steps, rate)
    x = c @ (np.array(inside, dtype=np.float64).reshape(steps, n) / claims.max_grad_norm)
    z = c @ (np.reshape(noise, (steps, starts[-1])) / claims.noise_stddev) / scale
    taken = np.array(batches).reshape(steps, n)
    return Seen(z, tuple(starts), taken, (x - c @ taken) / (claims.noise_multiplier * scale))


def check_run(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Check noise, sampler and accounting of one run."""
    limit, rate = setting.limit, setting.sample_rate
    seen = observe(step, setting, setting.num_steps, rate)
    yield from _account(step, seen, setting.num_steps, rate, "")
    if len(seen.noise) < 2:
        return
    yield from _noise(seen, limit)
    found = batches(step.claims, seen.taken, rate)
    p, oddest = statistics.smallest(found.values()), min(found, key=lambda key: found[key])
    yield p_value("batches are drawn as claimed", p, limit, f"oddest: {oddest}")
    yield p_value("release is of the drawn batch", statistics.chi_square(seen.rest), limit)


def _account(
    step: PrivateStep, seen: Seen, num_steps: int, rate: float, suffix: str
) -> Iterator[Check]:
    """Checks of one release and one event per step, none of which understates its cost.

    An event may have less noise or a larger sample rate than the step had, but not the reverse.
    """
    events, claims = list(step.events()), step.claims
    missing = abs(len(seen.noise) - num_steps)
    yield at_most(f"every step releases{suffix}", missing, 0, "steps without release")
    needed = [(claims.noise_multiplier, rate)] * num_steps
    if claims.sampler == "cyclic_poisson":
        norms = np.linalg.norm(claims.strategy(num_steps)[:, :: claims.min_separation], axis=0)
        sigmas = claims.noise_multiplier * norms.max() / norms
        needed = [(float(sigma), claims.min_separation * rate) for sigma in sigmas]
    elif claims.correlation is not None or claims.sampler == "fixed_order":
        needed = [(claims.noise_multiplier, 1.0)]
    pairs = zip(sorted(events), sorted(needed), strict=False)
    right = [e[0] <= n[0] * _ROUNDING and n[1] <= e[1] * _ROUNDING for e, n in pairs]
    wrong = abs(len(events) - len(needed)) + right.count(False)
    yield at_most(f"every step is accounted{suffix}", wrong, 0, "events missing, added or wrong")


def _noise(seen: Seen, limit: float) -> Iterator[Check]:
    """Checks that coordinates without a gradient are independent normals of the claimed stddev."""
    z = seen.noise
    leaves = [z[:, a:b] for a, b in zip(seen.starts[:-1], seen.starts[1:], strict=True)]
    scale = float(np.sqrt((z**2).mean()))
    p = statistics.smallest(statistics.chi_square(part) for part in (z, *leaves, *z))
    detail = f"{scale:.5f} of what is claimed; also that of each parameter and step"
    yield p_value("noise scale", p, limit, detail)
    yield p_value("noise is normal", statistics.normality(z[:, :: max(1, z.size >> 18)]), limit)
    yield p_value("noise is never used twice", statistics.repetition(z), limit)
    # The noise of the used canaries lies between free ones and parameters.
    z = np.hstack([z[:, : seen.starts[1]], seen.rest, z[:, seen.starts[1] :]])
    yield p_value("noise is independent in a step", statistics.autocorrelation(z), limit)


def batches(claims: Claims, taken: Taken, rate: float) -> dict[str, float]:
    """Return p-values of `taken`, the (steps, examples) participations, 0 for what can not be."""
    (steps, examples), sizes = taken.shape, taken.sum(1)
    sampler = claims.sampler
    found: dict[str, float] = {}
    if sampler == "poisson":
        found["sample rate"] = statistics.total(int(taken.sum()), taken.size, rate)
        found["batch sizes"] = statistics.dispersion(sizes, examples, rate)
    elif sampler == "fixed_size":
        found["batches have one size"] = float(np.abs(sizes - rate * examples).max() < 0.5)
    elif sampler == "truncated_poisson":
        over = float(taken.sum() - taken.size * rate) / math.sqrt(taken.size * rate * (1 - rate))
        found["sample rate"] = statistics.largest(np.array([max(over, 0.0)]))
    elif sampler == "cyclic_poisson":
        classes, within = claims.min_separation, claims.min_separation * rate
        turns = steps // classes
        by_class = taken[: turns * classes].reshape(turns, classes, -1).sum(0)
        found["every example joins one class"] = float(((by_class > 0).sum(0) <= 1).all())
        found["sample rate"] = statistics.total(int(by_class.sum()), turns * examples, within)
        found["participations"] = statistics.dispersion(by_class.max(0), turns, within)
    else:
        bins = num_batches(1, rate)
        whole = taken[: steps // bins * bins].reshape(-1, bins, examples)
        found["every example once a pass"] = float((whole.sum(1) == 1).all())
        if sampler != "balls_in_bins":
            found["batches have one size"] = float(np.ptp(sizes) <= 1)
        if sampler == "fixed_order":
            found["every pass has the same order"] = float((whole == whole[:1]).all())
    if sampler in ("poisson", "fixed_size"):  # different steps and examples are independent
        found["participations"] = statistics.dispersion(taken.sum(0), steps, rate)
        found["batches share members"] = statistics.shared_members(taken, rate)
        found["neighbours"] = statistics.neighbours(taken, rate)
    return found


def check_empty(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Check that batches without examples release noise and are accounted."""
    rate = _EMPTY_BATCH / setting.num_examples
    seen = observe(step, setting, _EMPTY_STEPS, rate)
    yield from _account(step, seen, _EMPTY_STEPS, rate, ", empty batches")
    p = statistics.smallest(statistics.chi_square(row) for row in seen.noise)
    yield p_value("noise of empty batches", p, setting.limit)


CHECKS: Mapping[str, Callable[[PrivateStep, Setting], Iterator[Check]]] = {
    "sensitivity": check_sensitivity,
    "run": check_run,
    "empty": check_empty,
}


def check_private_step(
    step: PrivateStep,
    *,
    checks: Sequence[str] = tuple(CHECKS),
    num_steps: int = 100,
    num_examples: int = 1000,
    sample_rate: float = 0.1,
    false_alarm: float = FALSE_ALARM,
    seed: int | None = None,
) -> Report:
    """Test that the releases of an implementation have their claimed distribution and sensitivity.

    The distribution of the releases is compared statistically with the claimed mechanism, and the
    sensitivity exactly. Empirical lower bounds on epsilon (`dualdp.audit`) overlook most faults.
    The number of steps that a later run will take is not tested.

    Args:
        step: `PrivateStep`, the implementation.
        checks: names among "sensitivity", "run" (noise, sampler, events) and "empty"
            (batches without examples).
        num_steps: number of steps of the run with canaries.
        num_examples: number of examples of that run; as many further canaries have no example.
        sample_rate: sampling rate of that run.
        false_alarm: probability that a correct implementation fails.
        seed: int that fixes the randomness of implementation and test, or None.

    Returns:
        `Report` with `passed`, `failures` and `checks`, for `print`.

    Raises:
        ValueError, TypeError: an argument out of range.

    Guarantees:
        A correct implementation fails with probability at most about `false_alarm`.
            [test_p_values_are_uniform, test_the_correct_implementation_passes]
        It finds the faults that research and practice know.  [test_every_mutant_is_killed]

    Source: Nasr et al. 2023 (canaries); the choice of tests is ours.
    """
    for name in checks:
        _validate.choice("checks", name, CHECKS)
    setting = Setting(
        num_steps=_validate.integer("num_steps", num_steps, minimum=10),
        num_examples=_validate.integer("num_examples", num_examples, minimum=100),
        sample_rate=_validate.open_probability("sample_rate", sample_rate),
        limit=_validate.open_probability("false_alarm", false_alarm) / _P_VALUES,
        seed=None if seed is None else _validate.integer("seed", seed),
    )
    found: list[Check] = []
    for name in checks:
        try:
            found += CHECKS[name](step, setting)
        except NotImplementedError as error:  # the adapter can't do that
            found.append(Check(name, None, detail=str(error)))
    return Report(found, false_alarm)

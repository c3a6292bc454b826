# SPDX-License-Identifier: Apache-2.0
"""`check_private_step`: sensitivity, noise, sampler, canaries and accounting of a private step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.audit import statistics
from dualdp.audit.protocol import Claims, PrivateStep
from dualdp.audit.report import Check, Report, at_most, not_run, p_value
from dualdp.audit.sampling import participation, sampler_checks

Array = NDArray[np.float64]

FALSE_ALARM = 1e-6
_P_VALUES = 25  # largest number of p-values in a report, which share the false-alarm rate
_TOLERANCE = 1e-4  # of a contribution's norm, relative to C: contract.md, 1
_MOST = 1 << 15  # number of coordinates whose noise is kept, equally many of every leaf
_PATHS = 20_000  # simulated canaries for the reference of the log-likelihood ratio
_ROUNDING = 1 + 1e-6  # tolerance for the arguments of an accountant
_EMPTY_STEPS, _EMPTY_BATCH = 30, 0.5
_FACTORS = (1.0, 1e6, 1e-3, math.nan, math.inf, 0.0)


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
    names = ("contribution is bounded", "a broken example counts for nothing")
    bound = step.claims.max_grad_norm
    others = [k % step.num_examples for k in range(1, 8)]
    try:
        few, many = _sum(step, others[:2]), _sum(step, others)
    except NotImplementedError as error:
        yield from (not_run(name, str(error)) for name in names)
        return
    added = {f: _sum(step, [*others[:2], 0], [1.0, 1.0, f]) - few for f in _FACTORS}
    largest = max(_norm(added[f]) for f in (1.0, 1e6)) / bound
    yield at_most(names[0], largest, 1 + _TOLERANCE, "largest contribution / max_grad_norm")
    broken = max(_norm(added[f]) for f in (math.nan, math.inf, 0.0)) / bound
    yield at_most(names[1], broken, 1 + _TOLERANCE, "nan, inf or no gradient / max_grad_norm")
    differences = [
        _norm(_sum(step, [*others, 0], [1.0] * 7 + [f]) - many - added[f]) / bound
        for f in (1.0, 1e6, 1e-3)
    ]
    yield at_most(
        "contribution does not depend on others",
        max(differences),
        20 * _TOLERANCE,
        "difference beside 2 and beside 7 others / max_grad_norm",
    )
    once = _sum(step, [0], [1e6])
    eight = _sum(step, [0] * 8, [1e6] * 8)
    yield at_most("eight equal examples add up", _norm(eight - 8 * once) / bound, 20 * _TOLERANCE)


def _sum(step: PrivateStep, rows: list[int], factors: list[float] | None = None) -> Array:
    """Clipped sum as a float64 vector."""
    found = step.clipped_sum(rows, [1.0] * len(rows) if factors is None else factors)
    return np.asarray(found, dtype=np.float64).ravel()


def _norm(vector: Array) -> float:
    """L2 norm, inf for a vector with nan or inf."""
    return float(np.linalg.norm(vector)) if np.isfinite(vector).all() else math.inf


@dataclass(frozen=True)
class Seen:
    """Releases of a run."""

    inside: Array  # (steps, examples) coordinates of the canaries with an example, in units of C
    noise: Array  # (steps, numbers) coordinates with noise only, divided by the claimed stddev
    starts: tuple[int, ...]  # of each parameter in `noise`, after the free canaries, and its end
    taken: NDArray[np.bool_] | None  # (steps, examples) participations
    signal: Array | None  # (steps, examples) the part of the examples in `inside`
    sigma: float  # standard deviation of the noise in `inside`


def observe(step: PrivateStep, setting: Setting, num_steps: int, batch_size: float) -> Seen:
    """Run the implementation with an example for each of the second half of the canaries.

    Correlated noise is made independent: the releases are multiplied by C.
    """
    n, bound = setting.num_examples, step.claims.max_grad_norm
    rows = n + np.arange(n)
    inside, noise, taken = [], [], []
    starts: list[int] = []
    for release in step.releases(
        num_steps, rows=rows, num_canaries=2 * n, expected_batch_size=batch_size, seed=setting.seed
    ):
        canaries = np.asarray(release.canaries, dtype=np.float64).ravel()
        leaves = [np.ravel(leaf) for leaf in release.leaves]
        share = max(1, _MOST // max(1, len(leaves)))
        kept = [np.asarray(leaf[:share], dtype=np.float64) for leaf in leaves if leaf.size]
        arrays = [canaries[:n], *kept]
        starts = np.cumsum([0, *map(len, arrays)]).tolist()
        inside.append(canaries[n:] / bound)
        noise.append(np.concatenate(arrays) / step.claims.noise_stddev)
        if release.indices is not None:
            taken.append(np.isin(np.arange(n), release.indices))
    steps = len(inside)
    c, scale = step.claims.strategy(steps), step.claims.noise_scale(steps, batch_size / n)
    joined = np.array(taken) if taken and len(taken) == steps else None
    return Seen(
        c @ np.reshape(inside, (steps, n)),
        c @ np.reshape(noise, (steps, -1)) / scale if noise else np.zeros((0, 0)),
        tuple(starts),
        joined,
        None if joined is None else c @ joined,
        step.claims.noise_multiplier * scale,
    )


def check_run(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Check noise, sampler, canaries and accounting of one run."""
    batch_size = setting.sample_rate * setting.num_examples
    seen = observe(step, setting, setting.num_steps, batch_size)
    yield from _account(step, seen, setting.num_steps, batch_size / setting.num_examples, "")
    if len(seen.inside) < 2:
        return
    yield from _noise(seen, setting.limit)
    classes = step.claims.min_separation
    sampler, rate = step.claims.sampler, setting.sample_rate
    yield from sampler_checks(sampler, seen.taken, rate, setting.limit, classes)
    yield from _canaries(step, seen, setting)


def _account(
    step: PrivateStep, seen: Seen, num_steps: int, rate: float, suffix: str
) -> Iterator[Check]:
    """Checks of one release and one event per step, with parameters no better than those run."""
    events, claims = list(step.events()), step.claims
    missing = abs(len(seen.inside) - num_steps)
    yield at_most(f"every step releases{suffix}", missing, 0, "steps without release")
    needed = [(claims.noise_multiplier, rate)] * num_steps
    if claims.is_patterned:
        needed = _rounds(claims, num_steps, rate)
    pairs = zip(sorted(events), sorted(needed), strict=False)
    right = [e[0] <= n[0] * _ROUNDING and n[1] <= e[1] * _ROUNDING for e, n in pairs]
    wrong = abs(len(events) - len(needed)) + right.count(False)
    yield at_most(f"every step is accounted{suffix}", wrong, 0, "events missing, added or wrong")


def _rounds(claims: Claims, num_steps: int, rate: float) -> list[tuple[float, float]]:
    """(noise multiplier, sample rate) of the releases that a run is worth as a whole."""
    if claims.sampler != "cyclic_poisson":
        return [(claims.noise_multiplier, 1.0)]
    norms = np.linalg.norm(claims.strategy(num_steps)[:, :: claims.min_separation], axis=0)
    sigmas = claims.noise_multiplier * norms.max() / norms
    return [(float(sigma), claims.min_separation * rate) for sigma in sigmas]


def _noise(seen: Seen, limit: float) -> Iterator[Check]:
    """Checks that coordinates without a gradient are independent normals of the claimed stddev."""
    z, steps = seen.noise, range(len(seen.noise))
    leaves = [z[:, a:b] for a, b in zip(seen.starts[:-1], seen.starts[1:], strict=True)]
    scale = float(np.sqrt((z**2).mean()))
    yield p_value("noise scale", statistics.chi_square(z), limit, f"{scale:.5f} of what is claimed")
    by_leaf = statistics.smallest(statistics.chi_square(leaf) for leaf in leaves)
    yield p_value("noise scale of each parameter", by_leaf, limit)
    by_step = statistics.smallest(statistics.chi_square(z[t]) for t in steps)
    yield p_value("noise scale of each step", by_step, limit)
    yield p_value("noise is normal", statistics.normality(z[:, :: max(1, z.size >> 18)]), limit)
    yield p_value("noise is never used twice", statistics.repetition(z), limit)
    if seen.signal is not None:  # then the noise of the used canaries is known too
        free, parameters = z[:, : seen.starts[1]], z[:, seen.starts[1] :]
        z = np.hstack([free, (seen.inside - seen.signal) / seen.sigma, parameters])
    yield p_value("noise is independent in a step", statistics.autocorrelation(z), limit)


def _canaries(step: PrivateStep, seen: Seen, setting: Setting) -> Iterator[Check]:
    """Checks of the canaries' distribution in each release, and of their privacy loss."""
    sigma, rate, limit = seen.sigma, setting.sample_rate, setting.limit
    x, free = seen.inside, seen.noise[:, : seen.starts[1]] * sigma
    if seen.signal is not None:
        rest = (x - seen.signal) / sigma
        yield p_value("release is of the drawn batch", statistics.chi_square(rest), limit)
        height = (rest * seen.signal).sum() / max(1.0, float(np.linalg.norm(seen.signal)))
        p = statistics.normality_of_one(float(height))
        yield p_value("canaries have the claimed norm", p, limit)
    if step.claims.is_patterned:  # the steps of an example are no independent draws
        return
    spread = math.sqrt(x.size * (sigma**2 + rate * (1 - rate)))
    p = statistics.normality_of_one(float((x - rate).sum()) / spread)
    if step.claims.sampler in ("poisson", "fixed_size"):
        yield p_value("canaries on average", p, limit)
    marginal = statistics.uniformity(statistics.mixture_uniforms(x, rate, sigma))
    yield p_value("canaries in single steps", marginal, limit)
    rng, shape = np.random.default_rng(setting.seed), (len(x), _PATHS)
    noise = sigma * rng.standard_normal(shape)
    taken = participation(step.claims.sampler, shape, rate, rng)
    for name, found, reference in (
        ("privacy loss without the example", free, noise),
        ("privacy loss with the example", x, noise + taken),
    ):
        p = statistics.two_samples(
            statistics.log_likelihood_ratio(found, rate, sigma),
            statistics.log_likelihood_ratio(reference, rate, sigma),
        )
        yield p_value(name, p, limit)


def check_empty(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Check that batches without examples release noise and are accounted."""
    try:
        seen = observe(step, setting, _EMPTY_STEPS, _EMPTY_BATCH)
    except NotImplementedError as error:
        yield not_run("noise of empty batches", str(error))
        return
    rate = _EMPTY_BATCH / setting.num_examples
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
        checks: names among "sensitivity", "run" (noise, sampler, canaries, events) and "empty"
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
    began = time.perf_counter()
    found = [check for name in checks for check in CHECKS[name](step, setting)]
    return Report(tuple(found), false_alarm, time.perf_counter() - began)

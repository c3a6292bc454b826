# SPDX-License-Identifier: Apache-2.0
"""The checks of `check_private_step`, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualdp.testing import statistics
from dualdp.testing.report import Check, at_most, not_run, p_value
from dualdp.testing.sampling import participation, sampler_checks
from dualdp.testing.step import PrivateStep, Release

Array = NDArray[np.float64]

_TOLERANCE = 1e-4  # of a contribution's norm, relative to C: contract.md, 1
_MOST = 1 << 15  # parameters whose noise is kept, in equal parts of every leaf
_PATHS = 20_000  # simulated canaries for the reference of the log-likelihood ratio
_ROUNDING = 1 + 1e-6  # of the numbers that an accountant was told
_EMPTY_STEPS, _EMPTY_BATCH = 30, 0.5
_FACTORS = (1.0, 1e6, math.nan, math.inf, 0.0)


@dataclass(frozen=True)
class Setting:
    """Sizes of the test run, and the p-value below which one check fails."""

    num_steps: int
    num_examples: int
    sample_rate: float
    limit: float
    seed: int | None

    @property
    def rng(self) -> np.random.Generator:
        """The test's own randomness."""
        return np.random.default_rng(self.seed)


# ---------------------------------------------------------------------- sensitivity


def check_sensitivity(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Exact, without noise: what one example can change, and that nothing else changes it."""
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
    small = _sum(step, [*others[:2], 0], [1.0, 1.0, 1e-3]) - few
    differences = [
        _norm(_sum(step, [*others, 0], [1.0] * 7 + [f]) - many - alone) / bound
        for f, alone in ((1.0, added[1.0]), (1e6, added[1e6]), (1e-3, small))
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
    """A clipped sum as a float64 vector."""
    found = step.clipped_sum(rows, [1.0] * len(rows) if factors is None else factors)
    return np.asarray(found, dtype=np.float64).ravel()


def _norm(vector: Array) -> float:
    """L2 norm; nan and inf stay so, and fail."""
    return float(np.linalg.norm(vector)) if np.isfinite(vector).all() else math.inf


# ---------------------------------------------------------------------- a run with canaries


@dataclass(frozen=True)
class Seen:
    """What a run released, in units of C.

    Attributes:
        inside: (steps, examples) canaries that have an example.
        noise: (steps, numbers) coordinates that hold nothing but noise, over its claimed stddev.
        parts: where each parameter's share of `noise` begins; the first are free canaries.
        taken: (steps, examples) who took part, or None.
    """

    inside: Array
    noise: Array
    parts: tuple[int, ...]
    taken: NDArray[np.bool_] | None

    def whole(self, sigma: float) -> Array:
        """`noise`, with that of the canaries that have an example where it is known."""
        if self.taken is None:
            return self.noise
        free, leaves = self.noise[:, : self.parts[1]], self.noise[:, self.parts[1] :]
        return np.hstack([free, (self.inside - self.taken) / sigma, leaves])


def observe(step: PrivateStep, setting: Setting, num_steps: int, batch_size: float) -> Seen:
    """Run the implementation with an example for each of the second half of the canaries."""
    n, bound = setting.num_examples, step.claims.max_grad_norm
    rows = n + np.arange(n)
    inside, noise, taken = [], [], []
    parts: list[int] = []
    for release in step.releases(
        num_steps, rows=rows, num_canaries=2 * n, expected_batch_size=batch_size, seed=setting.seed
    ):
        canaries = np.asarray(release.canaries, dtype=np.float64).ravel()
        pieces = [canaries[:n], *_kept(release)]
        parts = np.cumsum([0, *map(len, pieces)]).tolist()
        inside.append(canaries[n:] / bound)
        noise.append(np.concatenate(pieces) / step.claims.noise_stddev)
        if release.indices is not None:
            taken.append(np.isin(np.arange(n), release.indices))
    shape = (len(inside), n)
    return Seen(
        np.reshape(inside, shape),
        np.reshape(noise, (len(noise), -1)) if noise else np.zeros((0, 0)),
        tuple(parts),
        np.array(taken) if taken and len(taken) == len(inside) else None,
    )


def _kept(release: Release) -> list[Array]:
    """The first coordinates of every leaf, `_MOST` in all or all of them."""
    leaves = [np.ravel(leaf) for leaf in release.leaves]
    share = max(1, _MOST // max(1, len(leaves)))
    return [np.asarray(leaf[:share], dtype=np.float64) for leaf in leaves if leaf.size]


def check_run(step: PrivateStep, setting: Setting) -> Iterator[Check]:
    """Noise, sampler, canaries and account of one run."""
    batch_size = setting.sample_rate * setting.num_examples
    seen = observe(step, setting, setting.num_steps, batch_size)
    yield from _account(step, seen, setting.num_steps, batch_size / setting.num_examples, "")
    if len(seen.inside) < 2:
        return
    yield from _noise(seen, step.claims.noise_multiplier, setting.limit)
    yield from sampler_checks(step.claims.sampler, seen.taken, setting.sample_rate, setting.limit)
    yield from _canaries(step, seen, setting)


def _account(
    step: PrivateStep, seen: Seen, num_steps: int, rate: float, suffix: str
) -> Iterator[Check]:
    """One release and one event for each step, which claims no more than what ran."""
    events = list(step.events())
    missing = abs(len(seen.inside) - num_steps)
    yield at_most(f"every step releases{suffix}", missing, 0, "steps without release")
    wrong = abs(len(events) - num_steps) + sum(
        not (
            event.noise_multiplier <= step.claims.noise_multiplier * _ROUNDING
            and rate <= event.sample_rate * _ROUNDING
        )
        for event in events
    )
    yield at_most(f"every step is accounted{suffix}", wrong, 0, "events missing, added or wrong")


def _noise(seen: Seen, sigma: float, limit: float) -> Iterator[Check]:
    """Coordinates without a gradient are independent normals of the claimed stddev."""
    z, steps = seen.noise, range(len(seen.noise))
    leaves = [z[:, a:b] for a, b in zip(seen.parts[:-1], seen.parts[1:], strict=True)]
    scale = float(np.sqrt((z**2).mean()))
    yield p_value("noise scale", statistics.chi_square(z), limit, f"{scale:.5f} of what is claimed")
    by_leaf = statistics.smallest(statistics.chi_square(leaf) for leaf in leaves)
    yield p_value("noise scale of each parameter", by_leaf, limit)
    by_step = statistics.smallest(statistics.chi_square(z[t]) for t in steps)
    yield p_value("noise scale of each step", by_step, limit)
    yield p_value("noise is normal", statistics.normality(z[:, :: max(1, z.size >> 18)]), limit)
    yield p_value("noise is never used twice", statistics.repetition(z), limit)
    p = statistics.autocorrelation(seen.whole(sigma))
    yield p_value("noise is independent in a step", p, limit)


def _canaries(step: PrivateStep, seen: Seen, setting: Setting) -> Iterator[Check]:
    """Canaries follow the claimed mechanism: each release, and the privacy loss of all."""
    sigma, rate, limit = step.claims.noise_multiplier, setting.sample_rate, setting.limit
    x, free = seen.inside, seen.noise[:, : seen.parts[1]] * sigma
    if seen.taken is not None:
        rest = (x - seen.taken) / sigma
        yield p_value("release is of the drawn batch", statistics.chi_square(rest), limit)
        height = (rest * seen.taken).sum() / math.sqrt(max(1, seen.taken.sum()))
        p = statistics.normality_of_one(float(height))
        yield p_value("canaries have the claimed norm", p, limit)
    spread = math.sqrt(x.size * (sigma**2 + rate * (1 - rate)))
    p = statistics.normality_of_one(float((x - rate).sum()) / spread)
    if step.claims.sampler in ("poisson", "fixed_size"):
        yield p_value("canaries on average", p, limit)
    marginal = statistics.uniformity(statistics.mixture_uniforms(x, rate, sigma))
    yield p_value("canaries in single steps", marginal, limit)
    rng, shape = setting.rng, (len(x), _PATHS)
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
    """Batches without examples release their noise, and are accounted."""
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

# SPDX-License-Identifier: Apache-2.0
"""Checks that batches were drawn as the accountant assumes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dualdp.audit import statistics
from dualdp.audit.report import Check, at_most, not_run, p_value

Taken = NDArray[np.bool_]

_AMPLIFIED_BY_STEP = ("poisson", "truncated_poisson", "fixed_size")


def sampler_checks(
    sampler: str, taken: Taken | None, rate: float, limit: float, num_classes: int = 1
) -> Iterator[Check]:
    """Yield checks of `taken`, the (steps, examples) participations."""
    if taken is None:
        yield not_run("batches are drawn as claimed", "the implementation does not say who joined")
        return
    (steps, examples), sizes = taken.shape, taken.sum(1)
    if sampler == "poisson":
        p = statistics.total(int(taken.sum()), taken.size, rate)
        yield p_value("sample rate", p, limit, f"{taken.mean():.5f} drawn, {rate:.5f} claimed")
        yield p_value("batch sizes scatter", statistics.dispersion(sizes, examples, rate), limit)
    elif sampler == "fixed_size":
        yield at_most("batches have one size", float(np.abs(sizes - rate * examples).max()), 0.5)
    elif sampler == "cyclic_poisson":
        yield from _classes(taken, rate, limit, num_classes)
    elif sampler in _AMPLIFIED_BY_STEP:  # Poisson batches with a maximum size
        over = float(taken.sum() - taken.size * rate) / math.sqrt(taken.size * rate * (1 - rate))
        yield p_value("sample rate", statistics.normality_of_one(max(over, 0.0)), limit)
    else:
        bins = _bins(rate)
        whole = taken[: steps // bins * bins].reshape(-1, bins, examples)
        wrong, detail = float((whole.sum(1) != 1).sum()), "(pass, example) pairs of another count"
        yield at_most("every example once a pass", wrong, 0, detail)
        if sampler in ("shuffle", "fixed_order"):
            yield at_most("batches have one size", float(np.ptp(sizes)), 1)
        if sampler == "fixed_order":
            moved = float((whole != whole[:1]).any(1).sum())
            yield at_most("every pass has the same order", moved, 0, detail)
    if sampler in ("poisson", "fixed_size"):  # different steps and examples are independent
        p = statistics.dispersion(taken.sum(0), steps, rate)
        yield p_value("participations scatter", p, limit)
        p = statistics.shared_members(taken, rate)
        yield p_value("batches share members by chance", p, limit)
        yield p_value("neighbours are independent", statistics.neighbours(taken, rate), limit)


def _classes(taken: Taken, rate: float, limit: float, num_classes: int) -> Iterator[Check]:
    """Yield checks of cyclic Poisson sampling: who joins, and how often within its class."""
    turns = len(taken) // num_classes
    by_class = taken[: turns * num_classes].reshape(turns, num_classes, -1).sum(0)
    several = float(((by_class > 0).sum(0) > 1).sum())
    yield at_most("every example joins one class", several, 0, "examples of several classes")
    within = num_classes * rate
    drawn, trials = int(by_class.sum()), turns * taken.shape[1]
    p = statistics.total(drawn, trials, within)
    yield p_value("sample rate", p, limit, f"{drawn / trials:.5f} drawn, {within:.5f} claimed")
    p = statistics.dispersion(by_class.max(0), turns, within)
    yield p_value("participations scatter", p, limit)


def participation(
    sampler: str, shape: tuple[int, int], rate: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return (steps, examples) of 0 and 1, as the claimed sampler draws single examples."""
    if sampler in _AMPLIFIED_BY_STEP:
        return (rng.random(shape) < rate).astype(np.float64)
    steps, examples = shape
    bins = _bins(rate)
    chosen = rng.integers(bins, size=(-(-steps // bins), 1, examples))
    drawn = np.arange(bins)[None, :, None] == chosen
    return np.asarray(drawn.reshape(-1, examples)[:steps], dtype=np.float64)


def _bins(rate: float) -> int:
    """Number of batches of one pass."""
    return max(1, math.ceil(1 / rate - 1e-9))

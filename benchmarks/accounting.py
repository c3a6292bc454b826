# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of the accountants, beside dp-accounting, Opacus and prv-accountant.

Every system gets the same problems in the same process. A peer that is not installed, fails, or
takes longer than the limit gets a row with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import dualdp
from benchmarks.accounting_peers import PEERS, Step, dp_sigma, opacus_sigma
from benchmarks.results import Row

LIMIT = 10.0  # seconds of one answer
SHARE = 5.0  # seconds of a system for the grid
DELTA = 1e-5


def ours(steps: Sequence[Step], delta: float, name: str = "pld", sampler: str = "poisson") -> float:
    """Return the upper bound of dualdp."""
    accountant = dualdp.accountants.create(name)
    for sigma, rate, count in steps:
        accountant.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count, sampler=sampler)
    return float(accountant.get_epsilon(delta=delta))


#: System -> function (steps, delta) -> epsilon.
SYSTEMS: dict[str, Callable[[Sequence[Step], float], float]] = {
    "dualdp": ours,
    "dualdp rdp": partial(ours, name="rdp"),
    **PEERS,
}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds` (POSIX)."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def timed(call: Callable[[], float]) -> tuple[float, float | None, str | None]:
    """Return (seconds, answer, error) of one call."""
    start = time.perf_counter()
    try:
        with limited(LIMIT):
            answer = call()
    except Exception as error:  # any exception of a peer is its result
        return time.perf_counter() - start, None, f"{type(error).__name__}: {error}"[:120]
    seconds = time.perf_counter() - start
    return seconds, answer, None if math.isfinite(answer) else "not finite"


def row(workload: str, system: str, **fields: Any) -> Row:
    """Return a row of this suite."""
    return Row(suite="accounting", stack="core", workload=workload, system=system, **fields)


def grid(*, quick: bool) -> Iterator[Row]:
    """Yield a row for each system over a grid of settings: the median, p90 and worst time."""
    axes: tuple[Sequence[float], ...] = (
        (0.5, 0.7, 1, 1.5, 4, 10),
        (1e-4, 1e-3, 0.01, 0.05),
        (1, 100, 1_000, 10_000, 100_000),
        (1e-5, 1e-7),
    )
    if quick:
        axes = ((1, 4), (0.01,), (100, 1_000), (1e-5, 1e-7))
    settings = [((s, q, int(t)), d) for s, q, t, d in itertools.product(*axes)]
    for system, function in SYSTEMS.items():
        seconds: list[float] = []
        failures, error = 0, None
        for step, delta in settings:
            if sum(seconds) > SHARE:
                break
            taken, _, error = timed(partial(function, [step], delta))
            if error and error.startswith("ModuleNotFoundError"):
                break
            seconds.append(taken)
            failures += error is not None
        if not seconds:
            yield row("grid of settings", system, error=error)
            continue
        ordered = sorted(seconds)
        note = (
            f"p90 {1e3 * ordered[int(0.9 * len(seconds))]:.1f} ms, max {ordered[-1]:.2f} s, "
            f"{failures} failed, {len(seconds)} of {len(settings)} settings"
        )
        median = statistics.median(seconds)
        yield row("grid of settings", system, rounds=len(seconds), seconds=median, note=note)


def schedule(n: int) -> list[Step]:
    """Return n steps with noise multipliers from 2.0 to 0.8, exponentially."""
    return [(2.0 * 0.4 ** (i / (n - 1)), 0.01, 1) for i in range(n)]


def problems(*, quick: bool) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Yield (problem, system, call) of single problems: schedules, calibration, balls in bins."""
    for n in (10, 100) if quick else (10, 100, 1_000, 10_000):
        for system, function in SYSTEMS.items():
            if n <= 1_000 or system not in PEERS:  # minutes to hours for a peer
                yield (
                    f"{n} different noise multipliers",
                    system,
                    partial(function, schedule(n), DELTA),
                )
    targets = [(0.01, 1_000, 1.0), (0.04, 2_250, 8.0)]
    for rate, steps, epsilon in targets[: 1 if quick else None]:
        name = f"calibrate q {rate:g}, T {steps}, epsilon {epsilon:g}"
        asked = {"sample_rate": rate, "num_steps": steps}
        ours_of = partial(dualdp.get_noise_multiplier, target_epsilon=epsilon, target_delta=DELTA)
        yield name, "dualdp", partial(ours_of, **asked)
        yield name, "opacus prv", partial(opacus_sigma, rate, steps, epsilon, DELTA)
        yield name, "dp-accounting pld", partial(dp_sigma, rate, steps, epsilon, DELTA)
    for sampler in ("balls_in_bins", "poisson"):
        name = f"1000 batches an epoch, 10 epochs, sigma 1, {sampler}"
        yield name, "dualdp", partial(ours, [(1.0, 1e-3, 10_000)], DELTA, sampler=sampler)


def rows(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of the suite."""
    for function in SYSTEMS.values():  # imports and first calls are not timed
        timed(partial(function, [(1.0, 0.02, 10)], DELTA))
    yield from grid(quick=quick)
    for name, system, call in problems(quick=quick):
        times, answer, error = [], None, None
        while len(times) < 3 and error is None:
            taken, answer, error = timed(call)
            times.append(taken)
            if taken > 1:
                break
        median = statistics.median(times)
        yield row(name, system, seconds=median, rounds=len(times), value=answer, error=error)

# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of the accountants, against dp-accounting, Opacus and prv-accountant.

Every system gets the same problems in the same run. A peer that is not installed, fails, or exceeds
the time limit gets a row with the reason. Rows are printed as they come.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dualdp
from dualdp_tools.bench.accounting_peers import PEERS, Step, dp_sigma, opacus_sigma
from dualdp_tools.bench.results import Row

LIMIT = 3.0  # seconds for one answer in the grid
PATIENCE = 3.0  # seconds for a peer's answer to a single problem
SHARE = 4.0  # seconds of a peer for the whole grid, in random order
MEMORY = 12 << 30  # bytes of address space, above which a system fails
DELTA = 1e-5


def _account(steps: Sequence[Step], name: str = "pld", sampler: str = "poisson") -> Any:
    made = dualdp.accountants.create(name)
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count, sampler=sampler)
    return made


def ours(steps: Sequence[Step], delta: float, **options: Any) -> float:
    """Return the certified upper bound of dualdp."""
    return float(_account(steps, **options).get_epsilon(delta=delta))


#: System -> function (steps, delta) -> epsilon.
SYSTEMS: dict[str, Callable[[Sequence[Step], float], float]] = {
    "dualdp": ours,
    # with the lower bound computed too
    "dualdp two-sided": lambda steps, delta: float(_account(steps).epsilon_bounds(delta=delta)[2]),
    "dualdp rdp": functools.partial(ours, name="rdp"),
    **PEERS,
}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds`, and limit the memory (POSIX)."""
    import resource

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    space = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, space[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, space)


def timed(function: Callable[[], float], limit: float) -> tuple[float, float | None, str | None]:
    """Return (seconds, answer, error) of one call."""
    start = time.perf_counter()
    try:
        with limited(limit):
            answer = function()
    except Exception as error:  # noqa: BLE001  (any exception of a peer is its result)
        return time.perf_counter() - start, None, f"{type(error).__name__}: {error}"[:120]
    seconds = time.perf_counter() - start
    return seconds, answer, None if math.isfinite(answer) else "not finite"


def row(workload: str, system: str, **fields: Any) -> Row:
    """Return a row of this suite."""
    fields |= {"suite": "accounting", "stack": "core", "quantity": "epsilon"}
    return Row(workload=workload, system=system, **fields)


def homogeneous(quick: bool) -> Iterator[list[Row]]:
    """Yield a row for each system over a grid: median; p90, worst and failures in the note."""
    axes: tuple[Sequence[float], ...] = (
        (0.5, 0.7, 1, 1.5, 4, 10),
        (1e-4, 1e-3, 0.01, 0.05),
        (1, 100, 1_000, 10_000, 100_000),
        (1e-5, 1e-7),
    )
    if quick:
        axes = ((1, 4), (0.01,), (100, 1_000), (1e-5, 1e-7))
    settings = [((s, q, int(t)), d) for s, q, t, d in itertools.product(*axes)]
    lower = [_account([step]).epsilon_bounds(delta=d)[0] for step, d in settings]
    problems = list(zip(settings, lower, strict=True))
    random.Random(0).shuffle(problems)
    for system, function in SYSTEMS.items():
        seconds: list[float] = []
        above, failures, error = [0.0], 0, None
        for (step, delta), least in problems:
            if system in PEERS and sum(seconds) > SHARE:
                break
            taken, answer, error = timed(functools.partial(function, [step], delta), LIMIT)
            if error and error.startswith("ModuleNotFoundError"):
                break
            seconds.append(taken)
            failures += error is not None
            if answer is not None and answer > 0.05 and least > 0 and math.isfinite(answer):
                above.append(answer / least - 1)
        if not seconds:
            yield [row("homogeneous grid", system, error=error)]
            continue
        ordered, answered, asked = sorted(seconds), len(seconds), len(settings)
        note = (
            f"p90 {1e3 * ordered[int(0.9 * answered)]:.1f} ms, max {ordered[-1]:.2f} s, "
            f"{failures} of {answered} failed, at most {100 * max(above):.2f} % (median "
            f"{100 * statistics.median(above):.2f} %) above the lower bound"
        )
        if answered < asked:
            note += f"; stopped after {SHARE:.0f} s, {answered} of {asked} settings drawn at random"
        numbers = {"seconds": statistics.median(seconds), "value": 100 * max(above)}
        yield [row("homogeneous grid", system, rounds=answered, note=note, **numbers)]


def schedule(n: int, *, rate_falls: bool = False) -> list[Step]:
    """Return n steps with noise multipliers from 2.0 to 0.8, exponentially; the rate may fall."""
    return [
        (2.0 * 0.4 ** (i / (n - 1)), 0.01 * (0.5 ** (i / (n - 1)) if rate_falls else 1.0), 1)
        for i in range(n)
    ]


def single_problems(quick: bool) -> Iterator[list[Row]]:
    """Yield rows of single problems: schedules, full batches, tiny deltas."""
    sizes = (10, 100) if quick else (10, 100, 1_000, 10_000)
    problems = [(f"{n} distinct noise multipliers", schedule(n), DELTA) for n in sizes]
    if not quick:
        pairs = schedule(10_000, rate_falls=True)
        problems.append(("10000 distinct (noise, rate) pairs", pairs, DELTA))
    problems.append(("full batch, 1000 steps, sigma 0.5", [(0.5, 1.0, 1_000)], DELTA))
    problems.append(("full batch, 1 step, sigma 4", [(4.0, 1.0, 1)], DELTA))
    for delta in (1e-12, 1e-20, 1e-30):
        name = f"sigma 1, q 0.01, T 1000, delta {delta:g}"
        problems.append((name, [(1.0, 0.01, 1_000)], delta))
    for name, steps, delta in problems:
        for system, function in SYSTEMS.items():
            if system in PEERS and len(steps) > 1_000:
                yield [row(name, system, error="not attempted: minutes to hours")]
            else:
                yield [measured(name, system, functools.partial(function, steps, delta), 5)]


def measured(workload: str, system: str, call: Callable[[], float], rounds: int) -> Row:
    """Return the row of a call: median of `rounds` calls, or one call if it is slow."""
    first, answer, error = timed(call, PATIENCE if system in PEERS else 120.0)
    if error is not None:
        return row(workload, system, rounds=1, value=answer, error=error, first=first)
    times = [first]
    if first < 0.5:
        times += [timed(call, PATIENCE)[0] for _ in range(rounds - 1)]
    seconds, count = statistics.median(times), len(times)
    return row(workload, system, seconds=seconds, rounds=count, value=answer, first=first)


def calibrations(quick: bool) -> Iterator[list[Row]]:
    """Yield rows of the noise multiplier for a target epsilon."""
    targets = [(0.01, 1_000, 1.0, 1e-5), (0.04, 2_250, 8.0, 1e-5), (1e-3, 100_000, 8.0, 1e-7)]
    for rate, steps, epsilon, delta in targets[: 1 if quick else None]:
        name = f"calibrate q {rate:g}, T {steps}, epsilon {epsilon:g}, delta {delta:g}"
        calls: dict[str, Callable[[], float]] = {
            "dualdp": functools.partial(
                dualdp.get_noise_multiplier,
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=rate,
                num_steps=steps,
            ),
            "opacus prv": functools.partial(opacus_sigma, rate, steps, epsilon, delta),
            "dp-accounting pld": functools.partial(dp_sigma, rate, steps, epsilon, delta),
        }
        yield [measured(name, system, call, 3) for system, call in calls.items()]


def balls_in_bins(quick: bool) -> Iterator[list[Row]]:
    """Yield rows of random allocation, for which no peer has a deterministic bound."""
    from dualdp.accountants.pld_engine import balls_in_bins as engine

    for sigma in (1.0,) if quick else (0.6, 0.8, 1.0):
        steps: list[Step] = [(sigma, 1e-3, 10_000)]

        def call(steps: list[Step] = steps) -> float:
            engine.one_epoch.cache_clear()
            return ours(steps, DELTA, sampler="balls_in_bins")

        name = f"balls in bins, 1000 bins, 10 epochs, sigma {sigma:g}"
        poisson = functools.partial(ours, steps, DELTA)
        yield [
            measured(name, "dualdp", call, 3),
            measured(f"{name} (Poisson, for comparison)", "dualdp", poisson, 3),
        ]


def measure(*, quick: bool) -> Iterator[list[Row]]:
    """Yield the rows, and print them as they come."""
    for function in SYSTEMS.values():  # imports and first calls are not timed
        timed(functools.partial(function, [(1.0, 0.02, 10)], DELTA), 120.0)
    for suite in (homogeneous, single_problems, calibrations, balls_in_bins):
        for rows in suite(quick):
            for one in rows:
                took = "-" if one.seconds is None else f"{1e3 * one.seconds:.2f} ms"
                text = f"{one.workload:50s} {one.system:20s} {took:>14s}"
                print(text, one.error or one.note or "", file=sys.stderr, flush=True)
            yield rows

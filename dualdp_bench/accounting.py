# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of the accountants, beside dp-accounting, Opacus and prv-accountant.

Every system gets the same questions in the same run. A peer that is not installed, fails, or needs
longer than the limit, has a row that says so. Beside each problem stands the time that we set out
to reach; where we miss it, a row says by how much, and where the time goes. Rows are printed as
they come.
"""

from __future__ import annotations

import contextlib
import cProfile
import itertools
import math
import pstats
import random
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dualdp
from dualdp_bench.accounting_peers import PEERS, Step, dp_sigma, opacus_sigma
from dualdp_bench.results import Row

LIMIT = 3.0  # seconds for one answer of a peer in the grid
PATIENCE = 3.0  # for one answer to a single problem
SHARE = 4.0  # seconds that a peer has for the whole grid, in random order
MEMORY = 12 << 30  # bytes of address space: where a peer would fill the machine it fails
# What we set out to reach: start of the problem's name, system, seconds.
REACH = (
    ("homogeneous grid", "dualdp", 0.010),
    ("1000 distinct noise", "dualdp", 0.2),
    ("10000 distinct noise", "dualdp", 1.0),
    ("10000 distinct noise", "dualdp two-sided", 3.0),
    ("10000 distinct (noise", "dualdp", 2.0),
    ("full batch", "dualdp", 1e-3),
    ("sigma 1, q 0.01", "dualdp", 0.5),
    ("calibrate", "dualdp", 0.3),
    ("balls in bins", "dualdp", 1.0),
)
DELTA = 1e-5


def ours(steps: Sequence[Step], delta: float, **options: Any) -> float:
    """Certified upper bound of dualdp."""
    return float(_account(steps, **options).get_epsilon(delta=delta))


def two_sided(steps: Sequence[Step], delta: float) -> float:
    """Upper bound of dualdp with the lower bound computed too."""
    return float(_account(steps).epsilon_bounds(delta=delta)[2])


def by_rdp(steps: Sequence[Step], delta: float) -> float:
    """Renyi accountant of dualdp."""
    return ours(steps, delta, name="rdp")


def _account(steps: Sequence[Step], name: str = "pld", sampler: str = "poisson") -> Any:
    made = dualdp.accountants.create(name)
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count, sampler=sampler)
    return made


OURS: dict[str, Callable[[Sequence[Step], float], float]] = {
    "dualdp": ours,
    "dualdp two-sided": two_sided,
    "dualdp rdp": by_rdp,
}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after so many seconds."""

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
    """(seconds, answer, error) of one call."""
    start = time.perf_counter()
    try:
        with limited(limit):
            answer = function()
    except Exception as error:  # noqa: BLE001  (whatever a peer raises is its result)
        return time.perf_counter() - start, None, f"{type(error).__name__}: {error}"[:120]
    seconds = time.perf_counter() - start
    return seconds, answer, None if math.isfinite(answer) else "not finite"


def row(workload: str, system: str, quantity: str = "epsilon", **fields: Any) -> Row:
    """A row of this suite."""
    return Row(
        suite="accounting",
        stack="core",
        workload=workload,
        system=system,
        quantity=quantity,
        **fields,
    )


def grid(quick: bool) -> list[tuple[Step, float]]:
    """The homogeneous settings: 240 of them, 8 when quick."""
    axes: tuple[Sequence[float], ...] = (
        (0.5, 0.7, 1, 1.5, 4, 10),
        (1e-4, 1e-3, 0.01, 0.05),
        (1, 100, 1_000, 10_000, 100_000),
        (1e-5, 1e-7),
    )
    if quick:
        axes = ((1, 4), (0.01,), (100, 1_000), (1e-5, 1e-7))
    return [((s, q, int(t)), d) for s, q, t, d in itertools.product(*axes)]


def homogeneous(quick: bool) -> Iterator[list[Row]]:
    """One row for each system over the grid: median, and p90, worst, failures in the note."""
    settings = grid(quick)
    lower = [_account([step]).epsilon_bounds(delta=d)[0] for step, d in settings]
    problems = list(zip(settings, lower, strict=True))
    random.Random(0).shuffle(problems)
    for system, function in (OURS | PEERS).items():
        seconds: list[float] = []
        above, failures, error = [0.0], 0, None
        for (step, delta), least in problems:
            if system in PEERS and sum(seconds) > SHARE:
                break
            taken, answer, error = timed(lambda f=function, s=step, d=delta: f([s], d), LIMIT)
            if error and error.startswith("ModuleNotFoundError"):
                break
            seconds.append(taken)
            failures += error is not None
            if answer is not None and answer > 0.05 and least > 0 and math.isfinite(answer):
                above.append(answer / least - 1)
        yield [
            _over_the_grid(system, seconds, above, failures, len(settings))
            if seconds
            else row("homogeneous grid", system, error=error)
        ]


def _over_the_grid(
    system: str, seconds: list[float], above: list[float], failures: int, asked: int
) -> Row:
    """The row of one system, in words where a median does not say it."""
    ordered = sorted(seconds)
    note = (
        f"p90 {1e3 * ordered[int(0.9 * len(ordered))]:.1f} ms, max {ordered[-1]:.2f} s, "
        f"{failures} of {len(seconds)} failed, at most {100 * max(above):.2f} % (median "
        f"{100 * statistics.median(above):.2f} %) above the lower bound"
    )
    if len(seconds) < asked:
        note += f"; stopped after {SHARE:.0f} s, {len(seconds)} of {asked} settings drawn at random"
    return row(
        "homogeneous grid",
        system,
        seconds=statistics.median(seconds),
        rounds=len(seconds),
        value=100 * max(above),
        note=note,
    )


def schedule(n: int, *, pairs: bool = False) -> list[Step]:
    """Noise from 2.0 to 0.8, exponentially; with `pairs` the rate falls too."""
    return [
        (2.0 * 0.4 ** (i / (n - 1)), 0.01 * (0.5 ** (i / (n - 1)) if pairs else 1.0), 1)
        for i in range(n)
    ]


def problems(quick: bool) -> Iterator[tuple[str, list[Step], float]]:
    """Single questions: schedules, full batches, tiny deltas."""
    for n in (10, 100) if quick else (10, 100, 1_000, 10_000):
        yield f"{n} distinct noise multipliers", schedule(n), DELTA
    if not quick:
        yield "10000 distinct (noise, rate) pairs", schedule(10_000, pairs=True), DELTA
    yield "full batch, 1000 steps, sigma 0.5", [(0.5, 1.0, 1_000)], DELTA
    yield "full batch, 1 step, sigma 4", [(4.0, 1.0, 1)], DELTA
    for delta in (1e-12, 1e-20, 1e-30):
        yield f"sigma 1, q 0.01, T 1000, delta {delta:g}", [(1.0, 0.01, 1_000)], delta


def measured(workload: str, system: str, call: Callable[[], float], rounds: int) -> Row:
    """Median of some calls; one only where the first took long."""
    taken, answer, error = timed(call, PATIENCE if system in PEERS else 120.0)
    times = [taken]
    if error is None and taken < 0.5:
        times += [timed(call, PATIENCE)[0] for _ in range(rounds - 1)]
    seconds = statistics.median(times) if error is None else None
    reach = _reach(workload, system)
    note = None
    if reach is not None and (seconds is None or seconds > reach):
        note = f"misses its reach of {reach:g} s: {_profile(call)}"
    return row(
        workload,
        system,
        seconds=seconds,
        rounds=len(times),
        value=answer,
        error=error,
        first=taken,
        note=note,
    )


def _reach(workload: str, system: str) -> float | None:
    """Seconds that we set out to reach there."""
    found = (s for start, who, s in REACH if workload.startswith(start) and system == who)
    return next(found, None)


def _profile(call: Callable[[], float]) -> str:
    """Where the time goes: the four functions with the most of their own."""
    profile = cProfile.Profile()
    profile.runcall(call)
    stats: Any = pstats.Stats(profile)
    whole = stats.total_tt or 1.0
    own = sorted(((v[2], k[2]) for k, v in stats.stats.items()), reverse=True)[:4]
    return ", ".join(f"{100 * t / whole:.0f} % {name.strip('<>')}" for t, name in own)


def judged(rows: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """The rows, with one for each time we set out to reach, printed as they come."""
    for found in rows:
        aims = [
            row(one.workload, f"{one.system}: reach", seconds=reach, error=one.note)
            if one.note and one.note.startswith("misses")
            else row(one.workload, f"{one.system}: reach", seconds=reach)
            for one in found
            if (reach := _reach(one.workload, one.system)) is not None
        ]
        for one in found:
            took = "-" if one.seconds is None else f"{1e3 * one.seconds:.2f} ms"
            said = f"{one.workload:50s} {one.system:20s} {took:>14s}"
            print(said, one.error or one.note or "", file=sys.stderr, flush=True)
        yield found + aims


def calibrations(quick: bool) -> Iterator[list[Row]]:
    """Noise for a target epsilon."""
    targets = [(0.01, 1_000, 1.0, 1e-5), (0.04, 2_250, 8.0, 1e-5), (1e-3, 100_000, 8.0, 1e-7)]
    for rate, steps, epsilon, delta in targets[: 1 if quick else None]:
        name = f"calibrate q {rate:g}, T {steps}, epsilon {epsilon:g}, delta {delta:g}"
        calls: dict[str, Callable[[], float]] = {
            "dualdp": lambda q=rate, t=steps, e=epsilon, d=delta: dualdp.get_noise_multiplier(
                target_epsilon=e, target_delta=d, sample_rate=q, num_steps=t
            ),
            "opacus prv": lambda q=rate, t=steps, e=epsilon, d=delta: opacus_sigma(q, t, e, d),
            "dp-accounting pld": lambda q=rate, t=steps, e=epsilon, d=delta: dp_sigma(q, t, e, d),
        }
        yield [measured(name, system, call, 3) for system, call in calls.items()]


def balls_in_bins(quick: bool) -> Iterator[list[Row]]:
    """Random allocation, which no peer bounds deterministically."""
    for sigma in (1.0,) if quick else (0.6, 0.8, 1.0):
        steps: list[Step] = [(sigma, 1e-3, 10_000)]

        def call(steps: list[Step] = steps) -> float:
            from dualdp.accountants import allocation

            allocation.one_epoch.cache_clear()
            return ours(steps, DELTA, sampler="balls_in_bins")

        name = f"balls in bins, 1000 bins, 10 epochs, sigma {sigma:g}"
        yield [measured(name, "dualdp", call, 3), measured(
            name + " (Poisson, for comparison)", "dualdp", lambda s=steps: ours(s, DELTA), 3
        )]  # fmt: skip


def measure(*, quick: bool) -> Iterator[list[Row]]:
    """Rows of the whole suite, a few at a time."""
    for function in (OURS | PEERS).values():  # imports and first calls are nobody's time
        timed(lambda f=function: f([(1.0, 0.02, 10)], DELTA), 120.0)
    yield from judged(itertools.chain(homogeneous(quick), _single(quick)))


def _single(quick: bool) -> Iterator[list[Row]]:
    for name, steps, delta in problems(quick):
        for system, function in (OURS | PEERS).items():
            if system in PEERS and len(steps) > 1_000:
                yield [row(name, system, error="not attempted: minutes to hours")]
                continue
            yield [measured(name, system, lambda f=function, s=steps, d=delta: f(s, d), 5)]
    yield from calibrations(quick)
    yield from balls_in_bins(quick)

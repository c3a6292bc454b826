# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of the accountants, beside dp-accounting, Opacus and prv-accountant.

Every system gets the same questions in the same run. A peer that is not installed, fails, or needs
longer than the limit, has a row that says so.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dualdp
from benchmarks.results import Row

Step = tuple[float, float, int]  # noise_multiplier, sample_rate, num_steps
LIMIT = 3.0  # seconds for one answer of a peer
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


def dp_accounting_pld(steps: Sequence[Step], delta: float) -> float:
    """dp-accounting's PLD accountant with its default grid."""
    import dp_accounting  # type: ignore[import-not-found,unused-ignore]

    return _dp_accounting(dp_accounting.pld.PLDAccountant(), steps, delta)


def dp_accounting_rdp(steps: Sequence[Step], delta: float) -> float:
    """dp-accounting's Renyi accountant."""
    import dp_accounting

    return _dp_accounting(dp_accounting.rdp.RdpAccountant(), steps, delta)


def _dp_accounting(accountant: Any, steps: Sequence[Step], delta: float) -> float:
    import dp_accounting

    for sigma, rate, count in steps:
        event = dp_accounting.GaussianDpEvent(sigma)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def opacus_prv(steps: Sequence[Step], delta: float) -> float:
    """Opacus' PRV accountant."""
    from opacus.accountants import PRVAccountant  # type: ignore[import-not-found,unused-ignore]

    accountant = PRVAccountant()
    accountant.history = list(steps)
    return float(accountant.get_epsilon(delta))


def opacus_rdp(steps: Sequence[Step], delta: float) -> float:
    """Opacus' Renyi accountant."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = list(steps)
    return float(accountant.get_epsilon(delta))


def prv_accountant(steps: Sequence[Step], delta: float) -> float:
    """prv-accountant's upper estimate."""
    from prv_accountant import (  # type: ignore[import-not-found,unused-ignore]
        PoissonSubsampledGaussianMechanism,
        PRVAccountant,
    )

    mechanisms = [
        PoissonSubsampledGaussianMechanism(noise_multiplier=s, sampling_probability=q)
        for s, q, _ in steps
    ]
    counts = [count for _, _, count in steps]
    accountant = PRVAccountant(
        mechanisms, max_self_compositions=counts, eps_error=0.1, delta_error=delta / 1000
    )
    return float(accountant.compute_epsilon(delta, counts)[2])


PEERS: dict[str, Callable[[Sequence[Step], float], float]] = {
    "dp-accounting pld": dp_accounting_pld,
    "dp-accounting rdp": dp_accounting_rdp,
    "opacus prv": opacus_prv,
    "opacus rdp": opacus_rdp,
    "prv-accountant": prv_accountant,
}
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
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    """One row for each system over the whole grid: median, and p90, worst, failures in the note."""
    settings = grid(quick)
    lower = [_account([step]).epsilon_bounds(delta=d)[0] for step, d in settings]
    for system, function in (OURS | PEERS).items():
        seconds, above, failures = [], [0.0], 0
        for (step, delta), least in zip(settings, lower, strict=True):
            taken, answer, error = timed(lambda f=function, s=step, d=delta: f([s], d), LIMIT)
            if error and error.startswith("ModuleNotFoundError"):
                yield [row("homogeneous grid", system, error=error)]
                break
            seconds.append(taken)
            failures += error is not None
            if answer is not None and answer > 0.05 and least > 0 and math.isfinite(answer):
                above.append(answer / least - 1)
        else:
            ordered = sorted(seconds)
            note = (
                f"p90 {1e3 * ordered[int(0.9 * len(ordered))]:.1f} ms, max {ordered[-1]:.2f} s, "
                f"{failures} of {len(settings)} failed, at most {100 * max(above):.2f} % (median "
                f"{100 * statistics.median(above):.2f} %) above the lower bound"
            )
            yield [
                row(
                    "homogeneous grid",
                    system,
                    seconds=statistics.median(seconds),
                    rounds=len(seconds),
                    value=100 * max(above),
                    note=note,
                )
            ]


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
    taken, answer, error = timed(call, LIMIT if system in PEERS else 120.0)
    times = [taken]
    if error is None and taken < 2:
        times += [timed(call, LIMIT)[0] for _ in range(rounds - 1)]
    seconds = statistics.median(times) if error is None else None
    return row(
        workload, system, seconds=seconds, rounds=len(times), value=answer, error=error, first=taken
    )


def calibrations(quick: bool) -> Iterator[list[Row]]:
    """Noise for a target epsilon."""
    targets = [(0.01, 1_000, 1.0, 1e-5), (0.04, 2_250, 8.0, 1e-5), (1e-3, 100_000, 8.0, 1e-7)]
    for rate, steps, epsilon, delta in targets[: 1 if quick else None]:
        name = f"calibrate q {rate:g}, T {steps}, epsilon {epsilon:g}, delta {delta:g}"
        calls: dict[str, Callable[[], float]] = {
            "dualdp": lambda q=rate, t=steps, e=epsilon, d=delta: dualdp.get_noise_multiplier(
                target_epsilon=e, target_delta=d, sample_rate=q, num_steps=t
            ),
            "opacus prv": lambda q=rate, t=steps, e=epsilon, d=delta: _opacus_sigma(q, t, e, d),
            "dp-accounting pld": lambda q=rate, t=steps, e=epsilon, d=delta: _dp_sigma(q, t, e, d),
        }
        yield [measured(name, system, call, 3) for system, call in calls.items()]


def _opacus_sigma(rate: float, steps: int, epsilon: float, delta: float) -> float:
    from opacus.accountants.utils import (  # type: ignore[import-not-found,unused-ignore]
        get_noise_multiplier,
    )

    return float(
        get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant="prv",
        )
    )


def _dp_sigma(rate: float, steps: int, epsilon: float, delta: float) -> float:
    import dp_accounting

    def event(sigma: float) -> Any:
        one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(one, steps)

    return float(
        dp_accounting.calibrate_dp_mechanism(dp_accounting.pld.PLDAccountant, event, epsilon, delta)
    )


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
    ours([(1.0, 0.02, 10)], DELTA)  # imports and first calls are nobody's time
    yield from homogeneous(quick)
    for name, steps, delta in problems(quick):
        for system, function in (OURS | PEERS).items():
            if system in PEERS and len(steps) > 1_000:
                yield [row(name, system, error="not attempted: minutes to hours")]
                continue
            yield [measured(name, system, lambda f=function, s=steps, d=delta: f(s, d), 5)]
    yield from calibrations(quick)
    yield from balls_in_bins(quick)


def main() -> None:
    """Print every row as it comes."""
    for rows in measure(quick=False):
        for one in rows:
            took = "-" if one.seconds is None else f"{1e3 * one.seconds:9.2f} ms"
            value = "" if one.value is None else f"{one.value:.6g}"
            print(f"{one.workload:50s} {one.system:20s} {took:>14s} {value:>12s} "
                  f"{one.error or one.note or ''}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How a number comes about: the correctness gate, interleaved rounds, medians and spread.

Every system of a point first proves itself on the very batch that is timed: its clipped sum and
norms must be those of the naive loop. Then all of them take turns, one step each per round in an
order that rotates, so that a machine that slows down slows everybody down. The process keeps the
memory that is freed (`keep_freed_memory` of the command line), for all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.results import Row
from benchmarks.systems import LOOP, NON_PRIVATE, Clipped, Prepared, Setting, Stack, reason
from benchmarks.workloads import Workload

# Largest difference from the loop: per parameter, relative to it; and relative to the whole sum.
# Float32 gives up to 1e-4 (sums in another order, ReLUs at their kink), a wrong rule percents.
TOLERANCE, FLOOR = 1e-3, 1e-5
# A batched forward rounds otherwise than one of a single example, so that an example at the kink of
# a ReLU may take its other side: seen on the MLP as 3e-4 of n C, for every system alike.
KINKS = 5e-4  # of n C, the most that n clipped examples add up to
PROBES = 8  # examples whose median norm becomes C, so that about half of a batch is clipped
PATIENCE = 20.0  # seconds after which a slow system has had enough rounds
FEWEST = 3


class WrongSystem(ValueError):
    """A system that does not compute the clipped sum."""


@dataclass(frozen=True)
class Protocol:
    """How long to measure.

    Attributes:
        rounds: turns of each system.
        warmup: calls before the first round that is counted, at least one.
        patience: seconds of turns after which a system sits out, having had `FEWEST` of them.
    """

    rounds: int = 15
    warmup: int = 2
    patience: float = PATIENCE


@dataclass(frozen=True)
class Timing:
    """Seconds of each counted round, and of the very first call."""

    seconds: tuple[float, ...]
    first: float = 0.0

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Interquartile range of the rounds."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(high - low)


def check(system: str, found: Clipped, truth: Clipped, slack: float = 0.0) -> None:
    """Refuse a system whose clipped sum or norms are not those of the loop.

    Args:
        system: its name.
        found: what it computed.
        truth: what the loop computed.
        slack: difference allowed beside the tolerance, gradient units.

    Raises:
        WrongSystem: which parameter differs and by how much.
    """
    if found.sums.keys() != truth.sums.keys():
        raise WrongSystem(
            f"{system} is not timed: it returned sums of {sorted(found.sums)}, "
            f"the loop has {sorted(truth.sums)}."
        )
    whole = np.sqrt(sum(float(np.square(sums).sum()) for sums in truth.sums.values()))
    pairs = [(f"the sum of {key!r}", found.sums[key], truth.sums[key]) for key in truth.sums]
    if found.norms is not None:
        pairs.append(("the norms", found.norms, truth.norms))
    for what, ours, theirs in pairs:
        if ours.shape != theirs.shape:
            raise WrongSystem(
                f"{system} is not timed: {what} has shape {ours.shape}, "
                f"the loop has {theirs.shape}."
            )
        size = float(np.linalg.norm(theirs))
        error = float(np.linalg.norm(ours.astype(np.float64) - theirs))
        allowed = TOLERANCE * size + FLOOR * whole + slack
        if not error <= allowed:
            raise WrongSystem(
                f"{system} is not timed: {what} differs from the loop by {error:.1e} "
                f"of {size:.1e}, allowed is {allowed:.1e}."
            )


def interleave(steps: Mapping[str, Callable[[], Any]], protocol: Protocol) -> dict[str, Timing]:
    """Time each step once per round, in a rotating order, after the warm-up.

    Args:
        steps: name -> a call that returns when its work is done.
        protocol: rounds, warm-up and patience.

    Returns:
        name -> the seconds of its rounds; at least `FEWEST` for a slow one.
    """
    first = {name: _seconds(step) for name, step in steps.items()}
    for step in steps.values():
        for _ in range(protocol.warmup - 1):
            step()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(protocol.rounds):
        shift = turn % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            if len(seconds[name]) >= FEWEST and sum(seconds[name]) > protocol.patience:
                continue
            seconds[name].append(_seconds(steps[name]))
    return {name: Timing(tuple(values), first[name]) for name, values in seconds.items()}


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def calibrate(stack: Stack, setting: Setting) -> Setting:
    """The setting with C at the median norm of a few examples, as the loop finds them."""
    few = replace(setting, n=min(setting.n, PROBES))
    loop = stack.systems[LOOP](few)
    norms = loop.read(loop.gradient(stack.load(few, *setting.workload.batch(few.n)))).norms
    return replace(setting, max_grad_norm=float(np.median(norms)))


@dataclass(frozen=True)
class Candidate:
    """A system that passed the gate, and the seconds from nothing to its first gradient."""

    prepared: Prepared
    first: float


def admit(
    stack: Stack, setting: Setting, names: list[str], batch: Any
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Prepare each system, call it once, and let it through the gate or note the reason."""
    admitted: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    loop = stack.systems[LOOP](setting)
    truth = loop.read(loop.gradient(batch))
    slack = KINKS * setting.n * setting.max_grad_norm
    for name in names:
        try:
            start = time.perf_counter()
            prepared = stack.systems[name](setting)
            outcome = stack.wait(prepared.gradient(batch))
            first = time.perf_counter() - start
            if prepared.read is not None:
                check(name, prepared.read(outcome), truth, slack)
            admitted[name] = Candidate(prepared, first)
        except Exception as error:  # whatever a system fails with is its row's reason
            refused[name] = reason(error)
    return admitted, refused


def point(
    stack: Stack,
    workload: Workload,
    n: int,
    *,
    suite: str = "run",
    systems: list[str] | None = None,
    quantities: tuple[str, ...] = ("gradient",),
    protocol: Protocol | None = None,
    memory: bool = False,
    device: str = "cpu",
) -> list[Row]:
    """Measure systems on one workload and batch size.

    Args:
        stack: whose systems.
        workload: the model.
        n: examples per step.
        suite: goes into the rows.
        systems: names; None for all of the stack.
        quantities: "gradient", "update" (noise and optimizer included) or "epoch" (an update with
            the copy of the batch to the device).
        protocol: None for the default.
        memory: also measure the peak of the gradient step.
        device: "cpu" or "cuda".

    Returns:
        One row per system and quantity; the non-private step comes first.
    """
    protocol = protocol or Protocol()
    setting = calibrate(stack, Setting(workload, n, device=device))
    arrays = workload.batch(n)
    batch = stack.load(setting, *arrays)
    admitted, refused = admit(stack, setting, stack.choose(systems), batch)
    rows = []
    for quantity in quantities:
        steps = {
            name: step
            for name, candidate in admitted.items()
            if (step := _step(stack, setting, candidate.prepared, quantity, arrays, batch))
        }
        timings = interleave(steps, protocol)
        base = Row(
            suite=suite,
            stack=stack.name,
            workload=workload.name,
            options=workload.options,
            batch=n,
            system="",
            quantity=quantity,
        )
        for name, timing in timings.items():
            # A gradient was first called at the gate, everything else in the warm-up.
            first = admitted[name].first if quantity == "gradient" else timing.first
            rows.append(_timed(replace(base, system=name), timings, first))
        rows += [replace(base, system=name, error=why) for name, why in refused.items()]
    return _with_memory(rows, admitted, batch) if memory else rows


def _step(
    stack: Stack, setting: Setting, prepared: Prepared, quantity: str, arrays: Any, batch: Any
) -> Callable[[], Any] | None:
    """The call that is timed for a quantity; None when the system does not offer it."""
    call = prepared.gradient if quantity == "gradient" else prepared.update
    if call is None:
        return None
    if quantity == "epoch":
        return lambda: stack.wait(call(stack.load(setting, *arrays)))
    return lambda: stack.wait(call(batch))


def _timed(row: Row, timings: dict[str, Timing], first: float) -> Row:
    timing, base = timings[row.system], timings.get(NON_PRIVATE)
    return replace(
        row,
        seconds=timing.median,
        spread=timing.spread,
        rounds=len(timing.seconds),
        first=first,
        ratio=timing.median / base.median if base else None,
    )


def _with_memory(rows: list[Row], admitted: dict[str, Candidate], batch: Any) -> list[Row]:
    """The rows with the peak of each system's gradient step beside the non-private one."""
    peaks = {name: candidate.prepared.memory(batch) for name, candidate in admitted.items()}
    base = peaks.get(NON_PRIVATE)

    def add(row: Row) -> Row:
        peak = peaks.get(row.system)
        ratio = peak / base if peak is not None and base else None
        return replace(row, memory=peak, memory_ratio=ratio)

    return [add(row) for row in rows]

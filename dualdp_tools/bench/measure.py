# SPDX-License-Identifier: Apache-2.0
"""Measurement protocol: correctness gate, interleaved rounds, medians with their spread.

Every system of a point is first checked on the batch that is timed: its clipped sum and norms must
equal those of the naive loop. Then the systems take turns, in a random order for each round, so
that a slowdown of the machine affects all of them. A short step would also pay for cold caches and
idle threads after another system's turn, which does not happen in training: it runs twice in a
turn, and the second run counts. The process keeps freed memory (`keep_freed_memory` of the command
line), for all systems alike.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dualdp_tools.bench.gate import Candidate, admit, calibrate
from dualdp_tools.bench.results import Row
from dualdp_tools.bench.systems import NON_PRIVATE, Prepared, Setting, Stack, attempt, error_text
from dualdp_tools.bench.workloads import Workload

TAKES = "takes "  # begins the note of a system that chooses between methods


@dataclass(frozen=True)
class Protocol:
    """Numbers of rounds and time limits of a measurement."""

    rounds: int = 9  # turns of each system
    warmup: int = 4  # calls before the first counted round; the gate makes one of a gradient
    patience: float = 4.0  # seconds of turns after which a system stops that had `fewest`
    fewest: int = 3  # turns for a median
    short: float = 0.02  # seconds of a call below which every turn begins with an uncounted one
    # Beyond `far` non-private calls a system gets only `fewest` turns, and none with noise and
    # update; beyond `longest` seconds a system that is far gets no turns at all.
    far: float = 2.5
    longest: float = 2.0


@dataclass(frozen=True)
class Timing:
    """Seconds of each counted round, of the first call, and of the last call before the rounds."""

    seconds: tuple[float, ...]
    first: float = 0.0
    warm: float = 0.0

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Interquartile range of the rounds."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(high - low)

    def fill(self, row: Row, steps: int = 1, **changes: Any) -> Row:
        """Return the row with the time of one of the `steps` steps in each call."""
        return replace(
            row,
            seconds=self.median / steps,
            spread=self.spread / steps,
            rounds=len(self.seconds),
            first=self.first,
            **changes,
        )


def interleave(
    steps: Mapping[str, Callable[[], Any]],
    protocol: Protocol | None = None,
    clear: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Timing]:
    """Time each step once per round, in a random order; too slow a system gets no rounds.

    `clear` is called after a step, and not counted.
    """
    protocol, clear = protocol or Protocol(), clear or {}

    def turn(name: str) -> float:
        seconds = _seconds(steps[name])
        if name in clear:
            clear[name]()
        return seconds

    first = {name: turn(name) for name in steps}
    warm = dict(first)
    for calls in range(1, protocol.warmup):  # in turn: memory that others left is new to a system
        again = [name for name in steps if calls < 2 or warm[name] <= protocol.longest]
        warm |= {name: turn(name) for name in again}
    behind = protocol.far * warm.get(NON_PRIVATE, math.inf)
    far = {name for name in steps if warm[name] > behind}
    names = [name for name in steps if name not in far or warm[name] <= protocol.longest]
    patience = {name: 0.0 if name in far else protocol.patience for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(protocol.rounds):
        for name in order.sample(names, len(names)):
            if len(seconds[name]) >= protocol.fewest and sum(seconds[name]) > patience[name]:
                continue
            if warm[name] < protocol.short:
                steps[name]()
            seconds[name].append(turn(name))
    return {name: Timing(tuple(seconds[name]), first[name], warm[name]) for name in steps}


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def empty_row(
    stack: Stack, suite: str, workload: Workload, batch: int | None, **fields: Any
) -> Row:
    """Return a row without numbers, and without system and quantity unless they are given."""
    point = {"suite": suite, "stack": stack.name, "workload": workload.name, "batch": batch}
    point |= {"options": workload.options, "system": "", "quantity": ""}
    return Row(**{**point, **fields})


def ratio_rows(base: Row, timings: Mapping[str, Timing], steps: int = 1) -> list[Row]:
    """Return the row of each timing of `steps` steps, with its ratio to the non-private one."""
    plain = timings[NON_PRIVATE].median
    return [
        timing.fill(replace(base, system=name), steps, ratio=timing.median / plain)
        for name, timing in timings.items()
    ]


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
    together: int = 1,
    rows_per_unit: int = 1,
) -> list[Row]:
    """Return a row per system and quantity of one point, the non-private step first."""
    base = empty_row(stack, suite, workload, n)
    setting, arrays = Setting(workload, n, device=device), workload.batch(n)
    setting = replace(setting, rows_per_unit=rows_per_unit)
    batch = stack.load(setting, *arrays)
    try:
        setting = calibrate(stack, setting)
        admitted, refused = admit(stack, setting, stack.choose(systems), batch)
    except Exception as error:  # without the loop's result nothing can be checked or timed
        admitted = {}
        refused = dict.fromkeys(stack.choose(systems), f"the loop failed: {error_text(error)}")
    protocol = protocol or Protocol()
    rows: list[Row] = []
    for quantity in quantities:
        base = replace(base, quantity=quantity)
        candidates = {name: one for name, one in admitted.items() if name not in refused}
        if quantity == "epoch":  # new systems, as at the start of a run
            for name in candidates:
                start = time.perf_counter()
                prepared, why = attempt(partial(stack.systems[name], setting))
                candidates[name] = Candidate(prepared, time.perf_counter() - start)
                refused |= {name: why} if why else {}
            candidates = {name: one for name, one in candidates.items() if name not in refused}
        elif quantity == "update":
            candidates = {name: replace(one, first=0.0) for name, one in candidates.items()}
        calls = {
            name: call
            for name, one in candidates.items()
            if (call := _call(quantity, stack, one.prepared, setting, arrays, batch, together))
        }
        if quantity != "gradient":  # the gate has called the gradient only
            candidates, failed = _called(calls, candidates)
            rows += [replace(base, system=name, error=why) for name, why in failed.items()]
            calls = {name: call for name, call in calls.items() if name not in failed}
        timed = _timed(base, calls, candidates, protocol)
        rows += timed
        rows += [replace(base, system=name, error=why) for name, why in refused.items()]
        refused |= {row.system: row.error for row in timed if row.error}
        too_far = f"not timed: over {protocol.far:g} times the non-private step without noise"
        refused |= {row.system: too_far for row in timed if row.ratio and row.ratio > protocol.far}
    return _with_memory_and_choice(rows, admitted, batch, memory=memory)


def _call(
    quantity: str,
    stack: Stack,
    prepared: Prepared,
    setting: Setting,
    arrays: Any,
    batch: Any,
    together: int,
) -> Callable[[], Any] | None:
    """Call that is timed for a quantity, or None if the system does not support it."""
    update = prepared.update
    if quantity == "gradient":
        return lambda: stack.wait(prepared.gradient(batch))
    if update is None:
        return None
    if quantity == "update":
        return lambda: stack.wait(update(batch))

    def epoch() -> None:
        for _ in range(together - 1):
            update(stack.load(setting, *arrays))
        stack.wait(update(stack.load(setting, *arrays)))

    return epoch


def _called(
    calls: Mapping[str, Callable[[], Any]], candidates: Mapping[str, Candidate]
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Call each once; return the candidates with those seconds, and reasons of those that fail."""
    called, failed = dict(candidates), {}
    for name, call in calls.items():
        one = candidates[name]
        seconds, why = attempt(partial(_seconds, call))
        if why:  # a step with noise needs more memory than its gradient
            failed[name] = why
        else:
            called[name] = replace(one, first=one.first + seconds)
        one.prepared.clear()
    return called, failed


def _timed(
    base: Row,
    calls: Mapping[str, Callable[[], Any]],
    candidates: Mapping[str, Candidate],
    protocol: Protocol,
) -> list[Row]:
    """Row of each call, with its time over that of the non-private step; of one that fails, why."""
    failed: dict[str, str] = {}

    def step(name: str) -> None:
        if name not in failed and (why := attempt(calls[name])[1]):
            failed[name] = why

    clear = {name: one.prepared.clear for name, one in candidates.items()}
    steps = {name: partial(step, name) for name in calls}
    timings = interleave(steps, replace(protocol, warmup=protocol.warmup - 1), clear)
    plain = None if NON_PRIVATE in failed else timings.get(NON_PRIVATE)
    rows = []
    for name, timing in timings.items():
        row = replace(base, system=name, error=f"too slow here: {timing.warm:.1f} s a step")
        if name in failed:
            row = replace(row, error=failed[name])
        elif timing.seconds:
            row = timing.fill(row, error=None)
            if plain and plain.seconds and plain.median:
                row = replace(row, ratio=timing.median / plain.median)
        rows.append(replace(row, first=candidates[name].first))
    return rows


def _with_memory_and_choice(
    rows: list[Row], admitted: Mapping[str, Candidate], batch: Any, *, memory: bool
) -> list[Row]:
    """Rows with the choice of the system of a gradient, and the peak memory of timed systems.

    A timed system that fails here keeps its time, and the note says why.
    """
    timed = {(row.system, row.quantity) for row in rows if row.seconds}
    measured = {name for name, _ in timed} if memory else set()
    peaks: dict[str, int | None] = {}
    choices: dict[str, str] = {}  # notes by system
    faults: dict[str, str] = {}
    for name, one in admitted.items():
        if (name, "gradient") in timed:
            chosen, why = attempt(partial(one.prepared.chosen, batch))
            said = f"{TAKES}{chosen}" if chosen else ""
            choices[name] = f"choice not known: {why}" if why else said
            one.prepared.clear()
        if name in measured:
            peaks[name], why = attempt(partial(one.prepared.memory, batch))
            faults[name] = f"peak memory not known: {why}" if why else ""
            one.prepared.clear()  # the next system needs what a peer left, such as gradients
    base, described = peaks.get(NON_PRIVATE), []
    for row in rows:
        choice = choices.get(row.system) if row.quantity == "gradient" else ""
        note = "; ".join(filter(None, (choice, faults.get(row.system))))
        row = replace(row, note=note or row.note)
        peak = peaks.get(row.system)
        ratio = peak / base if peak is not None and base else None
        described.append(replace(row, memory=peak, memory_ratio=ratio))
    return described

# SPDX-License-Identifier: Apache-2.0
"""How a number comes about: past the gate, in interleaved rounds, as medians with their spread.

Every system of a point first proves itself on the very batch that is timed: its clipped sum and
norms must be those of the naive loop. Then all of them take turns, in an order drawn anew for each
round, so that a machine that slows down slows everybody down. A short step also pays for what
another system left in the caches and for threads that went to sleep meanwhile, which no training
does: it is taken twice in a turn, and the second one counts. The process keeps the memory that is
freed (`keep_freed_memory` of the command line), for all of them alike.
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

from dualdp_bench.gate import Candidate, admit, calibrate
from dualdp_bench.results import Row
from dualdp_bench.systems import (
    NON_PRIVATE,
    Prepared,
    Setting,
    Stack,
    reason,
)
from dualdp_bench.workloads import Workload

TAKES = "takes "  # begins the note of a system that chooses between ways


@dataclass(frozen=True)
class Protocol:
    """How long to measure.

    Attributes:
        rounds: turns of each system.
        warmup: calls before the first round that is counted, at least one; of a gradient's, the
            gate makes one.
        patience: seconds of turns after which a system sits out, having had `fewest` of them.
        fewest: turns below which no median is reported.
        short: seconds of a warm call below which every turn begins with one that is not counted.
        far: times the non-private warm call beyond which a system gets `fewest` turns, and none
            with noise and update: nobody asks for its second digit.
        longest: seconds of a warm call beyond which a system that is far gets no turns at all.
    """

    rounds: int = 9
    warmup: int = 2
    patience: float = 1.5
    fewest: int = 3
    short: float = 0.02
    far: float = 2.5
    longest: float = 2.0


@dataclass(frozen=True)
class Timing:
    """Seconds of each counted round, of the very first call, and of the last before the rounds."""

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


def interleave(
    steps: Mapping[str, Callable[[], Any]], protocol: Protocol | None = None
) -> dict[str, Timing]:
    """Time each step once per round, in an order drawn for the round, after the warm-up.

    Args:
        steps: name -> a call that returns when its work is done.
        protocol: rounds, warm-up and patience; None for the default.

    Returns:
        name -> the seconds of its rounds; none of a system that is too slow.
    """
    protocol = protocol or Protocol()
    first = {name: _seconds(step) for name, step in steps.items()}
    warm = dict(first)
    for name, step in steps.items():
        for _ in range(protocol.warmup - 1):
            warm[name] = _seconds(step)
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
            seconds[name].append(_seconds(steps[name]))
    return {name: Timing(tuple(seconds[name]), first[name], warm[name]) for name in steps}


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


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
) -> list[Row]:
    """Measure systems on one workload and batch size.

    Args:
        stack: whose systems.
        workload: the model.
        n: examples per step.
        suite: goes into the rows.
        systems: names; None for all of the stack.
        quantities: "gradient", "update" (noise and optimizer included) or "epoch" (updates with
            the copy of the batch to the device, by a system made anew, as a run begins).
        protocol: None for the default.
        memory: also measure the peak of the gradient step.
        device: "cpu" or "cuda".
        together: updates of an epoch that are timed as one.

    Returns:
        One row per system and quantity; the non-private step comes first.
    """
    base = Row(
        suite=suite,
        stack=stack.name,
        workload=workload.name,
        options=workload.options,
        batch=n,
        system="",
        quantity="",
    )
    setting, arrays = Setting(workload, n, device=device), workload.batch(n)
    batch = stack.load(setting, *arrays)
    try:
        setting = calibrate(stack, setting)
        admitted, refused = admit(stack, setting, stack.choose(systems), batch)
    except Exception as error:  # without the loop's answer there is no gate: nothing is timed
        admitted = {}
        refused = dict.fromkeys(stack.choose(systems), f"the loop failed: {reason(error)}")
    protocol = protocol or Protocol()
    rows: list[Row] = []
    for quantity in quantities:
        base = replace(base, quantity=quantity)
        wanted = {name: one for name, one in admitted.items() if name not in refused}
        chosen = _for(quantity, stack, setting, wanted)
        timed = _timed(
            base, stack, chosen, partial(_call, setting, arrays, batch, together), protocol
        )
        timed = [_with_ratio(row, timed) for row in timed]
        rows += timed
        rows += [replace(base, system=name, error=why) for name, why in refused.items()]
        refused |= _left_behind(timed, protocol.far)
    rows = [_with_choice(row, admitted, batch) for row in rows]
    return _with_memory(rows, admitted, batch) if memory and admitted else rows


def _left_behind(rows: list[Row], far: float) -> dict[str, str]:
    """Systems too slow to be timed with noise as well, with the sentence that says so."""
    already = f"not timed: over {far:g} times the non-private step without noise"
    return {row.system: row.error for row in rows if row.error} | {
        row.system: already for row in rows if row.ratio and row.ratio > far
    }


def _for(
    quantity: str, stack: Stack, setting: Setting, admitted: dict[str, Candidate]
) -> dict[str, Candidate]:
    """The systems that are timed for a quantity, with the seconds before their first call."""
    if quantity == "gradient":
        return admitted
    if quantity == "update":
        return {name: replace(one, first=0.0) for name, one in admitted.items()}
    made = {}
    for name in admitted:  # anew, as a run begins
        start = time.perf_counter()
        prepared = stack.systems[name](setting)
        made[name] = Candidate(prepared, time.perf_counter() - start)
    return made


def _call(
    setting: Setting,
    arrays: Any,
    batch: Any,
    together: int,
    stack: Stack,
    prepared: Prepared,
    quantity: str,
) -> Callable[[], Any] | None:
    """The call that is timed for a quantity; None when the system does not offer it."""
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


def _timed(
    base: Row,
    stack: Stack,
    chosen: dict[str, Candidate],
    call: Callable[..., Callable[[], Any] | None],
    protocol: Protocol,
) -> list[Row]:
    """The rows of the systems that offer a quantity."""
    calls = {name: call(stack, one.prepared, base.quantity) for name, one in chosen.items()}
    called = base.quantity == "gradient"  # by the gate; all else is called first in the warm-up
    protocol = replace(protocol, warmup=protocol.warmup - called)
    timings = interleave({name: step for name, step in calls.items() if step}, protocol)
    rows = []
    for name, timing in timings.items():
        first = chosen[name].first + (0.0 if called else timing.first)
        row = replace(base, system=name, first=first)
        if timing.seconds:
            seconds, spread = timing.median, timing.spread
            row = replace(row, seconds=seconds, spread=spread, rounds=len(timing.seconds))
        else:
            row = replace(row, error=f"too slow here: {timing.warm:.1f} s a step")
        rows.append(row)
    return rows


def _with_ratio(row: Row, rows: list[Row]) -> Row:
    """The row with its time over that of the non-private step of the same quantity."""
    for base in rows:
        if base.system == NON_PRIVATE and base.seconds:
            return replace(row, ratio=row.seconds / base.seconds if row.seconds else None)
    return row


def _with_choice(row: Row, admitted: dict[str, Candidate], batch: Any) -> Row:
    """The row of a gradient with what its system chose to do."""
    if row.quantity != "gradient" or row.system not in admitted:
        return row
    chosen = admitted[row.system].prepared.takes(batch)
    return replace(row, note=f"{TAKES}{chosen}") if chosen else row


def _with_memory(rows: list[Row], admitted: dict[str, Candidate], batch: Any) -> list[Row]:
    """The rows with the peak of each timed system's gradient step beside the non-private one."""
    timed = {row.system for row in rows if row.seconds}
    peaks = {name: one.prepared.memory(batch) for name, one in admitted.items() if name in timed}
    base = peaks.get(NON_PRIVATE)

    def add(row: Row) -> Row:
        peak = peaks.get(row.system)
        ratio = peak / base if peak is not None and base else None
        return replace(row, memory=peak, memory_ratio=ratio)

    return [add(row) for row in rows]

# SPDX-License-Identifier: Apache-2.0
"""Measurement protocol: correctness gate, interleaved rounds, medians with their spread.

A row is one system beside the non-private step, in a process of its own: an allocator that another
system left behind, or its failure, touches no other row. The system is first checked on the batch
that is timed: its clipped sum and norms must equal those of the loop. Then the two take turns, in a
random order, so that a slowdown of the machine affects both.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import gate, workloads
from benchmarks.results import Row
from benchmarks.systems import NON_PRIVATE, Prepared, Setting, Stack

SHORT = 0.02  # seconds; a shorter call also pays for cold caches: it runs twice in a turn
SLOW = 3.0  # seconds, above which a system gets the fewest rounds


@dataclass(frozen=True)
class Protocol:
    """Numbers of turns of a measurement."""

    rounds: int = 15
    fewest: int = 3  # for a call of more than `SLOW` seconds
    warmup: int = 3  # calls before the first counted round
    memory: bool = True


def interleave(
    calls: Mapping[str, Callable[[], Any]], protocol: Protocol
) -> dict[str, list[float]]:
    """Return the seconds of each call in every round, in a random order within a round."""
    warm = {
        name: [seconds(call) for _ in range(protocol.warmup)][-1] for name, call in calls.items()
    }
    is_slow = max(warm.values()) > SLOW
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(protocol.fewest if is_slow else protocol.rounds):
        for name in order.sample(list(calls), len(calls)):
            if warm[name] < SHORT:
                calls[name]()
            found[name].append(seconds(calls[name]))
    return found


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Ratio:
    """Time of a system over that of the non-private step."""

    plain: float  # seconds, median
    median: float
    spread: float  # interquartile range over the rounds


def ratio(found: Mapping[str, list[float]], system: str) -> Ratio:
    """Return the ratio of the medians, and the spread of a system's rounds in the same unit."""
    plain = float(np.median(found[NON_PRIVATE]))
    low, median, high = np.percentile(found[system], (25, 50, 75)) / plain
    return Ratio(plain, float(median), float(high - low))


def measure(stack: Stack, row: Row, setting: Setting, protocol: Protocol) -> Row:
    """Return the row with its numbers; raises what the system raises."""
    setting = gate.calibrate(stack, setting)
    batch = stack.load(setting, *setting.workload.batch(setting.n))
    truth = gate.truth(stack, setting, batch)
    gc.collect()
    plain, took = _first(stack, NON_PRIVATE, setting, batch)
    system, row = plain, replace(row, plain_first=took, first=took)
    if row.system != NON_PRIVATE:
        system, took = _first(stack, row.system, setting, batch)
        row = replace(row, first=took)
        assert system.read is not None
        gate.check(row.system, system.read(system.gradient(batch)), truth, setting)
    both = {NON_PRIVATE: plain, row.system: system}
    gradients = {
        name: lambda one=one: stack.wait(one.gradient(batch)) for name, one in both.items()
    }
    sums = ratio(interleave(gradients, protocol), row.system)
    row = replace(row, rounds=protocol.rounds, seconds=sums.plain)
    row = replace(row, sum=sums.median, sum_spread=sums.spread)
    if system.step is not None and plain.step is not None:
        steps = {name: lambda one=one: stack.wait(one.step()) for name, one in both.items()}
        whole = ratio(interleave(steps, protocol), row.system)
        row = replace(row, step_seconds=whole.plain, step=whole.median, step_spread=whole.spread)
    if protocol.memory:
        row = replace(row, memory=system.memory(batch), plain_memory=plain.memory(batch))
    return row


def _first(stack: Stack, name: str, setting: Setting, batch: Any) -> tuple[Prepared, float]:
    """Return a system, and the seconds to make it and call it once, compilation included."""
    start = time.perf_counter()
    made = stack.system(name)(setting)
    stack.wait(made.gradient(batch))
    return made, time.perf_counter() - start


def setting_of(row: Row, device: str, compute: str = "float32") -> Setting:
    """Return the setting of a row."""
    workload = workloads.create(row.workload, **row.options)
    return Setting(workload, row.batch or 1, device=device, compute=compute)

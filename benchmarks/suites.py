# SPDX-License-Identifier: Apache-2.0
"""The benchmarks themselves: which points each suite visits and what it makes of them.

Every suite is a generator of lists of rows, so that a run shows its numbers as they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import layers as single
from benchmarks import measure, workloads
from benchmarks.measure import Protocol
from benchmarks.results import Row
from benchmarks.systems import LOOP, Setting, Stack, reason
from benchmarks.workloads import Workload

Rows = Iterator[list[Row]]


@dataclass(frozen=True)
class Session:
    """What all suites share.

    Attributes:
        stack: whose systems.
        systems: names, or None for all.
        workloads: names, or None for all of a suite.
        batch: the only batch size, or None for those of a suite.
        protocol: rounds and warm-up.
        device: "cpu" or "cuda".
        quick: small sizes, few points: shows that everything runs, not how fast it is.
    """

    stack: Stack
    systems: list[str] | None = None
    workloads: list[str] | None = None
    batch: int | None = None
    protocol: Protocol = Protocol()
    device: str = "cpu"
    quick: bool = False

    def __post_init__(self) -> None:
        for name in self.workloads or ():
            workloads.check(name)
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is not known. Expected 'cpu' or 'cuda'.")
        self.stack.choose(self.systems)

    def wanted(self, name: str) -> bool:
        """Whether the workload of that name is to be measured."""
        return not self.workloads or name in self.workloads

    def batches(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """The batch sizes of a suite, or the one that was asked for."""
        return (self.batch,) if self.batch else usual

    def point(self, workload: Workload, n: int, suite: str, **keywords: Any) -> list[Row]:
        """`measure.point` with this session's settings."""
        return measure.point(
            self.stack,
            workload,
            n,
            suite=suite,
            systems=self.systems,
            protocol=self.protocol,
            device=self.device,
            **keywords,
        )


# (workload, options, batch size) of the speed tables.
Point = tuple[str, dict[str, Any], int]
_IMAGE32, _VIT = {"image": 32}, {"image": 64, "layers": 6}
SPEED: dict[str, list[Point]] = {
    "torch": [
        ("mlp", {}, 256),
        ("mnist", {}, 256),
        ("cifar10", {}, 128),
        ("embed", {}, 256),
        ("lstm", {}, 64),
        ("gpt", {}, 16),
        ("resnet18_gn", _IMAGE32, 32),
        ("vit_tiny", _VIT, 32),
    ],
    "jax": [
        ("mlp", {}, 256),
        ("mnist", {}, 256),
        ("cifar10", {}, 64),
        ("embed", {}, 256),
        ("lstm", {}, 32),
        ("gpt", {}, 8),
        ("resnet18_gn", _IMAGE32, 16),
    ],
}
QUICK_SPEED: list[Point] = [
    ("mlp", {"width": 128}, 64),
    ("gpt", {"layers": 1, "width": 64, "length": 32, "vocabulary": 200}, 8),
]
LAYER_BATCHES = (16, 64, 256)
GPU_BATCHES = (64, 256, 1024, 2048)
EPOCH_BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# One axis of a model at a time: workload, what stays, the axis, its values, the batch size.
SCALE: list[tuple[str, dict[str, Any], str, tuple[int, ...], int]] = [
    ("mlp", {}, "width", (128, 256, 512, 1024), 128),
    ("mlp", {"width": 256}, "depth", (1, 2, 4, 8), 128),
    ("gpt", {"layers": 2, "width": 128, "vocabulary": 1_000}, "length", (32, 64, 128, 256), 8),
    ("mlp", {}, "batch", (32, 64, 128, 256, 512), 0),
]
QUICK_SCALE: list[tuple[str, dict[str, Any], str, tuple[int, ...], int]] = [
    ("mlp", {}, "width", (64, 256), 32),
]
MEMORY_LIMIT, QUICK_LIMIT = 2**30, 2**23  # bytes, for the largest batch
LARGEST = 2**14  # examples, where the search for the largest batch ends


def speed_points(session: Session) -> list[Point]:
    """The points of the speed table; a workload that it lacks comes in its own size."""
    table = QUICK_SPEED if session.quick else SPEED[session.stack.name]
    missing = [(name, {}, 32) for name in session.workloads or ()]
    points = [point for point in table if session.wanted(point[0])]
    points += [point for point in missing if point[0] not in {name for name, *_ in points}]
    gpu = session.device == "cuda" and not session.quick
    return [
        (name, options, size)
        for name, options, n in points
        for size in session.batches(GPU_BATCHES if gpu else (n,))
    ]


def run(session: Session) -> Rows:
    """Speed and peak memory of every system on the workloads, with and without noise and update."""
    quantities = ("gradient",) if session.quick else ("gradient", "update")
    for name, options, n in speed_points(session):
        workload = workloads.create(name, **options)
        yield session.point(workload, n, "run", quantities=quantities, memory=True)


def layers(session: Session) -> Rows:
    """Single layers by batch size, then the toy networks by channel rate, kernel and batch size."""
    points = []
    usual = (8,) if session.quick else LAYER_BATCHES
    for name, builder in single.LAYERS.items():
        layer = builder(**(single.QUICK_SIZES.get(name, {}) if session.quick else {}))
        points += [("batch", layer, n) for n in session.batches(usual)]
    for axis, options, n in single.SWEEPS["quick" if session.quick else session.device]:
        points.append((axis, single.toy_cnn(**options), n))
    for axis, workload, n in points:
        at = float(n if axis == "batch" else workload.options[axis])
        rows = session.point(workload, n, "layers", memory=True)
        yield [replace(row, axis=axis, at=at) for row in rows]


def memory(session: Session) -> Rows:
    """The largest batch whose step stays below a limit, for every system that passes the gate."""
    limit = QUICK_LIMIT if session.quick else MEMORY_LIMIT
    points = speed_points(session)
    for name, options, n in points[:1] if session.quick else points:
        workload = workloads.create(name, **options)
        setting = measure.calibrate(session.stack, Setting(workload, n, device=session.device))
        batch = session.stack.load(setting, *workload.batch(n))
        names = [name for name in session.stack.choose(session.systems) if name != LOOP]
        admitted, refused = measure.admit(session.stack, setting, names, batch)
        base = Row(
            suite="memory",
            stack=session.stack.name,
            workload=workload.name,
            options=options,
            system="",
            quantity="largest batch",
            note=f"below {limit:,} bytes beyond parameters and batch, to one part in eight",
        )
        rows = [replace(base, system=name, error=why) for name, why in refused.items()]
        most = 2 * n if session.quick else LARGEST
        yield rows + [_largest(session, setting, base, name, limit, most) for name in admitted]


def _peak(session: Session, setting: Setting, name: str, n: int) -> int:
    point = replace(setting, n=n)
    batch = session.stack.load(point, *setting.workload.batch(n))
    return session.stack.systems[name](point).memory(batch)


def _largest(session: Session, setting: Setting, row: Row, name: str, limit: int, most: int) -> Row:
    """Double the batch until its step is over the limit, then halve the interval three times."""
    row = replace(row, system=name)
    fits, peak, n = 0, None, min(setting.n, 16)
    try:
        while n <= most and (found := _peak(session, setting, name, n)) <= limit:
            fits, peak, n = n, found, 2 * n
        step = fits // 2
        while n <= most and step >= max(fits // 8, 1):
            if (found := _peak(session, setting, name, fits + step)) <= limit:
                fits, peak = fits + step, found
            step //= 2
    except Exception as error:  # the batch before this one is the answer, and this is why
        row = replace(row, error=reason(error) if not fits else None, note=reason(error))
    if n > most and fits:
        row = replace(row, note=f"{row.note}; the search ended at {most} examples")
    return replace(row, value=float(fits), batch=fits, memory=peak)


def end_to_end(session: Session) -> Rows:
    """Seconds per epoch by batch size: updates with noise, and the copy of every batch included."""
    names = ("embed",) if session.quick else tuple(workloads.EPOCH_EXAMPLES)
    for name in filter(session.wanted, names):
        workload = workloads.create(name)
        for n in session.batches((16,) if session.quick else EPOCH_BATCHES):
            rows = session.point(workload, n, "end-to-end", quantities=("epoch",))
            yield [_epoch(row, workloads.EPOCH_EXAMPLES[name]) for row in rows]


def _epoch(row: Row, examples: int) -> Row:
    """A row of steps as a row of epochs."""
    row = replace(row, axis="batch", at=float(row.batch))
    if row.seconds is None:
        return row
    steps = math.ceil(examples / row.batch)
    return replace(
        row,
        seconds=row.seconds * steps,
        spread=row.spread * steps,
        first=row.first + row.seconds * (steps - 1),
        note=f"{steps} times the median of {row.rounds} steps",
    )


def scale(session: Session) -> Rows:
    """Cost along one axis at a time, with the slope on log axes beside the non-private one."""
    for name, options, axis, values, n in QUICK_SCALE if session.quick else SCALE:
        if not session.wanted(name):
            continue
        found: list[Row] = []
        for value in values:
            sizes = options if axis == "batch" else options | {axis: value}
            workload = workloads.create(name, **sizes)
            rows = session.point(workload, value if axis == "batch" else n, "scale")
            rows = [replace(row, axis=axis, at=float(value)) for row in rows]
            found += rows
            yield rows
        yield _slopes(found)


def _slopes(rows: list[Row]) -> list[Row]:
    """The exponent of the cost along an axis, for each system with all of its points."""
    slopes = []
    for name in dict.fromkeys(row.system for row in rows):
        points = [(row.at, row.seconds) for row in rows if row.system == name and row.seconds]
        if len(points) < 2:
            continue
        x, y = np.log(np.array(points, dtype=np.float64)).T
        slopes.append(
            Row(
                suite="scale",
                stack=rows[0].stack,
                workload=rows[0].workload,
                system=name,
                quantity="slope",
                options={k: v for k, v in rows[0].options.items() if k != rows[0].axis},
                axis=rows[0].axis,
                value=float(np.polyfit(x, y, 1)[0]),
            )
        )
    return slopes


SUITES = {
    "run": run,
    "layers": layers,
    "memory": memory,
    "end-to-end": end_to_end,
    "scale": scale,
}

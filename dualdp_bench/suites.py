# SPDX-License-Identifier: Apache-2.0
"""The benchmarks themselves: which points each suite visits and what it makes of them.

Every suite is a generator of lists of rows, so that a run shows its numbers as they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dualdp.exactness import RATE, WHOLE
from dualdp_bench import gate, workloads
from dualdp_bench import layers as single
from dualdp_bench.measure import Protocol, interleave
from dualdp_bench.results import Row
from dualdp_bench.session import QUICK, SHORT, Session
from dualdp_bench.systems import AUTO, LOOP, MULTI, NON_PRIVATE, Setting, reason

Rows = Iterator[list[Row]]


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
GPU_BATCHES = (64, 256, 1024, 2048)
# The papers' three strategies (naive, crb, multi), and ours; a stack has those that it knows.
SWEPT = (NON_PRIVATE, AUTO, MULTI, LOOP)
# Engines by their rate of spot checks: none; prepared for one that doesn't come; at every step.
RATES = {"checks=0": 0.0, "between checks": 1e-9, "every step checked": 1.0}
CHECKED = ("mlp", "mnist", "embed", "lstm", "gpt")
# Slopes: ours beside the model's own and those of per-sample gradients that are written out.
SCALED = (NON_PRIVATE, AUTO, MULTI)
# What is compared on single layers beside those and the peers: in JAX the methods are the ways.
LAYER_WAYS = {"torch": (), "jax": ("dualdp:book_keeping", "dualdp:materialize")}
# Batch sizes of the epochs. A processor gets those that it can do in seconds.
EPOCH_BATCHES: dict[str, tuple[int, ...]] = {
    "mnist": (16, 64, 256),
    "cifar10": (16, 64),
    "embed": (16, 128),
    "lstm": (16,),
}
GPU_EPOCH_BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# At least ten steps, or ten epochs on a GPU, which are short there.
EPOCHS = Protocol(fewest=10, longest=0.5)
GPU_EPOCHS = Protocol(rounds=20, warmup=2, patience=60.0, fewest=3, longest=120.0)
# Workloads of the search for the largest batch; in JAX every try is compiled.
LARGEST_OF = {"torch": ("mlp", "embed"), "jax": ("mlp",)}
# One axis of a model at a time: workload, what stays, the axis, its values, the batch size.
SCALE: list[tuple[str, dict[str, Any], str, tuple[int, ...], int]] = [
    ("mlp", {}, "width", (256, 512, 1024), 128),
    ("mlp", {"width": 256}, "depth", (2, 4, 8), 128),
    ("gpt", {"layers": 1, "width": 128, "vocabulary": 1_000}, "length", (64, 128, 256), 8),
    ("mlp", {}, "batch", (32, 128, 512), 0),
]
QUICK_SCALE: list[tuple[str, dict[str, Any], str, tuple[int, ...], int]] = [
    ("mlp", {}, "width", (64, 256), 32),
]
# Bytes, for the largest batch. On a processor every allocation is traced: what loops over examples
# has millions of them, which take far more memory than the step itself.
MEMORY_LIMIT = {"quick": 2**23, "cpu": 2**25, "cuda": 2**34}
LARGEST = 2**12  # examples, where the search for the largest batch ends


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
        yield session.point(
            workload,
            n,
            "run",
            systems=session.without_methods,
            quantities=quantities,
            memory=True,
        )


def layers(session: Session) -> Rows:
    """Single layers by batch size, then the networks of Rochette et al., each way forced."""
    place, forced = session.place, session.stack.forced
    compiled = session.stack.name == "jax"
    on_layers = (*session.without_methods, *forced, *LAYER_WAYS[session.stack.name])
    on_layers = SWEPT if session.quick and compiled else on_layers
    for layer in single.layers(place):
        for n in session.batches(single.BATCHES[place]):
            if session.wanted(layer.name):
                yield session.layer(layer, n, "batch", on_layers)
    for axis, name, sizes, n in session.thin(single.SWEEPS[place]):
        if session.wanted(name):
            yield session.layer(single.network(name, sizes), n, axis, (*SWEPT, *forced))


def checks(session: Session) -> Rows:
    """Steps of an engine without spot checks, between two of them, and with; what they cost."""
    for name, options, n in speed_points(session):
        if name not in (session.workloads or CHECKED):
            continue
        workload = workloads.create(name, **options)
        if known := session.known(suite="checks", workload=name, options=workload.options):
            yield known
            continue
        yield _cost_of_checks(session, Setting(workload, n, device=session.device))


def _cost_of_checks(session: Session, setting: Setting) -> list[Row]:
    """Seconds of an engine's step by rate of its checks, and their share of a step on average."""
    stack, workload = session.stack, setting.workload
    batch = stack.load(setting, *workload.batch(setting.n))
    plain = stack.systems[NON_PRIVATE](setting).update
    assert plain is not None
    engines = {name: stack.engine(setting, rate) for name, rate in RATES.items()}

    def several(step: Callable[[], Any]) -> None:
        for _ in range(WHOLE):  # of which one looks at the whole batch, where all are checked
            stack.wait(step())

    calls = {name: partial(several, step) for name, step in engines.items()}
    calls[NON_PRIVATE] = partial(several, lambda: plain(batch))
    usual = QUICK if session.quick else Protocol(rounds=15, patience=20.0)
    timings = interleave(calls, replace(session.protocol or usual, far=math.inf))
    row = Row(
        suite="checks",
        stack=stack.name,
        workload=workload.name,
        options=workload.options,
        batch=setting.n,
        system="",
        quantity="step",
    )
    seconds = {name: timing.median / WHOLE for name, timing in timings.items()}
    steps = [
        replace(
            row,
            system=name,
            seconds=seconds[name],
            spread=timing.spread / WHOLE,
            rounds=len(timing.seconds),
            first=timing.first,
            ratio=seconds[name] / seconds[NON_PRIVATE],
        )
        for name, timing in timings.items()
    ]
    without, between, checked = (seconds[name] for name in RATES)
    share = (between - without + RATE * (checked - between)) / without
    return [*steps, replace(row, system=AUTO, quantity="share of checks", value=100 * share)]


def memory(session: Session) -> Rows:
    """The largest batch whose step stays below a limit, for every system that passes the gate."""
    limit = MEMORY_LIMIT[session.place]
    points = {point[0]: point for point in speed_points(session)}
    names = list(points)[:1] if session.quick else LARGEST_OF[session.stack.name]
    for name, options, n in (points[name] for name in session.workloads or names):
        workload = workloads.create(name, **options)
        if known := session.known(suite="memory", workload=name, options=workload.options):
            yield known
            continue
        setting = gate.calibrate(session.stack, Setting(workload, n, device=session.device))
        batch = session.stack.load(setting, *workload.batch(n))
        names = session.systems or session.without_methods
        names = [name for name in session.stack.choose(names) if name != LOOP]
        admitted, refused = gate.admit(session.stack, setting, names, batch)
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
    gpu = session.device == "cuda"
    names = ("embed",) if session.quick else tuple(EPOCH_BATCHES)
    with_methods = () if session.quick else session.thin(names)
    for name in filter(session.wanted, names):
        workload = workloads.create(name)
        usual = GPU_EPOCH_BATCHES if gpu else EPOCH_BATCHES[name]
        batches = session.batches((16,) if session.quick else session.thin(usual))
        for n in batches:
            steps = math.ceil(workloads.EPOCH_EXAMPLES[name] / n)
            every = n == batches[0] and name in with_methods
            yield session.point(
                workload,
                n,
                "end-to-end",
                axis="batch",
                systems=() if every else session.without_methods,
                quantities=("epoch",),
                protocol=GPU_EPOCHS if gpu else EPOCHS,
                together=steps if gpu and not session.quick else 1,
                finish=partial(_epoch, steps=1 if gpu and not session.quick else steps),
            )


def _epoch(row: Row, steps: int) -> Row:
    """A row of measured parts of an epoch as a row of epochs."""
    if row.seconds is None:
        return row
    whole = f"the median of {row.rounds} epochs"
    return replace(
        row,
        seconds=row.seconds * steps,
        spread=row.spread * steps,
        first=row.first + row.seconds * (steps - 1),
        note=f"{steps} times the median of {row.rounds} steps" if steps > 1 else whole,
    )


def scale(session: Session) -> Rows:
    """Cost along one axis at a time, with the slope on log axes beside the non-private one."""
    for name, options, axis, values, n in QUICK_SCALE if session.quick else SCALE:
        if not session.wanted(name):
            continue
        found: list[Row] = []
        for value in session.thin(values):
            sizes = options if axis == "batch" else options | {axis: value}
            workload = workloads.create(name, **sizes)
            size = value if axis == "batch" else n
            rows = session.point(
                workload,
                size,
                "scale",
                axis=axis,
                systems=SCALED,
                protocol=SHORT,
            )
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
    "checks": checks,
    "end-to-end": end_to_end,
    "scale": scale,
}

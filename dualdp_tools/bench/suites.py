# SPDX-License-Identifier: Apache-2.0
"""Benchmark suites: the points of each suite and their rows.

Every suite is a generator of lists of rows, so a run shows its numbers as they arrive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dualdp.exactness import RATE, WHOLE
from dualdp.plan.correlated.strategies import Strategy
from dualdp_tools.bench import gate, noise, workloads
from dualdp_tools.bench import layers as single
from dualdp_tools.bench.finetuning import finetuning
from dualdp_tools.bench.measure import Protocol, empty_row, interleave, ratio_rows
from dualdp_tools.bench.results import Row
from dualdp_tools.bench.session import QUICK, SHORT, Session
from dualdp_tools.bench.systems import AUTO, LOOP, MULTI, NON_PRIVATE, Setting, error_text
from dualdp_tools.bench.tensor_parallel import tensor_parallel

Rows = Iterator[list[Row]]
Suite = Callable[[Session], Rows]
Measure = Callable[[Session, Setting], list[Row]]

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
# On a GPU, in both stacks: sizes that fill one of a data centre.
GPT2_SMALL = {"layers": 12, "width": 768, "heads": 12, "length": 1_024, "vocabulary": 50_257}
GPU_SPEED: list[Point] = [
    ("mlp", {}, 2_048),
    ("embed", {}, 1_024),
    ("lstm", {}, 512),
    ("wrn16_4", {}, 256),
    ("gpt", GPT2_SMALL, 8),
    ("vit_base", {}, 64),
    ("resnet50_gn", {}, 64),
]
QUICK_SPEED: list[Point] = [
    ("mlp", {"width": 128}, 64),
    ("gpt", {"layers": 1, "width": 64, "length": 32, "vocabulary": 200}, 8),
]
# Views of an example, and (workload, options, examples): as many as the speed table has, or rows.
VIEWS = 8
VIEWED: list[Point] = [
    *(("mlp", {}, 256), ("mnist", {}, 256), ("cifar10", {}, 128), ("gpt", {}, 16)),
    *(("mlp", {}, 32), ("mnist", {}, 32), ("cifar10", {}, 16), ("gpt", {}, 4)),
]
# The papers' strategies and dualdp; a stack measures those in its table.
SWEPT = (NON_PRIVATE, AUTO, MULTI, LOOP)
# Rate of spot checks by engine: off; on, without a check in the timed steps; at every step.
RATES = {"checks=0": 0.0, "between checks": 1e-9, "every step checked": 1.0}
# Noise of the engine's step.
CORRELATED: dict[str, Strategy | None] = {"independent": None, **noise.CORRELATED}
COMPILED, GRAPH = ", compiled", ", CUDA graph"
# End of a compiled system's name -> backend of `torch.compile`, by size.
BACKENDS = {
    "quick": {COMPILED: "aot_eager"},
    "cpu": {COMPILED: "inductor"},
    "cuda": {COMPILED: "inductor", GRAPH: "cudagraphs"},
}
CHECKED = ("mlp", "mnist", "embed", "lstm", "gpt")
# Shape of GPT-2 small, on a CPU with few positions and words: options by size, and examples.
CHECKPOINTED: dict[str, tuple[dict[str, Any], int]] = {
    "quick": (QUICK_SPEED[1][1], 8),
    "cpu": (GPT2_SMALL | {"length": 128, "vocabulary": 1_000}, 4),
    "cuda": (GPT2_SMALL, 8),
}
# Slopes of dualdp, of the non-private step and of materialized per-sample gradients.
SCALED = (NON_PRIVATE, AUTO, MULTI)
# Further systems on single layers: dualdp's methods in JAX; torch forces the methods of a layer.
LAYER_METHODS = {"torch": (), "jax": ("dualdp:book_keeping", "dualdp:materialize")}
# Batch sizes of the epochs on a CPU, chosen to take seconds.
EPOCH_BATCHES: dict[str, tuple[int, ...]] = {
    "mnist": (16, 64, 256),
    "cifar10": (16, 64),
    "embed": (16, 128),
    "lstm": (16,),
}
GPU_EPOCH_BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# At least ten steps on a CPU; whole epochs on a GPU.
EPOCHS = Protocol(fewest=10, longest=0.5)
GPU_EPOCHS = Protocol(rounds=20, warmup=2, patience=60.0, fewest=3, longest=120.0)
# Workloads of the search for the largest batch; in JAX every trial is compiled.
LARGEST_OF = {"torch": ("mlp", "embed"), "jax": ("mlp",)}
# One axis of a model at a time: workload, fixed sizes, axis, its values, batch size.
SCALE: list[tuple[str, dict[str, Any], str, tuple[int, ...], int]] = [
    ("mlp", {}, "width", (256, 512, 1024), 128),
    ("mlp", {"width": 256}, "depth", (2, 4, 8), 128),
    ("gpt", {"layers": 1, "width": 128, "vocabulary": 1_000}, "length", (64, 128, 256), 8),
    ("mlp", {}, "batch", (32, 128, 512), 0),
]
QUICK_SCALE: list[tuple[str, dict[str, Any], str, tuple[int, ...], int]] = [
    ("mlp", {}, "width", (64, 256), 32)
]
# Bytes, for the largest batch. On a CPU every allocation is traced: a loop over examples makes
# millions of them, whose trace takes far more memory than the step itself.
MEMORY_LIMIT = {"quick": 2**23, "cpu": 2**25, "cuda": 2**34}
LARGEST = 2**12  # examples, where the search for the largest batch ends


def speed_table(stack: str, device: str) -> list[Point]:
    """Return the points of the full speed table of a stack on "cpu" or "cuda"."""
    return GPU_SPEED if device == "cuda" else SPEED[stack]


def speed_points(session: Session) -> list[Point]:
    """Return the points of the speed table; other requested workloads in their own size."""
    table = QUICK_SPEED if session.quick else speed_table(session.stack.name, session.device)
    missing = [(name, {}, 32) for name in session.workloads or ()]
    points = [point for point in table if session.wanted(point[0])]
    points += [point for point in missing if point[0] not in {name for name, *_ in points}]
    return [(name, options, session.batch or n) for name, options, n in points]


def run(session: Session) -> Rows:
    """Measure speed and peak memory of every system, with and without noise and update."""
    quantities = ("gradient",) if session.quick else ("gradient", "update")
    for name, options, n in speed_points(session):
        workload = workloads.create(name, **options)
        systems = session.without_methods
        yield session.point(workload, n, "run", systems=systems, quantities=quantities, memory=True)


def layers(session: Session) -> Rows:
    """Measure single layers by batch size, then the networks of Rochette et al., by method."""
    sizes, forced = session.size_key, session.stack.forced
    point = partial(session.point, suite="layers", memory=True, protocol=SHORT)
    on_layers = (*session.without_methods, *forced, *LAYER_METHODS[session.stack.name])
    on_layers = SWEPT if session.quick and session.stack.name == "jax" else on_layers
    for layer in filter(lambda layer: session.wanted(layer.name), single.layers(sizes)):
        for n in session.batches(single.BATCHES[sizes]):
            yield point(layer, n, axis="batch", systems=on_layers)
    for axis, name, options, n in session.thin(single.SWEEPS[sizes]):
        if session.wanted(name):
            yield point(single.network(name, options), n, axis=axis, systems=(*SWEPT, *forced))


def per_point(points: Callable[[Session], Iterable[Point]]) -> Callable[[Measure], Suite]:
    """Make a suite, of the function's name, of a function that measures one of these points.

    A point of the resumed run is not measured again.
    """

    def decorated(measure: Measure) -> Suite:
        @functools.wraps(measure)
        def suite(session: Session) -> Rows:
            for name, options, n in points(session):
                workload = workloads.create(name, **options)
                earlier = session.earlier_rows(measure.__name__, workload)
                yield earlier or measure(session, Setting(workload, n, device=session.device))

        return suite

    return decorated


def _checked(session: Session) -> list[Point]:
    names = session.workloads or CHECKED
    return [point for point in speed_points(session) if point[0] in names]


@per_point(_checked)
def checks(session: Session, setting: Setting) -> list[Row]:
    """Measure engine steps without spot checks, between two of them, and with them."""
    engines = {name: session.stack.engine(setting, rate) for name, rate in RATES.items()}
    steps = _engine_steps(session, setting, "checks", engines)
    seconds = {row.system: row.seconds or 0.0 for row in steps}
    without, between, checked = (seconds[name] for name in RATES)
    share = 100 * (between - without + RATE * (checked - between)) / without
    last = empty_row(session.stack, "checks", setting.workload, setting.n, system=AUTO)
    return [*steps, replace(last, quantity="share of checks", value=share)]


@per_point(speed_points)
def correlated(session: Session, setting: Setting) -> list[Row]:
    """Measure engine steps with independent noise, with a window, a band and buffers."""
    engine = partial(session.stack.engine, setting, 0.0)
    engines = {kind: engine(correlation=strategy) for kind, strategy in CORRELATED.items()}
    return _engine_steps(session, setting, "correlated", engines)


def _engine_steps(
    session: Session, setting: Setting, suite: str, engines: dict[str, Callable[[], Any]]
) -> list[Row]:
    """Seconds of a step of each engine and of the non-private step."""
    stack = session.stack
    batch = stack.load(setting, *setting.workload.batch(setting.n))
    plain = stack.systems[NON_PRIVATE](setting).update
    assert plain is not None

    def several(step: Callable[[], Any]) -> None:
        for _ in range(WHOLE):  # if every step is checked, one of them checks the whole batch
            stack.wait(step())

    calls = {name: partial(several, step) for name, step in engines.items()}
    calls[NON_PRIVATE] = partial(several, lambda: plain(batch))
    usual = Protocol(rounds=15, patience=20.0)
    return _interleaved(session, setting, suite, "step", calls, usual, WHOLE)


def _interleaved(
    session: Session,
    setting: Setting,
    suite: str,
    quantity: str,
    calls: dict[str, Callable[[], Any]],
    usual: Protocol,
    steps: int = 1,
) -> list[Row]:
    """Rows of calls of `steps` steps each, the non-private one among them; none is too far."""
    protocol = session.protocol or (QUICK if session.quick else usual)
    row = empty_row(session.stack, suite, setting.workload, setting.n, quantity=quantity)
    return ratio_rows(row, interleave(calls, replace(protocol, far=math.inf)), steps)


def _gpt(session: Session) -> list[Point]:
    """The one point of the suites of a large model in PyTorch."""
    options, n = CHECKPOINTED[session.size_key]
    measured = session.stack.name == "torch" and session.wanted("gpt")
    return [("gpt", options, n)] if measured else []


@per_point(_gpt)
def checkpoints(session: Session, setting: Setting) -> list[Row]:
    """Measure time and peak memory of a step with and without activation checkpoints (PyTorch)."""
    from dualdp_tools.bench import workloads_torch

    changes = {"": None, ", checkpointed": workloads_torch.checkpoint_blocks}
    return _steps_and_peaks(session, setting, "checkpoints", changes)


@per_point(_gpt)
def frozen(session: Session, setting: Setting) -> list[Row]:
    """Measure a step of adapters (LoRA) over a frozen base in float32 and bfloat16 (PyTorch)."""
    import torch

    from dualdp_tools.bench import systems_torch, workloads_torch

    changes = {
        "": partial(workloads_torch.adapt, dtype=torch.float32),
        ", base in bfloat16": partial(workloads_torch.adapt, dtype=torch.bfloat16),
    }
    rows = _steps_and_peaks(session, setting, "frozen", changes)
    base = empty_row(session.stack, "frozen", setting.workload, setting.n, quantity="weights")
    for suffix, change in changes.items():
        size = systems_torch.weights_size(setting, change) / 2**20
        rows.append(replace(base, system=NON_PRIVATE + suffix, value=size))
    return rows


def _steps_and_peaks(
    session: Session, setting: Setting, suite: str, changes: Mapping[str, Any]
) -> list[Row]:
    """Time and peak memory of the non-private step and the engine's, by change of the model.

    A change is that of `systems_torch.Problem`, under the end of the system's name.
    """
    from dualdp_tools.bench import systems_torch

    batch = session.stack.load(setting, *setting.workload.batch(setting.n))
    calls: dict[str, Callable[[], Any]] = {}
    for suffix, change in changes.items():
        changed = partial(systems_torch.Problem, change=change)
        plain = systems_torch.non_private(setting, kind=changed).update
        calls[NON_PRIVATE + suffix] = partial(plain, batch)
        calls[AUTO + suffix] = systems_torch.engine(setting, 0.0, change)
    usual = Protocol(rounds=5, warmup=1, patience=60.0)
    rows = _interleaved(session, setting, suite, "step", calls, usual)
    peaks = {
        name: systems_torch.peak_memory(
            lambda batch, call=call: call(), lambda **_: None, session.device, batch
        )
        for name, call in calls.items()
    }
    least = peaks[NON_PRIVATE]
    pairs = [(row, peaks[row.system]) for row in rows]
    return [replace(row, memory=peak, memory_ratio=peak / least) for row, peak in pairs]


@per_point(lambda session: speed_points(session) if session.stack.name == "torch" else [])
def compiled(session: Session, setting: Setting) -> list[Row]:
    """Measure the clipped sum and the non-private step, eager and compiled (PyTorch).

    On a GPU also as CUDA graphs of the eager kernels.
    """
    from dualdp_tools.bench import systems_torch

    batch = session.stack.load(setting, *setting.workload.batch(setting.n))
    systems = {
        NON_PRIVATE: systems_torch.non_private(setting),
        AUTO: systems_torch.dualdp(setting, "auto"),
    }
    systems_torch.forget_compiled()
    backends = BACKENDS[session.size_key]
    for suffix, backend in backends.items():
        systems[NON_PRIVATE + suffix] = systems_torch.non_private(setting, backend=backend)
        systems[AUTO + suffix] = systems_torch.compiled(setting, backend)
    calls = {key: partial(system.gradient, batch) for key, system in systems.items()}
    usual = Protocol(rounds=15, warmup=2, patience=60.0)
    rows = _interleaved(session, setting, "compiled", "gradient", calls, usual)
    seconds = {row.system: row.seconds for row in rows}
    last = empty_row(
        session.stack, "compiled", setting.workload, setting.n, quantity="over compiled"
    )
    for suffix in backends:
        ratio = seconds[AUTO + suffix] / seconds[NON_PRIVATE + suffix]
        note = systems[AUTO + suffix].chosen(batch)
        rows.append(replace(last, system=AUTO + suffix, value=ratio, note=note))
    return rows


def views(session: Session) -> Rows:
    """Measure the clipped sum of examples with 8 views beside the non-private step on all views."""
    for name, options, n in QUICK_SPEED if session.quick else VIEWED:
        if session.wanted(name):
            yield session.point(
                workloads.create(name, **options),
                VIEWS * (session.batch or n),
                "views",
                systems=(NON_PRIVATE, AUTO, MULTI),
                rows_per_unit=VIEWS,
                memory=True,
            )


def _searched(session: Session) -> list[Point]:
    points = {point[0]: point for point in speed_points(session)}
    names = list(points)[:1] if session.quick else LARGEST_OF[session.stack.name]
    return [points[name] for name in session.workloads or names]


@per_point(_searched)
def memory(session: Session, setting: Setting) -> list[Row]:
    """Search the largest batch whose step is below a memory limit, for every admitted system."""
    limit, n = MEMORY_LIMIT[session.size_key], setting.n
    setting = gate.calibrate(session.stack, setting)
    batch = session.stack.load(setting, *setting.workload.batch(n))
    names = session.stack.choose(session.systems or session.without_methods)
    names = [name for name in names if name != LOOP]
    admitted, refused = gate.admit(session.stack, setting, names, batch)
    note = f"below {limit:,} bytes beyond parameters and batch, to one part in eight"
    fields = {"quantity": "largest batch", "note": note}
    base = empty_row(session.stack, "memory", setting.workload, None, **fields)
    rows = [replace(base, system=name, error=why) for name, why in refused.items()]
    most = 2 * n if session.quick else LARGEST
    return rows + [_largest(session, setting, base, name, limit, most) for name in admitted]


def _largest(session: Session, setting: Setting, row: Row, name: str, limit: int, most: int) -> Row:
    """Double the batch until its step is over the limit, then halve the interval three times."""

    def peak_of(n: int) -> int:
        point = replace(setting, n=n)
        batch = session.stack.load(point, *setting.workload.batch(n))
        return session.stack.systems[name](point).memory(batch)

    row = replace(row, system=name)
    fits, peak, n = 0, None, min(setting.n, 16)
    try:
        while n <= most and (found := peak_of(n)) <= limit:
            fits, peak, n = n, found, 2 * n
        step = fits // 2
        while n <= most and step >= max(fits // 8, 1):
            if (found := peak_of(fits + step)) <= limit:
                fits, peak = fits + step, found
            step //= 2
    except Exception as error:  # the result is the previous batch, with this reason
        row = replace(row, error=error_text(error) if not fits else None, note=error_text(error))
    if n > most and fits:
        row = replace(row, note=f"{row.note}; the search ended at {most} examples")
    return replace(row, value=float(fits), batch=fits, memory=peak)


def end_to_end(session: Session) -> Rows:
    """Measure seconds per epoch by batch size, noise and the copy of every batch included."""
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
    """Row of an epoch, from a row of its measured steps."""
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
    """Measure the cost along one axis at a time, with its slope on log axes."""
    for name, options, axis, values, n in QUICK_SCALE if session.quick else SCALE:
        if not session.wanted(name):
            continue
        found: list[Row] = []
        for value in session.thin(values):
            sizes = options if axis == "batch" else options | {axis: value}
            workload = workloads.create(name, **sizes)
            size = value if axis == "batch" else n
            rows = session.point(workload, size, "scale", axis=axis, systems=SCALED, protocol=SHORT)
            found += rows
            yield rows
        yield _slopes(found)


def _slopes(rows: list[Row]) -> list[Row]:
    """Exponents of the cost along an axis, for each system with at least two points."""
    slopes = []
    for name in dict.fromkeys(row.system for row in rows):
        points = [(row.at, row.seconds) for row in rows if row.system == name and row.seconds]
        if len(points) < 2:
            continue
        x, y = np.log(np.array(points, dtype=np.float64)).T
        slope = Row(
            suite="scale",
            stack=rows[0].stack,
            workload=rows[0].workload,
            system=name,
            quantity="slope",
            options={k: v for k, v in rows[0].options.items() if k != rows[0].axis},
            axis=rows[0].axis,
            value=float(np.polyfit(x, y, 1)[0]),
        )
        slopes.append(slope)
    return slopes


SUITES = {
    suite.__name__.replace("_", "-"): suite
    for suite in (
        *(run, layers, memory, checks, correlated, checkpoints, frozen, compiled),
        *(views, finetuning, tensor_parallel, end_to_end, scale),
    )
}

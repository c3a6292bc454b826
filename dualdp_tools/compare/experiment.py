# SPDX-License-Identifier: Apache-2.0
"""Experiment in three parts: gradients, training and time per step on both backends."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dualdp import _validate, port
from dualdp.plan.plan import PrivacyPlan
from dualdp.porting import parameter_map
from dualdp_tools.compare import digits

if TYPE_CHECKING:
    from dualdp_tools.compare.jax_side import JaxRun
    from dualdp_tools.compare.torch_side import TorchRun

MODELS = ("cnn", "mlp")
DTYPES = ("float32", "float64")
DELTA = 1e-4
NUM_COMPARED_EXAMPLES = 32
# XLA's float64 convolution on a CPU costs more than linearly in the batch.
PHYSICAL_BATCH_SIZE = {"float32": None, "float64": 32}
GRADIENT_TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
WHOLE_NORM_TOLERANCE = {"float32": 1e-7, "float64": 1e-12}
TRAINING_TOLERANCE = {"float32": 1e-5, "float64": 1e-8}


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of `dualdp compare`, validated before any work."""

    steps: int = 400  # noise releases
    batch_size: int = 256  # expected size of a logical batch
    target_epsilon: float = 8.0  # of the whole run, at DELTA
    model: str = "cnn"
    dtype: str = "float32"
    seed: int = 0  # of the plan and of the initial weights
    max_grad_norm: float = 0.25  # C, gradient units
    learning_rate: float = 1.0
    momentum: float = 0.9
    switch_at: int | None = None  # steps after which a third run moves from PyTorch to JAX

    def __post_init__(self) -> None:
        _validate.integer("steps", self.steps, minimum=1)
        _validate.integer("batch_size", self.batch_size, minimum=1)
        _validate.integer("seed", self.seed)
        for name in ("target_epsilon", "max_grad_norm", "learning_rate"):
            _validate.positive(name, getattr(self, name))
        _validate.choice("model", self.model, MODELS)
        _validate.choice("dtype", self.dtype, DTYPES)
        if self.switch_at is not None and not 1 <= self.switch_at < self.steps:
            raise ValueError(
                f"switch_at={self.switch_at} is not within the run. Expected 1 to {self.steps - 1}."
            )


@dataclass(frozen=True)
class GradientRow:
    """Difference of the per-sample gradients of one parameter between both stacks."""

    torch_name: str
    jax_path: str
    shape: tuple[int, ...]  # in torch
    largest: float  # absolute difference of one number, gradient units
    relative: float  # largest over the examples of the difference's norm over the gradient's norm
    excess: float  # largest over the examples of the difference over its tolerance; <= 1 passes


@dataclass(frozen=True)
class Point:
    """State of both runs after a number of steps; the dicts are by stack, or "switched"."""

    step: int
    epsilon: dict[str, float]
    loss: dict[str, float]  # mean, held-out
    accuracy: dict[str, float]  # held-out
    difference: float  # largest over the parameters of |torch - jax| / |jax|, L2 norms
    parameter: str  # the one with that difference
    switched: float | None = None  # difference of the run that changed stacks to the one on JAX


@dataclass(frozen=True)
class Timing:
    """Seconds per step of one stack, medians of interleaved rounds; quartiles of the ratios."""

    stack: str
    private: float
    plain: float
    ratio: float
    spread: tuple[float, float]


class Experiment:
    """One network with the same weights on both stacks."""

    def __init__(self, settings: ExperimentOptions) -> None:
        from dualdp_tools.compare.jax_side import JaxRun
        from dualdp_tools.compare.torch_side import TorchRun

        self.settings, self.digits = settings, digits.load()
        self.torch = TorchRun(settings, *self.digits)
        self.jax = JaxRun(settings, *self.digits)
        self.jax.start(port.to_jax(self.torch.model, like=self.jax.params))
        self.layout = port.match(self.torch.model, self.jax.params)
        self.switched: JaxRun | None = None
        self.plan = PrivacyPlan.calibrate(
            num_examples=len(self.digits[0]),
            expected_batch_size=settings.batch_size,
            num_steps=settings.steps,
            target_epsilon=settings.target_epsilon,
            delta=DELTA,
            max_grad_norm=settings.max_grad_norm,
            physical_batch_size=PHYSICAL_BATCH_SIZE[settings.dtype],
            noise="portable",
            seed=settings.seed,
        )

    def compare_gradients(self) -> list[GradientRow]:
        """Return the differences of per-sample gradients on the initial weights."""
        rows = slice(0, NUM_COMPARED_EXAMPLES)
        ours, theirs = self.torch.per_sample_grads(rows), self.jax.per_sample_grads(rows)
        pairs = {
            leaf: (ours[leaf.torch_name], leaf.to_torch(theirs, batch_axes=1))
            for leaf in self.layout
        }
        whole = np.sqrt(sum(_norms(b) ** 2 for _, b in pairs.values()))
        table = []
        for leaf, (a, b) in pairs.items():
            difference, size = _norms(a - b), _norms(b)
            dtype = self.settings.dtype
            tolerated = GRADIENT_TOLERANCE[dtype] * size + WHOLE_NORM_TOLERANCE[dtype] * whole
            table.append(
                GradientRow(
                    leaf.torch_name,
                    leaf.jax_path,
                    leaf.torch_shape,
                    float(np.abs(a - b).max()),
                    float((difference / size).max()),
                    float((difference / tolerated).max()),
                )
            )
        return table

    def train(self) -> Iterator[tuple[int, Point | None]]:
        """Run the plan on both stacks; yield each step, with a `Point` at about 20 of them."""
        self.torch.follow(self.plan, self.layout)
        self.jax.follow(self.plan)
        switch, steps = self.settings.switch_at, self.settings.steps
        shown = {*np.linspace(1, steps, min(21, steps), dtype=int), *([switch] if switch else ())}
        for step in range(steps):
            self.torch.private_step(step)
            self.jax.private_step(step)
            if self.switched is not None:
                self.switched.private_step(step)
            done = step + 1
            if done == switch:
                self.switched = self._continued_on_jax(done)
            yield done, self._point(done) if done in shown else None

    def _continued_on_jax(self, steps: int) -> JaxRun:
        """JAX run that continues the PyTorch run."""
        run = type(self.jax)(self.settings, *self.digits)
        run.name = "switched"
        params = port.to_jax(self.torch.model, like=run.params)
        momentum = parameter_map.to_jax(self.layout, self.torch.momentum())
        run.take_over(params, momentum, self.plan, steps)
        return run

    def _point(self, step: int) -> Point:
        """State of all runs after `step` steps."""
        ours, theirs = self.torch.parameters(), self.jax.parameters()
        there = {leaf.torch_name: leaf.to_torch(theirs) for leaf in self.layout}
        differences = {name: _relative(ours[name], array) for name, array in there.items()}
        worst = max(differences, key=lambda name: _nan_is_worst(differences[name]))
        runs: list[TorchRun | JaxRun] = [self.torch, self.jax]
        switched = None
        if self.switched is not None:
            runs.append(self.switched)
            moved = self.switched.parameters().values()
            switched = max(map(_relative, moved, theirs.values()), key=_nan_is_worst)
        scores = {run.name: run.evaluate() for run in runs}
        return Point(
            step,
            {run.name: run.ledger.get_epsilon() for run in runs},
            {name: loss for name, (loss, _) in scores.items()},
            {name: accuracy for name, (_, accuracy) in scores.items()},
            differences[worst],
            worst,
            switched,
        )

    def time_steps(self, rounds: int = 11, steps: int = 4) -> list[Timing]:
        """Time private and plain steps in interleaved rounds, all four in each round.

        The noise is that of each framework ("fast"), the default of a user's run.
        """
        changes: Any = {"num_steps": (rounds + 1) * steps, "target_epsilon": None}
        plan = dataclasses.replace(self.plan, noise="fast", **changes)
        self.torch.follow(plan, self.layout)
        self.jax.follow(plan)
        seconds: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):  # the first round warms up
            window = range(number * steps, (number + 1) * steps)
            for run in (self.torch, self.jax):
                for kind, work in (("plain", run.plain_step), ("private", run.private_step)):
                    run.synchronize()
                    start = time.perf_counter()
                    for step in window:
                        work(step)
                    run.synchronize()
                    if number:
                        taken = (time.perf_counter() - start) / steps
                        seconds.setdefault((run.name, kind), []).append(taken)
        timings = []
        for stack in (self.torch.name, self.jax.name):
            private, plain = seconds[stack, "private"], seconds[stack, "plain"]
            ratios = [a / b for a, b in zip(private, plain, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            medians = statistics.median(private), statistics.median(plain)
            timings.append(Timing(stack, *medians, middle, (low, high)))
        return timings


def _norms(grads: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(n, *shape) -> (n,) L2 norms in float64."""
    norms: np.ndarray[Any, Any] = np.linalg.norm(
        grads.reshape(len(grads), -1).astype(float), axis=1
    )
    return norms


def _relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """|a - b| / |b|, L2 norms."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _nan_is_worst(value: float) -> float:
    """Sort key with nan last."""
    return np.inf if np.isnan(value) else value

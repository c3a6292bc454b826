# SPDX-License-Identifier: Apache-2.0
"""The experiment in three parts: same gradients, same training, and the time each stack takes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dualdp import _validate, port
from dualdp.demo import digits
from dualdp.plan import PrivacyPlan

if TYPE_CHECKING:
    from dualdp.demo.jax_side import JaxRun
    from dualdp.demo.torch_side import TorchRun

MODELS = ("cnn", "mlp")
ACTIVATIONS = ("tanh", "gelu", "relu")
DTYPES = ("float32", "float64")
DEVICES = ("cpu", "cuda")
KINKED = ("relu",)  # two correct runs drift apart: the kink decides on a rounding error
DELTA = 1e-4
NUM_COMPARED_EXAMPLES = 32
# XLA's float64 convolution on a CPU costs more than linearly in the batch.
PHYSICAL_BATCH_SIZE = {"float32": None, "float64": 32}
GRADIENT_TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
WHOLE_NORM_TOLERANCE = {"float32": 1e-7, "float64": 1e-12}
TRAINING_TOLERANCE = {"float32": 1e-5, "float64": 1e-8}


@dataclass(frozen=True)
class Settings:
    """What the user chose; every choice is checked before any work.

    Args:
        steps: noise releases.
        batch_size: expected size of a logical batch.
        target_epsilon: at delta = 1e-4, for the whole run.
        model: one of `MODELS`.
        activation: one of `ACTIVATIONS`.
        dtype: one of `DTYPES`.
        device: one of `DEVICES`.
        seed: of the plan's key and of the initial weights.
        accountant: name of the accountant.
        max_grad_norm: C, gradient units.
        learning_rate: of SGD.
        momentum: of SGD.
        switch_at: steps after which a third run goes from PyTorch to JAX; None for no such run.
    """

    steps: int = 400
    batch_size: int = 256
    target_epsilon: float = 8.0
    model: str = "cnn"
    activation: str = "tanh"
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    accountant: str = "pld"
    max_grad_norm: float = 0.25
    learning_rate: float = 1.0
    momentum: float = 0.9
    switch_at: int | None = None

    def __post_init__(self) -> None:
        _validate.integer("steps", self.steps, minimum=1)
        _validate.integer("batch_size", self.batch_size, minimum=1)
        _validate.integer("seed", self.seed)
        for name in ("target_epsilon", "max_grad_norm", "learning_rate"):
            _validate.positive(name, getattr(self, name))
        for name, table in _TABLES.items():
            _validate.choice(name, getattr(self, name), table)
        if self.switch_at is not None and not 1 <= self.switch_at < self.steps:
            raise ValueError(
                f"switch_at={self.switch_at} is not within the run. Expected 1 to {self.steps - 1}."
            )


_TABLES = {"model": MODELS, "activation": ACTIVATIONS, "dtype": DTYPES, "device": DEVICES}


@dataclass(frozen=True)
class GradientRow:
    """How far the stacks' per-sample gradients of one parameter are apart.

    Args:
        torch_name: of the parameter.
        jax_path: of its partner.
        shape: torch's.
        largest: largest absolute difference of one number, gradient units.
        relative: largest over the examples of the difference's norm over the gradient's norm.
        excess: largest over the examples of the difference over what is tolerated; at most 1 is ok.
    """

    torch_name: str
    jax_path: str
    shape: tuple[int, ...]
    largest: float
    relative: float
    excess: float


@dataclass(frozen=True)
class Point:
    """Where both runs are after a number of steps.

    Args:
        step: steps done.
        epsilon: spent on each stack.
        loss: mean held-out loss on each stack.
        accuracy: held-out accuracy on each stack.
        difference: largest over the parameters of |torch - jax| / |jax|, L2 norms.
        parameter: the parameter where that is.
        switched: the same difference of the run that changed stacks, to the one on JAX; None
            before the change. Its epsilon, loss and accuracy are under "switched".
    """

    step: int
    epsilon: dict[str, float]
    loss: dict[str, float]
    accuracy: dict[str, float]
    difference: float
    parameter: str
    switched: float | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds per step of one stack, medians of interleaved rounds.

    Args:
        stack: its name.
        private: one private step.
        plain: one step without privacy.
        ratio: median of the rounds' ratios.
        spread: quartiles of the rounds' ratios.
    """

    stack: str
    private: float
    plain: float
    ratio: float
    spread: tuple[float, float]


class Experiment:
    """The same network on both stacks, with the same weights.

    Args:
        settings: what the user chose.
    """

    def __init__(self, settings: Settings) -> None:
        from dualdp.demo.jax_side import JaxRun
        from dualdp.demo.torch_side import TorchRun

        self.settings = settings
        train, held_out = digits.load()
        self.num_examples = len(train)
        self.torch = TorchRun(settings, train, held_out)
        self.jax = JaxRun(settings, train, held_out)
        self.jax.start(port.to_jax(self.torch.model, like=self.jax.params))
        self.layout = port.match(self.torch.model, self.jax.params)
        self.switched: JaxRun | None = None
        self.plan = self._calibrated()

    def _calibrated(self) -> PrivacyPlan:
        """The run, written down."""
        chosen = self.settings
        return PrivacyPlan.calibrate(
            num_examples=self.num_examples,
            expected_batch_size=chosen.batch_size,
            num_steps=chosen.steps,
            target_epsilon=chosen.target_epsilon,
            delta=DELTA,
            max_grad_norm=chosen.max_grad_norm,
            physical_batch_size=PHYSICAL_BATCH_SIZE[chosen.dtype],
            noise="portable",
            accountant=chosen.accountant,
            seed=chosen.seed,
        )

    def compare_gradients(self) -> list[GradientRow]:
        """Per-sample gradients of the first training digits, on the initial weights."""
        rows = slice(0, NUM_COMPARED_EXAMPLES)
        ours, theirs = self.torch.per_sample_grads(rows), self.jax.per_sample_grads(rows)
        pairs = {
            leaf: (ours[leaf.torch_name], leaf.to_torch(theirs[leaf.jax_index], batch_axes=1))
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
        """Run the plan on both stacks; after each step its number, and a point now and then."""
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
                self.switched = self._handed_over(done)
            yield done, self._point(done) if done in shown else None

    def _handed_over(self, steps: int) -> JaxRun:
        """A run on JAX that goes on where PyTorch's is."""
        run = self.jax.twin()
        run.name = "switched"
        params = port.to_jax(self.torch.model, like=run.params)
        state = port.optimizer_to_jax(
            self.torch.optimizer, self.torch.model, like=run.optimizer_state, params=run.params
        )
        run.take_over(params, state, self.plan, steps)
        return run

    def _point(self, step: int) -> Point:
        """Where all runs are."""
        ours, theirs = self.torch.parameters(), self.jax.parameters()
        differences = {}
        for leaf in self.layout:
            a, b = ours[leaf.torch_name], leaf.to_torch(theirs[leaf.jax_index])
            differences[leaf.torch_name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        worst = max(differences, key=lambda name: _nan_is_worst(differences[name]))
        runs: list[TorchRun | JaxRun] = [self.torch, self.jax]
        switched = None
        if self.switched is not None:
            runs.append(self.switched)
            pairs = zip(self.switched.parameters(), theirs, strict=True)
            apart = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
            switched = max(apart, key=_nan_is_worst)
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
        """Private against plain steps, interleaved: every round times all four in turn.

        The noise is each framework's own ("fast"), as a user would have it.

        Args:
            rounds: how many.
            steps: of each kind in a round.
        """
        plan = dataclasses.replace(self.plan, noise="fast", num_steps=None, target_epsilon=None)
        self.torch.follow(plan, self.layout)
        self.jax.follow(plan)
        seconds: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):  # the first round warms up
            window = range(number * steps, (number + 1) * steps)
            for run in (self.torch, self.jax):
                for kind, work in (("plain", run.plain_step), ("private", run.private_step)):
                    taken = _seconds(run, work, window)
                    if number:
                        seconds.setdefault((run.name, kind), []).append(taken)
        return [_timing(run.name, seconds) for run in (self.torch, self.jax)]

    def judged_points(self, points: Sequence[Point]) -> Sequence[Point]:
        """The points whose difference is judged: with kinks only the first step's."""
        return points[:1] if self.settings.activation in KINKED else points


def _norms(grads: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(n, *shape) -> (n,) L2 norms in float64."""
    norms: np.ndarray[Any, Any] = np.linalg.norm(
        grads.reshape(len(grads), -1).astype(float), axis=1
    )
    return norms


def _nan_is_worst(value: float) -> float:
    """Order in which nan comes last."""
    return np.inf if np.isnan(value) else value


def _seconds(run: TorchRun | JaxRun, work: Callable[[int], None], window: range) -> float:
    """Seconds per step, over a window of steps."""
    run.synchronize()
    start = time.perf_counter()
    for step in window:
        work(step)
    run.synchronize()
    return (time.perf_counter() - start) / len(window)


def _timing(stack: str, seconds: dict[tuple[str, str], list[float]]) -> Timing:
    """Medians and quartiles of one stack."""
    private, plain = seconds[stack, "private"], seconds[stack, "plain"]
    ratios = [a / b for a, b in zip(private, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Timing(stack, statistics.median(private), statistics.median(plain), middle, (low, high))

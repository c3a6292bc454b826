# SPDX-License-Identifier: Apache-2.0
"""Experiment in three parts: gradients, training and time per step on both backends."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import logsumexp

from dualdp import port
from dualdp.plan.plan import PrivacyPlan
from dualdp.porting import parameter_map
from dualdp_tools.compare import digits
from dualdp_tools.compare.jax_side import JaxRun
from dualdp_tools.compare.options import ExperimentOptions
from dualdp_tools.compare.torch_side import TorchRun

DELTA = 1e-4
NUM_COMPARED_EXAMPLES = 32
# XLA's float64 convolution on a CPU costs more than linearly in the batch.
PHYSICAL_BATCH_SIZE = {"float32": None, "float64": 32}
GRADIENT_TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
WHOLE_NORM_TOLERANCE = {"float32": 1e-7, "float64": 1e-12}
TRAINING_TOLERANCE = {"float32": 1e-5, "float64": 1e-8}


#: Numbers and words by name, as they stand in compare.json.
Row = dict[str, Any]


class Experiment:
    """One network with the same weights on both stacks, and what was measured so far."""

    def __init__(self, settings: ExperimentOptions) -> None:
        self.settings = settings
        train, self.held_out = digits.load()
        self.plan = PrivacyPlan.calibrate(
            num_examples=len(train.y),
            expected_batch_size=settings.batch_size,
            num_steps=settings.steps,
            target_epsilon=settings.target_epsilon,
            delta=DELTA,
            max_grad_norm=settings.max_grad_norm,
            physical_batch_size=PHYSICAL_BATCH_SIZE[settings.dtype],
            noise="portable",
            seed=settings.seed,
        )
        self.torch, self.jax = TorchRun(settings), JaxRun(settings)
        self.jax.start(port.to_jax(self.torch.model, like=self.jax.params))
        self.layout = self.torch.layout = port.match(self.torch.model, self.jax.params)
        self.runs: list[TorchRun | JaxRun] = [self.torch, self.jax]
        self.gradients: list[Row] = []
        self.points: list[Row] = []
        self.timings: list[Row] = []

    def compare_gradients(self) -> None:
        """Measure the differences of per-sample gradients on the initial weights."""
        rows, dtype = slice(0, NUM_COMPARED_EXAMPLES), self.settings.dtype
        theirs, ours = self.jax.per_sample_grads(rows), self.torch.per_sample_grads(rows)
        there = {leaf: leaf.to_torch(theirs, batch_axes=1) for leaf in self.layout}
        whole = np.sqrt(sum(_norms(grads) ** 2 for grads in there.values()))
        for leaf, grads in there.items():
            apart = ours[leaf.torch_name] - grads
            norms, far = _norms(grads), _norms(apart)
            tolerated = GRADIENT_TOLERANCE[dtype] * norms + WHOLE_NORM_TOLERANCE[dtype] * whole
            row: Row = {"torch_name": leaf.torch_name, "jax_path": leaf.jax_path}
            row |= {"shape": leaf.torch_shape, "largest": float(np.abs(apart).max())}
            row["relative"] = float((far / norms).max())
            self.gradients.append(row | {"excess": float((far / tolerated).max())})

    def train(self) -> Iterator[int]:
        """Run the plan on both stacks; yield each step, and add to `points` at about 20 of them."""
        switch, steps = self.settings.switch_at, self.settings.steps
        shown = {*np.linspace(1, steps, min(21, steps), dtype=int), switch}
        self.torch.follow(self.plan)
        self.jax.follow(self.plan)
        for step in range(1, steps + 1):
            for run in self.runs:
                run.private_step(step - 1)
            if step == switch:
                self.runs.append(self._continued_on_jax(step))
            if step in shown:
                self.points.append(self._point(step))
            yield step

    def _continued_on_jax(self, steps: int) -> JaxRun:
        """JAX run that continues the PyTorch run."""
        run = JaxRun(self.settings)
        run.name = "switched"
        params = port.to_jax(self.torch.model, like=run.params)
        momentum = parameter_map.to_jax(self.layout, self.torch.momentum())
        run.take_over(params, momentum, self.plan, steps)
        return run

    def _point(self, step: int) -> Row:
        """State of all runs after `step` steps; loss and accuracy are those of held-out digits."""
        ours, theirs = self.torch.parameters(), self.jax.parameters()
        names = [leaf.torch_name for leaf in self.layout]
        apart = [_relative(ours[leaf.torch_name], leaf.to_torch(theirs)) for leaf in self.layout]
        worst = int(np.argmax(apart))  # nan, if there is one
        switched = None  # the run that changed stacks, against the one on JAX
        for run in self.runs[2:]:
            moved = run.parameters()
            switched = float(np.max([_relative(moved[path], theirs[path]) for path in theirs]))
        y, logits = self.held_out.y, {run.name: run.logits() for run in self.runs}
        losses = {name: logsumexp(z, 1) - z[range(len(y)), y] for name, z in logits.items()}
        return {
            "step": step,
            "epsilon": {run.name: run.ledger.get_epsilon() for run in self.runs},
            "loss": {name: float(np.mean(array)) for name, array in losses.items()},
            "accuracy": {name: float(np.mean(z.argmax(1) == y)) for name, z in logits.items()},
            "difference": apart[worst],  # of the parameters, |torch - jax| / |jax|, L2 norms
            "parameter": names[worst],
            "switched": switched,
        }

    def time_steps(self, rounds: int = 11, steps: int = 4) -> None:
        """Time private and plain steps in interleaved rounds, all four in each round.

        The noise is that of each framework ("fast"), the default of a user's run.
        """
        changes: Any = {"num_steps": (rounds + 1) * steps, "target_epsilon": None}
        plan = dataclasses.replace(self.plan, noise="fast", **changes)
        self.torch.follow(plan)
        self.jax.follow(plan)
        seconds = defaultdict[tuple[str, str], list[float]](list)
        for number in range(rounds + 1):
            for run in (self.torch, self.jax):
                for kind, work in (("plain", run.plain_step), ("private", run.private_step)):
                    self.jax.synchronize()
                    start = time.perf_counter()
                    for step in range(number * steps, (number + 1) * steps):
                        work(step)
                    self.jax.synchronize()
                    seconds[run.name, kind].append((time.perf_counter() - start) / steps)
        for stack in ("torch", "jax"):
            private = np.array(seconds[stack, "private"][1:])  # the first round warms up
            plain = np.array(seconds[stack, "plain"][1:])
            low, middle, high = map(float, np.quantile(private / plain, (0.25, 0.5, 0.75)))
            row: Row = {"stack": stack, "ratio": middle, "spread": (low, high)}
            row |= {"private": float(np.median(private)), "plain": float(np.median(plain))}
            self.timings.append(row)

    def disagreements(self) -> list[str]:
        """Return one sentence for each difference beyond the tolerance, of the first such step."""
        tolerance = TRAINING_TOLERANCE[self.settings.dtype]
        faults = [
            f"the per-sample gradients of {row['torch_name']} (JAX: {row['jax_path']}) differ by "
            f"{row['relative']:.1e} of their norm, {row['excess']:.1f} times what is tolerated."
            for row in self.gradients
            if not row["excess"] <= 1
        ]
        for point in self.points:
            apart, moved, epsilon = point["difference"], point["switched"], point["epsilon"]
            differ = []
            if not apart <= tolerance:
                differ.append(
                    f"the parameters differ by {apart:.1e}, most at {point['parameter']}; "
                    f"tolerated is {tolerance:.0e}."
                )
            if moved is not None and not moved <= tolerance:
                differ.append(
                    f"the run that changed stacks differs by {moved:.1e} from the one on JAX; "
                    f"tolerated is {tolerance:.0e}."
                )
            if len(set(epsilon.values())) > 1:
                differ.append(f"epsilon is {epsilon}.")
            if differ:
                return faults + [f"after step {point['step']} {fault}" for fault in differ]
        return faults


def _norms(grads: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(n, *shape) -> (n,) L2 norms in float64."""
    return np.asarray(np.linalg.norm(grads.reshape(len(grads), -1).astype(float), axis=1))


def _relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """|a - b| / |b|, L2 norms."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))

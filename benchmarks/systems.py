# SPDX-License-Identifier: Apache-2.0
"""Interface of the measured systems, and the table of stacks.

A system is a function of a `Setting` that returns a `Prepared`; one that is not installed or cannot
run the workload raises, and its row shows the reason. The tables are in `systems_torch.py` and
`systems_jax.py` (non-private, dualdp, `vmap(grad)`, the loop) and in `peers_torch.py` and
`peers_jax.py` (other libraries).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.workloads import Workload
from dualdp import PrivacyPlan

NON_PRIVATE, LOOP, OURS, MULTI = "non-private", "loop", "dualdp", "vmap(grad)"
STACKS = ("torch", "jax")
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 1e-3
EXAMPLES = 4  # data set of a whole step, in batches


class Clipped(NamedTuple):
    """Result that the gate compares: clipped sums by name, and the norms if available."""

    sums: dict[str, np.ndarray]
    norms: np.ndarray | None


@dataclass(frozen=True)
class Setting:
    """One point of a benchmark."""

    workload: Workload  # model, data and loss
    n: int  # examples per step
    max_grad_norm: float = 1.0
    device: str = "cpu"  # or "cuda"
    seed: int = 0  # of the weights
    compute: str = "float32"  # or "bfloat16": dtype of the products

    def plan(self) -> PrivacyPlan:
        """Return the plan of a run with batches of exactly n examples."""
        return PrivacyPlan(
            num_examples=EXAMPLES * self.n,
            expected_batch_size=self.n,
            num_steps=None,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=self.max_grad_norm,
            delta=1e-5,
            sampler="shuffle",
        )

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the data set of a run."""
        return self.workload.batch(EXAMPLES * self.n)


@dataclass(frozen=True)
class Prepared:
    """System with its own model.

    Attributes:
        gradient: batch on the device -> clipped sum (non-private: gradient of the mean loss).
        read: that sum as NumPy arrays; None for the non-private step.
        step: one whole step of a run: loader, gradient, noise, optimizer; None if not supported.
        memory: batch -> peak bytes of `gradient`.
    """

    gradient: Callable[[Any], Any]
    read: Callable[[Any], Clipped] | None
    step: Callable[[], Any] | None
    memory: Callable[[Any], int | None]


System = Callable[[Setting], Prepared]


@dataclass(frozen=True)
class Stack:
    """One framework: its systems, and functions to load data and to wait for results."""

    name: str
    systems: dict[str, System]
    load: Callable[[Setting, np.ndarray, np.ndarray], Any]  # NumPy batch -> batch on the device
    wait: Callable[[Any], Any]  # blocks until an outcome is complete, and returns it
    use_device: Callable[[str], str]  # "cpu" or "cuda" -> its name; products are float32 from now

    def system(self, name: str) -> System:
        """Return the system of that name."""
        if name not in self.systems:
            raise ValueError(
                f"system={name!r} is not known for {self.name}. Expected one of "
                f"{list(self.systems)}."
            )
        return self.systems[name]


def stack(name: str) -> Stack:
    """Return the stack of that name, after importing its framework."""
    if name not in STACKS:
        raise ValueError(f"stack={name!r} is not known. Expected 'torch' or 'jax'.")
    ours = importlib.import_module(f"benchmarks.systems_{name}")
    peers = importlib.import_module(f"benchmarks.peers_{name}")
    return Stack(name, ours.SYSTEMS | peers.SYSTEMS, ours.load, ours.wait, ours.use_device)

# SPDX-License-Identifier: Apache-2.0
"""Who is measured: table name -> system for each stack, and what a system has to offer.

A system is a function of a `Setting` that returns a `Prepared`; one that is not installed or cannot
run the workload raises, and its row shows the reason. The tables are in `systems_torch.py` and
`systems_jax.py` (non-private, dualdp's methods, `vmap(grad)`, the loop) and in `peers_torch.py` and
`peers_jax.py` (other libraries).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dualdp import PrivacyPlan
from dualdp_bench.workloads import Workload

NON_PRIVATE, LOOP, AUTO, MULTI = "non-private", "loop", "dualdp:auto", "vmap(grad)"
METHODS = ("auto", "book_keeping", "two_pass", "materialize", "vmap")
STACKS = ("torch", "jax")
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 1e-3


class NothingToForce(Exception):
    """No layer of the workload can go the way that a system forces: it has no row."""


class Clipped(NamedTuple):
    """What the gate looks at: the sum of clipped gradients by name, and the norms if offered."""

    sums: dict[str, np.ndarray]
    norms: np.ndarray | None


@dataclass(frozen=True)
class Setting:
    """One point of a benchmark.

    Attributes:
        workload: model, data and loss.
        n: examples per step.
        max_grad_norm: C.
        device: "cpu" or "cuda".
        seed: of the weights.
    """

    workload: Workload
    n: int
    max_grad_norm: float = 1.0
    device: str = "cpu"
    seed: int = 0

    def plan(self, **changes: Any) -> PrivacyPlan:
        """A run whose steps are such points; `changes` are arguments that differ."""
        usual: dict[str, Any] = {
            "num_examples": 100 * self.n,
            "expected_batch_size": self.n,
            "num_steps": None,
            "noise_multiplier": NOISE_MULTIPLIER,
            "max_grad_norm": self.max_grad_norm,
            "delta": 1e-5,
            "accountant": "rdp",
            "seed": self.seed,
        }
        return PrivacyPlan(**{**usual, **changes})

    def run_of_batches(self) -> PrivacyPlan:
        """A run of batches of n examples each, of two n."""
        return self.plan(num_examples=2 * self.n, sampler="shuffle")


@dataclass(frozen=True)
class Prepared:
    """A system with its own model, ready to be called with a batch on the device.

    Attributes:
        gradient: batch -> outcome: the clipped sum (non-private: the gradient of the mean loss).
        read: outcome -> `Clipped`; None for the non-private step.
        update: batch -> outcome: the same with noise and optimizer step; None if not offered.
        memory: batch -> peak bytes of `gradient` beyond what was alive; None if unknown.
        takes: batch -> the ways that a system which chooses has chosen, in words; or nothing.
    """

    gradient: Callable[[Any], Any]
    read: Callable[[Any], Clipped] | None = None
    update: Callable[[Any], Any] | None = None
    memory: Callable[[Any], int | None] = field(default=lambda batch: None)
    takes: Callable[[Any], str] = field(default=lambda batch: "")


@dataclass(frozen=True)
class Stack:
    """One framework: its systems and how to feed and await them.

    Attributes:
        name: "torch" or "jax".
        systems: table name -> system.
        load: (setting, x, y) -> batch on the device.
        wait: blocks until an outcome is there.
        device: name of what is measured on, for "cpu" or "cuda".
        engine: (setting, rate of spot checks) -> a call that makes one step of an engine's run.
        forced: names of systems that only compare the ways of a layer: `layers` alone has them.
    """

    name: str
    systems: dict[str, Callable[[Setting], Prepared]]
    load: Callable[[Setting, np.ndarray, np.ndarray], Any]
    wait: Callable[[Any], Any]
    device: Callable[[str], str]
    engine: Callable[[Setting, float], Callable[[], Any]]
    forced: tuple[str, ...] = ()

    def choose(self, names: list[str] | None) -> list[str]:
        """The systems of those names in the table's order, the non-private one always first.

        Without names all of them, but those in `forced`.
        """
        unknown = sorted(set(names or ()) - set(self.systems))
        if unknown:
            raise ValueError(
                f"systems={unknown} are not known for {self.name}. Expected names among "
                f"{list(self.systems)}."
            )
        if not names:
            return [name for name in self.systems if name not in self.forced]
        return [name for name in self.systems if name in (NON_PRIVATE, *names)]


def installed() -> list[str]:
    """The stacks whose frameworks are here.

    Raises:
        ModuleNotFoundError: neither is.
    """
    found = [name for name in STACKS if importlib.util.find_spec(name)]
    if not found:
        raise ModuleNotFoundError(
            "Neither torch nor jax is installed. Run: pip install 'dualdp[torch]' or 'dualdp[jax]'"
        )
    return found


def stack(name: str) -> Stack:
    """The stack of that name; imports its framework."""
    if name not in STACKS:
        raise ValueError(f"backend={name!r} is not known. Expected 'torch' or 'jax'.")
    return importlib.import_module(f"dualdp_bench.systems_{name}").STACK


def reason(error: Exception) -> str:
    """An exception as one line for a table."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:240]}"

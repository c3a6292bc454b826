# SPDX-License-Identifier: Apache-2.0
"""Interface of the measured systems, and the table of stacks.

A system is a function of a `Setting` that returns a `Prepared`; one that is not installed or cannot
run the workload raises, and its row shows the reason. The tables are in `systems_torch.py` and
`systems_jax.py` (non-private, dualdp's methods, `vmap(grad)`, the loop) and in `peers_torch.py` and
`peers_jax.py` (other libraries).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dualdp import PrivacyPlan
from dualdp.plan.correlated.strategies import Strategy
from dualdp_tools.bench.workloads import Workload

NON_PRIVATE, LOOP, AUTO, MULTI = "non-private", "loop", "dualdp:auto", "vmap(grad)"
METHODS = ("auto", "book_keeping", "two_pass", "materialize", "vmap")
STACKS = ("torch", "jax")
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 1e-3


class NothingToForce(Exception):
    """Forced method that no layer of the workload supports; the system then has no row."""


class Clipped(NamedTuple):
    """Result that the gate compares: clipped sums by name, and the norms if available."""

    sums: dict[str, np.ndarray]
    norms: np.ndarray | None


@dataclass(frozen=True)
class Setting:
    """One point of a benchmark."""

    workload: Workload  # model, data and loss
    n: int  # rows per step
    max_grad_norm: float = 1.0
    device: str = "cpu"  # or "cuda"
    seed: int = 0  # of the weights
    rows_per_unit: int = 1  # views of an example, whose gradients are averaged before the clip

    def plan(self, **changes: Any) -> PrivacyPlan:
        """Return a plan with steps of this setting; `changes` replace its arguments."""
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

    def run_of_batches(self, correlation: Strategy | None = None) -> PrivacyPlan:
        """Return the plan of a run with batches of exactly n of 2 n examples."""
        noise: dict[str, Any] = {"sampler": "shuffle"}
        if correlation is not None:
            noise = {"sampler": "fixed_order", "correlation": correlation, "num_steps": 100_000}
        return self.plan(num_examples=2 * self.n, **noise)


@dataclass(frozen=True)
class Prepared:
    """System with its own model, called with a batch on the device."""

    gradient: Callable[[Any], Any]  # -> clipped sum (non-private: gradient of the mean loss)
    read: Callable[[Any], Clipped] | None = None  # reads that sum; None for the non-private step
    update: Callable[[Any], Any] | None = None  # with noise and optimizer step, if supported
    memory: Callable[[Any], int | None] = lambda batch: None  # -> peak bytes of `gradient`
    chosen: Callable[[Any], str] = lambda batch: ""  # -> text about the methods it chose
    clear: Callable[[], Any] = lambda: None  # after a call: forgets the gradients left on a GPU
    problem: Any = None  # its model, loss and optimizer


@dataclass(frozen=True)
class Stack:
    """One framework: its systems, and functions to load data and to wait for results."""

    name: str  # "torch" or "jax"
    systems: dict[str, Callable[[Setting], Prepared]]
    load: Callable[[Setting, np.ndarray, np.ndarray], Any]  # NumPy batch -> batch on the device
    wait: Callable[[Any], Any]  # blocks until an outcome is complete, and returns it
    use_device: Callable[[str], str]  # "cpu" or "cuda" -> its name; products are float32 from now
    engine: Callable[..., Callable[[], Any]]  # (setting, checks, correlation=) -> a run's step
    forced: tuple[str, ...] = ()  # systems with one method forced, for the suite `layers` only

    def choose(self, names: list[str] | None) -> list[str]:
        """Return the systems of those names, the non-private one first; or all not `forced`."""
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
    """Return the stacks whose frameworks are installed; raise if neither is."""
    found = [name for name in STACKS if importlib.util.find_spec(name)]
    if not found:
        raise ModuleNotFoundError(
            "Neither torch nor jax is installed. Run: pip install 'dualdp[torch]' or 'dualdp[jax]'"
        )
    return found


def stack(name: str) -> Stack:
    """Return the stack of that name, after importing its framework."""
    if name not in STACKS:
        raise ValueError(f"backend={name!r} is not known. Expected 'torch' or 'jax'.")
    ours = importlib.import_module(f"dualdp_tools.bench.systems_{name}")
    peers = importlib.import_module(f"dualdp_tools.bench.peers_{name}")
    return Stack(
        name,
        ours.SYSTEMS | peers.SYSTEMS,
        ours.load,
        ours.wait,
        ours.use_device,
        ours.engine,
        tuple(ours.FORCED),
    )


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of a call and None; or None and its error, after letting go its memory."""
    try:
        return call(), None
    except Exception as error:  # any exception is the reason in the system's row
        why = error_text(error)
    gc.collect()  # what it allocated may be in cycles, such as those of hooks
    return None, why


def error_text(error: Exception) -> str:
    """Return an exception as one line for a table."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:240]}"

# SPDX-License-Identifier: Apache-2.0
"""Cost of the noise per number, relative to the frameworks' own generators.

For dualdp the whole release is timed: noise drawn, added to a sum, divided. A mode is compared with
the framework's generator in the mode's precision: float32, and float64 for "secure".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from dualdp import PrivacyPlan
from dualdp.plan.correlated import strategies
from dualdp.plan.correlated.strategies import Strategy
from dualdp.plan.plan import NOISE
from dualdp.randomness import parallel
from dualdp_tools.bench import systems
from dualdp_tools.bench.measure import Protocol, interleave
from dualdp_tools.bench.results import Row

NUM_PARAMETERS = 20  # parameters that hold the numbers
YARDSTICKS = {"fast": "float32", "portable": "float32", "secure": "float64"}
CORRELATED: dict[str, Strategy] = {
    "window of 4": strategies.bisr(bands=4),
    "band of 4": strategies.band((1.0, 0.5, 0.375, 0.3125)),
    "blt of 3": strategies.blt(decays=(0.99, 0.9, 0.5), scales=(0.1, 0.2, 0.3)),
}
SIZES: dict[str, Any] = {
    "num_examples": 10_000,
    "expected_batch_size": 100,
    "num_steps": None,
    "noise_multiplier": 1.0,
    "max_grad_norm": 1.0,
    "delta": 1e-5,
}
Calls = dict[str, Callable[[], Any]]


def torch_calls(size: int) -> Calls:
    """Return calls of every mode and both reference generators, under torch."""
    import torch

    from dualdp_torch.noise.noise import noised_mean

    sums = {str(index): torch.zeros(size // NUM_PARAMETERS) for index in range(NUM_PARAMETERS)}
    return {
        "float32": lambda: torch.randn(size),
        "float64": lambda: torch.randn(size, dtype=torch.float64),
        **releases(lambda plan, step: noised_mean(sums, plan, step)),
    }


def jax_calls(size: int) -> Calls:
    """Return compiled calls of every mode and both reference generators, under JAX."""
    import jax
    import jax.numpy as jnp

    from dualdp_jax.noise.noise import noised_mean, release_at
    from dualdp_jax.noise.recursion import rows_of

    sums = {str(index): jnp.zeros(size // NUM_PARAMETERS) for index in range(NUM_PARAMETERS)}
    update, steps = jax.jit(noised_mean), count()
    draw = jax.jit(
        lambda key, dtype: jax.random.normal(key, (size,), dtype), static_argnames="dtype"
    )

    def normals(dtype: str) -> Any:
        with jax.enable_x64(dtype == "float64"):
            return draw(jax.random.key(next(steps)), dtype).block_until_ready()

    def release(plan: PrivacyPlan, step: int) -> Any:
        noise = release_at(plan, step, like=sums, rows=rows_of(plan))
        return jax.block_until_ready(update(sums, noise))

    return {dtype: partial(normals, dtype) for dtype in ("float32", "float64")} | releases(release)


def releases(release: Callable[[PrivacyPlan, int], Any]) -> Calls:
    """Return one call per mode, each of which releases the next step of its own plan."""

    def call(mode: str, correlation: Strategy | None = None) -> Callable[[], Any]:
        changes: Any = {"noise": mode}
        if correlation is not None:
            changes |= {"correlation": correlation, "sampler": "fixed_order", "num_steps": 100_000}
        plan, steps = PrivacyPlan(**{**SIZES, **changes}), count()
        return lambda: release(plan, next(steps))

    independent = {f"dualdp {mode}": call(mode) for mode in NOISE}
    return independent | {f"dualdp {kind}": call("fast", s) for kind, s in CORRELATED.items()}


STACKS: dict[str, Callable[[int], Calls]] = {"torch": torch_calls, "jax": jax_calls}


def measure(*, quick: bool) -> Iterator[list[Row]]:
    """Yield rows with nanoseconds per number of every mode, on both stacks."""
    protocol = Protocol(rounds=3, warmup=1) if quick else Protocol(patience=1.0)
    for stack, calls in STACKS.items():
        for size in (10_000,) if quick else (1_000_000, 10_000_000):
            yield point(stack, calls, size, protocol)


def point(stack: str, calls: Callable[[int], Calls], size: int, protocol: Protocol) -> list[Row]:
    """Return the rows of every system of one stack for `size` numbers."""
    base = Row(
        suite="noise",
        stack=stack,
        workload=f"{size:.0e} numbers",
        system="dualdp",
        quantity="noise",
        options={"numbers": size, "threads": parallel.cores()},
    )
    try:
        timings = interleave(calls(size), protocol)
    except ModuleNotFoundError as error:
        return [replace(base, error=systems.error_text(error))]
    rows = []
    for system, timing in timings.items():
        mode = system.removeprefix("dualdp ")
        dtype = YARDSTICKS.get(mode, "float32" if mode in CORRELATED else mode)
        numbers = {
            "value": timing.median / size * 1e9,
            "ratio": timing.median / timings[dtype].median,
            "note": f"ratio: over {dtype} normals of {stack}",
        }
        rows.append(timing.fill(replace(base, system=system), **numbers))
    return rows

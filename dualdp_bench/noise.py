# SPDX-License-Identifier: Apache-2.0
"""What a million numbers of noise cost, beside the frameworks' own generators.

Ours is the whole release: noise drawn, added to a sum, divided. The yardstick of a mode is the
framework's generator in the precision that the mode draws in: float32, and float64 for "secure".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from dualdp import PrivacyPlan
from dualdp.plan import NOISE
from dualdp.randomness import blocks
from dualdp_bench import systems
from dualdp_bench.measure import Protocol, interleave
from dualdp_bench.results import Row

PARTS = 20  # parameters that the numbers are spread over
YARDSTICKS = {"fast": "float32", "portable": "float32", "secure": "float64"}
Calls = dict[str, Callable[[], Any]]


def run(mode: str) -> PrivacyPlan:
    """An endless plan with this noise."""
    return PrivacyPlan(
        num_examples=10_000,
        expected_batch_size=100,
        num_steps=None,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-5,
        noise=mode,
    )


def torch_calls(size: int) -> Calls:
    """Every mode and both yardsticks under torch."""
    import torch

    from dualdp_torch.noise import noised_mean

    sums = {str(part): torch.zeros(size // PARTS) for part in range(PARTS)}
    return {
        "float32": lambda: torch.randn(size),
        "float64": lambda: torch.randn(size, dtype=torch.float64),
        **releases(lambda plan, step: noised_mean(sums, plan, step)),
    }


def jax_calls(size: int) -> Calls:
    """The same under jax, compiled."""
    import jax
    import jax.numpy as jnp

    from dualdp_jax.noise import noised_mean, release_at

    sums = {str(part): jnp.zeros(size // PARTS) for part in range(PARTS)}
    update, steps = jax.jit(noised_mean), count()
    draw = jax.jit(
        lambda key, dtype: jax.random.normal(key, (size,), dtype), static_argnames="dtype"
    )

    def yardstick(dtype: str) -> Any:
        with jax.enable_x64(dtype == "float64"):
            return draw(jax.random.key(next(steps)), dtype).block_until_ready()

    return {
        "float32": lambda: yardstick("float32"),
        "float64": lambda: yardstick("float64"),
        **releases(
            lambda plan, step: jax.block_until_ready(
                update(sums, release_at(plan, step, like=sums))
            )
        ),
    }


def releases(release: Callable[[PrivacyPlan, int], Any]) -> Calls:
    """One call per mode, each the next step of a plan of its own."""

    def call(mode: str) -> Callable[[], Any]:
        plan, steps = run(mode), count()
        return lambda: release(plan, next(steps))

    return {f"dualdp {mode}": call(mode) for mode in NOISE}


STACKS: dict[str, Callable[[int], Calls]] = {"torch": torch_calls, "jax": jax_calls}


def measure(*, quick: bool) -> Iterator[list[Row]]:
    """Nanoseconds per number of every mode, on both stacks.

    Args:
        quick: a few numbers only, to show that all runs.
    """
    protocol = Protocol(rounds=3, warmup=1) if quick else Protocol(patience=1.0)
    for stack, calls in STACKS.items():
        for size in (10_000,) if quick else (1_000_000, 10_000_000):
            yield point(stack, calls, size, protocol)


def point(stack: str, calls: Callable[[int], Calls], size: int, protocol: Protocol) -> list[Row]:
    """Every system of one stack on so many numbers."""
    common: dict[str, Any] = {
        "suite": "noise",
        "stack": stack,
        "workload": f"{size:.0e} numbers",
        "quantity": "noise",
        "options": {"numbers": size, "threads": blocks.cores()},
    }
    try:
        timings = interleave(calls(size), protocol)
    except ModuleNotFoundError as error:
        return [Row(system="dualdp", error=systems.reason(error), **common)]
    rows = []
    for system, timing in timings.items():
        dtype = YARDSTICKS.get(system.removeprefix("dualdp "), system)
        rows.append(
            Row(
                system=system,
                seconds=timing.median,
                spread=timing.spread,
                rounds=len(timing.seconds),
                first=timing.first,
                value=timing.median / size * 1e9,
                ratio=timing.median / timings[dtype].median,
                note=f"ratio: over {dtype} normals of {stack}",
                **common,
            )
        )
    return rows

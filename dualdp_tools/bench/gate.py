# SPDX-License-Identifier: Apache-2.0
"""Correctness gate: a system is timed only if its result equals the loop's on the same batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dualdp_tools.bench.systems import (
    LOOP,
    Clipped,
    NothingToForce,
    Prepared,
    Setting,
    Stack,
    attempt,
)

# Largest difference from the loop: relative to each parameter's sum; and to the whole sum. Float32
# gives up to 1e-4 (sums in another order, ReLUs at their kink), a wrong rule several percent.
TOLERANCE, FLOOR = 1e-3, 1e-5
# A batched forward is rounded differently from that of a single example, so an example at the kink
# of a ReLU may fall on its other side: up to 3e-4 of n C on the MLP, for every system alike.
KINKS = 5e-4  # share of n C, the largest sum of n clipped examples
PROBES = 8  # examples whose median norm becomes C, so that about half of a batch is clipped


class WrongSystem(ValueError):
    """System that does not compute the clipped sum."""


def check(system: str, found: Clipped, truth: Clipped, slack: float = 0.0) -> None:
    """Raise `WrongSystem` if a system's clipped sum or norms differ from those of the loop."""
    if found.sums.keys() != truth.sums.keys():
        raise WrongSystem(
            f"{system} is not timed: it returned sums of {sorted(found.sums)}, "
            f"the loop has {sorted(truth.sums)}."
        )
    whole = np.sqrt(sum(float(np.square(sums).sum()) for sums in truth.sums.values()))
    pairs = [(f"the sum of {key!r}", found.sums[key], truth.sums[key]) for key in truth.sums]
    if found.norms is not None:
        pairs.append(("the norms", found.norms, truth.norms))
    for what, ours, theirs in pairs:
        if ours.shape != theirs.shape:
            raise WrongSystem(
                f"{system} is not timed: {what} has shape {ours.shape}, "
                f"the loop has {theirs.shape}."
            )
        size = float(np.linalg.norm(theirs))
        error = float(np.linalg.norm(ours.astype(np.float64) - theirs))
        allowed = TOLERANCE * size + FLOOR * whole + slack
        if not error <= allowed:
            raise WrongSystem(
                f"{system} is not timed: {what} differs from the loop by {error:.1e} "
                f"of {size:.1e}, allowed is {allowed:.1e}."
            )


def calibrate(stack: Stack, setting: Setting) -> Setting:
    """Return the setting with C at the median norm of a few examples, computed by the loop."""
    few = replace(setting, n=min(setting.n, PROBES * setting.rows_per_unit))
    loop = stack.systems[LOOP](few)
    norms = loop.read(loop.gradient(stack.load(few, *setting.workload.batch(few.n)))).norms
    return replace(setting, max_grad_norm=float(np.median(norms)))


@dataclass(frozen=True)
class Candidate:
    """System that passed the gate, and the seconds from its creation to its first gradient."""

    prepared: Prepared
    first: float


def admit(
    stack: Stack, setting: Setting, names: list[str], batch: Any
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Prepare and call each system once; return those that pass and reasons for the others."""
    admitted: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    start = time.perf_counter()
    loop = stack.systems[LOOP](setting)
    truth = loop.read(stack.wait(loop.gradient(batch)))
    of_loop = Candidate(loop, time.perf_counter() - start)
    slack = KINKS * setting.n / setting.rows_per_unit * setting.max_grad_norm
    for name in names:
        if name == LOOP:
            admitted[name] = of_loop
            continue
        candidate, why = attempt(partial(_checked, stack, setting, name, batch, truth, slack))
        if why:
            refused[name] = why
        elif candidate is not None:
            admitted[name] = candidate
    return admitted, refused


def _checked(
    stack: Stack, setting: Setting, name: str, batch: Any, truth: Clipped, slack: float
) -> Candidate | None:
    """Prepare and call a system, whose result is the loop's; None if it has nothing to force."""
    start = time.perf_counter()
    try:
        prepared = stack.systems[name](setting)
    except NothingToForce:
        return None
    outcome = stack.wait(prepared.gradient(batch))
    first = time.perf_counter() - start
    if prepared.read is not None:
        check(name, prepared.read(outcome), truth, slack)
    prepared.clear()
    return Candidate(prepared, first)

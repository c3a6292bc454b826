# SPDX-License-Identifier: Apache-2.0
"""Correctness gate: a system is timed only if its result equals the loop's on the same batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.systems import LOOP, Clipped, Setting, Stack

# Largest difference from the loop: relative to each parameter's sum; and to the whole sum. Float32
# gives up to 1e-4 (sums in another order, ReLUs at their kink), a wrong rule several percent.
TOLERANCE, FLOOR = {"float32": 1e-3, "bfloat16": 5e-2}, 1e-5
# A batched forward is rounded differently from that of a single example, so an example at the kink
# of a ReLU may fall on its other side: up to 3e-4 of n C on the MLP, for every system alike.
KINKS = 5e-4  # share of n C, the largest sum of n clipped examples
PROBES = 8  # examples whose median norm becomes C, so that about half of a batch is clipped


class WrongSystem(ValueError):
    """System that does not compute the clipped sum."""


def check(system: str, found: Clipped, truth: Clipped, setting: Setting) -> None:
    """Raise `WrongSystem` if a system's clipped sum or norms differ from those of the loop."""
    if found.sums.keys() != truth.sums.keys():
        raise WrongSystem(
            f"{system} is not timed: it returned sums of {sorted(found.sums)}, "
            f"the loop has {sorted(truth.sums)}."
        )
    whole = np.sqrt(sum(float(np.square(sums).sum()) for sums in truth.sums.values()))
    pairs = [(f"the sum of {key!r}", found.sums[key], truth.sums[key]) for key in truth.sums]
    if found.norms is not None and truth.norms is not None:
        pairs.append(("the norms", found.norms, truth.norms))
    for what, ours, theirs in pairs:
        if ours.shape != theirs.shape:
            raise WrongSystem(
                f"{system} is not timed: {what} has shape {ours.shape}, "
                f"the loop has {theirs.shape}."
            )
        size = float(np.linalg.norm(theirs))
        error = float(np.linalg.norm(ours.astype(np.float64) - theirs))
        slack = KINKS * setting.n * setting.max_grad_norm
        allowed = TOLERANCE[setting.compute] * size + FLOOR * whole + slack
        if not error <= allowed:
            raise WrongSystem(
                f"{system} is not timed: {what} differs from the loop by {error:.1e} "
                f"of {size:.1e}, allowed is {allowed:.1e}."
            )


def calibrate(stack: Stack, setting: Setting) -> Setting:
    """Return the setting with C at the median norm of a few examples, computed by the loop."""
    few = replace(setting, n=min(setting.n, PROBES))
    norms = truth(stack, few, stack.load(few, *setting.workload.batch(few.n))).norms
    assert norms is not None
    return replace(setting, max_grad_norm=float(np.median(norms)))


def truth(stack: Stack, setting: Setting, batch: Any) -> Clipped:
    """Return the clipped sum and norms of the loop over single examples."""
    loop = stack.systems[LOOP](replace(setting, compute="float32"))
    assert loop.read is not None
    return loop.read(stack.wait(loop.gradient(batch)))

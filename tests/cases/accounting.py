# SPDX-License-Identifier: Apache-2.0
"""Published accounting values, and random settings with extreme corners."""

import json
import math
import pathlib

import numpy as np

from dualdp import accountants

PUBLISHED = json.loads((pathlib.Path(__file__).parent / "accounting.json").read_text())


def run_of(row):
    """Arguments of `get_epsilon` of a published row."""
    names = ("noise_multiplier", "sample_rate", "num_steps", "delta")
    return {name: row[name] for name in names}


def get_delta(*, epsilon, accountant="pld", **run):
    """Delta of equal steps; arguments as those of `dualdp.get_epsilon`."""
    about = {key: run.pop(key) for key in ("neighboring_relation", "group_size") if key in run}
    made = accountants.create(accountant, **about)
    made.step(**run)
    return made.get_delta(epsilon=epsilon)


def settings(count, seed, *, extreme):
    """`count` random runs; extreme ones reach sigma .05 .. 100, q 1e-8 .. 1, 1e7 steps, 1e-30."""
    rng = np.random.default_rng(seed)
    low, high = (
        ((0.05, 1e-8, 1, 1e-30), (100, 1, 1e7, 0.5))
        if extreme
        else ((0.4, 1e-4, 1, 1e-8), (8, 0.3, 1e5, 1e-3))
    )
    for _ in range(count):
        sigma, rate, steps, delta = (
            math.exp(rng.uniform(math.log(a), math.log(b))) for a, b in zip(low, high, strict=True)
        )
        yield {
            "noise_multiplier": sigma,
            "sample_rate": min(rate, 1.0),
            "num_steps": int(steps),
            "delta": delta,
        }

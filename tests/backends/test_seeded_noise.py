# SPDX-License-Identifier: Apache-2.0
"""What a seed gives on each stack: the noise of tests/fixtures/seeded.json.

`python -m tests.backends.test_seeded_noise` writes the parts "torch" and "jax" of that file anew.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dualdp.jax as dpj
import dualdp.torch as dpt
from tests.dualdp.randomness.test_seeded import FIXTURE, made

PLANS = ("poisson", "window", "band", "blt")
NUM_STEPS = 6
SHAPES = {"bias": (3,), "weight": (4, 5)}
CASES = [
    (stack, noise, name)
    for stack in ("torch", "jax")
    for noise in ("fast", "portable")
    for name in PLANS
]


def noises(stack: str, noise: str, name: str) -> list[list[float]]:
    """Return the noisy means of zeros at each step, bias and weight one after the other."""
    plan = dataclasses.replace(made(name), noise=noise)
    rows = []
    for step in range(NUM_STEPS):
        if stack == "torch":
            sums: Any = {k: torch.zeros(v) for k, v in SHAPES.items()}
            means = dpt.noisy_mean(sums, plan, step)
        else:
            sums = {k: jnp.zeros(v) for k, v in SHAPES.items()}
            means = dpj.noisy_mean(sums, plan, step)
        flat = np.concatenate([np.asarray(means[k], np.float64).ravel() for k in SHAPES])
        rows.append(flat.tolist())
    return rows


@pytest.mark.parametrize(("stack", "noise", "name"), CASES)
def test_seeded_noise(stack: str, noise: str, name: str) -> None:
    """An uninterrupted seeded run has the noise of the fixture, to the rounding of a machine."""
    kept = json.loads(FIXTURE.read_text())[stack][noise][name]
    np.testing.assert_allclose(noises(stack, noise, name), kept, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    whole = json.loads(FIXTURE.read_text())
    for stack, noise, name in CASES:
        whole.setdefault(stack, {}).setdefault(noise, {})[name] = noises(stack, noise, name)
    FIXTURE.write_text(json.dumps(whole, indent=1) + "\n")

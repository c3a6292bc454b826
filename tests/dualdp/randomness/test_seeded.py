# SPDX-License-Identifier: Apache-2.0
"""What a seed gives: the batches, keys and normals of tests/fixtures/seeded.json, to the bit.

`python -m tests.dualdp.randomness.test_seeded` writes the part "core" of that file anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualdp
from dualdp.randomness import PURPOSES, SegmentBits, fold_in, seeded_bits, threefry

FIXTURE = Path(__file__).parents[2] / "fixtures" / "seeded.json"
STEPS = (0, 1, 6, 13)
SEEDS = (0, 7, 2**100)
BASE: dict[str, Any] = {
    **{"num_examples": 100, "expected_batch_size": 20, "num_steps": 14, "noise_multiplier": 1.1},
    **{"max_grad_norm": 0.5, "delta": 1e-5, "noise": "portable", "seed": 3},
}
BANDS = dualdp.correlated.band([1.0, 0.5, 0.3])
BLT = dualdp.correlated.blt(decays=[0.9, 0.5], scales=[0.2, 0.1])
BINS, CYCLIC = {"sampler": "balls_in_bins"}, {"sampler": "cyclic_poisson", "min_separation": 4}
PLANS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "open-ended": {"num_steps": None, "seed": 2**64},
    "truncated_poisson": {"sampler": "truncated_poisson", "max_batch_size": 18},
    "fixed_size": {"sampler": "fixed_size", "neighboring_relation": "replace"},
    "shuffle": {"sampler": "shuffle"},
    "balls_in_bins": BINS,
    "balls_in_bins of 2 epochs": {**BINS, "epochs_per_assignment": 2},
    "cyclic_poisson": CYCLIC,
    "fixed_order": {"sampler": "fixed_order"},
    "window": {"sampler": "fixed_order", "correlation": dualdp.correlated.bisr(bands=3)},
    "band": {**CYCLIC, "correlation": BANDS},
    "blt": {**BINS, "correlation": BLT},
    "users": {"unit": "user", "rows_per_unit": 2},
    "pairs": {"rows_per_unit": 2},
    "batch sizes that grow": {"expected_batch_size": dualdp.schedules.Linear(5, 40, over=10)},
}
USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 3))


def made(name: str) -> dualdp.PrivacyPlan:
    """Return the seeded plan of this name."""
    return dualdp.PrivacyPlan(**BASE | PLANS[name])


def digest(array: Any) -> str:
    """Return the first half of the SHA-256 of an array's little-endian bytes."""
    array = np.asarray(array)
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return hashlib.sha256(data).hexdigest()[:32]


def batches(name: str) -> list[Any]:
    """Return (size, digest of the int64 indices) of some batches, or of their rows."""
    plan, drawn = made(name), []
    for step in STEPS:
        units = plan.batch_indices(step)
        rows = [] if plan.unit == "example" else [digest(plan.row_indices(step, USERS))]
        drawn.append([len(units), digest(units), *rows])
    return drawn


def secrets(seed: int) -> dict[str, list[str]]:
    """Return the 64 bytes of some steps for every purpose, in hexadecimal."""
    return {p: [seeded_bits(seed, p, step).hex() for step in (0, 12_345)] for p in PURPOSES}


def normals() -> list[Any]:
    """Return float32 and float64 normals of two parameters at two steps, as lists."""
    found = []
    for step in (0, 5):
        key = SegmentBits(made("poisson").seed).key("noise", step)
        for leaf, dtype in ((0, np.float32), (3, np.float64)):
            found.append(threefry.normal(fold_in(key, leaf), 6, dtype=dtype).tolist())
    return found


def core() -> dict[str, Any]:
    """Return everything that this file compares."""
    return {
        "batches": {name: batches(name) for name in PLANS},
        "secrets": {str(seed): secrets(seed) for seed in SEEDS},
        "keys": [SegmentBits(made("window").seed).key("noise", step).tolist() for step in STEPS],
        "normals": normals(),
    }


def load() -> dict[str, Any]:
    """Return the part "core" of the fixture."""
    return json.loads(FIXTURE.read_text())["core"]


@pytest.mark.parametrize("name", PLANS)
def test_seeded_batches(name: str) -> None:
    """Batches of every sampler, and rows of users, are those of the fixture."""
    assert batches(name) == load()["batches"][name]


@pytest.mark.parametrize("seed", SEEDS)
def test_seeded_secrets(seed: int) -> None:
    """The 64 bytes of a step are those of the fixture, for every purpose."""
    assert secrets(seed) == load()["secrets"][str(seed)]


def test_seeded_keys_and_normals() -> None:
    """Keys are equal to the bit; normals to the rounding of the machine's logarithm."""
    kept = load()
    assert core()["keys"] == kept["keys"]
    for ours, theirs in zip(normals(), kept["normals"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=4e-7)


if __name__ == "__main__":
    whole = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
    FIXTURE.write_text(json.dumps(whole | {"core": core()}, indent=1) + "\n")

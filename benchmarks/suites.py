# SPDX-License-Identifier: Apache-2.0
"""Benchmark suites as data: which workloads, sizes and systems have a row."""

from __future__ import annotations

from typing import Any

from benchmarks.results import Row
from benchmarks.systems import LOOP, MULTI, NON_PRIVATE, OURS

# (workload, options, batch size)
Point = tuple[str, dict[str, Any], int]
_IMAGE32, _VIT = {"image": 32}, {"image": 64, "layers": 6}
SPEED: dict[str, list[Point]] = {
    "torch": [
        ("mlp", {}, 256),
        ("mnist", {}, 256),
        ("cifar10", {}, 128),
        ("embed", {}, 256),
        ("lstm", {}, 64),
        ("gpt", {}, 16),
        ("resnet18_gn", _IMAGE32, 32),
        ("vit_tiny", _VIT, 32),
    ],
    "jax": [
        ("mlp", {}, 256),
        ("mnist", {}, 256),
        ("cifar10", {}, 64),
        ("embed", {}, 256),
        ("lstm", {}, 32),
        ("gpt", {}, 8),
        ("resnet18_gn", _IMAGE32, 16),
    ],
}
# Sizes that fill a GPU of a data centre, for both stacks.
GPT2_SMALL = {"layers": 12, "width": 768, "heads": 12, "length": 1_024, "vocabulary": 50_257}
GPU: list[Point] = [
    ("mlp", {}, 2_048),
    ("mnist", {}, 2_048),
    ("cifar10", {}, 1_024),
    ("wrn16_4", {}, 256),
    ("resnet50_gn", {}, 64),
    ("vit_base", {}, 64),
    ("gpt", GPT2_SMALL, 8),
    ("lstm", {}, 512),
    ("embed", {}, 1_024),
]
QUICK: list[Point] = [
    ("mlp", {"width": 128}, 64),
    ("gpt", {"layers": 1, "width": 64, "length": 32, "vocabulary": 200}, 8),
]
PEERS = {
    "torch": (
        *("opacus:hooks", "opacus:functorch", "opacus:ew", "opacus:ghost"),
        *("backpack", "opake", MULTI, LOOP),
    ),
    "jax": ("jax_privacy", MULTI, LOOP),
}
SUITES = ("speed", "first-batch", "gpu")


def rows(
    suite: str,
    stack: str,
    *,
    workloads: list[str] | None = None,
    systems: list[str] | None = None,
    quick: bool = False,
) -> list[Row]:
    """Return the empty rows of a suite, those of one workload together."""
    points = QUICK if quick else GPU if suite == "gpu" else SPEED[stack]
    usual = (OURS,) if quick else (NON_PRIVATE, OURS, MULTI)
    if suite in ("speed", "gpu") and not quick:
        usual = (NON_PRIVATE, OURS, *PEERS[stack])
    unknown = sorted(set(workloads or ()) - {name for name, *_ in points})
    if unknown:
        raise ValueError(
            f"workload={unknown} is not in the suite {suite!r}. Expected any of "
            f"{[name for name, *_ in points]}."
        )
    return [
        Row(suite=suite, stack=stack, workload=name, options=options, batch=n, system=system)
        for name, options, n in points
        for system in systems or usual
        if not workloads or name in workloads
    ]

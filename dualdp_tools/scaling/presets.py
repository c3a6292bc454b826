# SPDX-License-Identifier: Apache-2.0
"""Presets of accelerators and models, the assumptions of the time model, and a forecast's input."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualdp import _validate
from dualdp_tools.scaling.traffic import GATHERS

SHARDINGS = ("auto", "data", "node", "full")
PRECISIONS = {"bfloat16": 2, "float32": 4}
NOISES = ("fast", "secure")


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its interconnect: peak figures published by its maker."""

    flops: float  # dense bfloat16 operations per second
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes per second
    node: int  # accelerators joined by `link`
    link: float  # bytes per second in one direction inside a node
    network: float  # bytes per second in one direction and per accelerator between nodes
    source: str  # of the figures


_GPU_NODE = "data sheet of the SXM module; network of a DGX, one adapter per GPU"
HARDWARE = {
    "a100": Hardware(312e12, 80e9, 2.039e12, 8, 300e9, 25e9, f"NVIDIA A100 80GB {_GPU_NODE}"),
    "h100": Hardware(989e12, 80e9, 3.35e12, 8, 450e9, 50e9, f"NVIDIA H100 {_GPU_NODE}"),
    "h200": Hardware(989e12, 141e9, 4.8e12, 8, 450e9, 50e9, f"NVIDIA H200 {_GPU_NODE}"),
    "tpu_v5p": Hardware(
        459e12, 95 * 2**30, 2.765e12, 6144, 600e9, 6.25e9, "Google Cloud documentation, TPU v5p"
    ),
}


@dataclass(frozen=True)
class Transformer:
    """Decoder of equal blocks: attention, then two products of four times the width."""

    layers: int
    width: int  # d, numbers per position
    positions: int = 1024  # T, of one example
    vocabulary: int = 32_000  # V; embedding and head are separate matrices

    @property
    def block(self) -> int:
        """Weights of one block, without biases and norms (less than 0.1 %)."""
        return 12 * self.width**2

    @property
    def root(self) -> int:
        """Weights outside the blocks: embedding, positions, head."""
        return (2 * self.vocabulary + self.positions) * self.width

    @property
    def num_parameters(self) -> int:
        """P, all weights."""
        return self.layers * self.block + self.root

    @property
    def largest(self) -> int:
        """Weights of the largest matrix."""
        return self.width * max(4 * self.width, self.vocabulary)

    @property
    def products(self) -> list[tuple[int, int, int, int]]:
        """(count, positions, inputs, outputs) of the products with a weight."""
        t, d = self.positions, self.width
        block = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
        return [(self.layers, t, *sizes) for sizes in block] + [(1, t, d, self.vocabulary)]


#: Billions of parameters -> model of about that size.
MODELS = {
    0.1: Transformer(12, 640),
    0.35: Transformer(24, 1024),
    1.3: Transformer(24, 2048),
    2.7: Transformer(32, 2560),
    6.7: Transformer(32, 4096),
    13: Transformer(40, 5120),
    30: Transformer(48, 7168),
    70: Transformer(86, 8192),
}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the time model that no formula gives; adapt them to your machine."""

    utilisation: float = 0.4  # share of the peak that matrix products reach
    efficiency: float = 0.8  # share of the published bandwidth that a collective reaches
    overlap: float = 0.8  # share of the shorter of computing and sending that overlaps
    latency: float = 5e-6  # seconds of one hop of a collective; log2(ranks) hops are counted
    usable: float = 0.9  # share of the accelerator's memory that the arrays may fill
    optimizer_numbers: int = 2  # float32 numbers of optimizer state per parameter (Adam: 2)
    noise_passes: int = 4  # times that the noise goes through the memory ("fast")
    secure_rate: float = 30e6  # normals of the cipher per second and core ("secure")
    cores: int = 8  # of the host, per accelerator


@dataclass(frozen=True)
class Job:
    """Input of a forecast."""

    model: Transformer
    ranks: int  # k, number of accelerators
    hardware: Hardware
    expected_batch_size: int = 8192  # N, size of the logical batch over all ranks
    # "data" (a copy of the weights on each rank), "node" (one per node, which FSDP2 under our
    # engine does not support), "full" (one over all ranks), or "auto": the fastest that fits.
    sharding: str = "auto"
    precision: str = "bfloat16"  # of forward and backward; all else is float32
    noise: str = "fast"
    stack: str = "torch"  # or "jax", which gathers sharded weights differently
    assumed: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        _validate.integer("ranks", self.ranks, minimum=1)
        _validate.integer("expected_batch_size", self.expected_batch_size, minimum=1)
        _validate.choice("sharding", self.sharding, SHARDINGS)
        _validate.choice("precision", self.precision, PRECISIONS)
        _validate.choice("noise", self.noise, NOISES)
        _validate.choice("stack", self.stack, GATHERS)
        if self.sharding == "node" and self.stack == "torch":
            raise ValueError(
                "sharding='node' is not there under torch, whose engine wants FSDP2 over all "
                "processes. Expected 'data' or 'full', or stack='jax'."
            )

    @property
    def share(self) -> int:
        """Expected number of examples of one rank in a step."""
        return math.ceil(self.expected_batch_size / self.ranks)

    @property
    def shards(self) -> list[int]:
        """Candidate numbers of ranks that share one copy of the weights."""
        node = math.gcd(self.hardware.node, self.ranks)
        numbers = {"data": 1, "node": node, "full": self.ranks}
        if self.stack == "torch":
            del numbers["node"]
        return list(numbers.values()) if self.sharding == "auto" else [numbers[self.sharding]]

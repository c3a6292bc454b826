# SPDX-License-Identifier: Apache-2.0
"""Presets of accelerators and models, and the assumptions of the time model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its interconnect: peak figures published by its maker.

    Attributes:
        flops: dense bfloat16 operations per second.
        memory: bytes of memory.
        bandwidth: memory bandwidth, bytes per second.
        node: number of accelerators joined by `link`.
        link: bytes per second in one direction inside a node.
        network: bytes per second in one direction and per accelerator between nodes.
        source: str, source of the figures.
    """

    flops: float
    memory: float
    bandwidth: float
    node: int
    link: float
    network: float
    source: str


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
    """Decoder of equal blocks: attention, then two products of four times the width.

    Attributes:
        layers: number of blocks.
        width: d, numbers per position.
        positions: T, positions of one example.
        vocabulary: V; embedding and head are separate matrices.
    """

    layers: int
    width: int
    positions: int = 1024
    vocabulary: int = 32_000

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
    """Assumptions of the time model that no formula gives; adapt them to your machine.

    Attributes:
        utilisation: share of the peak that matrix products reach.
        efficiency: share of the published bandwidth that a collective reaches.
        overlap: share of the shorter of computing and sending that overlaps with the longer.
        latency: seconds of one hop of a collective; log2(ranks) hops are counted.
        usable: share of the accelerator's memory that the arrays may fill.
        optimizer_numbers: float32 numbers of optimizer state per parameter (Adam: 2).
        noise_passes: number of times the noise goes through the memory ("fast").
        secure_rate: normals of the cipher per second and core ("secure").
        cores: number of host cores per accelerator.
    """

    utilisation: float = 0.4
    efficiency: float = 0.8
    overlap: float = 0.8
    latency: float = 5e-6
    usable: float = 0.9
    optimizer_numbers: int = 2
    noise_passes: int = 4
    secure_rate: float = 30e6
    cores: int = 8

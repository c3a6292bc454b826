# SPDX-License-Identifier: Apache-2.0
"""Forecast for a model, a method and a number of accelerators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualdp import _validate
from dualdp_tools.scaling.footprint import memory
from dualdp_tools.scaling.presets import Assumptions, Hardware, Transformer
from dualdp_tools.scaling.timing import Duration, duration
from dualdp_tools.scaling.traffic import GATHERS, METHODS, bytes_sent, messages

SHARDINGS = ("auto", "data", "node", "full")
PRECISIONS = {"bfloat16": 2, "float32": 4}
NOISES = ("fast", "secure")


@dataclass(frozen=True)
class Job:
    """Input of a forecast.

    Attributes:
        model: `Transformer`, sizes of the model.
        ranks: k, number of accelerators.
        hardware: `Hardware` of one accelerator.
        expected_batch_size: N, size of the logical batch over all ranks.
        sharding: "data" (a copy of the weights on each rank), "node" (one per node, which FSDP2
            under our engine does not support), "full" (one over all ranks), or "auto": the fastest
            that fits.
        precision: dtype of forward and backward; sums, norms, noise and optimizer are float32.
        noise: "fast" or "secure".
        stack: "torch" or "jax", which gather sharded weights differently.
        assumed: `Assumptions` of the time model.
    """

    model: Transformer
    ranks: int
    hardware: Hardware
    expected_batch_size: int = 8192
    sharding: str = "auto"
    precision: str = "bfloat16"
    noise: str = "fast"
    stack: str = "torch"
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


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step on each rank.

    Attributes:
        method: key of `METHODS`.
        shards: number of ranks that share one copy of the weights.
        physical_batch_size: largest power of two that fits, at most the rank's share.
        chunks: number of physical batches of a step.
        memory: mapping from item to bytes.
        sent: bytes sent.
        time: `Duration` of a step.
    """

    method: str
    shards: int
    physical_batch_size: int
    chunks: int
    memory: dict[str, float]
    sent: float
    time: Duration


def forecast(method: str, job: Job) -> Forecast | None:
    """Return the forecast of the fastest sharding that fits, or None if none does."""
    _validate.choice("method", method, METHODS)
    found = (_with_shards(method, job, shards) for shards in job.shards)
    fitting = [forecast for forecast in found if forecast is not None]
    return min(fitting, key=lambda forecast: forecast.time.total, default=None)


def _with_shards(method: str, job: Job, shards: int) -> Forecast | None:
    """Forecast with the largest power of two of examples that fits, at most the rank's share."""
    limit = job.hardware.memory * job.assumed.usable
    compute_bytes = PRECISIONS[job.precision]
    size = 1 << (job.share.bit_length() - 1)
    while size:
        chunks = math.ceil(job.share / size)
        items = memory(
            method,
            job.model,
            physical_batch_size=size,
            shards=shards,
            chunks=chunks,
            compute_bytes=compute_bytes,
            optimizer_numbers=job.assumed.optimizer_numbers,
            stack=job.stack,
        )
        if sum(items.values()) <= limit:
            break
        size //= 2
    else:
        return None
    found = messages(
        method,
        job.model.num_parameters,
        ranks=job.ranks,
        shards=shards,
        chunks=chunks,
        compute_bytes=compute_bytes,
        root=job.model.root,
        stack=job.stack,
    )
    time = duration(
        method,
        job.model,
        found,
        hardware=job.hardware,
        assumed=job.assumed,
        physical_batch_size=size,
        shards=shards,
        noise=job.noise,
        chunks=chunks,
        compute_bytes=compute_bytes,
    )
    return Forecast(method, shards, size, chunks, items, bytes_sent(found), time)

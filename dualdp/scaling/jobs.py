# SPDX-License-Identifier: Apache-2.0
"""One line of the table: a model, a method and a number of accelerators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualdp import _validate

from .footprint import memory
from .presets import Assumptions, Hardware, Transformer
from .timing import Duration, duration
from .traffic import GATHERS, METHODS, bytes_sent, messages

SHARDINGS = ("auto", "data", "node", "full")
PRECISIONS = {"bfloat16": 2, "float32": 4}
NOISES = ("fast", "secure")


@dataclass(frozen=True)
class Job:
    """What is to be forecast.

    Attributes:
        model: sizes.
        ranks: k, accelerators.
        hardware: figures of one.
        expected_batch_size: N, of the logical batch, over all ranks.
        sharding: "data" (a copy of the weights on each rank), "node" (one per node, which FSDP2
            under our engine does not do), "full" (one over all ranks), or "auto": the fastest that
            fits.
        precision: of forward and backward; sums, norms, noise and optimizer are float32.
        noise: "fast" or "secure".
        stack: "torch" or "jax", which gather sharded weights in different ways.
        assumed: what the figures do not say.
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
        """Expected examples of one rank in a step."""
        return math.ceil(self.expected_batch_size / self.ranks)

    @property
    def shards(self) -> list[int]:
        """Numbers of ranks that may share one copy of the weights."""
        node = math.gcd(self.hardware.node, self.ranks)
        ways = {"data": 1, "node": node, "full": self.ranks}
        if self.stack == "torch":
            del ways["node"]
        return list(ways.values()) if self.sharding == "auto" else [ways[self.sharding]]


@dataclass(frozen=True)
class Forecast:
    """What a step takes on each rank.

    Attributes:
        method: key of `METHODS`.
        shards: ranks that share one copy of the weights.
        physical_batch_size: largest power of two that fits, at most the rank's share.
        chunks: physical batches of a step.
        memory: item -> bytes.
        sent: bytes.
        time: seconds by what they go to.
    """

    method: str
    shards: int
    physical_batch_size: int
    chunks: int
    memory: dict[str, float]
    sent: float
    time: Duration


def forecast(method: str, job: Job) -> Forecast | None:
    """The fastest way to take a step that fits; None where nothing fits.

    Args:
        method: key of `METHODS`; "plain" is training without privacy.
        job: the rest.
    """
    _validate.choice("method", method, METHODS)
    sizes = {number: physical_batch_size(method, job, number) for number in job.shards}
    fitting = [_at(method, job, number, size) for number, size in sizes.items() if size]
    return min(fitting, key=lambda found: found.time.total, default=None)


def physical_batch_size(method: str, job: Job, shards: int) -> int | None:
    """The largest power of two that fits, at most the rank's share; None if not even 1 does."""
    limit = job.hardware.memory * job.assumed.usable
    size = 1 << (job.share.bit_length() - 1)
    while size and sum(_memory(method, job, shards, size).values()) > limit:
        size //= 2
    return size or None


def _memory(method: str, job: Job, shards: int, size: int) -> dict[str, float]:
    return memory(
        method,
        job.model,
        physical_batch_size=size,
        shards=shards,
        chunks=math.ceil(job.share / size),
        compute_bytes=PRECISIONS[job.precision],
        optimizer_numbers=job.assumed.optimizer_numbers,
        stack=job.stack,
    )


def _at(method: str, job: Job, shards: int, size: int) -> Forecast:
    """The forecast of one way to do it."""
    chunks, compute_bytes = math.ceil(job.share / size), PRECISIONS[job.precision]
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
    kept = _memory(method, job, shards, size)
    return Forecast(method, shards, size, chunks, kept, bytes_sent(found), time)

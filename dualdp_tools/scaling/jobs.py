# SPDX-License-Identifier: Apache-2.0
"""Forecast for a model, a method and a number of accelerators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dualdp import _validate
from dualdp_tools.scaling.footprint import memory
from dualdp_tools.scaling.presets import PRECISIONS, Job
from dualdp_tools.scaling.timing import Duration, duration
from dualdp_tools.scaling.traffic import METHODS, bytes_sent, messages


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step on each rank."""

    method: str
    shards: int  # ranks that share one copy of the weights
    physical_batch_size: int  # largest power of two that fits, at most the rank's share
    chunks: int  # physical batches of a step
    memory: dict[str, float]  # item -> bytes
    sent: float  # bytes
    time: Duration


def forecast(method: str, job: Job) -> Forecast | None:
    """Return the forecast of the fastest sharding that fits, or None if none does."""
    _validate.choice("method", method, METHODS)
    found = (_with_shards(method, job, shards) for shards in job.shards)
    fitting = [forecast for forecast in found if forecast is not None]
    return min(fitting, key=lambda forecast: forecast.time.total, default=None)


def _with_shards(method: str, job: Job, shards: int) -> Forecast | None:
    """Forecast with the largest power of two of examples that fits, at most the rank's share."""
    size = 1 << (job.share.bit_length() - 1)
    while size:
        sizes: dict[str, Any] = {
            "shards": shards,
            "chunks": math.ceil(job.share / size),
            "compute_bytes": PRECISIONS[job.precision],
            "stack": job.stack,
        }
        numbers = job.assumed.optimizer_numbers
        items = memory(
            method, job.model, physical_batch_size=size, optimizer_numbers=numbers, **sizes
        )
        if sum(items.values()) <= job.hardware.memory * job.assumed.usable:
            break
        size //= 2
    else:
        return None
    model, chunks = job.model, sizes["chunks"]
    found = messages(method, model.num_parameters, ranks=job.ranks, root=model.root, **sizes)
    time = duration(method, job, found, physical_batch_size=size, shards=shards, chunks=chunks)
    return Forecast(method, shards, size, chunks, items, bytes_sent(found), time)

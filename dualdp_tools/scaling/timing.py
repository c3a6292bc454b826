# SPDX-License-Identifier: Apache-2.0
"""Time model of one step: computing, sending, noise and update, from peaks and bandwidths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dualdp import costs
from dualdp_tools.scaling.presets import PRECISIONS, Assumptions, Hardware, Job, Transformer
from dualdp_tools.scaling.traffic import METHODS, SUM_BYTES, Message

#: Numbers of weights, state and gradients that an optimizer moves per parameter.
_OPTIMIZER_ACCESSES = 7


@dataclass(frozen=True)
class Work:
    """Operations of one example; a multiplication and an addition are two."""

    forward: float  # all products and attention
    highway: float  # backward to the outputs of the layers
    weights: float  # (weighted) sums of gradients
    norms: float  # additional ones of the norms, memory traffic included


def work(method: str, model: Transformer, move: float) -> Work:
    """Return the operations of one example in one pass.

    `move` is the number of operations that take as long as moving one float32 number (see `costs`).
    """
    products = 2.0 * sum(count * t * i * o for count, t, i, o in model.products)
    scores = 2.0 * model.layers * model.positions**2 * model.width  # causal: half of two products
    norms = 0.0
    for count, t, i, o in model.products if method != "plain" else ():
        gram = costs.gram_cost(t=t, d_in=i, d_out=o, move=move)
        discard = costs.discard_cost(t=t, d_in=i, d_out=o, move=move)
        keep = costs.keep_cost(t=t, d_in=i, d_out=o, move=move)
        norms += count * (keep if method == "materialize" else min(gram, discard))
    return Work(products + scores, products + 2 * scores, products, norms)


@dataclass(frozen=True)
class Duration:
    """Seconds of one step."""

    compute: float  # forward, backward, norms and sums
    exposed: float  # sending that does not overlap with computing
    noise: float  # drawing and adding it
    update: float  # of the optimizer

    @property
    def total(self) -> float:
        """Seconds of one step."""
        return self.compute + self.exposed + self.noise + self.update


def seconds_of(message: Message, hardware: Hardware, assumed: Assumptions) -> float:
    """Return the seconds of one call of a collective on the slowest link that it crosses."""
    rate = hardware.link if message.ranks <= hardware.node else hardware.network
    hops = math.ceil(math.log2(message.ranks))
    return message.sent() / message.times / (rate * assumed.efficiency) + hops * assumed.latency


def duration(
    method: str,
    job: Job,
    found: Sequence[Message],
    *,
    physical_batch_size: int,
    shards: int,
    chunks: int,
) -> Duration:
    """Return the duration of one step of one rank that sends the messages `found`.

    Float32 takes twice the time of bfloat16; less is not modelled.
    """
    hardware, assumed = job.hardware, job.assumed
    rate = hardware.flops * assumed.utilisation * min(1.0, 2 / PRECISIONS[job.precision])
    amount = work(method, job.model, move=rate * SUM_BYTES / hardware.bandwidth)
    by_name = {message.what: message for message in found}
    seconds = {what: seconds_of(m, hardware, assumed) for what, m in by_name.items()}
    compute = exposed = 0.0
    for operations, what, times in _phases(method, amount):
        busy, sending = operations * physical_batch_size / rate, seconds.get(what, 0.0)
        compute += busy * times * chunks
        hidden = assumed.overlap * min(busy, sending)
        exposed += (sending - hidden) * times * chunks
    # Messages once per step, of which the sums over copies overlap with the last products.
    behind = _last_products(method, amount) * physical_batch_size / rate
    once = {
        what: seconds[what] * by_name[what].times
        for what in ("sums over copies", "agreement")
        if what in by_name
    }
    hidden = assumed.overlap * min(once.get("sums over copies", 0.0), behind)
    exposed += sum(once.values()) - hidden
    held = job.model.num_parameters / shards
    moves = held * SUM_BYTES / hardware.bandwidth
    drawn = 0.0
    if method != "plain":
        cipher = held / (assumed.secure_rate * assumed.cores)
        drawn = cipher if job.noise == "secure" else assumed.noise_passes * moves
    return Duration(compute, exposed, drawn, _OPTIMIZER_ACCESSES * moves)


def _phases(method: str, amount: Work) -> list[tuple[float, str, int]]:
    """(operations, concurrent message, times) of one physical batch."""
    forward, backward, sums = "weights, forward", "weights, backward", "sums over shards"
    if method == "plain" or method == "per_layer":
        # Each layer's sum is formed and sent while the backward goes on.
        both = amount.highway + amount.weights + amount.norms
        return [(amount.forward, forward, 1), (both / 2, backward, 1), (both / 2, sums, 1)]
    passes = METHODS[method]
    phases = [(amount.forward, forward, passes), (amount.highway, backward, passes)]
    return [*phases, (amount.norms, "", 1), (amount.weights, sums, 1)]


def _last_products(method: str, amount: Work) -> float:
    """Operations of an example during which complete sums over copies are already sent.

    This happens in the last physical batch: without privacy in the backward; with privacy while
    other sums are formed; in a second backward all sums are complete at its end.
    """
    if method == "plain":
        return amount.highway + amount.weights
    return 0.0 if method == "two_pass" else amount.weights

# SPDX-License-Identifier: Apache-2.0
"""Collectives of a rank in one step, with their sizes and their bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from dualdp import _validate

#: Number of forward and backward passes of each method.
METHODS = {"plain": 1, "book_keeping": 1, "per_layer": 1, "two_pass": 2, "materialize": 1}
#: How each stack gathers sharded weights for a private step: FSDP2 layer by layer in every forward
#: and every backward, our JAX step all of them at the start of a physical batch.
GATHERS = {"torch": "layers", "jax": "whole"}
SUM_BYTES = 4  # of a number in the clipped sums, norms, noise and optimizer: float32

#: Transport -> collective -> how often a rank sends its (k - 1) / k of the whole payload, mean over
#: ranks (for a gather, of what every rank ends up with).
WIRES: dict[str, dict[str, int]] = {
    "ring": {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1},
    # torch on gloo implements reduce_scatter as an all_reduce of which it keeps a part.
    "torch_gloo": {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1},
}


@dataclass(frozen=True)
class Message:
    """One collective of a step."""

    what: str  # description of the payload
    collective: str  # key of a table of `WIRES`
    size: float  # bytes of the whole payload
    ranks: int  # that take part
    times: int = 1  # calls per step

    def sent(self, wire: str = "ring") -> float:
        """Return the bytes that one rank sends in a step, mean over the ranks."""
        part = WIRES[wire][self.collective] * (self.ranks - 1) / self.ranks
        return part * self.size * self.times


def gathers_whole(method: str, stack: str) -> bool:
    """Return True if sharded weights are gathered all at once, which needs a private method."""
    _validate.choice("stack", stack, GATHERS)
    return method != "plain" and GATHERS[stack] == "whole"


def messages(
    method: str,  # "plain" is training without privacy
    num_parameters: int,  # P, trained ones
    *,
    ranks: int,  # k, number of accelerators
    shards: int = 1,  # g, ranks that share one copy of the weights: 1 is data parallel
    chunks: int = 1,  # c, physical batches of a rank in one step
    compute_bytes: int = SUM_BYTES,  # of a number of the gathered weights
    root: int = 0,  # parameters outside the wrapped layers: FSDP2 gathers them once
    stack: str = "torch",
) -> list[Message]:
    """Return the collectives of one step.

    >>> [m.what for m in messages("two_pass", 10, ranks=4, shards=4)]
    ['weights, forward', 'weights, backward', 'sums over shards', 'agreement']
    >>> round(bytes_sent(messages("plain", 10**6, ranks=4)))
    6000000
    """
    passes = METHODS[_validate.choice("method", method, METHODS)]
    ranks = _validate.integer("ranks", ranks, minimum=1)
    shards = _validate.integer("shards", shards, minimum=1)
    if ranks % shards:
        raise ValueError(
            f"shards={shards} does not divide ranks={ranks}. Expected 1 (data parallel), {ranks} "
            "(fully sharded) or a divisor."
        )
    weights, sums = compute_bytes * num_parameters, SUM_BYTES * num_parameters
    if gathers_whole(method, stack):
        root, passes = num_parameters, 1
    again = weights - compute_bytes * root
    found = [
        Message("weights, forward", "all_gather", weights, shards, passes * chunks),
        Message("weights, backward", "all_gather", again, shards, passes * chunks),
        Message("sums over shards", "reduce_scatter", sums, shards, chunks),
        Message("sums over copies", "all_reduce", sums / shards, ranks // shards),
    ]
    if method != "plain":
        found.append(Message("agreement", "all_gather", AGREEMENT_BYTES * ranks, ranks, AGREEMENTS))
    return [message for message in found if message.ranks > 1 and message.size]


#: Number of small gathers by which the ranks agree on a step, and the bytes of each rank's message.
AGREEMENTS, AGREEMENT_BYTES = 2, 1180


def bytes_sent(found: list[Message], wire: str = "ring") -> float:
    """Return the bytes that one rank sends in a step, mean over the ranks."""
    return sum(message.sent(wire) for message in found)

# SPDX-License-Identifier: Apache-2.0
"""Collectives of a rank in one step, with their sizes and their bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dualdp import _validate

#: Number of forward and backward passes of each method.
METHODS = {"plain": 1, "book_keeping": 1, "per_layer": 1, "two_pass": 2, "materialize": 1}
#: How each stack gathers sharded weights for a private step: FSDP2 layer by layer in every forward
#: and every backward, our JAX step all of them at the start of a physical batch.
GATHERS = {"torch": "layers", "jax": "whole"}
SUM_BYTES = 4  # of a number in the clipped sums, norms, noise and optimizer: float32

_ring_once: Callable[[int], float] = lambda k: (k - 1) / k  # noqa: E731
_ring_twice: Callable[[int], float] = lambda k: 2 * (k - 1) / k  # noqa: E731

#: Transport -> collective -> bytes that a rank sends, mean over ranks, per byte of the whole
#: payload (for a gather, of what every rank ends up with).
WIRES: dict[str, dict[str, Callable[[int], float]]] = {
    "ring": {"all_reduce": _ring_twice, "reduce_scatter": _ring_once, "all_gather": _ring_once},
    # torch on gloo implements reduce_scatter as an all_reduce of which it keeps a part.
    "torch_gloo": {
        "all_reduce": _ring_twice,
        "reduce_scatter": _ring_twice,
        "all_gather": _ring_once,
    },
}


@dataclass(frozen=True)
class Message:
    """One collective of a step.

    Attributes:
        what: str, description of the payload.
        collective: key of a table of `WIRES`.
        size: bytes of the whole payload.
        ranks: number of participating ranks.
        times: number of calls per step.
    """

    what: str
    collective: str
    size: float
    ranks: int
    times: int = 1

    def sent(self, wire: str = "ring") -> float:
        """Return the bytes that one rank sends in a step, mean over the ranks."""
        return WIRES[wire][self.collective](self.ranks) * self.size * self.times


def gathers_whole(method: str, stack: str) -> bool:
    """Return True if sharded weights are gathered all at once, which needs a private method."""
    _validate.choice("stack", stack, GATHERS)
    return method != "plain" and GATHERS[stack] == "whole"


def messages(
    method: str,
    num_parameters: int,
    *,
    ranks: int,
    shards: int = 1,
    chunks: int = 1,
    compute_bytes: int = SUM_BYTES,
    root: int = 0,
    stack: str = "torch",
) -> list[Message]:
    """Return the collectives of one step.

    Args:
        method: one of `METHODS`; "plain" is training without privacy.
        num_parameters: P, number of trained parameters.
        ranks: k, number of accelerators.
        shards: g, ranks that share one copy of the weights: 1 is data parallel, k fully sharded.
        chunks: c, physical batches of a rank in one step.
        compute_bytes: bytes of a number of the gathered weights.
        root: number of parameters outside the wrapped layers, which FSDP2 keeps gathered from
            forward to backward.
        stack: key of `GATHERS`.

    Raises:
        ValueError: an unknown word, or shards that do not divide the ranks.

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

# SPDX-License-Identifier: Apache-2.0
"""The ways to a clipped sum, as a table; each is a triple of functions of a `Call`'s rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from dualdp import _validate
from dualdp_jax import ghost
from dualdp_jax.bounds import Clip, Clipped
from dualdp_jax.call import Call, Row
from dualdp_jax.capture import mapping, one_by_one
from dualdp_jax.choices import has_own_kernels, is_small
from dualdp_jax.norms import Accuracy, Source, settled
from dualdp_jax.rules.estimate import of_gradients
from dualdp_jax.rules.product import weighted_sum

Map = Callable[[Callable[..., Any]], Callable[..., Any]]  # of one example to that of all
Mapped = Callable[[Call, Row], Map]


class Method(NamedTuple):
    """One way of the literature.

    Attributes:
        grads: (call, rows) to (per-sample gradients, (n, *shape) per leaf; losses (n,); aux).
        sq_norms: (call, rows, accuracy) to (squared norms, (n,) per leaf; losses; aux).
        clipped: (call, rows, mask, clip) to `Clipped`.
        footprint: call to the bytes that one example keeps alive because of privacy.
        keeps: (use, operands, cotangents) to whether the per-sample gradients of a use are kept;
            None where no use is worked on for itself.
    """

    grads: Callable[[Call, Row], Any]
    sq_norms: Callable[[Call, Row, Accuracy], Any]
    clipped: Callable[[Call, Row, Any, Clip], Clipped]
    footprint: Callable[[Call], int]
    keeps: ghost.Keeps | None = None


def _grads(mapped: Mapped, call: Call, rows: Row) -> Any:
    """Per-sample gradients by automatic differentiation of each example's loss."""

    def one(row: Row) -> Any:
        loss = lambda trained: call.loss(trained, row)  # noqa: E731
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(call.parameters.trained)
        return grads, value, aux

    return mapped(call, rows)(one)(rows)


def _sq_norms(mapped: Mapped, call: Call, rows: Row, accuracy: Accuracy) -> Any:
    grads, losses, aux = _grads(mapped, call, rows)
    sources = [Source(of_gradients(grad)) for grad in grads]
    return settled(sources, accuracy).sq_norms, losses, aux


def _clipped(mapped: Mapped, call: Call, rows: Row, mask: Any, clip: Clip) -> Clipped:
    grads, losses, aux = _grads(mapped, call, rows)
    sources = [Source(of_gradients(grad)) for grad in grads]
    norms, factors = clip(settled(sources, clip.accuracy, mask), mask)
    pairs = zip(clip.groups, grads, strict=True)
    sums = [weighted_sum(factors[group], grad) for group, grad in pairs]
    return Clipped(sums, norms, factors, losses, aux)


def _differentiated(mapped: Mapped) -> Method:
    return Method(
        partial(_grads, mapped),
        partial(_sq_norms, mapped),
        partial(_clipped, mapped),
        lambda call: ghost.num_bytes(call.parameters.trained),
    )


def _all_at_once(call: Call, rows: Row) -> Map:
    """`vmap`, where XLA computes the gradients of all kernels rightly."""
    return mapping(lambda: has_own_kernels(call, rows), (rows, call.parameters.trained))


def _captured(keeps: ghost.Keeps) -> Method:
    return Method(
        ghost.grads,
        partial(ghost.sq_norms, keeps),
        partial(ghost.clipped, keeps),
        partial(ghost.footprint, keeps),
        keeps,
    )


METHODS: dict[str, Method] = {
    "book_keeping": _captured(ghost.never),
    "two_pass": _captured(ghost.never)._replace(clipped=ghost.reweighted),
    "materialize": _captured(ghost.always),
    "vmap": _differentiated(_all_at_once),
    "loop": _differentiated(lambda call, rows: one_by_one),
}


def _cheapest(name: str) -> Callable[..., Any]:
    """One of the functions of "auto": that of "vmap" for a small model, else a use at a time."""

    def function(call: Call, rows: Row, *rest: Any) -> Any:
        chosen = METHODS["vmap"] if is_small(call, rows) else _BY_COST
        return getattr(chosen, name)(call, rows, *rest)

    return function


_BY_COST = _captured(ghost.keeps_by_cost)
AUTO = _BY_COST._replace(
    grads=_cheapest("grads"), sq_norms=_cheapest("sq_norms"), clipped=_cheapest("clipped")
)


def choose(method: str) -> Method:
    """The method of that name; "auto" is the cheapest."""
    name = _validate.choice("method", method, [*METHODS, "auto"])
    return AUTO if name == "auto" else METHODS[name]

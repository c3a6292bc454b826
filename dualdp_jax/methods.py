# SPDX-License-Identifier: Apache-2.0
"""The ways to a clipped sum, as a table; each is a triple of functions of a `Call`'s rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from dualdp import _validate
from dualdp_jax import ghost
from dualdp_jax.bounds import Clip
from dualdp_jax.call import Call, Row
from dualdp_jax.choices import is_small
from dualdp_jax.rules.product import sq_norm, weighted_sum

Map = Callable[..., Any]


class Method(NamedTuple):
    """One way of the literature.

    Attributes:
        grads: (call, rows) to (per-sample gradients, (n, *shape) per leaf; losses (n,); aux).
        sq_norms: (call, rows) to (squared norms, (n,) per leaf; losses; aux).
        clipped: (call, rows, mask, clip) to (sums per leaf, norms (n,), losses, aux).
        footprint: call to the bytes that one example keeps alive because of privacy.
    """

    grads: Callable[[Call, Row], Any]
    sq_norms: Callable[[Call, Row], Any]
    clipped: Callable[[Call, Row, Any, Clip], Any]
    footprint: Callable[[Call], int]


def _grads(each: Map, call: Call, rows: Row) -> Any:
    """Per-sample gradients by automatic differentiation of each example's loss."""

    def one(row: Row) -> Any:
        loss = lambda trained: call.loss(trained, row)  # noqa: E731
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(call.parameters.trained)
        return grads, value, aux

    return each(one)(rows)


def _sq_norms(each: Map, call: Call, rows: Row) -> Any:
    grads, losses, aux = _grads(each, call, rows)
    return [sq_norm(grad) for grad in grads], losses, aux


def _clipped(each: Map, call: Call, rows: Row, mask: Any, clip: Clip) -> Any:
    grads, losses, aux = _grads(each, call, rows)
    norms, factors = clip([sq_norm(grad) for grad in grads], mask)
    sums = [weighted_sum(f, grad) for f, grad in zip(factors, grads, strict=True)]
    return sums, norms, losses, aux


def _differentiated(each: Map) -> Method:
    return Method(
        partial(_grads, each),
        partial(_sq_norms, each),
        partial(_clipped, each),
        lambda call: ghost.num_bytes(call.parameters.trained),
    )


def _one_by_one(function: Callable[[Row], Any]) -> Callable[[Row], Any]:
    return partial(jax.lax.map, function)


def _captured(keeps: ghost.Keeps) -> Method:
    return Method(
        ghost.grads,
        partial(ghost.sq_norms, keeps),
        partial(ghost.clipped, keeps),
        partial(ghost.footprint, keeps),
    )


METHODS: dict[str, Method] = {
    "book_keeping": _captured(ghost.never),
    "two_pass": _captured(ghost.never)._replace(clipped=ghost.reweighted),
    "materialize": _captured(ghost.always),
    "vmap": _differentiated(jax.vmap),
    "loop": _differentiated(_one_by_one),
}


def _cheapest(name: str) -> Callable[..., Any]:
    """One of the functions of "auto": that of "vmap" for a small model, else a use at a time."""

    def function(call: Call, rows: Row, *rest: Any) -> Any:
        chosen = METHODS["vmap"] if is_small(call, rows) else _BY_COST
        return getattr(chosen, name)(call, rows, *rest)

    return function


_BY_COST = _captured(ghost.keeps_by_cost)
AUTO = Method(_cheapest("grads"), _cheapest("sq_norms"), _cheapest("clipped"), _BY_COST.footprint)


def choose(method: str) -> Method:
    """The method of that name; "auto" is the cheapest."""
    name = _validate.choice("method", method, [*METHODS, "auto"])
    return AUTO if name == "auto" else METHODS[name]

# SPDX-License-Identifier: Apache-2.0
"""Methods that compute per-sample gradients, norms and clipped sums, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.per_sample import norms
from dualdp_jax.per_sample.call import Answer, Call, Row
from dualdp_jax.per_sample.capture import analyzed
from dualdp_jax.per_sample.clip import Clip
from dualdp_jax.per_sample.jaxpr import CONVOLUTION
from dualdp_jax.per_sample.mapping import mapping, one_by_one
from dualdp_jax.per_sample.squared_norms import Accuracy, LeafNorms, accurate
from dualdp_jax.rules import small
from dualdp_jax.rules.arrays import weighted_sum
from dualdp_jax.rules.estimate import of_gradients

Map = Callable[[Callable[..., Any]], Callable[..., Any]]  # function of one example -> of all


class Method(NamedTuple):
    """Functions of one method of the literature."""

    #: callable (call, rows) -> (gradients, (n, *shape) per leaf; losses (n,); aux).
    grads: Callable[[Call, Row], Any]
    #: callable (call, rows, accuracy) -> (squared norms, (n,) per leaf; losses; aux).
    sq_norms: Callable[[Call, Row, Accuracy], Any]
    #: callable (call, rows, mask, clip) -> `Answer`.
    clipped: Callable[[Call, Row, Any, Clip], Answer]
    footprint: Callable[[Call], int]  # callable (call) -> bytes that one example holds for privacy
    #: callable (captured use) -> True if its per-sample gradients are kept.
    keeps: norms.Keeps = norms.always


def _differentiated(mapped: Callable[[Call, Row], Map]) -> Method:
    """Method that differentiates each example's loss; `mapped` extends this to all examples."""

    def grads(call: Call, rows: Row) -> Any:
        def one(row: Row) -> Any:
            loss = lambda trained: call.loss(trained, row)  # noqa: E731
            (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(call.parameters.trained)
            return grads, value, aux

        return mapped(call, rows)(one)(rows)

    def sq_norms(call: Call, rows: Row, accuracy: Accuracy) -> Any:
        found, losses, aux = grads(call, rows)
        return accurate([LeafNorms(of_gradients(g)) for g in found], accuracy).sq_norms, losses, aux

    def clipped(call: Call, rows: Row, mask: Any, clip: Clip) -> Answer:
        found, losses, aux = grads(call, rows)
        leaves = [LeafNorms(of_gradients(grad)) for grad in found]
        norms, factors = clip(accurate(leaves, clip.accuracy, mask), mask)
        pairs = zip(clip.groups, found, strict=True)
        sums = [weighted_sum(factors[group], grad) for group, grad in pairs]
        return Answer(sums, norms, factors, losses, aux)

    return Method(grads, sq_norms, clipped, lambda call: norms.num_bytes(call.parameters.trained))


def _vmap(call: Call, rows: Row) -> Map:
    """Map over the examples: `vmap`, unless XLA would miscompute per-example kernels."""
    return mapping(lambda: _has_own_kernels(call), (rows, call.parameters.trained))


def _captured(keeps: norms.Keeps) -> Method:
    """Method that captures parameter uses, and keeps some of their per-sample gradients."""
    return Method(
        norms.grads,
        partial(norms.sq_norms, keeps),
        partial(norms.clipped, keeps),
        partial(norms.footprint, keeps),
        keeps,
    )


METHODS: dict[str, Method] = {
    "book_keeping": _captured(norms.never),
    "two_pass": _captured(norms.never)._replace(clipped=norms.reweighted),
    "materialize": _captured(norms.always),
    "vmap": _differentiated(_vmap),
    "loop": _differentiated(lambda call, rows: one_by_one),
}
BY_COST = _captured(norms.by_cost)  # "auto" for all but small models


def check_method(name: str) -> None:
    """Refuse a name that is no method."""
    _validate.choice("method", name, [*METHODS, "auto"])


def choose(name: str, call: Call, n: int) -> Method:
    """Return the method of that name for n rows of a call; "auto" picks the cheapest."""
    if name == "auto" and is_small(call, n):
        name = "vmap"
    return METHODS.get(name, BY_COST)


def is_small(call: Call, n: int) -> bool:
    """True if "auto" differentiates the whole model by `vmap(grad)`."""
    parameters = sum(leaf.size for leaf in call.parameters.trained)
    if not small.is_worth_a_look(n, parameters):
        return False
    return all(use.choice.is_small for use in analyzed(call).analysis.uses_of(n))


def _has_own_kernels(call: Call, *, of_weights: bool = True) -> bool:
    """True if examples have convolution kernels, or (of weights) kernel gradients, of their own."""
    found = analyzed(call).analysis
    if of_weights and any(use.primitive == CONVOLUTION for use in found.uses):
        return True
    return bool(found.convolves)


def prepared(call: Call, method: str) -> Call:
    """Return a call with the analysis that the method needs; refused where XLA would get it wrong.

    Convolutions with a kernel, or a kernel gradient, per example become one with batch groups, of
    which XLA's partitioner loses most (found in jax 0.10.2; a test watches it).
    """
    arrays = (call.rows, call.parameters.trained)
    if compat.is_sharded_in_type(arrays):
        raise UnsupportedLayerError(
            "The arrays are spread over a mesh with explicit axes, for which every operation would "
            "have to name its sharding. Expected a mesh of automatic axes: jax.make_mesh(shape, "
            "names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    if method == "loop" or call.num_examples == 0:
        return call
    spans_devices = compat.spans_devices(arrays)
    if method != "vmap" or spans_devices:
        call = analyzed(call)
    if spans_devices and _has_own_kernels(call, of_weights=method == "vmap"):
        raise UnsupportedLayerError(
            "XLA computes wrong gradients for convolutions with a kernel per example when arrays "
            f"are spread over several devices, and method={method!r} needs one here. Use "
            "method='auto' or 'book_keeping' for kernels that are parameters, else one device."
        )
    return call

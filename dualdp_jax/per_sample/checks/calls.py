# SPDX-License-Identifier: Apache-2.0
"""When a call of the user's is compared with plain autodiff: the first of a kind, on its own rows.

A call inside the user's own `jit` has no numbers. It warns once, unless a call of its kind outside
`jit`, such as `check`, was compared before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import CHECKS, ExactnessError
from dualdp_jax import compat
from dualdp_jax.chunk import Origin
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.per_sample.call import Array, Call
from dualdp_jax.per_sample.checks import identity
from dualdp_jax.per_sample.checks.identity import Change, Floats, Leaves, Numbers, Reference
from dualdp_jax.per_sample.clip import checked_mask
from dualdp_jax.per_sample.methods import (
    LEAF_NORMS,
    NORMS,
    SUM,
    WAYS,
    Answer,
    Request,
    answer,
    check_method,
    chunk_size,
    way_of,
)
from dualdp_jax.rules.arrays import weighted_sum, widen
from dualdp_jax.rules.estimate import stable_norm

_seeds = np.random.default_rng(0)  # of the rows and signs of checks; no noise
#: Kinds of calls that need not be compared again, and their method; "" if one has warned.
seen: dict[int, str] = {}


def answered(request: Request, call: Call, mask: Array | None, where: str) -> Answer:
    """Answer a request of the public function `where`, and check the answer if that is due.

    Raises:
        ExactnessError: it differs from plain autodiff by more than rounding, by each way.
    """
    options = call.options
    _validate.choice("check", options.check, CHECKS)
    check_method(options.method)
    if options.row_weights is not None:  # a unit whose rows all have weight 0 is padding
        counts = jnp.asarray(options.row_weights).reshape(-1, options.rows_per_unit) != 0
        mask = counts.any(1) & checked_mask(mask, call.num_examples)
    if call.num_examples == 0 or (options.check == "off" and options.method != "auto"):
        return answer(request, call, mask)
    kind = _kind_of(request, call)
    known, is_due = seen.get(kind), options.check != "off"
    if not compat.is_eager():
        if not known and is_due:
            _warn_of_traced(kind, where, options.origin)
        is_due = False
    elif options.check == "first":
        is_due = not known
    *others, last = WAYS if not known and options.method == "auto" else (known or options.method,)
    for way in others:
        with contextlib.suppress(UnsupportedLayerError, ExactnessError):
            return _by(way, request, call, mask, kind if is_due else None)
    return _by(last, request, call, mask, kind if is_due else None)


def _by(way: str, request: Request, call: Call, mask: Array | None, kind: int | None) -> Answer:
    """Answer a request by a method, and compare it with plain autodiff, if it has a `kind`."""
    own = call.by(way)
    found = answer(request, own, mask)
    if kind is None:
        return found
    numbers, seed = numbers_of(request, own, mask, found), int(_seeds.integers(2**32))
    if identity.check(reference_of(own), numbers, seed=seed, is_first=True, released=True):
        seen[kind] = way
        if way != call.options.method:
            _note(call.options.origin, method=f"auto went by {way}, which alone passed its check")
    return found


def _kind_of(request: Request, call: Call) -> int:
    """Key of request and program, without bounds.

    Of numbers of rows it holds the way that "auto" takes for them, and whether rows can meet.
    """
    settings = map(compat.setting, ("jax_enable_x64", "jax_default_matmul_precision"))
    program = compat.fingerprint(call.program.jaxpr), len(call.parameters.trained)
    size, n = chunk_size(call), call.num_examples
    rows = call.options.method, way_of(call, size), size < n, n > 1
    return hash((program, request.key, rows, *settings))


def _warn_of_traced(kind: int, where: str, origin: Origin | None) -> None:
    """Warn, once for a kind, of a traced call that nothing has compared; its ledger notes it."""
    _note(origin, check_impossible=f"{where} is called inside jit, and nothing was compared before")
    if kind in seen:
        return
    seen[kind] = ""
    warnings.warn(
        f"{where} is called inside jit, where it has no numbers to compare with plain autodiff, "
        "and no call of its kind was compared before. Call dualdp.jax.check(loss_fn, params, "
        "*batch) once outside jit, with the keywords of this call; check='off' does without.",
        stacklevel=6,
    )


def _note(origin: Origin | None, **facts: str) -> None:
    """Record a fact in the ledger of the loop that a batch comes from, if there is one."""
    if origin is not None and origin.loop is not None:
        origin.loop.note(**facts)


def numbers_of(request: Request, call: Call, mask: Array | None, found: Answer) -> Numbers:
    """Return the numbers of an answered call for a comparison."""
    names, n, dtype = call.parameters.names, call.num_examples, call.parameters.dtype
    counts = np.ones(n, bool) if mask is None else np.asarray(whole(jnp.asarray(mask)))
    if request.kind == SUM:

        def of_factors(weights: Floats) -> Leaves:
            return answer(request, call, mask, jnp.asarray(weights, dtype)).leaves

        factors = {group: on_host(factor) for group, factor in found.factors.items()}
        norms = on_host(found.norms)
        return Numbers(names, counts, norms, None, request.clip, factors, of_factors, found.leaves)
    if request.kind == NORMS:
        return Numbers(names, counts, on_host(found.norms))
    if request.kind == LEAF_NORMS:
        return Numbers(names, counts, on_host(found.norms), list(map(on_host, found.leaves)))
    leaf_norms = [on_host(stable_norm(leaf)) for leaf in found.leaves]
    norms = np.linalg.norm(leaf_norms, axis=0)
    usable = np.isfinite(norms) & (norms > 0)
    inverse = np.where(usable, 1 / np.where(usable, norms, 1), 0)

    def of_grads(weights: Floats) -> Leaves:
        return [weighted_sum(jnp.asarray(weights, dtype), leaf) for leaf in found.leaves]

    return Numbers(names, counts, norms, leaf_norms, None, {"": inverse}, of_grads)


def reference_of(call: Call) -> Reference:
    """Return plain autodiff of the rows of a call."""

    @partial(jax.jit, compiler_options=compat.compiled_quickly(call.program.jaxpr))
    def program(
        trained: Leaves, arrays: Leaves, start: Leaves, weights: Sequence[jax.Array]
    ) -> tuple[Leaves, Leaves]:
        parameters = replace(call.parameters, trained=trained)
        own = call._replace(parameters=parameters, rows=(arrays, call.rows[1]))
        rest = identity.without_gradient(own, start, *weights)
        return rest, list(map(jnp.linalg.norm, rest))

    def subtract(
        chunk: int, start: Leaves, weights: Floats, change: Change
    ) -> tuple[Leaves, Leaves]:
        inputs = [list(map(change, leaves)) for leaves in (call.parameters.trained, call.rows[0])]
        start = [leaf.astype(zero.dtype) for leaf, zero in zip(start, zeros, strict=True)]
        return program(*inputs, start, identity.blocks_of(weights))

    zeros = [jnp.zeros_like(widen(leaf)) for leaf in call.parameters.trained]
    return Reference(subtract, [call.num_examples], zeros, identity.precision_of(call.program))


def on_host(values: jax.Array) -> Floats:
    """Return an array as float64 on the host."""
    return np.asarray(whole(values), np.float64)

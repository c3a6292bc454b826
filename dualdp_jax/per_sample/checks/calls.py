# SPDX-License-Identifier: Apache-2.0
"""When a call of the user's is compared with plain autodiff: the first of a kind, on its own rows.

A call inside the user's own `jit` has no numbers. It warns once, unless a call of its kind outside
`jit`, such as `check`, was compared before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dualdp_jax import compat
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.per_sample.call import Answer, Call
from dualdp_jax.per_sample.checks import identity
from dualdp_jax.per_sample.checks.identity import Change, Floats, Leaves, Numbers, Reference
from dualdp_jax.per_sample.methods import SUM, Request, answer
from dualdp_jax.rules.arrays import weighted_sum, widen
from dualdp_jax.rules.estimate import stable_norm

_seeds = np.random.default_rng(0)  # of the rows and signs of checks; no noise
_compared: set[int] = set()  # kinds of calls that were compared, which need not be again
_warned: set[int] = set()


def forget() -> None:
    """Forget which kinds of calls were compared."""
    _compared.clear()
    _warned.clear()


def kind_of(request: Request, call: Call, *, is_cut: bool) -> int:
    """Return a key of request and program, without numbers of rows and bounds.

    `is_cut` is True if the rows are worked on in chunks.
    """
    settings = map(compat.setting, ("jax_enable_x64", "jax_default_matmul_precision"))
    program = compat.fingerprint(call.program.jaxpr), len(call.parameters.trained)
    return hash((program, request.kind_key, is_cut, *settings))


def was_compared(kind: int) -> bool:
    """True if a call of this kind was compared."""
    return kind in _compared


def warn_of_traced(kind: int, where: str) -> None:
    """Warn, once for a kind, of a traced call that nothing has compared."""
    if kind in _compared or kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"{where} is called inside jit, where it has no numbers to compare with plain autodiff, "
        "and no call of its kind was compared before. Call dualdp.jax.check(loss_fn, params, "
        "*batch) once outside jit, with the keywords of this call; check='off' does without.",
        stacklevel=5,
    )


def check(
    request: Request,
    call: Call,
    mask: jax.Array | None,
    size: int,
    found: Answer,
    kind: int,
) -> None:
    """Compare an answer with plain autodiff.

    Raises:
        ExactnessError: it differs by more than rounding.
    """
    numbers = numbers_of(request, call, mask, size, found)
    reference = reference_of(call)
    seed = int(_seeds.integers(2**32))
    if identity.check(reference, numbers, seed=seed, is_first=True, released=True):
        _compared.add(kind)


def numbers_of(
    request: Request, call: Call, mask: jax.Array | None, size: int, found: Answer
) -> Numbers:
    """Return the numbers of an answered call for a comparison."""
    names, n = call.parameters.names, call.num_examples
    counts = np.ones(n, bool) if mask is None else np.asarray(whole(jnp.asarray(mask)))
    if request.kind == SUM:

        def weighted(weights: Floats) -> Leaves:
            given = jnp.asarray(weights, call.parameters.dtype)
            return answer(request, call, mask, size, given).leaves

        factors = {group: on_host(factor) for group, factor in found.factors.items()}
        norms = on_host(found.norms)
        return Numbers(names, counts, norms, None, request.clip, factors, weighted, found.leaves)
    if found.norms is not None:
        leaf_norms = [on_host(leaf) for leaf in found.leaves] if request.per_parameter else None
        return Numbers(names, counts, on_host(found.norms), leaf_norms)
    leaf_norms = [on_host(stable_norm(leaf)) for leaf in found.leaves]
    norms = np.linalg.norm(leaf_norms, axis=0)
    usable = np.isfinite(norms) & (norms > 0)
    inverse = np.where(usable, 1 / np.where(usable, norms, 1), 0)

    def of_grads(weights: Floats) -> Leaves:
        given = jnp.asarray(weights, call.parameters.dtype)
        return [weighted_sum(given, leaf) for leaf in found.leaves]

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
        return rest, identity.lengths(rest)

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

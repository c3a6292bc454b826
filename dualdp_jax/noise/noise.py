# SPDX-License-Identifier: Apache-2.0
"""Noisy mean of clipped gradients: the only release of this backend about the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from dualdp import _validate
from dualdp.plan.correlated.noise import Path, as_path, branch_at, window_terms
from dualdp.plan.correlated.strategies import Window
from dualdp.plan.plan import checked_step, require_plan
from dualdp.randomness import grid_noise, run_registry
from dualdp_jax import compat
from dualdp_jax.noise import generators
from dualdp_jax.noise.recursion import Rows, rows_of
from dualdp_jax.rules.arrays import widen

_log = logging.getLogger("dualdp")
_LOW = 2.0**24  # base of the two words of a cell count; float32 holds each word exactly
_MOST = 2.0**53  # cells; larger sums are clipped to it, which never moves two sums apart


class GridNoise(NamedTuple):
    """Noise drawn on the host, in cells of the public grid: high * 2^24 + low."""

    high: Any  # pytree like the sums, int32
    low: Any  # pytree like the sums, int32, in [0, 2^24)
    pitch: Any  # scalar, cell size of the grid, a power of two, gradient units
    per_unit: Any  # scalar, 1 / pitch


class Draws(NamedTuple):
    """Keys of normals whose weighted sum is the noise; the p places have room for later steps."""

    keys: Any  # (p, 2) uint32, secret; that of the step itself first
    stddevs: Any  # (p,) standard deviation of each draw in the sum, gradient units
    count: Any  # int32 scalar, places in use


class RowNoise(NamedTuple):
    """Noise that was made from rows of earlier noise."""

    noise: Any  # pytree like the sums, secret, in units of z
    stddev: Any  # scalar, standard deviation of z, gradient units


class Release(NamedTuple):
    """Noise source and divisor of one release, as data for a jitted function."""

    source: Any  # `Draws`, `RowNoise` or `GridNoise`
    expected_batch_size: Any  # scalar, divisor of the noisy sum


@compat.promoting  # also called on the thread of a callback
def release_at(
    plan: Any,
    step: int,
    *,
    branch: int | Path = 0,
    max_grad_norm: float | None = None,
    like: Any,
    rows: Rows | None = None,
) -> Release:
    """Return the `Release` of a step, computed on the host.

    The key is a keyed hash of the step. A traced program must not hold it, since it would end in
    compilation caches; so it is computed here and passed as data.

    Args:
        plan: `PrivacyPlan`.
        step: int, index of the release.
        branch: int as in `noisy_mean`, or the branches of all steps so far (`Seal.path`).
        max_grad_norm: float or None, see `noisy_mean`.
        like: pytree, the sums or, without `rows`, their shapes and dtypes.
        rows: rows of the plan's noise, if it has any; without them all steps are drawn again.
    """
    step = checked_step(plan, step)
    path = as_path([(0, branch)] if isinstance(branch, int) else branch)
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    bound = _validate.positive("max_grad_norm", bound)
    if plan.is_correlated and bound != plan.max_grad_norm_at(step):
        raise ValueError(
            f"max_grad_norm={bound} with correlated noise, which takes back noise of earlier steps "
            f"at the plan's max_grad_norm={plan.max_grad_norm_at(step)}. Expected the plan's."
        )
    stddev, dtype = plan.draw_stddev(step, bound), _scalar_dtype(like)
    source: Any
    if plan.noise == "secure":
        source = _grid_noise(plan, step, branch_at(path, step), bound, stddev, like)
    else:
        compat.check_counter_layout()
        if rows is not None:
            source = RowNoise(rows.noise(plan, step, path, like), np.asarray(stddev, dtype))
        else:
            source = _draws(plan, step, path, stddev, dtype)
    return Release(source, np.asarray(plan.expected_batch_size_at(step), dtype))


def _draws(plan: Any, step: int, path: Path, stddev: float, dtype: Any) -> Draws:
    """Draws of the normals of a step and of the earlier ones that its noise holds."""
    terms = window_terms(plan.correlation, step, path)
    keys, stddevs = np.zeros((_most_draws(plan), 2), np.uint32), np.zeros(_most_draws(plan), dtype)
    for place, term in enumerate(terms):
        keys[place] = plan.step_key("noise", term.step, term.branch)
        stddevs[place] = stddev * term.weight
    return Draws(keys, stddevs, np.asarray(len(terms), np.int32))


def _most_draws(plan: Any) -> int:
    """Return the draws of the last step, so that all steps have one program."""
    if plan.correlation is None:
        return 1
    if isinstance(plan.correlation, Window):
        return len(plan.correlation.weights)
    return int(plan.num_steps)


def refuse_adaptive(plan: Any) -> None:
    """Refuse a plan whose bounds only the engine's ledger knows."""
    if plan.is_adaptive:
        raise ValueError(
            "The plan's max_grad_norm is adaptive: its next value is known once a step is sealed. "
            "Use PrivacyEngine.make_private, or noisy_mean(..., max_grad_norm=)."
        )


def _no_release(plan: Any, like: Any) -> Release:
    """`Release` for a step not on record, which makes every noisy mean nan.

    Its shapes and dtypes are those of `release_at(plan, step, like=like)`.
    """
    scalar = np.full((), math.nan, _scalar_dtype(like))
    source: Any
    if plan.noise == "secure":
        cells = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.int32), like)
        source = GridNoise(cells, cells, scalar, scalar)
    else:
        most = _most_draws(plan)
        keys, stddevs = np.zeros((most, 2), np.uint32), np.full(most, scalar)
        source = Draws(keys, stddevs, np.zeros((), np.int32))
    return Release(source, scalar)


def _scalar_dtype(like: Any) -> Any:
    """Dtype of the scalars of a release: the widest of the sums."""
    return jnp.result_type(jnp.float32, *jax.tree.leaves(like))


def noisy_mean(
    grads: Any,
    plan: Any,
    step: Any,
    *,
    branch: int | None = None,
    max_grad_norm: float | None = None,
) -> Any:
    """Add the noise of a step to a clipped sum and divide by the expected batch size.

    `plan.noise` selects the generator. "fast" and "portable" are JAX's own normals with the plan's
    key: a statistical generator, and float32 normals of 2^23 values, so that an adversary who sees
    one exact released number can rule out a data set nine times in ten. "secure" is meant against
    that adversary: its noise is drawn on the host (see `dualdp.randomness.grid_noise`).

    The noise of a release is drawn once, and with a ledger (`engine.make_loader`, `Ledger`) only
    for releases on record. Without a ledger, a plan with a seed may draw its noise freely, and one
    with a secret key draws that of one step only. Inside `jit` the step is data: a callback gets
    its noise from the host, and a step that is not on record by then gets nan.

    With `plan.correlation` the noise of a step holds that of earlier steps, from the same key. A
    window draws all its terms anew. A band or a buffered Toeplitz strategy keeps rows of noise in
    memory while the steps come in order, and draws them again otherwise; inside `jit` it keeps
    none, and step t takes t + 1 draws.

    Args:
        grads: pytree, the SUM of clipped gradients of one logical batch.
        plan: `PrivacyPlan`.
        step: int, index of the release; inside a traced function a traced integer.
        branch: int, the ledger's branch for a step released again with other gradients; None for
            the one on record.
        max_grad_norm: float, C of this step if the ledger learns it; None for the plan's.

    Returns:
        Pytree like `grads`, float32 or wider: (sum + noise) / expected_batch_size.

    Raises:
        AccountingError: the step is past the plan or not on record, its noise was handed out
            before, or something else draws this plan's noise.
        TypeError: inside a traced function, a step that is a constant there, or `vmap` around it.
        ValueError: a bound that is not that of a plan with correlated noise.

    Guarantees:
        Noise of standard deviation noise_multiplier times max_grad_norm, independent over leaves,
            steps and branches.
            [test_noise_has_the_declared_scale, test_noise_never_repeats]
        With a correlation, normals z of standard deviation `plan.draw_stddev`, independent in the
            same way, of which step t gets sum_j w_j z_(t-j).
            [test_covariance_over_the_steps_is_that_of_the_strategy,
            test_noise_is_the_filter_of_the_normals]
        With noise="portable" the same normals as torch's: leaf i of `jax.tree.leaves(grads)` gets
            `fold_in(plan.step_key("noise", step), i)`.  [test_noise_is_the_counter_generator]
        No compiled program holds the key.  [test_noisy_mean_keeps_the_key_on_the_host]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    source = "noisy_mean"
    return claimed_mean(grads, plan, step, source, source, branch, max_grad_norm)


def check_sum(grads: Any) -> None:
    """Refuse what is no clipped sum: a pytree of arrays."""
    if grads is None or "norms" in getattr(grads, "_fields", ()):
        raise TypeError(
            f"grads is {_validate.kind(grads)}. Expected the clipped sum alone, such as "
            "clipped_grad_sum(...).grads: no noise makes norms and losses private."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"grads{jax.tree_util.keystr(path)} is {_validate.kind(leaf)}. Expected a JAX or "
                "NumPy array."
            )


@compat.promoting
def claimed_mean(
    grads: Any,
    plan: Any,
    step: Any,
    source: str,
    caller: object,
    branch: int | None = None,
    max_grad_norm: float | None = None,
) -> Any:
    """Return the noisy mean, after `caller` has claimed the noise of the step.

    `source` is the user's name of the noise source; the other arguments are those of `noisy_mean`.
    """
    require_plan(plan)
    check_sum(grads)
    draw = partial(run_registry.drawing, plan, source, caller, branch=branch)
    release_of = partial(release_at, plan, max_grad_norm=max_grad_norm)
    if compat.is_traced((grads, step)) or compat.in_trace():
        _check_trace(grads, step, source)
        if max_grad_norm is None:
            refuse_adaptive(plan)
        return _traced_mean(grads, plan, step, source, draw, release_of)
    step = checked_step(plan, step)
    with draw(step) as granted:
        if granted is None:
            raise run_registry.not_recorded(source, step)
        release = release_of(step, branch=granted, like=grads, rows=rows_of(plan))
        if not compat.spans_devices(grads):
            return noised_mean(grads, release)
        # One program, so that no device draws the noise of another.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, grads)
        return jax.jit(noised_mean, out_shardings=shardings)(grads, release)


def _check_trace(grads: Any, step: Any, source: str) -> None:
    """Refuse a traced function that would draw one noise for several releases."""
    if not compat.is_traced(step):
        raise TypeError(
            f"{source} got step={step} as a constant inside jit, scan or vmap: every call of the "
            "compiled function would add the same noise. Expected the step as an argument of that "
            "function (or in the carry of the scan), or the call outside of it."
        )
    if axes := sorted(compat.manual_axes(grads)):
        raise TypeError(
            f"{source} is inside shard_map or pmap, over {axes}: each device would ask for the "
            "noise of the step. Expected it outside, on the sums of all devices."
        )


def _traced_mean(
    grads: Any, plan: Any, step: Any, source: str, draw: Callable[..., Any], release_of: Any
) -> Any:
    """Noisy mean in a traced function, which gets the noise of its step from the host.

    The key of a step is a keyed hash, which must not be in the program: it would be the same at
    every call, and end in compilation caches. The callback costs tens of microseconds.
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), grads)

    def ask_host(step: Any) -> Release:
        number = checked_step(plan, step)
        with draw(number, on_record_only=True) as granted:
            if granted is None:
                _log.error("%s It gets nan.", run_registry.not_recorded(source, number))
                return _no_release(plan, like)
            return release_of(number, branch=granted, like=like)

    @jax.custom_batching.custom_vmap
    def noisy(grads: Any, step: Any) -> Any:
        # Not pure: two calls of one step must not become one, whose noise both sums would get.
        release = io_callback(ask_host, jax.eval_shape(lambda: _no_release(plan, like)), step)
        return noised_mean(grads, release)

    @noisy.def_vmap
    def refuse(*_: Any) -> Any:
        raise TypeError(
            f"{source} is inside vmap, where all members would get the same noise, or one release "
            "would be accounted for many. Expected vmap around the clipped sums alone; each model "
            "of an ensemble has a plan of its own."
        )

    return noisy(grads, step)


def noised_mean(grads: Any, release: Release) -> Any:
    """Return the noisy mean as a pure function of sums and `Release`; may be traced."""
    leaves, treedef = jax.tree.flatten(grads)
    leaves = [widen(leaf) for leaf in leaves]
    if isinstance(release.source, GridNoise):
        high, low, *scales = release.source
        parts = zip(leaves, jax.tree.leaves(high), jax.tree.leaves(low), strict=True)
        noisy = [_on_grid(*part, *(s.astype(part[0].dtype) for s in scales)) for part in parts]
    elif isinstance(release.source, RowNoise):
        noisy = _plus(leaves, release.source.stddev, jax.tree.leaves(release.source.noise))
    else:
        keys, stddevs, _ = release.source
        noisy = _plus(leaves, stddevs[0], generators.draw(keys[0], leaves))
        noisy = noisy if len(keys) == 1 else _with_earlier(noisy, release.source)
    sizes = [release.expected_batch_size.astype(leaf.dtype) for leaf in leaves]
    means = [leaf / size for leaf, size in zip(noisy, sizes, strict=True)]
    return jax.tree.unflatten(treedef, means)


def _plus(leaves: Sequence[Any], stddev: Any, normals: Sequence[Any]) -> list[Any]:
    """Leaves plus normals of a standard deviation."""
    return [x + stddev.astype(x.dtype) * z for x, z in zip(leaves, normals, strict=True)]


@jax.jit
def _with_earlier(leaves: list[Any], draws: Draws) -> list[Any]:
    """Leaves plus all draws but the first, in order, each added before the next is drawn."""

    def plus(place: Any, leaves: list[Any]) -> list[Any]:
        return _plus(leaves, draws.stddevs[place], generators.draw(draws.keys[place], leaves))

    return list(jax.lax.fori_loop(1, draws.count, plus, leaves))


def _grid_noise(
    plan: Any, step: int, branch: int, bound: float, stddev: float, like: Any
) -> GridNoise:
    """Noise of a step on the public grid, in the shapes of the sums."""
    leaves, treedef = jax.tree.flatten(like)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    pitch = grid_noise.pitch(bound, sum(sizes))
    cells = grid_noise.grid_noise(plan, step, branch=branch, cells=stddev / pitch, size=sum(sizes))
    high = np.floor(cells * (1 / _LOW))
    cells -= high * _LOW

    def like_the_sums(flat: Any) -> Any:
        flat, ends = flat.astype(np.int32), np.cumsum(sizes)
        parts = [flat[end - n : end] for end, n in zip(ends, sizes, strict=True)]
        placed = [_like(part, leaf) for part, leaf in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(treedef, placed)

    scales = [np.asarray(scale, _scalar_dtype(like)) for scale in (pitch, 1 / pitch)]
    return GridNoise(like_the_sums(high), like_the_sums(cells), *scales)


def _like(part: Any, leaf: Any) -> Any:
    """Noise in the shape of a sum, sharded like it."""
    part = part.reshape(leaf.shape)
    if compat.is_traced(leaf) or not compat.spans_devices(leaf):
        return part
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: part[index])


def _on_grid(total: Any, high: Any, low: Any, pitch: Any, per_unit: Any) -> Any:
    """Sum rounded to the grid, plus the noise: exact in pairs of 32-bit integers.

    float64 is off in JAX by default. Every operation here is exact: scaling by a power of two,
    rounding to an integer, splitting it, adding integers. Only the return to floating point rounds,
    and it rounds the noisy sum.
    """
    cells = jnp.clip(jnp.rint(total * per_unit), -_MOST, _MOST)
    upper = jnp.floor(cells * (1 / _LOW))
    lower = (cells - upper * _LOW).astype(jnp.int32) + low
    upper = upper.astype(jnp.int32) + high + (lower >> 24)
    lower &= (1 << 24) - 1
    return upper.astype(total.dtype) * (_LOW * pitch) + lower.astype(total.dtype) * pitch

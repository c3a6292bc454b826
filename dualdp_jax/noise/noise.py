# SPDX-License-Identifier: Apache-2.0
"""Noisy mean of clipped gradients: the only release of this backend about the data.

    source = NoiseSource(plan)                     # held by an engine, or by a loop of one's own
    release = ledger.record(step)                  # the ledger has the release before it is made
    mean = source.noisy_mean(sums, release, noise_bits(plan.seed, step))

Inside the user's own jit the noise comes from a key, an argument of the compiled program:

    engine.record(num_steps=100)
    keys = dpj.noise_keys(100)                     # (100, 2)
    state, _ = jax.lax.scan(step, state, (steps, keys))    # noisy_mean(sums, plan, t, key=key)
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.ledger import own_loops
from dualdp.ledger.ledger import Release
from dualdp.plan.correlated.strategies import Window
from dualdp.plan.plan import PrivacyPlan, checked_step, require_plan
from dualdp.randomness import grid_noise, key_of, noise_bits, seeded_bits
from dualdp_jax import compat
from dualdp_jax.chunk import Chunk
from dualdp_jax.noise.correlated import Kept, Leaves, next_noise
from dualdp_jax.rules.arrays import widen

Grads = TypeVar("Grads")
#: Shape, dtype and sharding of each leaf; no sharding where nobody placed the sum.
Layout = tuple[tuple[tuple[int, ...], Any, Any], ...]
_LOW = 2.0**24  # base of the two words of a cell count; float32 holds each word exactly
_MOST = 2.0**53  # cells; larger sums are clipped to it, which never moves two sums apart


class GridNoise(NamedTuple):
    """Noise drawn on the host, in cells of the public grid: high * 2^24 + low."""

    high: Sequence[Any]  # leaves like the sums, int32
    low: Sequence[Any]  # leaves like the sums, int32, in [0, 2^24)
    pitch: Any  # scalar, cell size of the grid, a power of two, gradient units
    per_unit: Any  # scalar, 1 / pitch


class KeyNoise(NamedTuple):
    """Independent noise, drawn where it is added."""

    key: Any  # (2,) uint32, secret
    stddev: Any  # scalar, gradient units


class Noise(NamedTuple):
    """Noise and divisor of one release, as data for a jitted function."""

    source: KeyNoise | GridNoise | Leaves  # leaves of correlated noise, gradient units, secret
    expected_batch_size: Any  # scalar, divisor of the noisy sum


class Held(NamedTuple):
    """Where correlated noise stands: what is kept before `step`."""

    owner: tuple[int, int]  # process and segment
    step: int
    layout: Layout
    kept: Kept


class NoiseSource:
    """Noise of the releases of one run, an object that its owner (engine, own loop) holds.

    `plan.noise` selects the generator. "fast" and "portable" are JAX's own normals: leaf i of the
    sums gets `jax.random.normal(fold_in(key, i), shape)`, where the key is that of the release. It
    is a statistical generator of floating-point numbers: an adversary who sees one exact released
    number can rule out a data set nine times in ten. "secure" is meant against that adversary: its
    noise is drawn on the host (see `dualdp.randomness.grid_noise`).

    With `plan.correlation` the noise of a step holds that of the steps before it in its segment,
    of which the source keeps what is needed (`dualdp_jax.noise.correlated`) in memory.

    Args:
        plan: `PrivacyPlan`.
        noise_scale: float, by which a recalibrated segment multiplies the plan's noise.

    Guarantees:
        Noise of standard deviation noise_multiplier times max_grad_norm, independent over leaves,
            steps and segments.  [test_noise_has_the_declared_scale, test_releases_share_no_noise]
        With a correlation, normals z of standard deviation `release.draw_stddev`, of which step t
            of a segment gets sum_j w_j z_(t-j).
            [test_covariance_over_the_steps_is_that_of_the_strategy]
        No compiled program, pickle, copy or repr has the noise or its bits.
            [test_no_file_of_a_run_holds_the_bits, test_a_source_is_in_no_pickle_and_no_repr]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """

    def __init__(self, plan: PrivacyPlan, noise_scale: float = 1.0) -> None:
        self._plan, self.noise_scale = plan, noise_scale
        self._held: Held | None = None
        self._used: set[bytes] = set()  # keys of eager calls
        self._traced: list[weakref.ref[Any]] = []  # keys of programs that are being traced

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A noise source can't be copied: its normals take the noise away from what was "
            "released. A resumed run begins a segment with a source of its own."
        )

    def noisy_mean(self, sums: Grads, release: Release, bits: bytes) -> Grads:
        """Return (sum + noise) / expected batch size of a release that is on record.

        Args:
            sums: pytree, clipped sums; may be sharded.
            release: `Release` of `Ledger.record`.
            bits: 64 bytes of this release alone, see `dualdp.randomness.noise_bits`.

        Returns:
            Pytree like `sums`, float32 or wider.

        Raises:
            ValueError: correlated noise is asked for other sums than at the step before.
        """
        noise = self.drawn(jax.tree.leaves(sums), release, bits)
        if not compat.spans_devices(sums):
            return noised_mean(sums, noise)
        # One program, so that no device draws the noise of another.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, sums)
        placed: Grads = jax.jit(noised_mean, out_shardings=shardings)(sums, noise)
        return placed

    def drawn(self, sums: Sequence[Any], release: Release, bits: bytes) -> Noise:
        """Return the noise of a release as data for a program that calls `noised_mean`."""
        plan, dtype = self._plan, jnp.result_type(jnp.float32, *sums)
        size = np.asarray(release.expected_batch_size, dtype)
        if plan.noise == "secure":
            return Noise(_on_host(sums, release, bits, dtype), size)
        if not plan.is_correlated:
            return Noise(KeyNoise(key_of(bits), np.asarray(release.draw_stddev, dtype)), size)
        return Noise(self._correlated(sums, release, bits), size)

    def spend(self, key: Any) -> None:
        """Note a key that is used; raise if it is known to have been used before."""
        word = b"" if compat.is_traced(key) else np.asarray(key).tobytes()
        self._traced = [ref for ref in self._traced if ref() is not None]
        if word in self._used or any(ref() is key for ref in self._traced):
            raise AccountingError(
                "key= came twice: both releases would get the same noise, and their difference "
                "none. Expected one row of dpj.noise_keys(n) for each release."
            )
        if word:
            self._used.add(word)
        else:
            self._traced.append(weakref.ref(key))

    def _correlated(self, sums: Sequence[Any], release: Release, bits: bytes) -> Leaves:
        """Noise of a step of its segment, gradient units."""
        strategy, layout = self._plan.correlation, _layout_of(sums)
        assert strategy is not None
        kept: Kept = ()
        held, first = self._held, release.segment_start
        owner = (os.getpid(), release.segment)
        if held is not None and held.owner == owner and held.step <= release.step:
            if held.layout != layout:
                raise ValueError(
                    "The sums have other shapes, dtypes or shardings than at the step before, "
                    "whose noise is a part of this one. Expected the same at every step of a run "
                    "with correlated noise; load_checkpoint begins a segment."
                )
            first, kept = held.step, held.kept
        if isinstance(strategy, Window) and release.step - first >= len(strategy.weights):
            # Nothing before is needed: of a seeded plan any step may be asked for.
            first, kept = max(release.step - len(strategy.weights) + 1, release.segment_start), ()
        self._held = None  # a call that fails on the way leaves nothing behind
        for step in range(first, release.step + 1):
            z = _drawing(layout)(key_of(self._bits_of(step, release, bits)))
            index = step - release.segment_start
            noise, kept = next_noise(strategy, index, z, kept, release.draw_stddev)
        self._held = Held(owner, release.step + 1, layout, kept)
        return noise

    def _bits_of(self, step: int, release: Release, bits: bytes) -> bytes:
        """Bits of a step of the segment up to this release.

        A step before it whose release failed after it was recorded has no noise yet, and gets that
        of bits that nothing else has, on all processes the same.
        """
        if step == release.step:
            return bits
        if self._plan.seed is not None:
            return seeded_bits(self._plan.seed, "noise", step)
        return hashlib.blake2b(step.to_bytes(8, "little"), key=bits).digest()


def noised_mean(sums: Grads, noise: Noise) -> Grads:
    """Return the noisy mean as a pure function of sums and `Noise`; may be traced."""
    leaves, treedef = jax.tree.flatten(sums)
    leaves, source = [widen(leaf) for leaf in leaves], noise.source
    if isinstance(source, GridNoise):
        parts = zip(leaves, source.high, source.low, strict=True)
        noisy = [_on_grid(*part, source.pitch, source.per_unit) for part in parts]
    elif isinstance(source, KeyNoise):
        drawn = zip(leaves, _normals(source.key, leaves), strict=True)
        noisy = [x + source.stddev.astype(x.dtype) * z for x, z in drawn]
    else:
        noisy = [x + n for x, n in zip(leaves, source, strict=True)]
    means = [leaf / noise.expected_batch_size.astype(leaf.dtype) for leaf in noisy]
    mean: Grads = jax.tree.unflatten(treedef, means)
    return mean


def _normals(key: jax.Array, leaves: Sequence[Any]) -> Leaves:
    """Standard normals in the shapes and dtypes, float32 or float64, of leaves."""
    return _drawn(key, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))


@partial(jax.jit, static_argnums=1)  # outside of a jitted function it is compiled once
def _drawn(key: jax.Array, leaves: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    typed = compat.wrap_key(key)
    return [
        jax.random.normal(jax.random.fold_in(typed, index), leaf.shape, leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]


def _layout_of(sums: Sequence[Any]) -> Layout:
    return tuple(
        (x.shape, jnp.result_type(jnp.float32, x), x.sharding if _is_placed(x) else None)
        for x in sums
    )


def _is_placed(leaf: Any) -> bool:
    return bool(getattr(leaf, "committed", False))


@cache
def _drawing(layout: Layout) -> Any:
    """Compiled function (key) -> standard normals, each on the devices of its sum."""
    like = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in layout]
    return jax.jit(lambda key: _normals(key, like), out_shardings=[place for *_, place in layout])


def _on_host(sums: Sequence[Any], release: Release, bits: bytes, dtype: Any) -> GridNoise:
    """Noise of a release on the public grid, in the shapes of the sums."""
    sizes = [math.prod(leaf.shape) for leaf in sums]
    pitch = grid_noise.pitch(release.max_grad_norm, sum(sizes))
    cells = grid_noise.grid_noise(bits, cells=release.draw_stddev / pitch, size=sum(sizes))
    high = np.floor(cells * (1 / _LOW))
    cells -= high * _LOW

    def like_the_sums(flat: NDArray[np.float64]) -> list[Any]:
        parts = np.split(flat.astype(np.int32), np.cumsum(sizes)[:-1])
        return [_like(part, leaf) for part, leaf in zip(parts, sums, strict=True)]

    scales = [np.asarray(scale, dtype) for scale in (pitch, 1 / pitch)]
    return GridNoise(like_the_sums(high), like_the_sums(cells), *scales)


def _like(part: NDArray[np.int32], leaf: Any) -> Any:
    """Noise in the shape of a sum, sharded like it."""
    part = part.reshape(leaf.shape)
    if not compat.spans_devices(leaf):
        return part
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: part[index])


def _on_grid(
    total: jax.Array, high: jax.Array, low: jax.Array, pitch: jax.Array, per_unit: jax.Array
) -> jax.Array:
    """Sum rounded to the grid, plus the noise: exact in pairs of 32-bit integers.

    float64 is off in JAX by default. Every operation here is exact: scaling by a power of two,
    rounding to an integer, splitting it, adding integers. Only the return to floating point rounds,
    and it rounds the noisy sum.
    """
    pitch, per_unit = pitch.astype(total.dtype), per_unit.astype(total.dtype)
    cells = jnp.clip(jnp.rint(total * per_unit), -_MOST, _MOST)
    upper = jnp.floor(cells * (1 / _LOW))
    lower = (cells - upper * _LOW).astype(jnp.int32) + low
    upper = upper.astype(jnp.int32) + high + (lower >> 24)
    lower &= (1 << 24) - 1
    return upper.astype(total.dtype) * (_LOW * pitch) + lower.astype(total.dtype) * pitch


@compat.promoting
def noisy_mean(
    grads: Grads,
    plan: PrivacyPlan | Chunk,
    step: Any = None,
    *,
    max_grad_norm: float | None = None,
    key: Any = None,
) -> Grads:
    """Add the noise of a step to a clipped sum and divide by the expected batch size.

    For a loop of your own: `engine.make_loader(plan=plan)` draws its batches, `engine.record()`
    puts each release on record, and its noise is then drawn here, once. A plan with a seed is drawn
    from freely while no such loop is open, for tests and comparisons. See `NoiseSource` for the
    noise.

    Inside `jit`, `scan` or `grad` the noise is that of `key`, an argument of the compiled function;
    a constant would be the same noise at every call, and end in compilation caches.

    Args:
        grads: pytree, the SUM of clipped gradients of one logical batch.
        plan: `PrivacyPlan`; or a `Chunk` of the batch, which knows plan and step.
        step: int, index of the release; inside a traced function an integer, traced or not.
        max_grad_norm: float, C of the step, of a plan with a seed whose bound adapts and that no
            loop records; None for the plan's, or that on record.
        key: (2,) uint32, a row of `noise_keys(n)`; required inside a traced function.

    Returns:
        Pytree like `grads`, float32 or wider: (sum + noise) / expected_batch_size.

    Raises:
        AccountingError: the step is past the plan or not on record, its noise was drawn before, or
            a key came twice.
        TypeError: inside a traced function, no key or one that is a constant there; `vmap` or
            `shard_map` around it.
        ValueError: inside a traced function, correlated or secure noise, or an adaptive bound;
            `max_grad_norm` is not that on record, or came with correlated noise.

    Guarantees:
        With noise="portable" the same normals as torch's.  [test_noise_is_the_counter_generator]
        No compiled program holds a key or bits.  [test_no_file_of_a_run_holds_the_bits]
        What no ledger records is not released.  [test_what_nobody_records_has_no_noise]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    if isinstance(plan, Chunk):
        chunk, plan = plan, plan.plan
        step, loop = chunk.step if step is None else step, chunk.loop
    else:
        require_plan(plan)
        loop = own_loops.loop_of(plan)
    check_sum(grads)
    if loop is None and plan.seed is None:
        raise AccountingError(
            "The noise of a step was asked for, but no loop that is open records the releases of "
            "this plan. Expected engine.make_loader(plan=plan), then engine.record() before each "
            "release; a plan with a seed gives its noise freely, for tests."
        )
    if plan.noise != "secure":
        compat.check_counter_layout()
    source = None if loop is None else loop.source
    source = source if isinstance(source, NoiseSource) else NoiseSource(plan)
    if compat.in_trace() or compat.is_traced(grads, step, key):
        _check_trace(grads, key)
        return _keyed_mean(grads, plan, step, source, key)
    step = checked_step(plan, step)
    if key is not None:
        return _keyed_mean(grads, plan, step, source, key)
    release = _free(plan, step, max_grad_norm) if loop is None else loop.take(step)
    if max_grad_norm not in (None, release.max_grad_norm):
        raise ValueError(
            f"max_grad_norm={max_grad_norm} came for a release that is on record with "
            f"{release.max_grad_norm}. Expected that one, or none."
        )
    bits = noise_bits(plan.seed, step)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(grads)):
        words = np.frombuffer(bits, np.uint8)  # of several processes those of the first
        bits = np.asarray(multihost_utils.broadcast_one_to_all(words)).tobytes()
    return source.noisy_mean(grads, release, bits)


def _free(plan: PrivacyPlan, step: int, bound: float | None) -> Release:
    """Release of a plan with a seed that nobody records."""
    bound = plan.max_grad_norm_at(step) if bound is None else bound
    bound = _validate.positive("max_grad_norm", bound)
    if plan.is_correlated and bound != plan.max_grad_norm_at(step):
        raise ValueError(
            f"max_grad_norm={bound} with correlated noise, which holds that of earlier steps at "
            f"the plan's max_grad_norm={plan.max_grad_norm_at(step)}. Expected the plan's."
        )
    return Release(
        step=step,
        segment=0,
        segment_start=0,
        max_grad_norm=bound,
        noise_multiplier=plan.noise_multiplier_at(step),
        draw_stddev=plan.draw_stddev(step, bound),
        expected_batch_size=plan.expected_batch_size_at(step),
    )


def _check_trace(grads: Any, key: Any) -> None:
    """Refuse a traced function that would draw one noise for several releases."""
    if key is None or not compat.is_traced(key):
        came = "no key" if key is None else "a key that is a constant"
        raise TypeError(
            f"noisy_mean (or add_noise) is inside jit, scan or grad with {came}, where every call "
            "of the compiled function would add the same noise. Expected key=, a row of "
            "dpj.noise_keys(n) that is an argument of that function, or the call outside of it."
        )
    if not compat.is_of_this_trace(key):
        raise TypeError(
            "noisy_mean (or add_noise) is inside scan, vmap, grad or another jit, and its key "
            "comes from outside of that: every turn would add the same noise. Expected a key for "
            "each turn, such as the xs of the scan, or the call outside of it."
        )
    if axes := sorted(compat.manual_axes(grads)):
        raise TypeError(
            f"noisy_mean (or add_noise) is inside shard_map or pmap, over {axes}: each device "
            "would add noise of its own. Expected it outside, on the sums of all devices."
        )


def _keyed_mean(grads: Grads, plan: PrivacyPlan, step: Any, source: NoiseSource, key: Any) -> Grads:
    """Noisy mean with the noise of a key of `noise_keys`."""
    _check_key(key)
    kinds = {
        "correlated noise, which holds that of the steps before": plan.is_correlated,
        "noise='secure', which is drawn on the host": plan.noise == "secure",
        "an adaptive max_grad_norm, which only the ledger knows": plan.is_adaptive,
    }
    for kind in (kind for kind, is_so in kinds.items() if is_so):
        raise ValueError(f"key= came for a plan with {kind}. Expected noisy_mean outside of jit.")
    source.spend(key)
    scale = source.noise_scale * plan.sensitivity
    stddev = _at(plan, step, "noise_multiplier", "max_grad_norm") * scale
    size = _at(plan, step, "expected_batch_size")

    @jax.custom_batching.custom_vmap
    def noisy(grads: Any, key: Any, stddev: Any, size: Any) -> Any:
        return noised_mean(grads, Noise(KeyNoise(key, stddev), size))

    @noisy.def_vmap
    def refuse(*_: Any) -> Any:
        raise TypeError(
            "noisy_mean (or add_noise) is inside vmap, where one release would be accounted for "
            "many. Expected vmap around the clipped sums alone; each model of an ensemble has a "
            "plan of its own."
        )

    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(grads))
    mean: Grads = noisy(grads, key, jnp.asarray(stddev, dtype), jnp.asarray(size, dtype))
    return mean


def _check_key(key: Any) -> None:
    """Refuse anything but one row of `noise_keys`."""
    if getattr(key, "shape", None) != (2,) or key.dtype != np.uint32:
        found = f"{getattr(key, 'dtype', type(key).__name__)}{list(getattr(key, 'shape', ()))}"
        raise TypeError(
            f"key is {found}. Expected uint32[2], a row of dpj.noise_keys(n), the bits of one "
            "release."
        )


def _at(plan: PrivacyPlan, step: Any, *names: str) -> Any:
    """Product of settings of a plan at a step, which may be traced; nan past the plan."""
    if all(plan.is_constant(name) for name in names):
        return math.prod(getattr(plan, f"{name}_at")(0) for name in names)
    if plan.num_steps is None:
        raise ValueError(
            f"{names[0]} follows a schedule without end. Expected num_steps= in the plan, so that "
            "a compiled program can hold its values."
        )
    steps = np.arange(plan.num_steps)
    table = np.prod([np.asarray(getattr(plan, name).at(steps)) for name in names], axis=0)
    return jnp.asarray(table).at[step].get(mode="fill", fill_value=math.nan)


def noise_keys(num_steps: int) -> jax.Array:
    """Return keys for the noise of releases inside the user's own jit: (n, 2) uint32.

    They belong to the next n releases that `engine.record(num_steps=n)` put on record, in order,
    and hand out the noise of each once. Pass them as arguments: whatever holds one can take the
    noise of that release away.

    Args:
        num_steps: int n, releases on record whose noise nobody has asked for.

    Raises:
        AccountingError: fewer are on record, or the program has several processes, whose keys
            would differ.

    Guarantees:
        Fresh bits for each release.  [test_noise_keys_are_fresh]
    """
    if jax.process_count() > 1:
        raise AccountingError(
            "noise_keys came in a program of several processes, whose keys would differ. Expected "
            "noisy_mean outside of jit, or make_private."
        )
    taken = own_loops.take_any(_validate.integer("num_steps", num_steps, minimum=1))
    keys = [key_of(noise_bits(seed, release.step)) for seed, release in taken]
    return jnp.asarray(np.stack(keys))


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


class AddNoiseState(NamedTuple):
    """State of `add_noise`: `step` is the index of the next release, int32 ()."""

    step: jax.Array


def add_noise(plan: PrivacyPlan) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of clipped SUMS to noisy means; put it first in `optax.chain`.

    Its noise is that of `noisy_mean(sums, plan, state.step)`. Inside `jit` its update takes `key=`,
    a row of `noise_keys(n)`, as an argument of the compiled function:

        updates, state = optimizer.update(sums, state, params, key=key)

    The transformation does no accounting: set up the run by `engine.make_loader(plan=...)`, and
    call `engine.record(num_steps=k)` before the steps run.

    Args:
        plan: `PrivacyPlan`.

    Returns:
        `optax.GradientTransformationExtraArgs` whose state is the step.

    Raises:
        ValueError: the plan's max_grad_norm is learned, which only the engine's ledger knows.

    Guarantees:
        The same noise as `noisy_mean(sums, plan, step)`.  [test_add_noise_is_noisy_mean]
    """
    require_plan(plan)
    if plan.is_adaptive:
        raise ValueError(
            "The plan's max_grad_norm is adaptive: its next value is known once a step is on "
            "record. Expected PrivacyEngine.make_private."
        )

    def init(params: Any) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(
        sums: Any, state: AddNoiseState, params: Any = None, *, key: Any = None, **_: Any
    ) -> tuple[Any, AddNoiseState]:
        mean = noisy_mean(sums, plan, state.step, key=key)
        return mean, AddNoiseState(state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)

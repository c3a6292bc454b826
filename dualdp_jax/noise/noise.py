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
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from numpy.typing import NDArray

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.ledger import own_loops
from dualdp.ledger.ledger import Release
from dualdp.plan.plan import PrivacyPlan, checked_step, require_plan
from dualdp.randomness import grid_noise, key_of, noise_bits, seeded_bits
from dualdp_jax import compat
from dualdp_jax.chunk import Chunk
from dualdp_jax.compat import PyTree
from dualdp_jax.noise.correlated import Kept, Leaves, next_noise
from dualdp_jax.rules.arrays import widen

Array = jax.Array | NDArray[Any]
Grads = TypeVar("Grads")
#: Of each leaf; no sharding where nobody placed the sum.
Layout = tuple[jax.ShapeDtypeStruct, ...]
_ARRAYS = (jax.Array, np.ndarray, np.generic)
_LOW = 2.0**24  # base of the two words of a cell count; float32 holds each word exactly
_MOST = 2.0**53  # cells; larger sums are clipped to it, which never moves two sums apart
#: Numbers of a leaf below which "fast" noise draws it together with other small leaves: each draw
#: of its own costs 0.2 s of compilation. A large leaf is drawn alone, on the devices that hold it.
_SMALL = 2**20


class GridNoise(NamedTuple):
    """Noise drawn on the host, in cells of the public grid: high * 2^24 + low."""

    high: Sequence[Array]  # leaves like the sums, int32
    low: Sequence[Array]  # leaves like the sums, int32, in [0, 2^24)
    pitch: Array  # scalar, cell size of the grid, a power of two, gradient units
    per_unit: Array  # scalar, 1 / pitch


class KeyNoise(NamedTuple):
    """Independent noise, drawn where it is added."""

    key: Array  # (2,) uint32, secret
    stddev: Array  # scalar, gradient units


class FastNoise(KeyNoise):
    """The same, whose small leaves are drawn together."""


class Noise(NamedTuple):
    """Noise and divisor of one release, as data for a jitted function."""

    source: KeyNoise | GridNoise | Leaves  # leaves of correlated noise, gradient units, secret
    expected_batch_size: Array  # scalar, divisor of the noisy sum


class Held(NamedTuple):
    """Where correlated noise stands: what is kept before `step`."""

    owner: tuple[int, int]  # process and segment
    step: int
    layout: Layout
    kept: Kept


class NoiseSource:
    """Noise of the releases of one run, an object that its owner (engine, own loop) holds.

    `plan.noise` selects the generator. "portable" and "fast" are JAX's own normals: leaf i of the
    sums gets `jax.random.normal(fold_in(key, i), shape)`, where the key is that of the release, and
    under "fast" the small leaves are drawn together. It is a statistical generator of
    floating-point numbers: an adversary who sees one exact released number can rule out a data set
    nine times in ten. "secure" is meant against that adversary: its noise is drawn on the host (see
    `dualdp.randomness.grid_noise`).

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
        if plan.noise != "secure" and not compat.setting("jax_threefry_partitionable"):
            raise ValueError(
                "jax_threefry_partitionable=False gives other normals. Expected jax's default."
            )
        self._plan, self.noise_scale = plan, noise_scale
        self._held: Held | None = None
        self._used: set[bytes] = set()  # keys of eager calls
        self._traced: list[weakref.ref[Any]] = []  # keys of programs that are being traced

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A noise source can't be copied: it takes the noise away from what was released."
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
        leaves, treedef = jax.tree.flatten(sums)
        noise = self.drawn(leaves, release, bits)
        # One program, so that no device draws the noise of another.
        places = [leaf.sharding for leaf in _layout_of(leaves)]
        means = jax.jit(noised_mean, out_shardings=places)(leaves, noise)
        mean: Grads = jax.tree.unflatten(treedef, means)
        return mean

    def drawn(self, sums: Sequence[Array], release: Release, bits: bytes) -> Noise:
        """Return the noise of a release as data for a program that calls `noised_mean`."""
        plan, dtype = self._plan, jnp.result_type(jnp.float32, *sums)
        size, stddev = np.asarray(release.expected_batch_size, dtype), release.draw_stddev
        if plan.noise == "secure":
            return Noise(_on_host(sums, release, bits, dtype), size)
        if plan.is_correlated:
            return Noise(self._correlated(sums, release, bits), size)
        kind = FastNoise if plan.noise == "fast" else KeyNoise
        return Noise(kind(key_of(bits), np.asarray(stddev, dtype)), size)

    def spend(self, key: Array) -> None:
        """Note a key that is used; raise if it is known to have been used before."""
        word = b"" if compat.is_traced(key) else np.asarray(key).tobytes()
        self._traced = [ref for ref in self._traced if ref() is not None]
        if word in self._used or any(ref() is key for ref in self._traced):
            raise AccountingError(
                "key= came twice, for releases whose difference would have no noise. Expected one "
                "row of dpj.noise_keys(n) for each."
            )
        if word:
            self._used.add(word)
        else:
            self._traced.append(weakref.ref(key))

    def _correlated(self, sums: Sequence[Array], release: Release, bits: bytes) -> Leaves:
        """Noise of a step of its segment, gradient units.

        A step before it whose release failed after it was recorded has no noise yet, and gets that
        of bits that nothing else has, on all processes the same.
        """
        strategy, layout, plan = self._plan.correlation, _layout_of(sums), self._plan
        assert strategy is not None
        owner = (os.getpid(), release.segment)
        held, self._held = self._held, None  # a call that fails on the way leaves nothing behind
        if held is None or held.owner != owner or held.step > release.step:
            held = Held(owner, release.segment_start, layout, ())
        if held.layout != layout:
            raise ValueError(
                "The sums have other shapes, dtypes or shardings than at the step before. Expected "
                "the same at every step with correlated noise; load_checkpoint begins a segment."
            )
        kept, places = held.kept, [leaf.sharding for leaf in layout]
        draw = jax.jit(_normals, static_argnums=(1, 2), out_shardings=places)
        for step in range(held.step, release.step + 1):
            own = bits
            if step < release.step and plan.seed is not None:
                own = seeded_bits(plan.seed, "noise", step)
            elif step < release.step:
                own = hashlib.blake2b(step.to_bytes(8, "little"), key=bits).digest()
            z = draw(key_of(own), layout, plan.noise == "fast")
            index = step - release.segment_start
            noise, kept = next_noise(strategy, index, z, kept, release.draw_stddev)
        self._held = Held(owner, release.step + 1, layout, kept)
        return noise


def noised_mean(sums: Grads, noise: Noise, on_all: Sharding | None = None) -> Grads:
    """Return the noisy mean as a pure function of sums and `Noise`; may be traced.

    With `on_all`, each device of a mesh draws what small leaves share, so that nothing is moved.
    """
    leaves, treedef = jax.tree.flatten(sums)
    leaves, source = [widen(leaf) for leaf in leaves], noise.source
    if isinstance(source, GridNoise):
        parts = zip(leaves, source.high, source.low, strict=True)
        scales = source.pitch, source.per_unit
        noisy = [_on_grid(x, high, low, *scales) for x, high, low in parts]
    elif isinstance(source, KeyNoise):
        normals = _normals(source.key, leaves, isinstance(source, FastNoise), on_all)
        pairs = zip(leaves, normals, strict=True)
        noisy = [x + source.stddev.astype(x.dtype) * z for x, z in pairs]
    else:
        noisy = [x + n for x, n in zip(leaves, source, strict=True)]
    means = [leaf / noise.expected_batch_size.astype(leaf.dtype) for leaf in noisy]
    mean: Grads = jax.tree.unflatten(treedef, means)
    return mean


def _normals(
    key: Array,
    like: Sequence[Array | jax.ShapeDtypeStruct],
    is_fast: bool,
    on_all: Sharding | None = None,
) -> Leaves:
    """Standard normals in the shapes and dtypes, float32 or float64, of leaves.

    Leaf i has the key fold_in(key, i); if `is_fast`, small leaves share fold_in(key, len(like)).
    """
    fold = partial(jax.random.fold_in, compat.wrap_key(key))
    keys = jax.vmap(fold)(jnp.arange(len(like) + 1, dtype=jnp.uint32))
    small = [i for i, leaf in enumerate(like) if is_fast and leaf.size < _SMALL]
    sizes = [like[i].size for i in small]
    together = jax.random.normal(keys[-1], (sum(sizes),), jnp.result_type(jnp.float32, *like))
    parts = jnp.split(together, np.cumsum(sizes)[:-1])
    if on_all is not None:
        parts = [jax.lax.with_sharding_constraint(part, on_all) for part in parts]
    own = dict(zip(small, parts, strict=False))
    return [
        own[i].reshape(leaf.shape).astype(leaf.dtype)
        if i in own
        else jax.random.normal(keys[i], leaf.shape, leaf.dtype)
        for i, leaf in enumerate(like)
    ]


def _layout_of(sums: Sequence[PyTree]) -> Layout:
    places = [x.sharding if getattr(x, "committed", False) else None for x in sums]
    return tuple(
        jax.ShapeDtypeStruct(x.shape, jnp.result_type(jnp.float32, x), sharding=place)
        for x, place in zip(sums, places, strict=True)
    )


def _on_host(sums: Sequence[Array], release: Release, bits: bytes, dtype: np.dtype) -> GridNoise:
    """Noise of a release on the public grid, in the shapes of the sums."""
    sizes = [math.prod(leaf.shape) for leaf in sums]
    pitch = grid_noise.pitch(release.max_grad_norm, sum(sizes))
    cells = grid_noise.grid_noise(bits, cells=release.draw_stddev / pitch, size=sum(sizes))
    high = np.floor(cells * (1 / _LOW))
    cells -= high * _LOW

    def like_the_sums(flat: NDArray[np.float64]) -> list[Array]:
        parts = np.split(flat.astype(np.int32), np.cumsum(sizes)[:-1])
        return [_like(part, leaf) for part, leaf in zip(parts, sums, strict=True)]

    scales = [np.asarray(scale, dtype) for scale in (pitch, 1 / pitch)]
    return GridNoise(like_the_sums(high), like_the_sums(cells), *scales)


def _like(part: NDArray[np.int32], leaf: PyTree) -> Array:
    """Noise in the shape of a sum, sharded like it."""
    part = part.reshape(leaf.shape)
    if not compat.spans_devices(leaf):
        return part
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: part[index])


def _on_grid(total: jax.Array, high: Array, low: Array, pitch: Array, per_unit: Array) -> jax.Array:
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
    step: PyTree = None,
    *,
    max_grad_norm: float | None = None,
    key: Array | None = None,
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
        step = plan.step if step is None else step
        loop, plan = plan.origin.loop, plan.plan
    else:
        require_plan(plan)
        loop = own_loops.loop_of(plan)
    if grads is None or "norms" in getattr(grads, "_fields", ()):
        raise TypeError(
            f"grads is {_validate.kind(grads)}. Expected the clipped sum alone, such as "
            "clipped_grad_sum(...).grads: no noise makes norms and losses private."
        )
    for path, leaf in jax.tree.leaves_with_path(grads):
        if not isinstance(leaf, _ARRAYS):
            raise TypeError(
                f"grads{jax.tree_util.keystr(path)} is {_validate.kind(leaf)}. Expected a JAX or "
                "NumPy array."
            )
    if loop is None and plan.seed is None:
        raise AccountingError(
            "Noise was asked for, but no loop that is open records the releases of this plan. "
            "Expected engine.make_loader(plan=plan), then engine.record() before each release."
        )
    source = None if loop is None else loop.source
    source = source if isinstance(source, NoiseSource) else NoiseSource(plan)
    if not compat.is_eager() or compat.is_traced(grads, step, key):
        _check_trace(grads, key)
    else:
        step = checked_step(plan, step)
    if key is not None:
        return _keyed_mean(grads, plan, step, source, key)
    release = _free(plan, step, max_grad_norm) if loop is None else loop.take(step)
    if max_grad_norm not in (None, release.max_grad_norm):
        raise ValueError(
            f"max_grad_norm={max_grad_norm} is not that on record, {release.max_grad_norm}."
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
            f"max_grad_norm={bound} with correlated noise, which holds that of earlier steps. "
            f"Expected the plan's, {plan.max_grad_norm_at(step)}."
        )
    stddev, size = plan.draw_stddev(step, bound), plan.expected_batch_size_at(step)
    return Release(step, 0, 0, bound, plan.noise_multiplier_at(step), stddev, size)


def _check_trace(grads: PyTree, key: Array | None) -> None:
    """Refuse a traced function that would draw one noise for several releases."""
    if key is None or not compat.is_traced(key) or not compat.is_of_this_trace(key):
        raise TypeError(
            "noisy_mean (or add_noise) is inside jit, scan, vmap or grad, where every turn would "
            "add the same noise. Expected key=, a row of dpj.noise_keys(n) that is an argument of "
            "that function (of a scan: of its xs), or the call outside of it."
        )
    if axes := sorted(compat.manual_axes(grads)):
        raise TypeError(
            f"noisy_mean (or add_noise) is inside shard_map or pmap, over {axes}, where each "
            "device would add noise of its own. Expected it outside."
        )


def _keyed_mean(
    grads: Grads, plan: PrivacyPlan, step: int | Array, source: NoiseSource, key: Array
) -> Grads:
    """Noisy mean with the noise of a key of `noise_keys`."""
    if plan.is_correlated or plan.is_adaptive or plan.noise == "secure":
        raise ValueError(
            "key= came for a plan with correlated noise, noise='secure' or an adaptive "
            "max_grad_norm, of which a program can't know all. Expected noisy_mean outside of jit."
        )
    source.spend(key)
    stddev = _at(plan, step, "noise_multiplier", "max_grad_norm")
    stddev = stddev * source.noise_scale * plan.sensitivity
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(grads))

    @jax.custom_batching.custom_vmap
    def noisy(grads: Grads, key: Array, stddev: Array, size: Array) -> Grads:
        kind = FastNoise if plan.noise == "fast" else KeyNoise
        return noised_mean(grads, Noise(kind(key, stddev), size))

    @noisy.def_vmap
    def refuse(*_: PyTree) -> NoReturn:
        raise TypeError(
            "noisy_mean (or add_noise) is inside vmap, where one release would be accounted for "
            "many. Expected vmap around the clipped sums alone."
        )

    size = _at(plan, step, "expected_batch_size")
    mean: Grads = noisy(grads, key, jnp.asarray(stddev, dtype), jnp.asarray(size, dtype))
    return mean


def _at(plan: PrivacyPlan, step: int | Array, *names: str) -> Array | float:
    """Product of settings of a plan at a step, which may be traced; nan past the plan."""
    if all(plan.is_constant(name) for name in names):
        return math.prod(getattr(plan, f"{name}_at")(0) for name in names)
    if plan.num_steps is None:
        raise ValueError(
            f"{names[0]} follows a schedule without end. Expected num_steps= in the plan."
        )
    steps = np.arange(plan.num_steps)
    table = np.prod([plan.values(name, steps) for name in names], axis=0)
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
            "noise_keys came in a program of several processes. Expected noisy_mean outside jit."
        )
    taken = own_loops.take_any(_validate.integer("num_steps", num_steps, minimum=1))
    keys = [key_of(noise_bits(seed, release.step)) for seed, release in taken]
    return jnp.asarray(np.stack(keys))


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

    Guarantees:
        The same noise as `noisy_mean(sums, plan, step)`.  [test_add_noise_is_noisy_mean]
    """
    require_plan(plan)

    def init(params: PyTree) -> AddNoiseState:
        return AddNoiseState(jnp.zeros((), jnp.int32))

    def update(
        sums: PyTree,
        state: AddNoiseState,
        params: PyTree = None,
        *,
        key: Array | None = None,
        **_: PyTree,
    ) -> tuple[PyTree, AddNoiseState]:
        mean = noisy_mean(sums, plan, state.step, key=key)
        return mean, AddNoiseState(state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)

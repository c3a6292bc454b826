# SPDX-License-Identifier: Apache-2.0
"""Comparison of what is about to be released with its definition, by plain autodiff.

For random s_k of both signs, 1/2 <= |s_k| <= 1, and the clip factors c_k of the call or step,

    sum_k s_k c_k g_k  (ours)   =   gradient of  sum_k s_k c_k loss_k  (plain autodiff)

An error in any row, or in the way rows are added up, breaks it (Freivalds' argument). The factors
stand on both sides, so norms are compared too, with those of the gradients of rows alone. And the
other rows are replaced: the contribution of a drawn row is compared with that which it makes among
copies of itself. `vmap` keeps examples apart, but a `custom_vmap` or a callback may mix them.

One program of plain autodiff serves all comparisons: it subtracts the gradient of the weighted
losses of some rows from what it is given. A row alone is a batch with one weight that is not 0,
whose other rows are copies of it; many rows come in another order than that of the batch.

Source: Freivalds 1977 (random identities).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dualdp.exactness import ROUNDING, TOLERANCE, UNIT, ExactnessError, power_of_ten
from dualdp.plan.clipping import AUTOMATIC_OFFSET
from dualdp_jax import compat
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.per_sample.call import Call, Row
from dualdp_jax.per_sample.clip import Clip
from dualdp_jax.per_sample.program import Program
from dualdp_jax.per_sample.squared_norms import RESOLUTION
from dualdp_jax.rules.arrays import widen

Floats = NDArray[np.float64]
Array = jax.Array | NDArray[np.generic]
Leaves = list[jax.Array]
Places = NDArray[np.signedinteger]
Change = Callable[[Array], Array]

ADVICE = 'Use method="vmap" or "loop", which are plain autodiff, and report the model.'
#: Rounding allowed between two sums, in units of the sum's norm times the tolerance.
OF_SUM = {"float64": 0.02, "float32": 0.02, "tf32": 1.0, "float16": 1.0, "bfloat16": 1.0}
#: Rows whose signs are not 0 in reduced precision, so that one wrong row stands out of rounding.
FEW = 64
#: Rows down to which a difference that rounding may explain is followed, there.
FEWEST = 4
#: Rows whose norms are compared: on the first batch, and on later checks.
ROWS_OF_FIRST, ROWS = 16, 4
LARGEST = 1e-3 * math.sqrt(float(np.finfo(np.float32).max))  # norms whose squares are float32
_DRAWS = 4  # random perturbations in `Reference.moved`


class Numbers(NamedTuple):
    """What a call or a step gives, of n rows with those of padding.

    Attributes:
        names: name of each trained leaf.
        counts: (n,) bool, False for padding.
        norms: (n,) norm of each row's whole gradient.
        leaf_norms: per trained leaf (n,), if a caller gets norms or gradients of leaves; else None.
        clip: `Clip` of a sum; None without clipping.
        factors: mapping from clipping group to factors (n,).
        weighted_sum: callable, weights (n,) -> sum of weight times gradient, by our method; None if
            only norms are given.
        sums: leaves, the sum as it is released; None without one.
    """

    names: list[str]
    counts: NDArray[np.bool_]
    norms: Floats
    leaf_norms: list[Floats] | None = None
    clip: Clip | None = None
    factors: dict[str, Floats] = {}
    weighted_sum: Callable[[Floats], Leaves] | None = None
    sums: Leaves | None = None


def block_size(num_rows: int) -> int:
    """Return the number of rows of which the reference computes the gradient at once."""
    return min(num_rows, max(2, num_rows // 16))


def without_gradient(
    call: Call, start: Leaves, index: jax.Array, weights: jax.Array, num_blocks: jax.Array
) -> Leaves:
    """Return `start` minus the gradient of the sum of weight times loss of the rows at `index`.

    Args:
        call: `Call` of n rows.
        start: leaves like the sums.
        index: (m,) positions of rows, m a multiple of `block_size(n)`; see `blocks_of`.
        weights: (m,) weight of each of these rows.
        num_blocks: () number of blocks that hold a weight.
    """
    size = block_size(call.num_examples)
    is_linear = not any(map(compat.has_own_backward, call.program.jaxpr.eqns))

    def total(trained: Leaves, rows: Row, shares: jax.Array) -> jax.Array:
        each = call.program.mapping((rows, trained))
        losses = widen(each(lambda row: call.loss(trained, row)[0])(rows))
        return jnp.sum(losses * shares.astype(losses.dtype))

    def one_after_another(trained: Leaves, rows: Row, shares: jax.Array) -> Leaves:
        plain = jax.grad(call.loss, has_aux=True)
        grads = compat.one_by_one(lambda row: plain(trained, row)[0])(rows)
        return [jnp.einsum("n,n...->...", shares.astype(g.dtype), g) for g in map(widen, grads)]

    gradient = jax.grad(total) if is_linear else one_after_another

    def subtract(block: jax.Array, rest: Leaves) -> Leaves:
        at, shares = (
            jax.lax.dynamic_slice_in_dim(array, block * size, size) for array in (index, weights)
        )
        rows = jax.tree.map(lambda leaf: leaf[at], call.rows)
        grads = gradient(call.parameters.trained, rows, shares)
        counts = (shares != 0).any()
        return [old - jnp.where(counts, widen(g), 0) for old, g in zip(rest, grads, strict=True)]

    return list(jax.lax.fori_loop(0, num_blocks, subtract, start))


def blocks_of(
    weights: Floats, num_shards: int = 1
) -> tuple[NDArray[np.signedinteger], Floats, np.int32]:
    """Return index, weights and blocks of `without_gradient`, for weights (n,) of a chunk.

    Rows of weight 0 are left out by position: their numbers, perhaps nan, are not read. Each shard
    of the rows has positions of its own. The order is another one than that of our own sum.
    """
    parts = weights.reshape(num_shards, -1)
    num_rows, size = parts.shape[1], block_size(parts.shape[1])
    order = np.random.default_rng(0).permutation(num_rows)
    index = np.stack([order[np.argsort(part[order] == 0, kind="stable")] for part in parts])
    shares = np.take_along_axis(parts, index, 1)
    index = np.where(shares != 0, index, index[:, :1])
    padding = (0, 0), (0, -num_rows % size)
    index, shares = np.pad(index, padding, "edge").astype(np.int32), np.pad(shares, padding)
    most = int((shares != 0).sum(1).max())
    return index.ravel(), shares.ravel(), np.int32(-(-most // size))


def perturbed(leaf: Array, unit: float, rng: np.random.Generator) -> Array:
    """Return a floating array changed by relative errors of at most `unit`; others as they are."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    wide = np.asarray(whole(leaf), np.float64)
    changed = (wide * (1 + unit * rng.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return changed
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: changed[at])


@dataclass(frozen=True)
class Reference:
    """Plain autodiff of the rows of a call or step.

    Attributes:
        subtract: callable (chunk, start, weights of its rows, change) -> (leaves of start minus the
            gradient of the weighted losses, their norms); `change` is applied to each array of
            parameters and rows.
        sizes: number of rows of each chunk.
        zeros: leaves like the sums.
        precision: what the loss computes in, a key of `TOLERANCE`.
    """

    subtract: Callable[[int, Leaves, Floats, Change], tuple[Leaves, Leaves]]
    sizes: Sequence[int]
    zeros: Leaves
    precision: str

    def rest(
        self, start: Leaves, weights: Floats, change: Change = lambda leaf: leaf
    ) -> tuple[Leaves, Floats]:
        """Return start minus the gradient of all weighted losses, and its norm by leaf."""
        parts = np.split(weights, np.cumsum(self.sizes)[:-1])
        chosen = [chunk for chunk, part in enumerate(parts) if part.any()] or [0]
        for chunk in chosen:
            start, norms = self.subtract(chunk, start, parts[chunk], change)
        return start, np.array([float(whole(norm)) for norm in norms], np.float64)

    def moved(self, weights: Floats) -> Floats:
        """Return the change of the gradient, by leaf, when parameters and rows are rounded anew."""
        start = self.rest(self.zeros, weights)[0]
        changes = []
        for draw in range(_DRAWS):
            rng = np.random.default_rng(draw)  # the same in all processes
            change = partial(perturbed, unit=UNIT[self.precision], rng=rng)
            changes.append(self.rest(start, -weights, change)[1])
        finite = [change for change in changes if np.isfinite(change).all()]
        largest = max(finite, key=np.linalg.norm, default=np.zeros(len(start)))
        # A loss that is not deterministic changes without a perturbation: no excuse.
        again = self.rest(start, -weights)[1]
        return largest if 10 * np.linalg.norm(again) < np.linalg.norm(largest) else 0 * largest


def check(
    reference: Reference, numbers: Numbers, *, seed: int, is_first: bool, released: bool
) -> bool:
    """Compare the numbers of a call or step with plain autodiff; False if no row counts.

    The first check makes all comparisons; later ones compare four norms, and the released sum where
    `released` is True, else a sum with random signs.

    Raises:
        ExactnessError: they differ by more than rounding.
    """
    if not numbers.counts.any():
        return False
    comparison, rng = Comparison(reference, numbers), np.random.default_rng(seed)
    order = np.flatnonzero(numbers.counts)
    order = order[np.argsort(numbers.norms[order])]  # those that are not finite come last
    finite, drawn = int(np.isfinite(numbers.norms[order]).sum()), rng.permutation(order)
    rows = [*order[finite:][:1], *order[:finite][-1:], *order[:1], *drawn]
    for k in list(dict.fromkeys(map(int, rows)))[: ROWS_OF_FIRST if is_first else ROWS]:
        comparison.of_row(k)
    if numbers.weighted_sum is not None and (is_first or not released):
        smallest = np.min([*numbers.factors.values()], 0)
        signs = rng.choice([-1.0, 1.0], len(smallest)) * rng.uniform(0.5, 1, len(smallest))
        drawn = drawn[smallest[drawn] > 0]
        comparison.of_signs(signs * smallest, drawn)
        if is_first and len(drawn):  # the reference has copies of the row in place of the others
            alone = _only(smallest, drawn[:1])
            comparison.of_sum(alone, "an example with the other rows replaced")
    if numbers.sums is not None and (is_first or released):
        group = sorted(numbers.factors)[int(rng.integers(len(numbers.factors)))]
        weights = np.where(numbers.counts, numbers.factors[group], 0)
        comparison.of_sum(weights, "the sum of the clipped gradients", group)
    return True


def _only(weights: Floats, rows: Places) -> Floats:
    """Weights (n,) of these rows, 0 for the others."""
    return np.where(np.isin(np.arange(len(weights)), rows), weights, 0)


@dataclass(frozen=True)
class Comparison:
    """Numbers of a call or step beside plain autodiff of its rows."""

    reference: Reference
    numbers: Numbers

    @property
    def bounds(self) -> dict[str, float]:
        """Bound of each clipping group; empty without clipping."""
        clip = self.numbers.clip
        return {} if clip is None else {g: float(whole(c)) for g, c in clip.bounds.items()}

    def of_row(self, k: int) -> None:
        """Compare the norm and the factors of a row with those of its gradient alone."""
        numbers, alone = self.numbers, _only(np.ones(len(self.numbers.norms)), np.array([k]))
        plain = self.reference.rest(self.reference.zeros, alone)[1]
        unit = math.hypot(*self.bounds.values()) or RESOLUTION
        if numbers.clip is not None and numbers.clip.clipping == "automatic":
            unit = AUTOMATIC_OFFSET
        error, scale = self._error_of_row(k, plain, unit), max(float(np.linalg.norm(plain)), unit)
        if not error > TOLERANCE[self.reference.precision]:
            return
        if error * ROUNDING * scale > np.linalg.norm(self.reference.moved(alone)):
            what = "the norm or clip factor of an example"
            raise self._failure(what, error, plain, {"norm": float(numbers.norms[k])})

    def _error_of_row(self, k: int, plain: Floats, unit: float) -> float:
        """Relative error of a row's norm and factors; `plain` holds its leaves' true norms.

        An error of a norm below `unit` does not matter: the factor is computed from that.
        """
        numbers, clip = self.numbers, self.numbers.clip
        norm, ours = float(np.linalg.norm(plain)), float(numbers.norms[k])
        if not norm < LARGEST:  # also nan
            is_dropped = clip is None or not any(f[k] for f in numbers.factors.values())
            return 0.0 if is_dropped or ours >= LARGEST else math.inf
        if not math.isfinite(ours):
            return math.inf
        errors = [abs(ours - norm) / max(norm, unit)]
        for size, own in zip(numbers.leaf_norms or (), plain, strict=False):
            errors.append(abs(size[k] - own) / max(own, RESOLUTION))
        for group, bound in self.bounds.items():
            assert clip is not None
            own = float(np.linalg.norm(plain[[name == group for name in clip.groups]]))
            errors.append(abs(numbers.factors[group][k] - clip.factor(group, own)) * own / bound)
        return math.inf if any(map(math.isnan, errors)) else max(errors)

    def of_signs(self, weights: Floats, rows: Places) -> None:
        """Compare the sum of the gradients of rows times weights of both signs."""
        is_low = self.reference.precision not in ("float64", "float32")
        pending = [rows[:FEW] if is_low else rows]
        while pending:
            part = pending.pop()
            what = "the sum with random signs of the clipped gradients"
            is_excused = self.of_sum(_only(weights, part), what)
            # Rounding that adds up over many rows may be as large as one wrong row, not over few.
            if is_excused and is_low and len(part) > FEWEST:
                pending += np.array_split(part, 2)

    def of_sum(self, weights: Floats, what: str, group: str | None = None) -> bool:
        """Compare our weighted sum, or the leaves of a group in the released one, with autodiff.

        The scale of the tolerance is the largest contribution: the smaller of C and the largest
        norm. Returns True for a difference beyond the tolerance that rounding may explain.
        """
        numbers, reference = self.numbers, self.reference
        ours, chosen = numbers.sums, np.ones(len(numbers.names), bool)
        if group is None and numbers.weighted_sum is not None:
            ours = numbers.weighted_sum(weights)
        elif numbers.clip is not None:
            chosen = np.array([own == group for own in numbers.clip.groups])
        assert ours is not None
        gaps = np.where(chosen, reference.rest(ours, weights)[1], 0)
        at, bound = np.flatnonzero(weights), max(self.bounds.values(), default=0.0)
        largest = float(np.max(np.abs(weights[at]) * numbers.norms[at], initial=0.0))
        largest = max(largest if group is None else min(largest, bound), 1e-6 * bound)
        tolerance, gap = TOLERANCE[reference.precision], float(np.linalg.norm(gaps))
        if gap <= tolerance * largest:
            return False
        of_sum = np.linalg.norm(reference.rest(reference.zeros, weights)[1][chosen])
        if gap <= tolerance * (largest + OF_SUM[reference.precision] * of_sum):
            return False
        if gap * ROUNDING <= np.linalg.norm(reference.moved(weights)[chosen]):
            return True
        raise self._failure(what, gap / max(largest, RESOLUTION), gaps, {"gap": gap})

    def _failure(
        self, what: str, error: float, by_leaf: Floats, details: dict[str, float]
    ) -> ExactnessError:
        """Error of a failed check; it names the leaves that differ most, and no private number."""
        sizes = -np.nan_to_num(by_leaf, nan=np.inf)
        order = sorted(zip(sizes, self.numbers.names, strict=True))
        names = [name for size, name in order if size <= 0.1 * order[0][0]][:5]
        size = power_of_ten(error)
        return ExactnessError(
            f"A spot check failed: {what} differs from plain autodiff by {size} of its scale "
            f"(parameters {', '.join(map(repr, names))}). Nothing was released for this batch. "
            f"{ADVICE}",
            parameters=names,
            relative_error=size,
            unprotected_details={**details, "error": error},
        )


def precision_of(program: Program) -> str:
    """Return the precision that a loss computes in, a key of `TOLERANCE`."""
    jaxpr = program.jaxpr
    low = compat.low_precision_dtypes(jaxpr)
    if low:
        return "float16" if low == {"float16"} else "bfloat16"
    if np.dtype(np.float32) not in compat.dtypes_of(jaxpr):
        return "float64"
    # Accelerators multiply float32 matrices in fewer bits where the program does not forbid it.
    rounds = jax.default_backend() != "cpu" and compat.multiplies_by_default(jaxpr)
    return "tf32" if rounds else "float32"

# SPDX-License-Identifier: Apache-2.0
"""One example's numbers against their definition: plain autodiff of that example's own loss.

The definition is `jax.grad` of the loss of one example, alone: no capture, no rule, no `vmap`. This
module has what all checks share: the plain side, the comparison, and what may excuse a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import exactness
from dualdp.clipping import AUTOMATIC_OFFSET
from dualdp_jax import compat
from dualdp_jax.bounds import Clip
from dualdp_jax.call import Call, Row
from dualdp_jax.capture import all_at_once
from dualdp_jax.norms import RESOLUTION, margin_for
from dualdp_jax.request import NORMS, SUM, Answer, Request, answer
from dualdp_jax.rules.product import widen
from dualdp_jax.sharding import whole

ADVICE = 'Use method="loop", which is plain autodiff, and report the model.'
#: What rounding may add to a difference of two sums of many examples, in units of the sum's length
#: times the tolerance.
OF_SUM = {"float64": 0.02, "float32": 0.02, "tf32": 1.0, "float16": 1.0, "bfloat16": 1.0}
_DRAWS = 4  # of roundings that a loss may amplify


# ---------------------------------------------------------------------- the plain side


def plain_gradient(call: Call, row: Row) -> list[Any]:
    """Gradient of one example's own loss, per trained leaf, float32 or wider."""
    grads = jax.grad(lambda trained: call.loss(trained, row)[0])(call.parameters.trained)
    return [widen(grad) for grad in grads]


def plain_sum(call: Call, factors: Any) -> list[Any]:
    """Gradient of the sum of factor (n,) times loss; examples of factor 0 have no part in it."""
    counts = factors != 0
    index = jnp.where(counts, jnp.arange(counts.shape[0]), jnp.argmax(counts))
    rows = row_at(call.rows, index)
    if any(map(compat.has_own_backward, call.program.jaxpr.eqns)):
        return _sum_one_by_one(call, rows, factors)

    def loss(trained: list[Any]) -> Any:
        losses = widen(all_at_once(lambda row: call.loss(trained, row)[0])(rows))
        return jnp.sum(losses * factors.astype(losses.dtype))

    grads = jax.grad(loss)(call.parameters.trained)
    return [jnp.where(counts.any(), widen(grad), 0) for grad in grads]


def _sum_one_by_one(call: Call, rows: Row, factors: Any) -> list[Any]:
    """As `plain_sum`, for backwards that need not be linear in what comes down to them."""

    def of(k: Any) -> list[Any]:
        grads = plain_gradient(call, row_at(rows, k))
        return [jnp.where(factors[k] == 0, 0, factors[k] * grad) for grad in grads]

    add = lambda totals, k: (jax.tree.map(jnp.add, totals, of(k)), None)  # noqa: E731
    return list(jax.lax.scan(add, of(0), jnp.arange(1, factors.shape[0]))[0])


def row_at(rows: Row, k: Any) -> Row:
    """One example of (n, ...), or several."""
    return jax.tree.map(lambda leaf: leaf[k], rows)


def host(leaf: Any) -> Any:
    """An array as NumPy; random keys stay what they are."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return whole(leaf)


def length(leaf: Any) -> float:
    """L2 norm of an array, in float64 on the host."""
    return float(np.linalg.norm(np.asarray(host(leaf), np.float64).ravel()))


def lengths(leaves: Sequence[Any]) -> list[float]:
    """L2 norm of each leaf."""
    return [length(leaf) for leaf in leaves]


def differences(
    plain: Sequence[Any], ours: Sequence[Any], factors: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Of each leaf the length of (ours - factor * plain), and that of ours."""
    gaps = []
    for one, other, factor in zip(plain, ours, factors, strict=True):
        expected = factor * np.asarray(host(one), np.float64) if factor else 0.0
        gaps.append(length(np.asarray(host(other), np.float64) - expected))
    return gaps, lengths(ours)


def precision_of(jaxpr: Any) -> str:
    """The precision that a loss computes in, a key of `exactness.TOLERANCE`."""
    low = compat.low_precision_dtypes(jaxpr)
    if low:
        return "float16" if low == {"float16"} else "bfloat16"
    if not compat.computes_in(jaxpr, jnp.float32):
        return "float64"
    # Accelerators multiply float32 matrices in fewer bits where the program does not forbid it.
    rounds = jax.default_backend() != "cpu" and compat.multiplies_by_default(jaxpr)
    return "tf32" if rounds else "float32"


# ---------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Measure:
    """How the two sides of one example are compared.

    Attributes:
        names: of the trained leaves.
        groups: the clipping group of each leaf.
        clip: how examples are clipped; None where they are not.
    """

    names: list[str]
    groups: list[str]
    clip: Clip | None

    @classmethod
    def of(cls, request: Request, names: list[str]) -> Measure:
        """The measure of a request."""
        if request.clip is not None:
            return cls(names, request.clip.groups, request.clip)
        return cls(names, names if request.per_parameter else [""] * len(names), None)

    def factors(self, plain: Sequence[float]) -> list[float]:
        """What each leaf of a gradient with these lengths is multiplied by."""
        if not math.isfinite(math.hypot(*plain)):
            return [0.0] * len(plain)
        if self.clip is None:
            return [1.0] * len(plain)
        norms = {group: self.of_group(plain, group) for group in set(self.groups)}
        return [self.clip.factor(group, norms[group]) for group in self.groups]

    def of_group(self, values: Sequence[float], group: str) -> float:
        """Length of the leaves of a group from theirs."""
        return math.hypot(*(v for v, own in zip(values, self.groups, strict=True) if own == group))

    def sides(
        self, plain: Sequence[float], norm: float, gaps: Sequence[float], sizes: Sequence[float]
    ) -> exactness.Sides:
        """Both sides of one example.

        Args:
            plain: length of each leaf of the plain gradient.
            norm: of the whole gradient, ours.
            gaps: of each leaf, length of the difference of the contributions.
            sizes: of each leaf, length of our contribution.
        """
        expected = math.hypot(*plain)
        if math.isfinite(expected) and expected < _LARGEST and not math.isfinite(norm):
            norm = 0.0  # an example that should count was dropped
        if self.clip is None:
            bounds = {
                group: max(self.of_group(plain, group), self.of_group(sizes, group), RESOLUTION)
                for group in set(self.groups)
            }
            scale = max(expected, RESOLUTION)
        else:
            bounds = self.bounds
            automatic = self.clip.clipping == "automatic"
            scale = max(expected, AUTOMATIC_OFFSET if automatic else math.hypot(*bounds.values()))
        return exactness.Sides(
            norm=norm,
            expected_norm=expected,
            gaps=dict(zip(self.names, gaps, strict=True)),
            sizes=dict(zip(self.names, sizes, strict=True)),
            groups=dict(zip(self.names, self.groups, strict=True)),
            bounds=bounds,
            scale=scale,
        )

    @property
    def bounds(self) -> dict[str, float]:
        """Clipping group -> C."""
        found = {} if self.clip is None else self.clip.bounds
        return {group: float(whole(bound)) for group, bound in found.items()}

    def sides_of_sum(
        self, group: str, gaps: Sequence[float], sizes: Sequence[float], precision: str
    ) -> exactness.Sides:
        """Both sides of a sum of many examples, for one group: nobody's contribution is beyond C.

        Args:
            group: of the leaves that were compared.
            gaps: of each leaf, length of the difference.
            sizes: of each leaf, length of the plain sum.
            precision: see `precision_of`.
        """
        members = [i for i, own in enumerate(self.groups) if own == group]
        names = [self.names[i] for i in members]
        bound = self.bounds[group] + OF_SUM[precision] * self.of_group(sizes, group)
        return exactness.Sides(
            norm=0.0,
            expected_norm=0.0,
            gaps={self.names[i]: gaps[i] for i in members},
            sizes=dict.fromkeys(names, 0.0),
            groups=dict.fromkeys(names, group),
            bounds={group: bound},
            scale=bound,
        )


_LARGEST = 1e-3 * math.sqrt(float(np.finfo(np.float32).max))  # norms whose squares are float32


def amplified(
    plain: Callable[[Any], list[Any]],
    inputs: Any,
    unit: float,
    error: Callable[[list[Any], list[Any]], float],
) -> float:
    """How far plain autodiff moves when everything that goes in is rounded otherwise.

    Args:
        plain: (inputs) to gradients.
        inputs: pytree of arrays, of which the floating ones are moved.
        unit: relative rounding of one number.
        error: (gradients, the same moved) to how far they moved.
    """
    rng = np.random.default_rng(0)

    def shaken(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        wide = np.asarray(leaf, np.float64)
        return (wide * (1 + unit * rng.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    inputs = jax.tree.map(host, inputs)
    start = plain(inputs)
    errors = [error(start, plain(jax.tree.map(shaken, inputs))) for _ in range(_DRAWS)]
    largest = max((found for found in errors if math.isfinite(found)), default=0.0)
    # A loss that differs from itself, where nothing was moved, explains nothing.
    return largest if 10 * error(start, plain(inputs)) < largest else 0.0


def moved(measure: Measure, start: list[Any], other: list[Any]) -> float:
    """How far one example's contribution is from another, in the units of `Sides.error`."""
    before, after = lengths(start), lengths(other)
    ours = [
        f * np.asarray(host(leaf), np.float64) if f else np.zeros(leaf.shape)
        for f, leaf in zip(measure.factors(after), other, strict=True)
    ]
    gaps, sizes = differences(start, ours, measure.factors(before))
    return measure.sides(before, math.hypot(*after), gaps, sizes).error


def with_trained(call: Call, trained: list[Any]) -> Call:
    """The call at other parameters."""
    return call._replace(parameters=replace(call.parameters, trained=trained))


# ---------------------------------------------------------------------- a call as a whole


class Asked(NamedTuple):
    """A request, what it was asked of, and what came.

    Attributes:
        request: what was asked.
        call: the examples and their loss.
        mask: (n,) bool, or None.
        size: examples worked on at once.
        found: the answer.
    """

    request: Request
    call: Call
    mask: Any
    size: int
    found: Answer

    @property
    def measure(self) -> Measure:
        """How its examples are compared."""
        return Measure.of(self.request, self.call.parameters.names)


def examine(asked: Asked, rows: Sequence[int], where: str) -> None:
    """Compare some examples of a call with their definition, and a sum with that of all.

    Args:
        asked: outside of any trace.
        rows: which examples.
        where: what was called, for the error.

    Raises:
        ExactnessError: one differs, and no rounding explains it.
    """
    precision = precision_of(asked.call.program.jaxpr)
    for k in rows:
        sides = _sides(asked, k)
        if sides is not None and exactness.is_wrong(
            sides,
            precision,
            partial(repeated, asked, k),
            partial(moved_example, asked, k, precision),
        ):
            unit = "the clipping bound" if asked.request.kind == SUM else "its norm"
            raise exactness.failure(sides, f"what {where} gave for an example", ADVICE, unit)
    if asked.request.kind == SUM:
        group = sorted(asked.found.factors)[0]
        factors = asked.found.factors[group]
        if exactness.is_wrong(
            _sides_of_sum(asked, group, precision),
            precision,
            lambda: repeated_sum(asked, group),
            lambda: moved_sum(asked, group, factors, precision),
        ):
            sides = _sides_of_sum(asked, group, precision)
            raise exactness.failure(sides, f"the sum that {where} gave", ADVICE)


def repeated(asked: Asked, k: int) -> float | None:
    """The error of example k in float64, ours and the plain side; None where its loss has none."""
    return _in_double(asked, lambda other: _sides(other, k))


def repeated_sum(asked: Asked, group: str) -> float | None:
    """The same of the sum, for the leaves of one group."""
    return _in_double(asked, lambda other: _sides_of_sum(other, group, "float64"))


def moved_example(asked: Asked, k: int, precision: str) -> float:
    """How far example k's contribution moves by rounding; see `exactness.is_wrong`."""
    call, measure = asked.call, asked.measure
    return amplified(
        lambda inputs: plain_gradient(with_trained(call, inputs[0]), inputs[1]),
        (call.parameters.trained, row_at(call.rows, k)),
        exactness.UNIT[precision],
        lambda start, other: moved(measure, start, other),
    )


def moved_sum(asked: Asked, group: str, factors: Any, precision: str) -> float:
    """How far the sum of all examples, times these factors, moves by rounding."""
    call, measure = asked.call, asked.measure
    return amplified(
        lambda inputs: plain_sum(with_trained(call, inputs[0])._replace(rows=inputs[1]), factors),
        (call.parameters.trained, call.rows),
        exactness.UNIT[precision],
        lambda start, other: _of_sum(measure, start, other, group, precision).error,
    )


def _sides_of_sum(asked: Asked, group: str, precision: str) -> exactness.Sides:
    """Both sides of the clipped sum, for the leaves of one group."""
    plain = plain_sum(asked.call, asked.found.factors[group])
    return _of_sum(asked.measure, plain, asked.found.leaves, group, precision)


def _of_sum(
    measure: Measure, plain: list[Any], ours: list[Any], group: str, precision: str
) -> exactness.Sides:
    """Both sides of a sum of many examples, for the leaves of one group."""
    gaps, _ = differences(plain, ours, [1.0] * len(plain))
    return measure.sides_of_sum(group, gaps, lengths(plain), precision)


def _sides(asked: Asked, k: int) -> exactness.Sides | None:
    """Both sides of example k; None where its gradient is no number, and nothing is clipped."""
    request, call, _, size, found = asked
    plain = plain_gradient(call, row_at(call.rows, k))
    leaves = found.leaves
    if request.kind == SUM:
        leaves = answer(request, call, jnp.arange(call.num_examples) == k, size).leaves
    return sides_of(request, asked.measure, plain, leaves, found.norms, k)


def sides_of(
    request: Request,
    measure: Measure,
    plain: list[Any],
    leaves: list[Any],
    norms: Any,
    k: int,
    known: Sequence[float] | None = None,
) -> exactness.Sides | None:
    """Both sides of example k; None where its gradient is no number, and nothing is clipped.

    Args:
        request: what was asked.
        measure: how it is compared.
        plain: the example's gradient.
        leaves: of the answer; of a sum that of this example alone.
        norms: (n,) of the answer.
        k: the example.
        known: length of each leaf of its gradient; None to find them here.
    """
    known = lengths(plain) if known is None else known
    if request.kind != SUM and not math.isfinite(math.hypot(*known)):
        return None
    if request.kind == NORMS:
        if math.hypot(*known) >= _LARGEST:
            return None  # its square is no float32
        sizes = [float(host(leaf)[k]) for leaf in leaves]
        gaps = [abs(ours - theirs) for ours, theirs in zip(sizes, known, strict=True)]
    else:
        ours = leaves if request.kind == SUM else [host(leaf)[k] for leaf in leaves]
        gaps, sizes = differences(plain, ours, measure.factors(known))
    norm = math.hypot(*sizes) if norms is None else float(host(norms)[k])
    return measure.sides(known, norm, gaps, sizes)


def _in_double(asked: Asked, compare: Callable[[Asked], exactness.Sides | None]) -> float | None:
    """The error of a comparison of the same call in float64; None where its loss has none."""

    def wide(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, jnp.float64) if floating else leaf

    try:
        with jax.enable_x64(True):
            request, call, mask, size, _ = asked
            trained, rows = jax.tree.map(wide, (call.parameters.trained, call.rows))
            call = with_trained(call, trained)._replace(rows=rows, known=None)
            if precision_of(call.program.jaxpr) != "float64":
                return None
            if request.clip is not None:
                request = replace(request, clip=replace(request.clip, margin=margin_for(trained)))
            found = answer(request, call, mask, size)
            sides = compare(Asked(request, call, mask, size, found))
            return None if sides is None else sides.error
    except Exception:  # noqa: BLE001 - a loss that can't be computed in float64 says nothing
        return None

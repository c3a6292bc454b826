# SPDX-License-Identifier: Apache-2.0
"""Comparison of one example's results with plain autodiff of that example's own loss.

The reference is `jax.grad` of the loss of one example, alone: no capture, no rule, no `vmap`. This
module holds the parts that all checks share: the reference, the comparison, and the rounding errors
that may explain a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import exactness
from dualdp.plan.clipping import AUTOMATIC_OFFSET
from dualdp_jax import compat
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.per_sample.call import Answer, Call, Row
from dualdp_jax.per_sample.clip import Clip
from dualdp_jax.per_sample.mapping import all_at_once
from dualdp_jax.per_sample.request import NORMS, SUM, Request, answer
from dualdp_jax.per_sample.squared_norms import RESOLUTION, margin_for
from dualdp_jax.rules.arrays import widen

ADVICE = 'Use method="loop", which is plain autodiff, and report the model.'
#: Rounding that is allowed between two sums of many examples, in units of the sum's norm times the
#: tolerance.
OF_SUM = {"float64": 0.02, "float32": 0.02, "tf32": 1.0, "float16": 1.0, "bfloat16": 1.0}
_DRAWS = 4  # random perturbations in `amplified`


def plain_gradient(call: Call, row: Row) -> list[Any]:
    """Return the gradient of one example's own loss, per trained leaf, float32 or wider."""
    grads = jax.grad(lambda trained: call.loss(trained, row)[0])(call.parameters.trained)
    return [widen(grad) for grad in grads]


def plain_sum(call: Call, factors: Any) -> list[Any]:
    """Return the gradient of the sum of factor (n,) times loss, without examples of factor 0."""
    counts = factors != 0
    index = jnp.where(counts, jnp.arange(counts.shape[0]), jnp.argmax(counts))
    rows = row_at(call.rows, index)
    if any(map(compat.has_own_backward, call.program.jaxpr.eqns)):  # perhaps no linear map
        return _sum_one_by_one(call, rows, factors)

    def loss(trained: list[Any]) -> Any:
        losses = widen(all_at_once(lambda row: call.loss(trained, row)[0])(rows))
        return jnp.sum(losses * factors.astype(losses.dtype))

    grads = jax.grad(loss)(call.parameters.trained)
    return [jnp.where(counts.any(), widen(grad), 0) for grad in grads]


def _sum_one_by_one(call: Call, rows: Row, factors: Any) -> list[Any]:
    """`plain_sum`, one example after the other."""

    def of(k: Any) -> list[Any]:
        grads = plain_gradient(call, row_at(rows, k))
        return [jnp.where(factors[k] == 0, 0, factors[k] * grad) for grad in grads]

    add = lambda totals, k: (jax.tree.map(jnp.add, totals, of(k)), None)  # noqa: E731
    return list(jax.lax.scan(add, of(0), jnp.arange(1, factors.shape[0]))[0])


def row_at(rows: Row, k: Any) -> Row:
    """Return one example of (n, ...), or several for an array of indices."""
    return jax.tree.map(lambda leaf: leaf[k], rows)


def host(leaf: Any) -> Any:
    """Return an array as NumPy; random keys are returned unchanged."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return whole(leaf)


def in_double(leaf: Any) -> np.ndarray:
    """Return an array as float64 on the host."""
    return np.asarray(host(leaf), np.float64)


def lengths(leaves: Sequence[Any]) -> list[float]:
    """Return the L2 norm of each leaf, computed in float64 on the host."""
    return [float(np.linalg.norm(in_double(leaf).ravel())) for leaf in leaves]


def differences(
    plain: Sequence[Any], ours: Sequence[Any], factors: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return, per leaf, the L2 norm of (ours - factor * plain), and that of ours."""
    gaps = [
        in_double(other) - (factor * in_double(one) if factor else 0.0)
        for one, other, factor in zip(plain, ours, factors, strict=True)
    ]
    return lengths(gaps), lengths(ours)


def precision_of(jaxpr: Any) -> str:
    """Return the precision that a loss computes in, a key of `exactness.TOLERANCE`."""
    low = compat.low_precision_dtypes(jaxpr)
    if low:
        return "float16" if low == {"float16"} else "bfloat16"
    if np.dtype(np.float32) not in compat.dtypes_of(jaxpr):
        return "float64"
    # Accelerators multiply float32 matrices in fewer bits where the program does not forbid it.
    rounds = jax.default_backend() != "cpu" and compat.multiplies_by_default(jaxpr)
    return "tf32" if rounds else "float32"


@dataclass(frozen=True)
class Measure:
    """Comparison of an example's result with its plain gradient, by clipping group."""

    names: list[str]  # name of each trained leaf
    groups: list[str]  # clipping group of each leaf
    clip: Clip | None  # `Clip`, or None without clipping

    @classmethod
    def of(cls, request: Request, names: list[str]) -> Measure:
        """Return the measure for a request."""
        if request.clip is not None:
            return cls(names, request.clip.groups, request.clip)
        return cls(names, names if request.per_parameter else [""] * len(names), None)

    @property
    def bounds(self) -> dict[str, float]:
        """Mapping from clipping group to C; empty without clipping."""
        found = {} if self.clip is None else self.clip.bounds
        return {group: float(whole(bound)) for group, bound in found.items()}

    def factors(self, plain: Sequence[float]) -> list[float]:
        """Return the factor of each leaf for a gradient whose leaves have these norms."""
        if not math.isfinite(math.hypot(*plain)):
            return [0.0] * len(plain)
        if self.clip is None:
            return [1.0] * len(plain)
        norms = {group: self.of_group(plain, group) for group in set(self.groups)}
        return [self.clip.factor(group, norms[group]) for group in self.groups]

    def of_group(self, values: Sequence[float], group: str) -> float:
        """Return the norm of the leaves of a group from the norm of each leaf."""
        return math.hypot(*(v for v, own in zip(values, self.groups, strict=True) if own == group))

    def sides(
        self, plain: Sequence[float], norm: float, gaps: Sequence[float], sizes: Sequence[float]
    ) -> exactness.Sides:
        """Return both sides of the comparison of one example, whose norm we gave as `norm`.

        Per leaf: norm of the plain gradient, of the contributions' difference, of our contribution.
        """
        expected = math.hypot(*plain)
        if math.isfinite(expected) and expected < _LARGEST and not math.isfinite(norm):
            norm = 0.0  # an example with a finite gradient was dropped
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

    def sides_of_sum(
        self, group: str, gaps: Sequence[float], sizes: Sequence[float], precision: str
    ) -> exactness.Sides:
        """Return both sides of a sum of many examples for one group, without a bound to exceed.

        Per leaf: norm of the difference, and of the plain sum.
        """
        members = zip(self.names, gaps, self.groups, strict=True)
        gap_of = {name: gap for name, gap, own in members if own == group}
        bound = self.bounds[group] + OF_SUM[precision] * self.of_group(sizes, group)
        return exactness.Sides(
            norm=0.0,
            expected_norm=0.0,
            gaps=gap_of,
            sizes=dict.fromkeys(gap_of, 0.0),
            groups=dict.fromkeys(gap_of, group),
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
    """Return the largest change of plain autodiff's result when its inputs are rounded differently.

    The floating arrays of `inputs` are perturbed by `unit`, the relative rounding error of one
    number; `error` is the size of a change of the gradients.
    """
    rng = np.random.default_rng(0)

    def perturbed(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        wide = np.asarray(leaf, np.float64)
        return (wide * (1 + unit * rng.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    inputs = jax.tree.map(host, inputs)
    start = plain(inputs)
    errors = [error(start, plain(jax.tree.map(perturbed, inputs))) for _ in range(_DRAWS)]
    largest = max((found for found in errors if math.isfinite(found)), default=0.0)
    # A loss that is not deterministic changes without a perturbation: no excuse.
    return largest if 10 * error(start, plain(inputs)) < largest else 0.0


def moved(measure: Measure, start: list[Any], other: list[Any]) -> float:
    """Return the distance between the contributions of two gradients, in units of `Sides.error`."""
    before, after = lengths(start), lengths(other)
    ours = [
        f * in_double(leaf) if f else np.zeros(leaf.shape)
        for f, leaf in zip(measure.factors(after), other, strict=True)
    ]
    gaps, sizes = differences(start, ours, measure.factors(before))
    return measure.sides(before, math.hypot(*after), gaps, sizes).error


def sides_of(
    request: Request,
    measure: Measure,
    plain: list[Any],
    leaves: list[Any],
    norms: Any,
    k: int,
    known: Sequence[float] | None = None,
) -> exactness.Sides | None:
    """Return both sides of example k; None for norms or gradients that cannot be compared.

    `leaves` are those of the answer, for a sum those of the sum of this example alone; `known`
    holds the norm of each leaf of `plain`, None to compute them.
    """
    known = lengths(plain) if known is None else known
    if request.kind != SUM and not math.isfinite(math.hypot(*known)):
        return None
    if request.kind == NORMS:
        if math.hypot(*known) >= _LARGEST:
            return None  # its square overflows float32
        sizes = [float(host(leaf)[k]) for leaf in leaves]
        gaps = [abs(ours - theirs) for ours, theirs in zip(sizes, known, strict=True)]
    else:
        ours = leaves if request.kind == SUM else [host(leaf)[k] for leaf in leaves]
        gaps, sizes = differences(plain, ours, measure.factors(known))
    norm = math.hypot(*sizes) if norms is None else float(host(norms)[k])
    return measure.sides(known, norm, gaps, sizes)


class AnsweredCall(NamedTuple):
    """Request with its call and the answer that is checked."""

    request: Request  # `Request` that was answered
    call: Call  # `Call` with the examples and their loss
    mask: Any  # (n,) bool, or None
    size: int  # examples per chunk
    found: Answer  # `Answer` to check

    @property
    def measure(self) -> Measure:
        """`Measure` of this request."""
        return Measure.of(self.request, self.call.parameters.names)

    def at(self, trained: list[Any], rows: Row) -> Call:
        """Return the call with other numbers of the same types."""
        parameters = replace(self.call.parameters, trained=trained)
        return self.call._replace(parameters=parameters, rows=rows)

    def sides(self, k: int) -> exactness.Sides | None:
        """Return both sides of example k, see `sides_of`."""
        request, call, _, size, found = self
        plain, leaves = plain_gradient(call, row_at(call.rows, k)), found.leaves
        if request.kind == SUM:
            leaves = answer(request, call, jnp.arange(call.num_examples) == k, size).leaves
        return sides_of(request, self.measure, plain, leaves, found.norms, k)

    def sides_of_sum(self, group: str, precision: str) -> exactness.Sides:
        """Return both sides of the clipped sum, for the leaves of one group."""
        plain = plain_sum(self.call, self.found.factors[group])
        return _sides_of_sum(self.measure, plain, self.found.leaves, group, precision)

    def error_in_double(
        self, compare: Callable[[AnsweredCall], exactness.Sides | None]
    ) -> float | None:
        """Return the error of a comparison in float64; None if the loss has no float64."""

        def wide(leaf: Any) -> Any:
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jnp.asarray(leaf, jnp.float64) if floating else leaf

        try:
            with jax.enable_x64(True):
                request, call, mask, size, _ = self
                trained, rows = jax.tree.map(wide, (call.parameters.trained, call.rows))
                call = self.at(trained, rows)._replace(known=None, analysis=None)
                if precision_of(call.program.jaxpr) != "float64":
                    return None
                if request.clip is not None:
                    clip = replace(request.clip, margin=margin_for(trained))
                    request = replace(request, clip=clip)
                found = answer(request, call, mask, size)
                sides = compare(AnsweredCall(request, call, mask, size, found))
                return None if sides is None else sides.error
        except Exception:  # noqa: BLE001 - the loss can't be computed in float64
            return None

    def moved(self, k: int, precision: str) -> float:
        """Return the change of example k's contribution by rounding; see `exactness.is_wrong`."""
        call, measure = self.call, self.measure
        return amplified(
            lambda inputs: plain_gradient(self.at(inputs[0], call.rows), inputs[1]),
            (call.parameters.trained, row_at(call.rows, k)),
            exactness.UNIT[precision],
            lambda start, other: moved(measure, start, other),
        )

    def moved_sum(self, group: str, factors: Any, precision: str) -> float:
        """Return the change by rounding of the sum of all examples times these factors."""
        call, measure = self.call, self.measure
        return amplified(
            lambda inputs: plain_sum(self.at(*inputs), factors),
            (call.parameters.trained, call.rows),
            exactness.UNIT[precision],
            lambda start, other: _sides_of_sum(measure, start, other, group, precision).error,
        )


def _sides_of_sum(
    measure: Measure, plain: list[Any], ours: list[Any], group: str, precision: str
) -> exactness.Sides:
    """Both sides of two sums, for the leaves of one group."""
    gaps, _ = differences(plain, ours, [1.0] * len(plain))
    return measure.sides_of_sum(group, gaps, lengths(plain), precision)


def examine(answered: AnsweredCall, rows: Sequence[int], where: str) -> None:
    """Compare some examples of a call with plain autodiff, and a clipped sum as a whole.

    Raises:
        ExactnessError: one differs, and no rounding explains it.
    """
    precision = precision_of(answered.call.program.jaxpr)
    is_sum = answered.request.kind == SUM
    for k in rows:
        sides = answered.sides(k)
        if sides is not None and exactness.is_wrong(
            sides,
            precision,
            partial(answered.error_in_double, methodcaller("sides", k)),
            partial(answered.moved, k, precision),
        ):
            unit = "the clipping bound" if is_sum else "its norm"
            raise exactness.failure(sides, f"what {where} gave for an example", ADVICE, unit)
    if is_sum:
        group = min(answered.found.factors)
        sides = answered.sides_of_sum(group, precision)
        if exactness.is_wrong(
            sides,
            precision,
            partial(answered.error_in_double, methodcaller("sides_of_sum", group, "float64")),
            lambda: answered.moved_sum(group, answered.found.factors[group], precision),
        ):
            raise exactness.failure(sides, f"the sum that {where} gave", ADVICE)

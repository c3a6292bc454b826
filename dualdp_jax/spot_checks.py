# SPDX-License-Identifier: Apache-2.0
"""Spot checks of the engine's steps: on the host, on the numbers of the step itself.

A check takes place after the totals of a step are known and before anything is recorded or
released. It runs programs of its own beside those of the step and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dualdp import exactness
from dualdp_jax import checks
from dualdp_jax.checks import ADVICE, Asked, Measure
from dualdp_jax.request import SUM, Answer, Request
from dualdp_jax.rules.estimate import stable_norm
from dualdp_jax.rules.kinds import as_if
from dualdp_jax.rules.product import widen
from dualdp_jax.sharding import shardings, whole

if TYPE_CHECKING:
    from dualdp_jax.training import Each, Run, Totals

_SEVERAL = 8  # examples whose norms a check of the whole batch looks at


class Place(NamedTuple):
    """Where an example of a logical batch lies."""

    chunk: int
    row: int


class Step(NamedTuple):
    """A step whose totals are known.

    Attributes:
        inputs: per chunk (arrays of the model, arrays of its rows).
        dropout: key data of the dropout masks.
        masks: (rows,) of each chunk, NumPy.
        each: what each chunk gave for its rows.
        parts: of the logical batch, as the chunks left them: on a mesh with an axis of parts.
        totals: the same, added up.
        bound: C.
    """

    inputs: list[Any]
    dropout: Any
    masks: list[Any]
    each: list[Each]
    parts: Totals
    totals: Totals
    bound: float


class SpotChecks:
    """The checks of one run, with their compiled programs.

    Args:
        run: whose steps are checked.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.layout = run, run.layout
        self._known_precision: str | None = None

    def check(self, step: Step, due: exactness.Check) -> bool:
        """Compare a step with the definition; False where it has no example.

        Args:
            step: its totals are known, and nothing of it was released.
            due: what is drawn.

        Raises:
            ExactnessError: it differs.
        """
        places = [
            Place(chunk, int(row))
            for chunk, mask in enumerate(step.masks)
            for row in np.flatnonzero(mask)
        ]
        self._check_count(step, len(places))
        if not places:
            return False
        norms = [whole(part.norms) for part in step.each]
        two = [places[due.draw(len(places))], max(places, key=lambda at: _size(norms, at))]
        rng = np.random.default_rng(int(due.fractions[1] * 2**53))
        several = rng.permutation(len(places))[:_SEVERAL] if due.is_whole else ()
        for at in dict.fromkeys([*two, *(places[i] for i in several)]):
            norm = float(norms[at.chunk][at.row])
            self._check_example(step, at, norm, with_contribution=due.is_whole and at in two)
        if due.is_whole:
            self._check_chunk(step, due)
        return True

    def _check_count(self, step: Step, count: int) -> None:
        """Refuse totals in which a reduction lost rows, or has some twice.

        Raises:
            ExactnessError: it did.
        """
        if int(whole(step.totals.num_rows)) != count:
            raise exactness.ExactnessError(
                "A spot check failed: the totals of a step do not count the rows of its batch, so "
                "the sum over chunks or devices lost some, or has some twice. Nothing was released "
                "for this batch. Report it, with the mesh and the version of jax.",
                relative_error="inf",
            )

    # ------------------------------------------------------------------ one example

    def _check_example(
        self, step: Step, at: Place, norm: float, *, with_contribution: bool
    ) -> None:
        """Compare the norm of an example, and what it contributes to the clipped sum.

        Raises:
            ExactnessError: one differs.
        """
        (trained, others), rows = step.inputs[at.chunk]
        measure = self._measure(step)
        plain, known = self._plain(trained, others, self._one_row(rows, at.row), step.dropout)
        known = _floats(known)
        zeros = [0.0] * len(plain)
        if with_contribution:
            sums = self._alone(step, at)
            found = self._differences(plain, sums, measure.factors(known), None)
            gaps, sizes = map(_floats, found)
        else:
            gaps, sizes = zeros, zeros
        sides = measure.sides(known, norm, gaps, sizes)
        # Two rows, since one alone is no batch; the first of them is compared.
        one = lambda: self._local(step, at.chunk, [at.row, at.row])  # noqa: E731
        if exactness.is_wrong(
            sides,
            self._precision(step),
            lambda: self._repeated(one, len(step.masks[at.chunk])),
            lambda: checks.moved_example(one(), 0, self._precision(step)),
        ):
            where = "what one example contributes to the clipped sum" if any(gaps) else "a norm"
            raise exactness.failure(sides, where, ADVICE)

    def _one_row(self, rows: Any, row: int) -> Any:
        """(leaves, mask, indices) of one row, (1, ...)."""
        if self.layout is None:
            return jax.tree.map(lambda leaf: leaf[row : row + 1], rows)
        return self._pick(rows, np.int32(row))

    def _alone(self, step: Step, at: Place) -> list[Any]:
        """What one example contributes: the sums of the same program, all others masked."""
        (trained, others), (leaves, _, indices) = step.inputs[at.chunk]
        mask = np.arange(len(step.masks[at.chunk])) == at.row
        place = mask if self.layout is None else self.layout.rows(mask)
        rows = leaves, place, indices
        return self.run.sums(trained, others, rows, step.dropout, step.bound, after=None)

    # ------------------------------------------------------------------ a chunk

    def _check_chunk(self, step: Step, due: exactness.Check) -> None:
        """Compare the clipped sum of a chunk with plain autodiff of all its losses.

        Each loss is multiplied by the factor that the engine used: what it made of the norms is
        looked at elsewhere, and here whether every row is in the sum with it, once.

        Raises:
            ExactnessError: it differs.
        """
        measure, precision = self._measure(step), self._precision(step)
        filled = [i for i, mask in enumerate(step.masks) if mask.any()]
        chunk = filled[due.draw(len(filled), 2)]
        groups = sorted(step.each[chunk].factors)
        group = groups[due.draw(len(groups), 3)]
        (trained, others), rows = step.inputs[chunk]
        factors = step.each[chunk].factors[group]
        plain, known = self._plain_sum(trained, others, (*rows, factors), step.dropout)
        sums, before = step.totals.sums, None
        if len(step.inputs) > 1:  # what the chunk adds to the totals when it comes once more
            before, arguments = sums, (trained, others, rows, step.dropout, step.bound)
            sums = self.run.sums(*arguments, after=step.parts)
        gaps, _ = self._differences(plain, sums, [1.0] * len(sums), before)
        sides = measure.sides_of_sum(group, _floats(gaps), _floats(known), precision)
        every = lambda: self._local(step, chunk, range(len(step.masks[chunk])))  # noqa: E731
        used = whole(factors)
        if exactness.is_wrong(
            sides,
            precision,
            lambda: checks.repeated_sum(every(), group),
            lambda: checks.moved_sum(every(), group, used, precision),
        ):
            raise exactness.failure(sides, "the clipped sum of a physical batch", ADVICE)

    # ------------------------------------------------------------------ the other looks

    def _local(self, step: Step, chunk: int, rows: Sequence[int]) -> Asked:
        """Some rows of a chunk as a call of their own, with all arrays on the host.

        So the comparison can be made in other precisions. Nothing is answered yet.
        """
        (trained, others), (leaves, mask, indices) = jax.tree.map(checks.host, step.inputs[chunk])
        at = np.asarray(rows)
        arrays = ([leaf[at] for leaf in leaves], mask[at], indices[at])
        call = self.run.call(trained, others, arrays, step.dropout)
        request = Request(SUM, self.run.method, self.run.clipper(call.parameters, step.bound))
        return Asked(request, call, mask[at], len(at), Answer([]))

    def _repeated(self, one: Callable[[], Asked], count: int) -> float | None:
        """The error of one example in float64, by the rules that are chosen for so many."""
        with as_if(count):
            return checks.repeated(one(), 0)

    # ------------------------------------------------------------------ what is compiled

    @cached_property
    def _plain(self) -> Callable[..., Any]:
        """(trained, others, row (1, ...), dropout) to one gradient and its leaves' lengths."""

        def gradient(trained: Any, others: Any, row: Any, dropout: Any) -> Any:
            call = self.run.call(trained, others, row, dropout)
            return _with_lengths(checks.plain_gradient(call, checks.row_at(call.rows, 0)))

        return self._jitted(gradient, lambda like, number: (like, number))

    @cached_property
    def _plain_sum(self) -> Callable[..., Any]:
        """(trained, others, rows with factors, dropout) to a gradient and its leaves' lengths.

        It is that of the sum over the rows of factor times loss.
        """

        def total(trained: Any, others: Any, rows: Any, dropout: Any) -> Any:
            call = self.run.call(trained, others, rows[:3], dropout)
            return checks.plain_sum(call, rows[3])

        if self.layout is None:
            return jax.jit(lambda *arguments: _with_lengths(total(*arguments)))
        layout, like = self.layout, self.run.parameters.trained

        def parts(*arguments: Any) -> Any:
            return jax.tree.map(lambda x: x[None], total(*arguments))

        spread = layout.each(parts, like, out_specs=P(layout.axes))
        added = lambda *args: jax.tree.map(lambda x: x.sum(0), spread(*args))  # noqa: E731
        return self._jitted(
            lambda *args: _with_lengths(added(*args)), lambda like, number: (like, number)
        )

    @cached_property
    def _pick(self) -> Callable[..., Any]:
        """(rows on a mesh, number of one) to that row on all devices, (1, ...)."""
        assert self.layout is not None
        take = lambda rows, k: jax.tree.map(  # noqa: E731
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, k, 1), rows
        )
        return jax.jit(take, out_shardings=self.layout.sharding())

    @cached_property
    def _differences(self) -> Callable[..., Any]:
        """(plain, ours, factors, before) to the lengths of (ours - factor * plain), and of ours.

        Ours is what is left of it when `before` is taken away, unless that is None.
        """

        def compare(plain: Any, ours: Any, factors: Any, before: Any) -> Any:
            if before is not None:
                ours = jax.tree.map(jnp.subtract, ours, before)
            pairs = zip(plain, ours, factors, strict=True)
            gaps = [widen(o) - jnp.where(f == 0, 0, f * p) for p, o, f in pairs]
            return _lengths(gaps), _lengths(ours)

        return self._jitted(compare, lambda like, number: number)

    def _jitted(self, function: Callable[..., Any], places: Callable[..., Any]) -> Any:
        """A jitted function; `places` says of (trained leaves, a number) where its results lie."""
        if self.layout is None:
            return jax.jit(function)
        like = shardings(self.run.parameters.trained)
        return jax.jit(function, out_shardings=places(like, self.layout.sharding()))

    # ------------------------------------------------------------------ facts

    def _measure(self, step: Step) -> Measure:
        """How the examples of a step are compared."""
        parameters = self.run.parameters
        clip = self.run.clipper(parameters, step.bound)
        return Measure(parameters.names, clip.groups, clip)

    def _precision(self, step: Step) -> str:
        """The precision that the loss computes in."""
        if self._known_precision is None:
            (trained, others), rows = step.inputs[0]
            call = self.run.call(trained, others, self._one_row(rows, 0), step.dropout)
            self._known_precision = checks.precision_of(call.program.jaxpr)
        return self._known_precision


def _size(norms: list[Any], at: Place) -> float:
    """The norm of an example, -1 where it is no number."""
    norm = float(norms[at.chunk][at.row])
    return norm if math.isfinite(norm) else -1.0


def _lengths(leaves: Sequence[Any]) -> list[Any]:
    """L2 norm of each leaf, ()."""
    return [stable_norm(leaf[None])[0] for leaf in leaves]


def _with_lengths(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Leaves, and the L2 norm of each."""
    return leaves, _lengths(leaves)


def _floats(values: Sequence[Any]) -> list[float]:
    """Numbers on the device, as floats."""
    return [float(whole(value)) for value in values]

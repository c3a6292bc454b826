# SPDX-License-Identifier: Apache-2.0
"""Spot checks of the engine's steps, on the host, with the arrays of the step itself.

A check takes place after the totals of a step are known and before anything is recorded or
released. It runs its own programs beside those of the step and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dualdp import exactness
from dualdp_jax.parallel.mesh import shardings, whole
from dualdp_jax.per_sample.call import Answer
from dualdp_jax.per_sample.checks import spot_check
from dualdp_jax.per_sample.checks.spot_check import ADVICE, AnsweredCall, Measure
from dualdp_jax.per_sample.request import SUM, Request
from dualdp_jax.rules.arrays import widen
from dualdp_jax.rules.base import as_if
from dualdp_jax.rules.estimate import stable_norm
from dualdp_jax.training.step import CompiledStep, ComputedStep, Rows

_SEVERAL = 8  # examples whose norms a check of the whole batch compares


class Example(NamedTuple):
    """Index of an example of a logical batch: chunk, and row in the chunk."""

    chunk: int
    row: int


class StepChecks:
    """Spot checks of one run, with their compiled programs.

    Args:
        run: `CompiledStep` whose steps are checked.
    """

    def __init__(self, run: CompiledStep) -> None:
        self.run, self.data_mesh = run, run.data_mesh
        self._known_precision: str | None = None

    def check(self, step: ComputedStep, due: exactness.SpotCheck, *, is_first: bool) -> bool:
        """Compare a step with plain autodiff; return False if it has no example.

        If the whole batch is due, its sum, further norms, and the contribution of one of the two
        examples are compared; of both if `is_first`.

        Raises:
            ExactnessError: it differs.
        """
        examples = [
            Example(chunk, int(row))
            for chunk, mask in enumerate(step.masks)
            for row in np.flatnonzero(mask)
        ]
        if int(whole(step.totals.num_rows)) != len(examples):
            raise exactness.ExactnessError(
                "A spot check failed: the totals of a step do not count the rows of its batch, so "
                "the sum over chunks or devices lost some, or has some twice. Nothing was released "
                "for this batch. Report it, with the mesh and the version of jax.",
                relative_error="inf",
            )
        if not examples:
            return False
        norms = [whole(answer.norms) for answer in step.answers]
        norm_of = {at: float(norms[at.chunk][at.row]) for at in examples}
        largest = max(examples, key=lambda at: norm_of[at] if math.isfinite(norm_of[at]) else -1.0)
        two = [examples[due.draw(len(examples))], largest]
        contributing = two if is_first else [two[due.draw(2, 1)]] if due.is_whole else []
        rng = np.random.default_rng(int(due.fractions[1] * 2**53))
        several = rng.permutation(len(examples))[:_SEVERAL] if due.is_whole else ()
        for at in dict.fromkeys([*two, *(examples[i] for i in several)]):
            with_contribution = at in contributing
            self._check_example(step, at, norm_of[at], with_contribution=with_contribution)
        if due.is_whole:
            self._check_chunk(step, due)
        return True

    def _check_example(
        self, step: ComputedStep, at: Example, norm: float, *, with_contribution: bool
    ) -> None:
        """Compare the norm of an example, and optionally its contribution to the clipped sum."""
        (trained, others), rows = step.inputs[at.chunk]
        measure = self._measure(step)
        row = self._pick(rows, np.int32(at.row))
        plain, known = self._plain(trained, others, row, step.dropout)
        known = _floats(known)
        gaps = sizes = [0.0] * len(plain)
        if with_contribution:  # the sums of the step's own program, with all others masked
            mask = np.arange(len(step.masks[at.chunk])) == at.row
            alone = rows._replace(
                mask=mask if self.data_mesh is None else self.data_mesh.rows(mask)
            )
            sums = self.run.sums(trained, others, alone, step.dropout, step.bound, after=None)
            found = self._differences(plain, sums, measure.factors(known), None)
            gaps, sizes = map(_floats, found)
        sides = measure.sides(known, norm, gaps, sizes)
        # Two copies of the row, so that the call has a batch; the first one is compared.
        one = lambda: self._local(step, at.chunk, [at.row, at.row])  # noqa: E731

        def repeated() -> float | None:
            with as_if(len(step.masks[at.chunk])):  # the rules chosen for the whole chunk
                return one().error_in_double(lambda call: call.sides(0))

        if exactness.is_wrong(
            sides,
            self._precision(step),
            repeated,
            lambda: one().moved(0, self._precision(step)),
        ):
            where = "what one example contributes to the clipped sum" if any(gaps) else "a norm"
            raise exactness.failure(sides, where, ADVICE)

    def _check_chunk(self, step: ComputedStep, due: exactness.SpotCheck) -> None:
        """Compare the clipped sum of a chunk with plain autodiff of its weighted losses.

        Each loss is multiplied by the factor that the engine used; norms are compared elsewhere. A
        difference shows rows that are missing from the sum, or in it twice or with another factor.
        """
        measure, precision = self._measure(step), self._precision(step)
        filled = [i for i, mask in enumerate(step.masks) if mask.any()]
        chunk = filled[due.draw(len(filled), 2)]
        groups = sorted(step.answers[chunk].factors)
        group = groups[due.draw(len(groups), 3)]
        (trained, others), rows = step.inputs[chunk]
        factors = step.answers[chunk].factors[group]
        plain, known = self._plain_sum(trained, others, (rows, factors), step.dropout)
        sums, before = step.totals.sums, None
        if len(step.inputs) > 1:  # the chunk once more on top of the totals
            before, arguments = sums, (trained, others, rows, step.dropout, step.bound)
            sums = self.run.sums(*arguments, after=step.unreduced)
        gaps, _ = self._differences(plain, sums, [1.0] * len(sums), before)
        sides = measure.sides_of_sum(group, _floats(gaps), _floats(known), precision)
        every = lambda: self._local(step, chunk, range(len(step.masks[chunk])))  # noqa: E731
        used = whole(factors)
        if exactness.is_wrong(
            sides,
            precision,
            lambda: every().error_in_double(lambda call: call.sides_of_sum(group, "float64")),
            lambda: every().moved_sum(group, used, precision),
        ):
            raise exactness.failure(sides, "the clipped sum of a physical batch", ADVICE)

    def _local(self, step: ComputedStep, chunk: int, rows: Sequence[int]) -> AnsweredCall:
        """Unanswered request for some rows of a chunk, with all arrays on the host.

        The comparison can then be repeated in other precisions.
        """
        (trained, others), whole_chunk = jax.tree.map(spot_check.host, step.inputs[chunk])
        some = _picked(whole_chunk, rows)
        call = self.run.call(trained, others, some, step.dropout)
        request = Request(SUM, self.run.method, self.run.clipper(call.parameters, step.bound))
        return AnsweredCall(request, call, some.mask, len(some.mask), Answer([]))

    @cached_property
    def _plain(self) -> Callable[..., Any]:
        """Program (trained, others, row (1, ...), dropout) -> one gradient, norms of its leaves."""

        def gradient(trained: Any, others: Any, row: Any, dropout: Any) -> Any:
            call = self.run.call(trained, others, row, dropout)
            grads = spot_check.plain_gradient(call, spot_check.row_at(call.rows, 0))
            return grads, _lengths(grads)

        return self._jitted(gradient, returns_gradient=True)

    @cached_property
    def _plain_sum(self) -> Callable[..., Any]:
        """Program (trained, others, (rows, factors), dropout) -> gradient, norms of its leaves.

        The gradient is that of the sum over the rows of factor times loss.
        """

        def total(trained: Any, others: Any, rows: Any, dropout: Any) -> Any:
            call = self.run.call(trained, others, rows[0], dropout)
            return spot_check.plain_sum(call, rows[1])

        of_all = total
        if self.data_mesh is not None:
            of_all = self.data_mesh.each(
                lambda *arguments: [x[None] for x in total(*arguments)],
                self.run.parameters.trained,
                out_specs=P(self.data_mesh.axes),
            )

        def with_lengths(*arguments: Any) -> Any:
            grads = of_all(*arguments)
            grads = grads if self.data_mesh is None else [x.sum(0) for x in grads]
            return grads, _lengths(grads)

        return self._jitted(with_lengths, returns_gradient=True)

    @cached_property
    def _pick(self) -> Callable[..., Any]:
        """Program (rows of a chunk, number of an example) -> its rows, on all devices of a mesh."""

        def take(rows: Rows, at: Any) -> Rows:
            def own(leaf: Any) -> Any:
                each = len(leaf) // len(rows.mask)
                return jax.lax.dynamic_slice_in_dim(leaf, at * each, each)

            return jax.tree.map(own, rows)

        if self.data_mesh is None:
            return jax.jit(take)
        return jax.jit(take, out_shardings=self.data_mesh.sharding())

    @cached_property
    def _differences(self) -> Callable[..., Any]:
        """Program (plain, ours, factors, before) -> norms of ours - factor * plain, and of ours.

        `before` is subtracted from ours first, unless it is None.
        """

        def compare(plain: Any, ours: Any, factors: Any, before: Any) -> Any:
            if before is not None:
                ours = jax.tree.map(jnp.subtract, ours, before)
            pairs = zip(plain, ours, factors, strict=True)
            gaps = [widen(o) - jnp.where(f == 0, 0, f * p) for p, o, f in pairs]
            return _lengths(gaps), _lengths(ours)

        return self._jitted(compare)

    def _jitted(self, function: Callable[..., Any], *, returns_gradient: bool = False) -> Any:
        """Jit a function whose results are scalars, after a gradient if it returns one."""
        if self.data_mesh is None:
            return jax.jit(function)
        scalar, like = self.data_mesh.sharding(), shardings(self.run.parameters.trained)
        return jax.jit(function, out_shardings=(like, scalar) if returns_gradient else scalar)

    def _measure(self, step: ComputedStep) -> Measure:
        parameters = self.run.parameters
        clip = self.run.clipper(parameters, step.bound)
        return Measure(parameters.names, clip.groups, clip)

    def _precision(self, step: ComputedStep) -> str:
        """Precision that the loss computes in; cached."""
        if self._known_precision is None:
            (trained, others), rows = step.inputs[0]
            call = self.run.call(trained, others, self._pick(rows, np.int32(0)), step.dropout)
            self._known_precision = spot_check.precision_of(call.program.jaxpr)
        return self._known_precision


def _picked(rows: Rows, examples: Sequence[int]) -> Rows:
    """Rows of some examples."""

    def own(leaf: Any) -> Any:
        each = len(leaf) // len(rows.mask)
        return leaf[(np.asarray(examples)[:, None] * each + np.arange(each)).ravel()]

    return jax.tree.map(own, rows)


def _lengths(leaves: Sequence[Any]) -> list[Any]:
    return [stable_norm(leaf[None])[0] for leaf in leaves]


def _floats(values: Sequence[Any]) -> list[float]:
    """Device scalars as Python floats."""
    return [float(whole(value)) for value in values]

# SPDX-License-Identifier: Apache-2.0
"""Checks of the engine's steps: the identity, with the step's own program and arrays.

A check takes place after the totals of a step are known and before anything is recorded or
released. Our side is the program that computed the totals, with other weights; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dualdp import exactness
from dualdp_jax import compat
from dualdp_jax.parallel.mesh import shardings, whole
from dualdp_jax.per_sample.checks import identity
from dualdp_jax.per_sample.checks.calls import on_host
from dualdp_jax.per_sample.checks.identity import Change, Floats, Leaves, Numbers, Reference
from dualdp_jax.rules.arrays import widen
from dualdp_jax.training.step import CompiledStep, ComputedStep, Rows


class StepChecks:
    """Checks of one run, with their compiled program.

    Args:
        run: `CompiledStep` whose steps are checked.
    """

    def __init__(self, run: CompiledStep) -> None:
        self.run, self.data_mesh = run, run.data_mesh

    def check(self, step: ComputedStep, due: exactness.SpotCheck, *, is_first: bool) -> bool:
        """Compare a step with plain autodiff; return False if it has no example.

        Raises:
            ExactnessError: it differs.
        """
        numbers = self._numbers(step)
        if int(whole(step.totals.num_rows)) != numbers.counts.sum():
            raise exactness.ExactnessError(
                "A spot check failed: the totals of a step do not count the rows of its batch, so "
                "the sum over chunks or devices lost some, or has some twice. Nothing was released "
                "for this batch. Report it, with the mesh and the version of jax.",
                relative_error="inf",
            )
        seed = int(due.fractions[1] * 2**53)
        released = due.fractions[2] < 0.5
        reference = self._reference(step)
        return identity.check(reference, numbers, seed=seed, is_first=is_first, released=released)

    def _numbers(self, step: ComputedStep) -> Numbers:
        """Norms and factors of all rows of a step, its sum, and sums with other weights."""
        run, sizes = self.run, [len(mask) for mask in step.masks]
        factors = {
            group: np.concatenate([on_host(answer.factors[group]) for answer in step.answers])
            for group in step.answers[0].factors
        }

        def weighted_sum(weights: Floats) -> Leaves:
            parts = np.split(weights, np.cumsum(sizes)[:-1])
            return run.weighted_sum(step, [part.astype(run.parameters.dtype) for part in parts])

        return Numbers(
            run.parameters.names,
            np.concatenate(step.masks),
            np.concatenate([on_host(answer.norms) for answer in step.answers]),
            None,
            run.clipper(run.parameters, step.bound),
            factors,
            weighted_sum,
            step.totals.sums,
        )

    def _reference(self, step: ComputedStep) -> Reference:
        """Plain autodiff of the rows of a step."""
        num_shards = 1 if self.data_mesh is None else self.data_mesh.num_shards
        zeros, dtype = self.run.zeros, self.run.parameters.dtype

        def subtract(
            chunk: int, start: Leaves, weights: Floats, change: Change
        ) -> tuple[Leaves, Leaves]:
            (trained, others), rows = step.inputs[chunk]
            trained, arrays = (list(map(change, leaves)) for leaves in (trained, rows.arrays))
            index, shares, count = identity.blocks_of(weights, num_shards)
            chosen = rows._replace(arrays=arrays), *map(self.run.put, (index, shares.astype(dtype)))
            return self._program(start, trained, others, chosen, step.dropout, count)

        sizes = [len(mask) for mask in step.masks]
        return Reference(subtract, sizes, zeros, self._precision)

    @cached_property
    def _program(self) -> Callable[..., tuple[Leaves, Leaves]]:
        """Program of `Reference.subtract`: (trained, others, (rows, index, weights), ...)."""
        run, mesh = self.run, self.data_mesh

        def of_shard(
            trained: Leaves,
            others: Leaves,
            chosen: tuple[Rows, jax.Array, jax.Array],
            dropout: jax.Array,
            count: jax.Array,
        ) -> Leaves:
            rows, index, shares = chosen
            call = run.call(trained, others, rows, dropout)
            zeros = [jnp.zeros_like(widen(leaf)) for leaf in trained]
            return identity.without_gradient(call, zeros, index, shares, count)

        each: Callable[..., Leaves] = of_shard
        if mesh is not None:
            each = mesh.each(
                lambda *inputs: [leaf[None] for leaf in of_shard(*inputs)],
                run.parameters.trained,
                out_specs=P(mesh.axes),
            )

        def subtract(start: Leaves, *inputs: Any) -> tuple[Leaves, Leaves]:
            parts = each(*inputs)
            parts = parts if mesh is None else [leaf.sum(0) for leaf in parts]
            rest = [old + part for old, part in zip(start, parts, strict=True)]
            return rest, list(map(jnp.linalg.norm, rest))

        options = compat.compiled_quickly(run.program.jaxpr)
        if mesh is None:
            return jax.jit(subtract, compiler_options=options)
        out = (shardings(run.parameters.trained), mesh.sharding())
        return jax.jit(subtract, out_shardings=out, compiler_options=options)

    @cached_property
    def _precision(self) -> str:
        """Precision that the loss computes in."""
        return identity.precision_of(self.run.program)

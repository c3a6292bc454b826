# SPDX-License-Identifier: Apache-2.0
"""One private step: a jitted function per chunk, then one jitted update. Two compilations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp_jax import bounds, compat
from dualdp_jax.call import build, split_batch
from dualdp_jax.data import LogicalBatch
from dualdp_jax.methods import choose
from dualdp_jax.noise import Release, noised_mean, release_at
from dualdp_jax.parameters import Parameters
from dualdp_jax.per_sample import clipped_call


class TrainState(NamedTuple):
    """What a step takes and returns.

    Attributes:
        params: as they were given; for an `nnx.Module` its `nnx.State`, for `nnx.update`.
        opt_state: of the optimizer, for the trained leaves.
        step: number of releases applied.
    """

    params: Any
    opt_state: Any
    step: int


class Totals(NamedTuple):
    """What the chunks of a logical batch add up to.

    Attributes:
        sums: clipped gradients, per trained leaf.
        loss: sum of the losses.
        num_examples: unmasked examples.
        num_clipped: of them, how many had a norm above the bound, or none that is finite.
    """

    sums: list[Any]
    loss: Any
    num_examples: Any
    num_clipped: Any


@dataclass(frozen=True)
class Run:
    """A plan, a loss and an optimizer, and the two compiled functions of a step."""

    plan: Any
    parameters: Parameters
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    needs_key: bool
    has_aux: bool
    method: str
    rebuild: Callable[[list[Any]], tuple[Any, ...]]
    _jitted: tuple[Callable[..., Any], Callable[..., Any]] = field(init=False)

    def __post_init__(self) -> None:
        choose(self.method)
        object.__setattr__(self, "_jitted", (jax.jit(self._add_chunk), jax.jit(self._update)))

    def first_state(self) -> TrainState:
        """The state before step 0; dtypes are made strong, so that no later step recompiles."""
        strong = [jax.lax.convert_element_type(p, p.dtype) for p in self.parameters.trained]
        opt_state = self.optimizer.init(self.parameters.like(strong))
        return TrainState(self.parameters.whole(strong, self.parameters.others), opt_state, 0)

    def step(self, state: TrainState, batch: LogicalBatch) -> tuple[TrainState, dict[str, Any]]:
        """The state after the release of this batch, which the caller has recorded."""
        add_chunk, update = self._jitted
        trained, others = self.parameters.arrays(state.params)
        dropout = self.plan.step_key("dropout", batch.step)
        bound = np.asarray(self.plan.max_grad_norm_at(batch.step), self.parameters.dtype)
        totals, aux = self._nothing(), []
        for chunk in batch.chunks:
            arrays, _, _ = split_batch(chunk.args)
            rows = (arrays, chunk.mask, chunk.indices)
            totals, part = add_chunk(trained, others, totals, rows, dropout, bound)
            aux.append(part)
        release = self._release(batch.step)
        trained, opt_state, metrics = update(trained, state.opt_state, totals, release)
        params = self.parameters.whole(trained, others)
        if self.has_aux:
            metrics["unprotected_aux"] = aux
        return TrainState(params, opt_state, state.step + 1), {"step": batch.step, **metrics}

    def _nothing(self) -> Totals:
        """Totals before the first chunk, on the host."""
        trained = self.parameters.trained
        zeros = [np.zeros(p.shape, jnp.result_type(jnp.float32, p)) for p in trained]
        count = np.zeros((), np.int32)
        return Totals(zeros, np.zeros((), self.parameters.dtype), count, count)

    def _release(self, step: int) -> Release:
        """The numbers of a release, in the precision of the sums."""
        key, stddev, size = release_at(self.plan, step)
        return Release(key, *(np.asarray(v, self.parameters.dtype) for v in (stddev, size)))

    def _add_chunk(
        self, trained: Any, others: Any, totals: Totals, rows: Any, dropout: Any, bound: Any
    ) -> tuple[Totals, Any]:
        """Totals with one more chunk, and the aux of its examples."""
        arrays, mask, indices = rows
        key = compat.wrap_key(dropout)
        parameters = replace(
            self.parameters, trained=trained, others=self.parameters.keyed(others, key)
        )
        call = build(
            self.loss_fn,
            parameters,
            self.rebuild(arrays),
            has_aux=self.has_aux,
            key=key if self.needs_key else None,
            trainable=None,
            positions=indices.astype(jnp.uint32),
        )
        clip = bounds.clipper(parameters, self.plan.clipping, bound)
        result = clipped_call(call, clip=clip, mask=mask, method=self.method)
        over = mask & ~(result.norms <= bound)
        added = Totals(
            jax.tree.leaves(result.grads),
            result.losses.sum().astype(totals.loss.dtype),
            mask.sum(dtype=jnp.int32),
            over.sum(dtype=jnp.int32),
        )
        return jax.tree.map(jnp.add, totals, added), result.aux

    def _update(
        self, trained: Any, opt_state: Any, totals: Totals, release: Release
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Noise, divide, step the optimizer; and the metrics."""
        like = self.parameters.like
        updates, opt_state = self.optimizer.update(
            noised_mean(like(totals.sums), release), opt_state, like(trained)
        )
        moved = jax.tree.leaves(optax.apply_updates(like(trained), updates))
        count = jnp.maximum(totals.num_examples, 1)
        metrics = {
            "unprotected_loss": totals.loss / count,
            "unprotected_clipped_fraction": totals.num_clipped / count,
        }
        return moved, opt_state, metrics

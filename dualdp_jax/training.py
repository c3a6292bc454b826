# SPDX-License-Identifier: Apache-2.0
"""One private step: a jitted function per chunk, then one jitted update. Two compilations.

On a mesh a third one stands between them: it adds up what the shards have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp_jax import bounds, compat
from dualdp_jax.call import Call, build, split_batch
from dualdp_jax.choices import prepared
from dualdp_jax.data import LogicalBatch, PlannedLoader
from dualdp_jax.methods import choose
from dualdp_jax.noise import Release, noised_mean, release_at
from dualdp_jax.parameters import Parameters, split
from dualdp_jax.request import SUM, Request, answer
from dualdp_jax.rules.product import widen
from dualdp_jax.sharding import Layout, shardings, whole
from dualdp_jax.spot_checks import Step


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

    @classmethod
    def create(
        cls, params: Any, optimizer: optax.GradientTransformation, trainable: Any = None
    ) -> TrainState:
        """The state before step 0, such as `load_checkpoint(path, like=...)` takes.

        Args:
            params: pytree of parameters, or an `nnx.Module`.
            optimizer: of optax.
            trainable: pytree of bools like `params`, False freezes.
        """
        return first_state(split(params, trainable), optimizer)


class Totals(NamedTuple):
    """What the chunks of a logical batch add up to.

    Attributes:
        sums: clipped gradients, per trained leaf.
        loss: sum of the losses.
        num_rows: unmasked examples.
        num_below: of them, how many had a norm of at most the bound.
    """

    sums: list[Any]
    loss: Any
    num_rows: Any
    num_below: Any


class Each(NamedTuple):
    """What a chunk gives for its rows.

    Attributes:
        norms: (rows,) of the whole gradients, 0 for padding.
        factors: clipping group -> (rows,).
        aux: stacked over the rows, or None.
    """

    norms: Any
    factors: dict[str, Any]
    aux: Any


class Stages(NamedTuple):
    """The gradients of one step on their way to the optimizer, for inspection only.

    Attributes:
        unprotected_norms: (n,) norms of the examples' gradients, not private.
        unprotected_sum: pytree, the clipped sum, not private.
        noisy_mean: pytree, what the optimizer got.
        unprotected_grads: pytree, leaves (n, *shape), not private; None unless
            `engine.keep_per_sample` was set.
    """

    unprotected_norms: Any
    unprotected_sum: Any
    noisy_mean: Any
    unprotected_grads: Any = None


@dataclass(frozen=True)
class Run:
    """A plan, a loss and an optimizer, and the compiled functions of a step.

    Attributes:
        layout: where the rows of a chunk go; None for one device.
        opt_shardings: on a mesh, where the leaves of the optimizer's state lie.
    """

    plan: Any
    parameters: Parameters
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    needs_key: bool
    has_aux: bool
    method: str
    rebuild: Callable[[list[Any]], tuple[Any, ...]]
    layout: Layout | None = None
    opt_shardings: Any = None
    _jitted: dict[str, Callable[..., Any]] = field(init=False)
    _nothing: Totals = field(init=False)

    def __post_init__(self) -> None:
        choose(self.method)
        self.clipper(self.parameters, 1.0)  # refuses shares of other groups
        object.__setattr__(self, "_jitted", self._compiled())
        # Once per run and on the device: made anew in each step it would be a transfer of the
        # size of the parameters.
        trained, count = self.parameters.trained, jnp.zeros((), jnp.int32)
        numbers = jnp.zeros((), self.parameters.dtype), count, count
        if self.layout is None:
            zeros = [jnp.zeros_like(widen(p)) for p in trained]
        else:
            zeros, numbers = self.layout.zeros(trained, numbers)
        object.__setattr__(self, "_nothing", Totals(zeros, *numbers))

    def _compiled(self) -> dict[str, Callable[..., Any]]:
        """The functions of a step; "grads" is compiled if someone asks for it."""
        plain: dict[str, Callable[..., Any]] = {
            "add": self._add_chunk,
            "update": self._update,
            "grads": self._grads,
        }
        if self.layout is None:
            return {name: jax.jit(function) for name, function in plain.items()}
        trained, parts = self.parameters.trained, self.layout.parts(self.parameters.trained)
        sums, number = shardings(trained), self.layout.sharding()
        pieces = Totals(parts[0], *[parts[1]] * 3)
        return {
            "add": jax.jit(self._add_chunk, out_shardings=(pieces, parts[1])),
            "collect": jax.jit(
                lambda totals: jax.tree.map(lambda x: x.sum(0), totals),
                out_shardings=Totals(sums, number, number, number),
            ),
            "update": jax.jit(self._update, out_shardings=(sums, self.opt_shardings, number)),
            "grads": jax.jit(self.layout.each(self._grads, trained)),
        }

    def computed(self, params: Any, batch: LogicalBatch, bound: float) -> Step:
        """What the logical batch adds up to, and everything that went into it."""
        parts, each = self._nothing, []
        inputs, dropout = self._inputs(params, batch)
        limit = np.asarray(bound, self.parameters.dtype)
        for arrays, rows in inputs:
            parts, one = self._jitted["add"](*arrays, parts, rows, dropout, limit)
            each.append(one)
        masks = [np.asarray(chunk.mask) for chunk in batch.chunks]
        return Step(inputs, dropout, masks, each, parts, self._collected(parts), bound)

    def _collected(self, parts: Totals) -> Totals:
        """Totals added up over the devices of a mesh."""
        return parts if self.layout is None else self._jitted["collect"](parts)

    def sums(
        self, trained: Any, others: Any, rows: Any, dropout: Any, bound: float, after: Totals | None
    ) -> list[Any]:
        """The clipped sums of a chunk, added to parts of totals (None: to zeros).

        By the program that makes the totals of a step.
        """
        limit, start = np.asarray(bound, self.parameters.dtype), after or self._nothing
        parts, _ = self._jitted["add"](trained, others, start, rows, dropout, limit)
        return self._collected(parts).sums

    def release(
        self, state: TrainState, totals: Totals, step: int, seal: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state after the release of these totals, which the caller has recorded and sealed."""
        trained, others = self.parameters.arrays(state.params)
        release = self._numbers(step, seal, totals.sums)
        trained, opt_state, metrics = self._jitted["update"](
            trained, state.opt_state, totals, release
        )
        state = TrainState(self.parameters.whole(trained, others), opt_state, state.step + 1)
        return state, metrics

    def stages(self, params: Any, batch: LogicalBatch, seal: Any, per_sample: bool) -> Stages:
        """The stages of a step that was released, computed once more from its inputs."""
        step = self.computed(params, batch, seal.max_grad_norm)
        like, sums = self.parameters.like, step.totals.sums
        kept = lambda parts: np.concatenate(  # noqa: E731
            [whole(p)[c.mask] for p, c in zip(parts, batch.chunks, strict=True)]
        )
        grads = None
        if per_sample:
            inputs, dropout = self._inputs(params, batch)
            chunks = [self._jitted["grads"](*arrays, rows, dropout) for arrays, rows in inputs]
            grads = like([kept(leaf) for leaf in zip(*chunks, strict=True)])
        return Stages(
            kept([part.norms for part in step.each]),
            like(sums),
            jax.jit(noised_mean)(like(sums), self._numbers(batch.step, seal, sums)),
            grads,
        )

    # ------------------------------------------------------------------ what is compiled

    def _inputs(self, params: Any, batch: LogicalBatch) -> tuple[list[Any], Any]:
        """Per chunk (arrays of the model, arrays of its rows), and the key of the dropout masks."""
        arrays = self.parameters.arrays(params)
        put = (lambda rows: rows) if self.layout is None else self.layout.rows
        rows = [(split_batch(c.args)[0], put(c.mask), put(c.indices)) for c in batch.chunks]
        return [(arrays, row) for row in rows], self.plan.step_key("dropout", batch.step)

    def _numbers(self, step: int, seal: Any, sums: list[Any]) -> Release:
        """The numbers of a sealed release."""
        return release_at(
            self.plan,
            step,
            branch=seal.branch,
            max_grad_norm=seal.max_grad_norm,
            like=self.parameters.like(sums),
        )

    def call(self, trained: Any, others: Any, rows: Any, dropout: Any) -> Call:
        """The rows of a chunk in normal form, with the dropout keys of (plan, step, example)."""
        arrays, _, indices = rows
        key = compat.wrap_key(dropout)
        parameters = replace(
            self.parameters, trained=trained, others=self.parameters.keyed(others, key)
        )
        return build(
            self.loss_fn,
            parameters,
            self.rebuild(arrays),
            has_aux=self.has_aux,
            key=key if self.needs_key else None,
            trainable=None,
            positions=indices.astype(jnp.uint32),
        )

    def clipper(self, parameters: Parameters, bound: Any) -> bounds.Clip:
        """The clipper of a step with this C."""
        shares, clipping = self.plan.group_shares, self.plan.clipping
        if shares is None:
            return bounds.clipper(parameters, clipping, bound)
        return bounds.clipper(parameters, clipping, shares, times=bound)

    def _add_chunk(
        self, trained: Any, others: Any, totals: Totals, rows: Any, dropout: Any, bound: Any
    ) -> tuple[Totals, Any]:
        """Totals with one more chunk, and what it gives for its rows."""
        work = self._chunk
        if self.layout is not None:
            work = self.layout.spread(work, self.parameters.trained)
        sums, numbers, each = work(trained, others, rows, dropout, bound)
        return jax.tree.map(jnp.add, totals, Totals(sums, *numbers)), each

    def _chunk(self, trained: Any, others: Any, rows: Any, dropout: Any, bound: Any) -> Any:
        """Sums, numbers (see `Totals`) and `Each` of some rows."""
        call, mask = self.call(trained, others, rows, dropout), rows[1]
        clip = self.clipper(call.parameters, bound)
        call = prepared(call, self.method)
        result = answer(Request(SUM, self.method, clip), call, mask, call.num_examples)
        numbers = (
            result.losses.sum().astype(self.parameters.dtype),
            mask.sum(dtype=jnp.int32),
            (mask & (result.norms <= bound)).sum(dtype=jnp.int32),
        )
        return result.leaves, numbers, Each(result.norms, result.factors, result.aux)

    def _update(
        self, trained: Any, opt_state: Any, totals: Totals, release: Release
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Noise, divide, step the optimizer; and the metrics."""
        like = self.parameters.like
        updates, opt_state = self.optimizer.update(
            noised_mean(like(totals.sums), release), opt_state, like(trained)
        )
        moved = jax.tree.leaves(optax.apply_updates(like(trained), updates))
        count = jnp.maximum(totals.num_rows, 1)
        metrics = {
            "unprotected_loss": totals.loss / count,
            "unprotected_clipped_fraction": (totals.num_rows - totals.num_below) / count,
        }
        return moved, opt_state, metrics

    def _grads(self, trained: Any, others: Any, rows: Any, dropout: Any) -> list[Any]:
        """Per-sample gradients of a chunk, (rows, *shape) per trained leaf."""
        call = self.call(trained, others, rows, dropout)
        return list(choose(self.method).grads(call, call.rows)[0])


def first_state(parameters: Parameters, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before step 0.

    Dtypes are made strong, and the optimizer starts from parameters as wide as the noisy mean that
    it will see, so that no later step recompiles.
    """
    strong = [jax.lax.convert_element_type(p, p.dtype) for p in parameters.trained]
    opt_state = optimizer.init(parameters.like([widen(p) for p in strong]))
    return TrainState(parameters.whole(strong, parameters.others), opt_state, 0)


def continued(loaded: TrainState, fresh: TrainState) -> TrainState:
    """The loaded state, once it is that of the model and optimizer at hand.

    Raises:
        ValueError: they have other leaves.
    """
    for name in ("params", "opt_state"):
        flat = [jax.tree_util.tree_flatten_with_path(getattr(s, name))[0] for s in (fresh, loaded)]
        ours, theirs = ({jax.tree_util.keystr(path) for path, _ in leaves} for leaves in flat)
        if ours != theirs:
            raise ValueError(
                f"{name} has the leaves {sorted(ours - theirs)}, which the loaded state lacks, and "
                f"lacks {sorted(theirs - ours)}. Expected the model and the optimizer that "
                "load_checkpoint was given in like=."
            )
    return loaded


def check_step(loader: PlannedLoader, state: TrainState, batch: LogicalBatch) -> None:
    """Refuse what the ledger could not account.

    Raises:
        TypeError: the step is traced, or the batch is not one that the loader drew.
    """
    if compat.is_traced(state) or compat.in_trace():
        raise TypeError(
            "step was called inside jit, scan or grad, where it would be recorded once for many "
            "releases. Call it from Python; for a jitted loop use clipped_grad_sum, "
            "add_noise(plan) and engine.record(num_steps=k)."
        )
    if not loader.drew(batch):
        raise TypeError(
            f"batch is a {type(batch).__name__} that this engine's loader did not draw, or that "
            "was changed since. Expected one of its batches as it is: only they are what the "
            "accountant assumes. Augment examples in loss_fn (needs_key=True gives each a key)."
        )

# SPDX-License-Identifier: Apache-2.0
"""Private step: one jitted function per chunk, then one jitted update; two compilations.

On a mesh a third jitted function between them sums over the shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp import _validate
from dualdp.ledger.ledger import Release
from dualdp.plan.plan import PrivacyPlan
from dualdp_jax import compat
from dualdp_jax.chunk import Chunk
from dualdp_jax.chunk import Rows as Rows
from dualdp_jax.noise.noise import Noise, noised_mean
from dualdp_jax.parallel.mesh import DataMesh, shardings, whole
from dualdp_jax.per_sample import clip
from dualdp_jax.per_sample.call import Call, Options, build
from dualdp_jax.per_sample.methods import (
    GRADS,
    SUM,
    WAYS,
    Answer,
    Request,
    answer,
    check_method,
    prepared,
)
from dualdp_jax.per_sample.parameters import ModuleParameters, Parameters, split
from dualdp_jax.rules.arrays import widen
from dualdp_jax.training.loader import PlannedLoader
from dualdp_jax.training.views import loss_of_view


class TrainState(NamedTuple):
    """State that a step takes and returns.

    Attributes:
        params: pytree as given; for an `nnx.Module` its `nnx.State`, for `nnx.update`.
        opt_state: pytree, the optimizer's state for the trained leaves.
        step: int, number of releases applied.
    """

    params: Any
    opt_state: Any
    step: int

    @classmethod
    @compat.promoting
    def create(
        cls, params: Any, optimizer: optax.GradientTransformation, trainable: Any = None
    ) -> TrainState:
        """Return the state before step 0, for example for `load_checkpoint(path, like=...)`.

        Args:
            params: pytree of parameters, or an `nnx.Module`.
            optimizer: optax transformation.
            trainable: pytree of bools like `params`, False freezes.
        """
        return first_state(split(params, trainable), optimizer)


class Totals(NamedTuple):
    """Sums over the chunks of a logical batch."""

    sums: list[Any]  # clipped gradient sum per trained leaf
    loss: Any  # scalar, sum of the losses
    num_rows: Any  # scalar, number of unmasked examples
    num_below: Any  # scalar, number of unmasked examples with a norm of at most the bound


class ComputedStep(NamedTuple):
    """Step whose totals are known, with its inputs."""

    inputs: list[Any]  # per chunk (arrays of the model, `Rows`)
    dropout: Any  # key data of the dropout masks
    masks: list[Any]  # (rows,) NumPy arrays, one per chunk
    answers: list[Answer]  # per chunk an `Answer` with norms, factors and aux
    unreduced: Totals  # `Totals` of the logical batch; on a mesh with a leading axis of shards
    totals: Totals  # `Totals` summed over the shards
    bound: float  # C

    @property
    def arrays(self) -> tuple[list[Any], list[Any]]:
        """Trained leaves and other arrays of the model."""
        arrays: tuple[list[Any], list[Any]] = self.inputs[0][0]
        return arrays


class Stages(NamedTuple):
    """Gradients of one step at each stage before the optimizer, for inspection only.

    Attributes:
        unprotected_norms: (n,) norms of the examples' gradients, not private.
        unprotected_sum: pytree, the clipped sum, not private.
        noisy_mean: pytree, input of the optimizer.
        unprotected_grads: pytree, leaves (n, *shape), not private; None unless
            `engine.keep_per_sample` was set.
    """

    unprotected_norms: Any
    unprotected_sum: Any
    noisy_mean: Any
    unprotected_grads: Any = None


@dataclass(eq=False)
class CompiledStep:
    """Plan, loss and optimizer of a run, with the compiled functions of a step."""

    plan: PrivacyPlan
    parameters: Parameters
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    needs_key: bool
    has_aux: bool
    keep_batch_dim: bool
    method: str
    rebuild: Callable[[list[Any]], tuple[Any, ...]]  # arrays -> arguments of the loss
    augment: Callable[..., Any] | None = None  # callable (example, key) -> one view, or None
    views: int = 1  # views of each example
    data_mesh: DataMesh | None = None  # `DataMesh` of the rows; None for one device
    #: pytree of the shardings of the optimizer's state; None for one device.
    opt_shardings: Any = None
    takes_noise: bool = False  # the optimizer takes the noise's standard deviation: an `adam_bc`

    def __post_init__(self) -> None:
        check_method(self.method)
        self.next_ways = list(WAYS[1:]) if self.method == "auto" else []
        self.clipper(self.parameters, 1.0)  # refuses group shares that do not fit
        self._jitted, self.dtype = self._compiled(), self.parameters.dtype
        is_module = isinstance(self.parameters, ModuleParameters)  # whose dropout has keys
        self.draws_keys = self.needs_key or self.augment is not None or is_module
        # Zeros once per run, on the device: new ones at each step would be a transfer of the size
        # of the parameters.
        trained, count = self.parameters.trained, jnp.zeros((), jnp.int32)
        numbers = jnp.zeros((), self.dtype), count, count
        if self.data_mesh is None:
            zeros = [jnp.zeros_like(widen(p)) for p in trained]
        else:
            zeros, numbers = self.data_mesh.zeros(trained, numbers)
        self._nothing = Totals(zeros, *numbers)
        self.program: Any = None  # `Program` of the loss, which all compiled functions share

    @property
    def rows_of_each(self) -> int:
        """Rows of each example in a chunk: K of a user, else 1, which may be an item of K rows."""
        return self.plan.rows_per_unit or 1 if self.plan.unit == "user" else 1

    @property
    def has_weights(self) -> bool:
        """True if the rows of an example may weigh differently: those of a user with K > 1."""
        return self.rows_of_each > 1

    def _compiled(self) -> dict[str, Callable[..., Any]]:
        """Jitted functions of a step; "grads" is compiled at its first use."""
        if self.data_mesh is None:
            return {
                "add": jax.jit(self._add_chunk),
                "update": jax.jit(self._update),
                "grads": jax.jit(self._grads),
            }
        trained = self.parameters.trained
        of_sums, of_number = self.data_mesh.parts(trained)
        sums, number = shardings(trained), self.data_mesh.sharding()
        unreduced = Totals(of_sums, *[of_number] * 3)
        return {
            "add": jax.jit(self._add_chunk, out_shardings=(unreduced, of_number)),
            "collect": jax.jit(
                lambda totals: jax.tree.map(lambda x: x.sum(0), totals),
                out_shardings=Totals(sums, number, number, number),
            ),
            "update": jax.jit(self._update, out_shardings=(sums, self.opt_shardings, number)),
            "grads": jax.jit(self.data_mesh.each(self._grads, trained)),
        }

    def falls_back(self) -> bool:
        """Go on by the next way of "auto"; False if there is none."""
        if not self.next_ways:
            return False
        self.method = self.next_ways.pop(0)
        self._jitted = self._compiled()
        return True

    def computed(self, params: Any, batch: Chunk, dropout: Any, bound: float) -> ComputedStep:
        """Return the totals of a logical batch, with the inputs and results of its chunks.

        `dropout` is the (2,) uint32 key of the step's random masks.
        """
        unreduced, answers, add = self._nothing, list[Answer](), self._jitted["add"]
        limit, arrays = np.asarray(bound, self.dtype), self.arrays(params)
        parts = [*map(self._placed, batch.parts)]
        for rows in parts:
            unreduced, answer = add(*arrays, unreduced, rows, dropout, limit)
            answers.append(answer)
        totals = self._collected(unreduced)
        masks = [part.mask for part in batch.parts]
        inputs = [(arrays, rows) for rows in parts]
        return ComputedStep(inputs, dropout, masks, answers, unreduced, totals, bound)

    def arrays(self, params: Any) -> tuple[list[Any], list[Any]]:
        """Return the trained leaves, and the other arrays of the model."""
        trained, others = self.parameters.arrays(params)
        return trained, others if self.data_mesh is None else self.data_mesh.others(others)

    def _placed(self, part: Rows) -> Rows:
        """Rows of a chunk on the devices of the mesh, clipped by their own factors."""
        own = np.full(len(part.mask), np.nan, self.dtype)
        rest = (part.mask, part.indices, part.weights, own)
        return Rows(part.arrays, *(rest if self.data_mesh is None else map(self.put, rest)))

    def _collected(self, unreduced: Totals) -> Totals:
        """Totals summed over the shards of a mesh."""
        return unreduced if self.data_mesh is None else self._jitted["collect"](unreduced)

    def weighted_sum(self, step: ComputedStep, weights: list[np.ndarray]) -> list[Any]:
        """Return the sum of a step's gradients with these weights, per chunk (examples,).

        The compiled program is the one that computes the totals of a step.
        """
        limit, totals = np.asarray(step.bound, self.dtype), self._nothing
        for (arrays, rows), part in zip(step.inputs, weights, strict=True):
            chosen = rows._replace(factors=self.put(part))
            totals, _ = self._jitted["add"](*arrays, totals, chosen, step.dropout, limit)
        return self._collected(totals).sums

    @property
    def zeros(self) -> list[Any]:
        """Leaves like the sums, all zero."""
        nothing = self._nothing
        return (nothing if self.data_mesh is None else self._jitted["collect"](nothing)).sums

    def put(self, rows: Any) -> Any:
        """Return an array of rows, or None, on the devices of the mesh."""
        if rows is None or self.data_mesh is None:
            return rows
        return self.data_mesh.rows(rows)

    def release(
        self,
        state: TrainState,
        arrays: tuple[list[Any], list[Any]],
        totals: Totals,
        release: Release,
        noise: Noise,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Return the state after a release of these totals that is on record.

        `arrays` are those of the state's parameters.
        """
        (trained, others), extra = arrays, {}
        if self.takes_noise:
            stddev = release.draw_stddev / release.expected_batch_size
            extra = {"noise_stddev": np.asarray(stddev, self.dtype)}
        trained, opt_state, metrics = self._jitted["update"](
            trained, state.opt_state, totals, noise, **extra
        )
        state = TrainState(self.parameters.whole(trained, others), opt_state, state.step + 1)
        return state, metrics

    def stages(
        self, params: Any, batch: Chunk, dropout: Any, release: Release, noise: Noise, grads: bool
    ) -> Stages:
        """Return the stages of a released step, recomputed from its inputs.

        `grads` tells whether the per-sample gradients are formed.
        """
        step = self.computed(params, batch, dropout, release.max_grad_norm)
        like, sums = self.parameters.like, step.totals.sums

        def kept(parts: Sequence[Any]) -> Any:
            return np.concatenate([whole(p)[m] for p, m in zip(parts, step.masks, strict=True)])

        each: list[list[Any]] = []
        if grads:
            each = [self._jitted["grads"](*held, rows, dropout) for held, rows in step.inputs]
        return Stages(
            kept([answer.norms for answer in step.answers]),
            like(sums),
            like(jax.jit(noised_mean)(sums, noise)),
            like([kept(leaf) for leaf in zip(*each, strict=True)]) if grads else None,
        )

    def call(self, trained: Any, others: Any, rows: Rows, dropout: Any) -> Call:
        """Return the rows of a chunk in normal form, with keys by (plan, step, example, place).

        The place is that of a view of an example, or of a row of a user.
        """
        arrays, positions, loss_fn = rows.arrays, rows.indices.astype(jnp.uint32), self.loss_fn
        key, rows_per_unit = compat.wrap_key(dropout), self.views * self.rows_of_each
        if self.augment is not None:
            loss_fn = loss_of_view(loss_fn, self.augment, self.needs_key, self.keep_batch_dim)
            arrays = [jnp.repeat(leaf, self.views, 0) for leaf in arrays]
        if self.augment is not None or self.has_weights:
            place = jnp.arange(rows_per_unit, dtype=positions.dtype)
            positions = (positions[:, None] * place.dtype.type(rows_per_unit) + place).ravel()
        parameters = replace(
            self.parameters, trained=trained, others=self.parameters.keyed(others, key)
        )
        options = Options(
            method=self.method,
            has_aux=self.has_aux,
            key=key if self.needs_key or self.augment is not None else None,
            keep_batch_dim=self.keep_batch_dim and self.augment is None,
            positions=positions,
            rows_per_unit=rows_per_unit,
            row_weights=None if rows.weights is None else rows.weights.astype(parameters.dtype),
            program=self.program,
        )
        call = build(loss_fn, parameters, self.rebuild(arrays), options)
        self.program = call.program
        return call

    def clipper(self, parameters: Parameters, bound: Any) -> clip.Clip:
        """Return the clipping of a step with the bound C."""
        shares, clipping = self.plan.group_shares, self.plan.clipping
        if shares is None:
            return clip.clipper(parameters, clipping, bound)
        return clip.clipper(parameters, clipping, shares, times=bound)

    def _add_chunk(
        self, trained: Any, others: Any, totals: Totals, rows: Any, dropout: Any, bound: Any
    ) -> tuple[Totals, Any]:
        """Totals plus one more chunk, and the chunk's per-example results."""
        work = self._chunk
        if self.data_mesh is not None:
            work = self.data_mesh.spread(work, self.parameters.trained)
        sums, numbers, each = work(trained, others, rows, dropout, bound)
        return jax.tree.map(jnp.add, totals, Totals(sums, *numbers)), each

    def _chunk(self, trained: Any, others: Any, rows: Any, dropout: Any, bound: Any) -> Any:
        """Sums, the other `Totals` of some rows as a triple, and their norms, factors and aux."""
        call, mask = self.call(trained, others, rows, dropout), rows.mask
        request = Request(SUM, self.clipper(call.parameters, bound))
        result = answer(request, prepared(call), mask, rows.factors)
        numbers = (
            result.losses.sum().astype(self.dtype),
            mask.sum(dtype=jnp.int32),
            (mask & (result.norms <= bound)).sum(dtype=jnp.int32),
        )
        return result.leaves, numbers, result._replace(leaves=[], losses=None)

    def _update(
        self, trained: Any, opt_state: Any, totals: Totals, noise: Noise, **extra: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Noise, divide, step the optimizer; return its results and the metrics."""
        like = self.parameters.like
        mean = like(noised_mean(totals.sums, noise))
        updates, opt_state = self.update(mean, opt_state, like(trained), **extra)
        updated = jax.tree.leaves(optax.apply_updates(like(trained), updates))
        count = jnp.maximum(totals.num_rows, 1)
        metrics = {
            "unprotected_loss": totals.loss / count,
            "unprotected_clipped_fraction": (totals.num_rows - totals.num_below) / count,
        }
        return updated, opt_state, metrics

    def update(self, mean: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """Return updates and state of the optimizer; `extra` is for an `adam_bc`."""
        if not self.takes_noise:
            return self.optimizer.update(mean, opt_state, params)
        optimizer = optax.with_extra_args_support(self.optimizer)
        return optimizer.update(mean, opt_state, params, noisy_mean=mean, **extra)

    def _grads(self, trained: Any, others: Any, rows: Any, dropout: Any) -> list[Any]:
        """Per-sample gradients of a chunk, (rows, *shape) per trained leaf."""
        call = self.call(trained, others, rows, dropout)
        return answer(Request(GRADS), prepared(call)).leaves


def first_state(parameters: Parameters, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before step 0.

    Dtypes are made strong, and the optimizer is initialized with parameters as wide as the noisy
    mean, so that no later step recompiles.
    """
    if hasattr(optimizer, "tx"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}. Expected "
            "its optax transformation: say optimizer.tx."
        )
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer is {_validate.kind(optimizer)}. Expected an optax transformation, such as "
            "optax.sgd(0.1)."
        )
    strong = [jax.lax.convert_element_type(p, p.dtype) for p in parameters.trained]
    try:
        opt_state = optimizer.init(parameters.like([widen(p) for p in strong]))
    except (TypeError, ValueError) as error:
        said = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"optimizer.init failed on params: {said}. Expected an optimizer of such a tree; "
            "labels and masks have its structure."
        ) from error
    return TrainState(parameters.whole(strong, parameters.others), opt_state, 0)


def continued(loaded: TrainState, fresh: TrainState) -> TrainState:
    """Return the loaded state, if it fits the model and optimizer of the fresh one."""
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


def check_step(loader: PlannedLoader, state: TrainState, batch: Chunk) -> None:
    """Refuse a step that the ledger could not account for: traced, or of another batch."""
    if compat.in_trace():
        raise TypeError(
            "step was called inside jit, scan or grad, where it would be recorded once for many "
            "releases. Call it from Python; for a jitted loop use clipped_grad_sum, "
            "add_noise(plan), engine.record(num_steps=k) and noise_keys(k)."
        )
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state is {_validate.kind(state)}. Expected the TrainState that make_private or the "
            "step before returned: step(state, batch)."
        )
    if not isinstance(batch, Chunk) or batch not in loader.drawn:
        raise TypeError(
            f"batch is {_validate.kind(batch)} that this engine's loader did not draw, or that "
            "was changed since. Expected one of its batches as it is: only they are what the "
            "accountant assumes. Augment examples in loss_fn (needs_key=True gives each a key)."
        )


def warn_of_older(state: TrainState, last: int) -> None:
    """Warn of a state that is older than the one returned last, of step `last`."""
    warnings.warn(
        f"step got a state of {state.step} steps after it had returned one of {last}: what was "
        "learned since is lost, and its epsilon is spent. Keep the state, as in state, metrics "
        "= step(state, batch); to go on from an older one give it the newer number, "
        "older._replace(step=state.step).",
        stacklevel=4,
    )

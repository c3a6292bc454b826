# SPDX-License-Identifier: Apache-2.0
"""Private step: one jitted function per chunk, then one jitted update; two compilations.

On a mesh a third jitted function between them sums over the shards. The host function that records,
draws bits and dispatches is `PrivateStep.__call__`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from dualdp import _validate, exactness
from dualdp._validate import AccountingError, UnsupportedLayerError
from dualdp.ledger.ledger import Ledger, Release
from dualdp.randomness import noise_bits
from dualdp_jax import compat
from dualdp_jax.chunk import Chunk, Rows
from dualdp_jax.compat import PyTree
from dualdp_jax.noise.noise import Array, Noise, NoiseSource, noised_mean
from dualdp_jax.parallel.mesh import shardings, whole
from dualdp_jax.per_sample import clip, methods
from dualdp_jax.per_sample.call import Call, Options, Program, build
from dualdp_jax.per_sample.checks import identity
from dualdp_jax.per_sample.checks.calls import on_host
from dualdp_jax.per_sample.checks.identity import Change, Floats, Numbers, Reference
from dualdp_jax.per_sample.parameters import ModuleParameters, Parameters, split
from dualdp_jax.rules.arrays import widen
from dualdp_jax.training.adam_bc import AdamBCState
from dualdp_jax.training.loader import PlannedLoader

DETACHED = (
    "The engine is detached, so its step and loader have ended. Make a new engine, or load a "
    "checkpoint."
)
_NO_KEY = np.zeros(2, np.uint32)  # where nothing random is drawn
#: Callable (example, key) -> one view of it.
Augment = Callable[[tuple[PyTree, ...], jax.Array], tuple[PyTree, ...]]
Leaves = list[jax.Array]
Arrays = tuple[Leaves, Leaves]  # trained leaves, and the other arrays of the model
Answers = list[methods.Answer]  # norms, factors and aux of each chunk
Metrics = dict[str, PyTree]


class TrainState(NamedTuple):
    """State that a step takes and returns.

    Attributes:
        params: pytree as given; for an `nnx.Module` its `nnx.State`, for `nnx.update`.
        opt_state: pytree, the optimizer's state for the trained leaves.
        step: int, number of releases applied.
    """

    params: PyTree
    opt_state: PyTree
    step: int

    @classmethod
    @compat.promoting
    def create(
        cls, params: PyTree, optimizer: optax.GradientTransformation, trainable: PyTree = None
    ) -> TrainState:
        """Return the state before step 0, for example for `load_checkpoint(path, like=...)`.

        Args:
            params: pytree of parameters, or an `nnx.Module`.
            optimizer: optax transformation.
            trainable: pytree of bools like `params`, False freezes.
        """
        return first_state(split(params, trainable), optimizer)


class Totals(NamedTuple):
    """Sums over the chunks of a logical batch; on a mesh first with a leading axis of shards."""

    sums: Leaves  # clipped gradient sum per trained leaf
    loss: jax.Array  # scalar, sum of the losses
    num_rows: jax.Array  # scalar, number of unmasked examples
    num_below: jax.Array  # scalar, number of unmasked examples with a norm of at most the bound


class Inputs(NamedTuple):
    """What the totals of a logical batch are computed from."""

    arrays: Arrays
    parts: list[Rows]  # the chunks, on the devices of a mesh
    dropout: Array  # (2,) uint32, key of the step's random masks
    bound: PyTree  # scalar, C


class Stages(NamedTuple):
    """Gradients of one step at each stage before the optimizer, for inspection only.

    Attributes:
        unprotected_norms: (n,) norms of the examples' gradients, not private.
        unprotected_sum: pytree, the clipped sum, not private.
        noisy_mean: pytree, input of the optimizer.
        unprotected_grads: pytree, leaves (n, *shape), not private; None unless
            `engine.keep_per_sample` was set.
    """

    unprotected_norms: Array
    unprotected_sum: PyTree
    noisy_mean: PyTree
    unprotected_grads: PyTree = None


@dataclass(eq=False)
class PrivateStep:
    """Private step of a run, `state, metrics = step(state, batch)`, and its compiled functions."""

    loader: PlannedLoader
    parameters: Parameters
    loss_fn: Callable[..., PyTree]
    optimizer: optax.GradientTransformation
    opt_state: PyTree  # the first
    needs_key: bool
    has_aux: bool
    keep_batch_dim: bool
    method: str
    augment: Augment | None
    views: int  # views of each example
    rate: float  # share of checked steps
    ledger: Ledger | None = None  # of the run, from its beginning until the engine is detached
    last: Callable[..., Stages] | None = None  # stages of the last step
    program: Program | None = None  # of the loss, which all compiled functions share

    def __post_init__(self) -> None:
        methods.check_method(self.method)
        self.next_ways = list(methods.WAYS[1:]) if self.method == "auto" else []
        self.plan, self.data_mesh = self.loader.plan, self.loader.data_mesh
        self.group = None if self.data_mesh is None else self.data_mesh.group
        self.source = NoiseSource(self.plan)
        self._is_checked = False  # a check passed since the start or the last failure
        self._returned = 0  # step of the state that was returned last
        self.clipper(self.parameters, 1.0)  # refuses group shares that do not fit
        is_module = isinstance(self.parameters, ModuleParameters)  # whose dropout has keys
        self.draws_keys = self.needs_key or self.augment is not None or is_module
        self.takes_noise = bool(compat.nodes_of(self.opt_state, AdamBCState))  # its deviation
        self.dtype, mesh = self.parameters.dtype, self.data_mesh
        trained: Any = self.parameters.trained
        # Zeros once per run, on the device: new ones at each step would be a transfer of the size
        # of the parameters.
        numbers = [np.zeros((), kind) for kind in (self.dtype, np.int32, np.int32)]
        sums = [np.zeros(leaf.shape, jnp.result_type(jnp.float32, leaf)) for leaf in trained]
        self._nothing = Totals(*jax.device_put((sums, *numbers)))
        self._added = updated = collected = None
        if mesh is not None:
            of_sums, of_numbers = mesh.zeros(trained, numbers)
            self._nothing = Totals(of_sums, *of_numbers)
            number: PyTree = mesh.sharding()
            self._added = shardings(self._nothing), mesh.sharding(mesh.axes)
            collected = Totals(shardings(trained), number, number, number)
            updated = shardings(trained), shardings(self.opt_state), number
        self._add = jax.jit(self._add_chunk, out_shardings=self._added)
        self._collect = jax.jit(_without_shards, out_shardings=collected)
        self._apply = jax.jit(self._update, out_shardings=updated)

    def __call__(self, state: TrainState, batch: Chunk) -> tuple[TrainState, Metrics]:
        """Perform one release: sum, check, record, draw bits, add noise, update.

        Raises:
            ExactnessError: the spot check of this step failed. Nothing of it was recorded or
                released, and the same batch may be tried again.
        """
        ledger, step = self._accepted(state, batch)
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            nullcontext() if self.group is None else self.group.collective(f"step {step}"),
        ):
            bits, bound = self.loader.bits, ledger.max_grad_norm
            dropout = bits.key("dropout", step) if self.draws_keys else _NO_KEY
            due = exactness.check_at(bits, step, self.rate, is_first=not self._is_checked)
            inputs = self.inputs(state.params, batch, dropout, bound)
            totals, answers = self._compared(inputs, ledger, step, due)
            arrays = inputs.arrays
            del inputs  # frees what the sums were computed from
            counts = (totals.num_below, totals.num_rows) if self.plan.is_adaptive else ()
            release, secret = self._recorded(ledger, step, *map(int, counts))
            noise = self.source.drawn(totals.sums, release, secret)
            self.last = partial(self.stages, noise, state.params, batch, dropout, bound)
            state, metrics = self.release(state, arrays, totals, release, noise)
        if self.has_aux:
            metrics["unprotected_aux"] = [answer.aux for answer in answers]
        if self.plan.noise == "secure":
            self.last, metrics = None, {}
        self._returned = state.step
        return state, {"step": step, **metrics}

    def _accepted(self, state: TrainState, batch: Chunk) -> tuple[Ledger, int]:
        """Ledger and step of a batch; a step that could not be accounted for is refused."""
        if not compat.is_eager():
            raise TypeError(
                "step was called inside jit, scan or grad, where it would be recorded once for "
                "many releases. Call it from Python; a jitted loop has clipped_grad_sum, "
                "engine.record(num_steps=k) and noise_keys(k)."
            )
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state is {_validate.kind(state)}. Expected the TrainState that make_private or "
                "the step before returned: step(state, batch)."
            )
        if not isinstance(batch, Chunk) or batch not in self.loader.drawn:
            raise TypeError(
                f"batch is {_validate.kind(batch)} that this engine's loader did not draw, or that "
                "was changed since. Expected one of its batches as it is; augment examples in "
                "loss_fn."
            )
        if self.ledger is None:
            raise AccountingError(DETACHED)
        step = int(batch.step)
        if step != self.ledger.position:
            self.ledger.require(step)  # raises
        if state.step < self._returned:
            warnings.warn(
                f"step got a state of {state.step} steps after it had returned one of "
                f"{self._returned}: what was learned since is lost, and its epsilon is spent. Keep "
                "the state, as in state, metrics = step(state, batch); to go on from an older one "
                "give it the newer number, older._replace(step=state.step).",
                stacklevel=3,
            )
        return self.ledger, step

    def _compared(
        self, inputs: Inputs, ledger: Ledger, step: int, due: exactness.SpotCheck | None
    ) -> tuple[Totals, Answers]:
        """Totals of a step, compared with plain autodiff where that is due.

        While no check has passed, "auto" goes on by its next way where one is not supported or
        differs; the ledger notes it.
        """
        while True:
            failed: Exception | None = None
            try:
                totals, answers = self.total(inputs)
                is_checked = due is not None and self._check(inputs, totals, answers, due)
            except (UnsupportedLayerError, exactness.ExactnessError) as error:
                failed = error
            if self.group is not None and due is not None:
                every = self.group.gather(f"the spot check of step {step}", failed)
                failed = failed or next(filter(None, every), None)
            if failed is None:
                break
            if not self.next_ways:
                if isinstance(failed, exactness.ExactnessError):
                    self._is_checked = False
                    ledger.check_failed(step, failed)
                raise failed.with_traceback(None)  # whose frames hold the data
            self.method = self.next_ways.pop(0)
            self._add = jax.jit(partial(self._add_chunk), out_shardings=self._added)  # traced anew
            ledger.note(method=f"auto goes by {self.method}")
        if is_checked:
            self._is_checked = True
            self.next_ways.clear()
            ledger.check_passed(step)
        return totals, answers

    def _recorded(self, ledger: Ledger, step: int, *counts: int) -> tuple[Release, bytes]:
        """Record a step and draw its bits; of several processes the first says both.

        `counts` are those of `Ledger.noisy_fraction`, for an adaptive bound.
        """

        def first() -> tuple[float | None, Release, bytes]:
            fraction = ledger.noisy_fraction(*counts) if counts else None
            release = ledger.record(step, noisy_fraction=fraction)
            return fraction, release, noise_bits(ledger.plan.seed, step)

        if self.group is None:
            return first()[1:]
        fraction, release, bits = self.group.on_first(f"the record of step {step}", first)
        if not self.group.is_first:
            release = ledger.record(step, noisy_fraction=fraction)
        return release, bits

    @property
    def rows_of_each(self) -> int:
        """Rows of each example in a chunk: K of a user, else 1, which may be an item of K rows."""
        return self.plan.rows_per_unit or 1 if self.plan.unit == "user" else 1

    def inputs(self, params: PyTree, batch: Chunk, dropout: Array, bound: float) -> Inputs:
        """Return the inputs of a step, on the devices of the mesh."""
        trained, others = self.parameters.arrays(params)
        parts = [
            part._replace(factors=np.full(len(part.mask), np.nan, self.dtype))
            for part in batch.parts
        ]
        if self.data_mesh is not None:
            parts = [Rows(part.arrays, *map(self.put, part[1:])) for part in parts]
        return Inputs((trained, others), parts, dropout, np.asarray(bound, self.dtype))

    def put(self, rows: Array | None) -> Array | None:
        """Return an array of rows, or None, on the devices of the mesh."""
        return rows if rows is None or self.data_mesh is None else self.data_mesh.rows(rows)

    def total(self, inputs: Inputs) -> tuple[Totals, Answers]:
        """Return the totals of a logical batch, and the answers of its chunks."""
        totals, answers = self._nothing, []
        for rows in inputs.parts:
            totals, found = self._add(inputs.arrays, rows, *inputs[2:], totals)
            answers.append(found)
        return totals if self.data_mesh is None else self._collect(totals), answers

    def release(
        self, state: TrainState, arrays: Arrays, totals: Totals, release: Release, noise: Noise
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """Return the state after a release of these totals that is on record.

        `arrays` are those of the state's parameters.
        """
        stddev = np.asarray(release.draw_stddev / release.expected_batch_size, self.dtype)
        trained, opt_state, metrics = self._apply(arrays[0], state.opt_state, totals, noise, stddev)
        params = self.parameters.whole(trained, arrays[1])
        return TrainState(params, opt_state, state.step + 1), metrics

    def stages(self, noise: Noise, *step: Any, grads: bool) -> Stages:
        """Return the stages of a released step, by the arguments of `inputs`.

        With `grads` the per-sample gradients are formed too.
        """
        inputs, like = self.inputs(*step), self.parameters.like
        totals, answers = self.total(inputs)

        def kept(parts: Sequence[jax.Array]) -> Array:
            pairs = zip(parts, inputs.parts, strict=True)
            return np.concatenate([whole(part)[whole(rows.mask)] for part, rows in pairs])

        formed = None
        if grads:
            trained, mesh = self.parameters.trained, self.data_mesh
            form = jax.jit(self._grads if mesh is None else mesh.each(self._grads, trained))
            each = [form(inputs.arrays, rows, inputs.dropout) for rows in inputs.parts]
            formed = like([kept(leaf) for leaf in zip(*each, strict=True)])
        mean = jax.jit(noised_mean)(totals.sums, noise)
        return Stages(
            kept([found.norms for found in answers]), like(totals.sums), like(mean), formed
        )

    def call(self, model: Arrays, rows: Rows, dropout: Array) -> Call:
        """Return the rows of a chunk in normal form, with keys by (plan, step, example, place).

        The place is that of a view of an example, or of a row of a user.
        """
        arrays, positions, loss_fn = rows.arrays, rows.indices.astype(jnp.uint32), self.loss_fn
        key, rows_per_unit = compat.wrap_key(dropout), self.views * self.rows_of_each
        if self.augment is not None:
            loss_fn = loss_of_view(loss_fn, self.augment, self.needs_key, self.keep_batch_dim)
            arrays = [jnp.repeat(leaf, self.views, 0) for leaf in arrays]
        if self.augment is not None or self.rows_of_each > 1:
            place = jnp.arange(rows_per_unit, dtype=positions.dtype)
            positions = (positions[:, None] * place.dtype.type(rows_per_unit) + place).ravel()
        others = self.parameters.keyed(model[1], key)
        options = Options(
            method=self.method,
            has_aux=self.has_aux,
            key=key if self.needs_key or self.augment is not None else None,
            keep_batch_dim=self.keep_batch_dim and self.augment is None,
            positions=positions,
            rows_per_unit=rows_per_unit,
            row_weights=None if rows.weights is None else rows.weights.astype(self.dtype),
            program=self.program,
        )
        parameters = replace(self.parameters, trained=model[0], others=others)
        call = build(loss_fn, parameters, self.loader.origin.rebuild(arrays), options)
        self.program = call.program
        return call

    def clipper(self, parameters: Parameters, bound: clip.Bound) -> clip.Clip:
        """Return the clipping of a step with the bound C."""
        shares, clipping = self.plan.group_shares, self.plan.clipping
        if shares is None:
            return clip.clipper(parameters, clipping, bound)
        return clip.clipper(parameters, clipping, shares, times=bound)

    def _add_chunk(
        self, model: Arrays, rows: Rows, dropout: Array, bound: jax.Array, totals: Totals
    ) -> tuple[Totals, methods.Answer]:
        """Totals plus one more chunk, and the chunk's per-example results."""
        work, mesh = self._chunk, self.data_mesh
        work = work if mesh is None else mesh.spread(work, self.parameters.trained)
        sums, numbers, each = work(model, rows, dropout, bound)
        return jax.tree.map(jnp.add, totals, Totals(sums, *numbers)), each

    def _chunk(
        self, model: Arrays, rows: Rows, dropout: Array, bound: jax.Array
    ) -> tuple[Leaves, tuple[jax.Array, ...], methods.Answer]:
        """Sums, the other `Totals` of some rows as a triple, and their norms, factors and aux."""
        call, mask = self.call(model, rows, dropout), rows.mask
        request = methods.Request(methods.SUM, self.clipper(call.parameters, bound))
        result = methods.answer(request, call, mask, rows.factors)
        numbers = (
            result.losses.sum().astype(self.dtype),
            mask.sum(dtype=jnp.int32),
            (mask & (result.norms <= bound)).sum(dtype=jnp.int32),
        )
        return result.leaves, numbers, result._replace(leaves=[], losses=None)

    def _update(
        self, trained: Leaves, opt_state: PyTree, totals: Totals, noise: Noise, stddev: Array
    ) -> tuple[Leaves, PyTree, dict[str, jax.Array]]:
        """Noise, divide, step the optimizer; return its results and the metrics."""
        like = self.parameters.like
        on_all = None if self.data_mesh is None else self.data_mesh.sharding()
        mean = like(noised_mean(totals.sums, noise, on_all))
        updates, opt_state = self.update(mean, opt_state, like(trained), stddev)
        updated = jax.tree.leaves(optax.apply_updates(like(trained), updates))
        count = jnp.maximum(totals.num_rows, 1)
        metrics = {
            "unprotected_loss": totals.loss / count,
            "unprotected_clipped_fraction": (totals.num_rows - totals.num_below) / count,
        }
        return updated, opt_state, metrics

    def update(
        self, mean: PyTree, opt_state: PyTree, params: PyTree, stddev: Array
    ) -> tuple[PyTree, PyTree]:
        """Return updates and state of the optimizer; an `adam_bc` gets the noise in the mean."""
        if not self.takes_noise:
            return self.optimizer.update(mean, opt_state, params)
        optimizer = optax.with_extra_args_support(self.optimizer)
        extra = {"noisy_mean": mean, "noise_stddev": stddev}
        return optimizer.update(mean, opt_state, params, **extra)

    def _check(
        self, inputs: Inputs, totals: Totals, answers: Answers, due: exactness.SpotCheck
    ) -> bool:
        """Compare a step with plain autodiff; return False if it has no example.

        It takes place after the totals are known and before anything is recorded or released. Our
        side is the program that computed the totals, with other weights; it changes nothing.

        Raises:
            ExactnessError: it differs.
        """
        masks = [whole(rows.mask) for rows in inputs.parts]
        counts, ends = np.concatenate(masks), np.cumsum([len(mask) for mask in masks])[:-1]
        if int(whole(totals.num_rows)) != counts.sum():
            raise exactness.ExactnessError(
                "A spot check failed: the totals of a step do not count the rows of its batch, so "
                "the sum over chunks or devices lost some, or has some twice. Nothing was released "
                "for this batch. Report it, with the mesh and the version of jax.",
                relative_error="inf",
            )

        def weighted_sum(weights: Floats) -> Leaves:
            shares = [self.put(part.astype(self.dtype)) for part in np.split(weights, ends)]
            parts = zip(inputs.parts, shares, strict=True)
            chosen = [rows._replace(factors=share) for rows, share in parts]
            sums, *_ = self.total(inputs._replace(parts=chosen))[0]
            return sums

        def subtract(
            chunk: int, start: Leaves, weights: Floats, change: Change
        ) -> tuple[Leaves, Leaves]:
            (trained, others), rows = inputs.arrays, inputs.parts[chunk]
            changed, arrays = ([*map(change, leaves)] for leaves in (trained, rows.arrays))
            num_shards = 1 if self.data_mesh is None else self.data_mesh.num_shards
            index, shares, count = identity.blocks_of(weights, num_shards)
            chosen = (
                rows._replace(arrays=arrays),
                self.put(index),
                self.put(shares.astype(self.dtype)),
            )
            return self.without(start, (changed, others), chosen, inputs.dropout, count)

        numbers = Numbers(
            self.parameters.names,
            counts,
            np.concatenate([on_host(answer.norms) for answer in answers]),
            None,
            self.clipper(self.parameters, inputs.bound),
            {
                group: np.concatenate([on_host(answer.factors[group]) for answer in answers])
                for group in answers[0].factors
            },
            weighted_sum,
            totals.sums,
        )
        assert self.program is not None
        nothing, _ = self.total(inputs._replace(parts=[]))
        sizes, precision = list(map(len, masks)), identity.precision_of(self.program)
        reference = Reference(subtract, sizes, nothing.sums, precision)
        seed, released = int(due.fractions[1] * 2**53), due.fractions[2] < 0.5
        is_first = not self._is_checked
        return identity.check(reference, numbers, seed=seed, is_first=is_first, released=released)

    @cached_property
    def without(self) -> Callable[..., tuple[Leaves, Leaves]]:
        """Program of a check: leaves minus the gradient of weighted losses, and their lengths.

        Its arguments are (leaves, model, (rows, index, weights), dropout, blocks), see
        `identity.without_gradient`.
        """
        mesh, trained = self.data_mesh, self.parameters.trained

        def of_shard(
            model: Arrays,
            chosen: tuple[Rows, jax.Array, jax.Array],
            dropout: Array,
            num_blocks: jax.Array,
        ) -> Leaves:
            rows, index, shares = chosen
            call = self.call(model, rows, dropout)
            zeros = [jnp.zeros_like(widen(leaf)) for leaf in model[0]]
            parts = identity.without_gradient(call, zeros, index, shares, num_blocks)
            return parts if mesh is None else jax.lax.psum(parts, mesh.axes)

        each = of_shard if mesh is None else mesh.each(of_shard, trained, out_specs=P())

        def subtract(start: Leaves, *inputs: PyTree) -> tuple[Leaves, Leaves]:
            rest = [old + part for old, part in zip(start, each(*inputs), strict=True)]
            return rest, list(map(jnp.linalg.norm, rest))

        assert self.program is not None
        options = compat.compiled_quickly(self.program.jaxpr)
        out = None if mesh is None else (shardings(trained), mesh.sharding())
        return jax.jit(subtract, out_shardings=out, compiler_options=options)

    def _grads(self, model: Arrays, rows: Rows, dropout: Array) -> Leaves:
        """Per-sample gradients of a chunk, (rows, *shape) per trained leaf."""
        request = methods.Request(methods.GRADS)
        return methods.answer(request, self.call(model, rows, dropout)).leaves


def _without_shards(totals: Totals) -> Totals:
    """Totals summed over the shards of a mesh."""
    return jax.tree.map(lambda leaf: leaf.sum(0), totals)


def first_state(parameters: Parameters, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before step 0.

    Dtypes are made strong, and the optimizer is initialized with parameters as wide as the noisy
    mean, so that no later step recompiles.
    """
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer is {_validate.kind(optimizer)}. Expected an optax transformation, such as "
            "optax.sgd(0.1); of an nnx.Optimizer say optimizer.tx."
        )
    strong = [jax.lax.convert_element_type(p, p.dtype) for p in parameters.trained]
    try:
        opt_state = optimizer.init(parameters.like([widen(p) for p in strong]))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer.init failed on params: {compat.first_line(error)}. Expected an optimizer "
            "of such a tree; labels and masks have its structure."
        ) from error
    return TrainState(parameters.whole(strong, parameters.others), opt_state, 0)


def continued(loaded: TrainState, fresh: TrainState) -> TrainState:
    """Return the loaded state, if it fits the model and optimizer of the fresh one."""
    ours, theirs = ({name for name, _ in compat.leaf_paths(s[:2])} for s in (fresh, loaded))
    if ours != theirs:
        raise ValueError(
            f"The loaded state lacks the leaves {sorted(ours - theirs)} and has "
            f"{sorted(theirs - ours)}. Expected the model and optimizer of load_checkpoint's like=."
        )
    return loaded


def loss_of_view(
    loss_fn: Callable[..., PyTree], augment: Augment, needs_key: bool, keep_batch_dim: bool
) -> Callable[..., PyTree]:
    """Return the loss of one augmented view of an example: (params, *example, key) -> loss.

    The key is split into one for the view and one for `loss_fn`.

    Source: De et al. 2022, section 3.2 (augmentation multiplicity).
    """

    def lifted(leaf: PyTree) -> PyTree:
        return leaf[None] if isinstance(leaf, jax.Array | np.ndarray) else leaf

    def loss(params: PyTree, *example: PyTree, key: jax.Array) -> PyTree:
        for_view, for_loss = jax.random.split(key)
        view = augment(example, for_view)
        view = jax.tree.map(lifted, view) if keep_batch_dim else view
        return loss_fn(params, *view, **({"key": for_loss} if needs_key else {}))

    return loss

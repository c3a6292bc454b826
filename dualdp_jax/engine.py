# SPDX-License-Identifier: Apache-2.0
"""The few-lines entry point: assembles plan, ledger, loader and step; owns no mathematics."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import optax

from dualdp import AccountingError, _validate, exactness, run_registry
from dualdp.accountants import require_bound
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.run_arguments import (
    KNOWN,
    NO_RUN,
    SECOND_RUN,
    names_delta,
    plan_of,
    refuse_beside_target,
)
from dualdp.sealing import Seal
from dualdp_jax.agreement import Account, begun, check_data, check_run, one_plan
from dualdp_jax.call import build, split_batch
from dualdp_jax.data import LogicalBatch, PlannedLoader, examples_of
from dualdp_jax.parameters import split
from dualdp_jax.sharding import Layout, layout_of, pieces, shardings
from dualdp_jax.spot_checks import SpotChecks
from dualdp_jax.spot_checks import Step as ComputedStep
from dualdp_jax.training import Run, Stages, TrainState, check_step, continued, first_state

Step = Callable[[TrainState, LogicalBatch], tuple[TrainState, dict[str, Any]]]
_STACK = f"jax {jax.__version__}"  # the generators of "fast" noise change between releases


class PrivacyEngine:
    """Makes one training run private and keeps its account.

    Args:
        accountant: "pld", "rdp" or one that was registered; None for the plan's, or "pld" without a
            plan.
        secure_mode: asks for noise="secure".

    Raises:
        AccountingError: the accountant gives no upper bound (`"gdp"`).

    Attributes:
        keep_per_sample: whether `stages` forms the per-sample gradients too, which takes the memory
            of n models.

    Guarantees:
        A release is recorded before its noise is drawn, once per step, in order.
            [test_step_records_before_it_releases]
        A step whose spot check fails is neither recorded nor released.
            [test_a_failed_check_releases_and_records_nothing]
        A run with spot checks and one without them end with the same bits.
            [test_checks_change_nothing]
    """

    def __init__(self, accountant: str | None = None, secure_mode: bool = False) -> None:
        self._accountant = accountant if accountant is None else require_bound(accountant)
        self._secure_mode, self._names_delta = bool(secure_mode), False
        self.keep_per_sample = False
        self._ledger: Ledger | None = None
        self._has_begun = self._is_detached = False
        self._own_loop: PlannedLoader | None = None  # of a run whose step is the user's own
        self._run: Run | None = None
        self._loader: PlannedLoader | None = None
        self._checks: SpotChecks | None = None
        self._rate = 0.0  # of checked steps
        self._is_checked = False  # whether the first step was, or the one after a failure
        self._account: Account | None = None  # shared by several processes
        self._loaded: TrainState | None = None  # what a checkpoint held
        self._last: tuple[Any, LogicalBatch, Any] | None = None  # params, batch, seal

    @classmethod
    def loaded(
        cls, ledger: Ledger, state: TrainState, account: Account | None = None
    ) -> PrivacyEngine:
        """The engine of a run that a checkpoint holds; `resume` goes on with it."""
        engine = cls()
        engine._ledger, engine._loaded, engine._account = ledger, state, account
        engine._names_delta = True
        return engine

    # ------------------------------------------------------------------ set-up

    def make_private(
        self,
        *,
        loss_fn: Callable[..., Any],
        params: Any,
        optimizer: optax.GradientTransformation,
        data: Any,
        plan: PrivacyPlan | None = None,
        needs_key: bool = False,
        has_aux: bool = False,
        trainable: Any = None,
        method: str = "auto",
        data_sharding: Any = None,
        ledger: str | os.PathLike[str] | None = None,
        checks: float | None = None,
        **plan_arguments: Any,
    ) -> tuple[Step, TrainState, PlannedLoader]:
        """Step, first state and loader of a private run.

        Args:
            loss_fn: (params, *example) to the scalar loss of one example; with `needs_key` it is
                called with `key=`, one key per (plan, step, example).
            params: pytree of parameters, or an `nnx.Module`, which is left as it is.
            optimizer: of optax; it sees the noisy mean.
            data: tuple of arrays (arguments of the loss after params), examples on axis 0.
            plan: the run, written down.
            needs_key: whether `loss_fn` takes `key=`.
            has_aux: whether `loss_fn` returns (loss, aux).
            trainable: pytree of bools like `params`, False freezes.
            method: see `clipped_grad_sum`.
            data_sharding: on a mesh, where the examples of a batch go: `NamedSharding(mesh,
                PartitionSpec("data"))`. Parameters stay where they were placed on the mesh, others
                go to all its devices. The data are given whole on every process, which reads only
                the rows of its devices.
            ledger: a new file for the record of releases; None keeps it in memory, until the first
                checkpoint.
            checks: share of steps at which two examples are compared with plain autodiff of their
                own losses before anything is released, one of five of these as a whole batch;
                None for 1/50, 0 for none, which the ledger says. The first step is always checked.
            **plan_arguments: without a plan, those of `PrivacyPlan` (expected_batch_size,
                noise_multiplier, max_grad_norm, target_epsilon, on_budget, ...), or epochs=
                instead of num_steps=, target_delta= instead of delta=, and
                max_physical_batch_size= (examples worked on at once).

        Returns:
            `(step, state, loader)`; `state, metrics = step(state, batch)` for each batch of the
            loader. The metrics called `unprotected_*` are not private; noise="secure" leaves
            them out.

        Raises:
            AccountingError: the engine has a run already.
            TypeError: arguments that nobody knows, or that are missing; `loss_fn` takes a key and
                `needs_key` does not say so, or the other way round.
            ValueError: arguments beside a plan that holds them, or that contradict each other.

        Guarantees:
            `loss_fn` is traced with one example before the plan's key is taken and the ledger is
                opened.  [test_a_loss_for_a_batch_is_told_so_before_anything_is_recorded]
        """
        self._refuse_a_second_run()
        if checks is None and self._loaded is not None:
            checks = self.ledger.check_rate
        rate = exactness.checked_rate(checks)
        if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}. Expected an optax transformation, "
                "such as optax.sgd(0.1)."
            )
        parameters = split(params, trainable)
        if not parameters.trained:
            raise ValueError("No leaf of params is trained. Expected at least one; see trainable=.")
        layout = layout_of(data_sharding, parameters)
        plan = self._plan_of(plan, data, plan_arguments, layout)
        parameters = parameters if layout is None else layout.model(parameters)
        examples = examples_of(data)
        loader = PlannedLoader(examples, plan, self._span, layout)
        state = first_state(parameters, optimizer)
        if self._loaded is not None:
            state = continued(self._loaded, state)
        if layout is not None:
            state = layout.state(state)
        run = Run(
            plan=plan,
            parameters=parameters,
            loss_fn=loss_fn,
            optimizer=optimizer,
            needs_key=bool(needs_key),
            has_aux=bool(has_aux),
            method=method,
            rebuild=loader.rebuild,
            layout=layout,
            opt_shardings=None if layout is None else shardings(state.opt_state),
        )
        _try_one_example(run, examples)
        _try_update(run, state)
        if layout is not None and layout.group is not None:
            check_data(layout.group, examples)
            check_run(layout.group, run, state)
        self._begin(plan, ledger, layout, "PrivacyEngine.make_private", run_registry.OWN_STEP)
        self._run, self._loader = run, loader
        self._checks, self._rate = SpotChecks(run), rate
        self.ledger.note(checks=rate)
        return self._step, state, loader

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, data: Any, **arguments: Any
    ) -> tuple[Step, TrainState, PlannedLoader]:
        """`make_private` with the noise multiplier that spends at most `target_epsilon`.

        Args:
            target_epsilon: at the end of the run.
            target_delta: its delta.
            data: as in `make_private`.
            **arguments: of `make_private`, without noise_multiplier and plan; among them num_steps
                or epochs.

        Raises:
            TypeError: an argument that nobody knows, or that is missing.
            ValueError: one that contradicts these, or neither or both of num_steps and epochs.
        """
        self._refuse_a_second_run()
        arguments |= {"target_epsilon": target_epsilon, "target_delta": target_delta}
        given = {name: arguments.pop(name) for name in KNOWN & arguments.keys()}
        refuse_beside_target(arguments.pop("plan", None), given)
        plan = plan_of(
            None,
            given,
            num_examples=split_batch(examples_of(data))[1],
            accountant=self._accountant,
            secure_mode=self._secure_mode,
            calibrates=True,
            method="make_private_with_epsilon",
        )
        return self.make_private(plan=plan, data=data, **arguments)

    def resume(self, **arguments: Any) -> tuple[Step, TrainState, PlannedLoader]:
        """Go on with a run that `load_checkpoint` brought back.

        Args:
            **arguments: those of `make_private` that describe the run and not its plan: loss_fn,
                params (for their structure; the numbers are the loaded ones), optimizer, data, ...

        Returns:
            `(step, state, loader)`, the state being the loaded one.

        Raises:
            AccountingError: the engine was not loaded.
        """
        if self._loaded is None:
            raise AccountingError(
                "There is no loaded run to go on with. Expected the engine of load_checkpoint."
            )
        return self.make_private(**arguments)

    def make_loader(
        self,
        *,
        data: Any,
        plan: PrivacyPlan | None = None,
        data_sharding: Any = None,
        ledger: str | os.PathLike[str] | None = None,
        **plan_arguments: Any,
    ) -> PlannedLoader:
        """The account and the batches of a run whose step is the user's own.

        Call `record()` before each release, and `noisy_mean` or `add_noise(plan)` for its noise.

        Args:
            data: as in `make_private`.
            plan: as there.
            data_sharding: as there.
            ledger: as there.
            **plan_arguments: as there.

        Returns:
            The loader.
        """
        self._refuse_a_second_run()
        layout = layout_of(data_sharding)
        plan = self._plan_of(plan, data, plan_arguments, layout)
        examples = examples_of(data)
        loader = PlannedLoader(examples, plan, self._span, layout)
        if layout is not None and layout.group is not None:
            check_data(layout.group, examples)
        self._begin(plan, ledger, layout, "PrivacyEngine.make_loader", "")
        self._own_loop = loader
        return loader

    def _plan_of(
        self,
        plan: PrivacyPlan | None,
        data: Any,
        given: Mapping[str, Any],
        layout: Layout | None,
    ) -> PrivacyPlan:
        """The plan, or one made of the arguments, or that of the loaded run; one for all."""
        if self._loaded is None:
            self._names_delta = names_delta(plan, given)
            plan = plan_of(
                plan,
                given,
                num_examples=split_batch(examples_of(data))[1],
                accountant=self._accountant,
                secure_mode=self._secure_mode,
            )
            return plan if layout is None or layout.group is None else one_plan(layout.group, plan)
        if plan is not None or given:
            raise ValueError(
                f"{sorted(given) or 'plan'} came for a run that was loaded from a checkpoint, "
                "which holds its plan. Expected none of it."
            )
        return self.plan

    def _refuse_a_second_run(self) -> None:
        if self._has_begun:
            raise AccountingError(SECOND_RUN)

    def _begin(
        self,
        plan: PrivacyPlan,
        path: str | os.PathLike[str] | None,
        layout: Layout | None,
        recorder: str,
        source: str,
    ) -> None:
        """Take the plan's key and open its ledger, unless that was loaded."""
        claim = {"recorder": recorder, "source": source}
        if self._ledger is not None and source:
            run_registry.draw_by_engine(self._ledger)
        elif self._ledger is None and layout is not None and layout.group is not None:
            self._account = Account(layout.group)
            self._ledger = self._account.opened(plan, self._accountant, path, **claim)
        elif self._ledger is None:
            self._ledger = begun(plan, self._accountant, path, **claim)
        self._has_begun = True

    # ------------------------------------------------------------------ a step

    def _span(self) -> tuple[int, int | None]:
        """Next step, and the first one that the loader must not draw."""
        ledger = self._running()
        end = ledger.end if ledger.plan.on_budget == "stop" else ledger.plan.num_steps
        return ledger.position, end

    def _step(self, state: TrainState, batch: LogicalBatch) -> tuple[TrainState, dict[str, Any]]:
        """One release: add up, check, record, seal, add noise, update.

        Raises:
            ExactnessError: the spot check of this step failed. Nothing of it was recorded or
                released, and the same batch may be tried again.
        """
        run, ledger = self._attached(), self._running()
        assert self._loader is not None
        check_step(self._loader, state, batch)
        ledger.expect(batch.step)
        with nullcontext() if self._account is None else self._account.at(batch.step):
            bound = ledger.max_grad_norm
            computed = run.computed(state.params, batch, bound)
            due = exactness.check_at(
                ledger.plan, batch.step, self._rate, is_first=not self._is_checked
            )
            if due is not None:
                self._check(computed, due)
            totals, each, counts = computed.totals, computed.each, {}
            del computed  # what the sums were made of takes memory
            if ledger.plan.is_adaptive:
                counts = {"num_below": int(totals.num_below), "num_rows": int(totals.num_rows)}
            trained = run.parameters.arrays(state.params)[0]
            ledger.record(batch.step)
            seal = self._seal(batch.step, trained, totals.sums, **counts)
        self._last = (state.params, batch, seal)
        state, metrics = run.release(state, totals, batch.step, seal)
        if run.has_aux:
            metrics["unprotected_aux"] = [part.aux for part in each]
        if ledger.plan.noise == "secure":
            metrics = {}
        return state, {"step": batch.step, **metrics}

    def _check(self, step: ComputedStep, due: exactness.Check) -> None:
        """Check a step whose totals are known, on all processes together.

        Raises:
            ExactnessError: it failed, on one of them at least.
        """
        assert self._checks is not None
        failed, is_checked, ledger = None, False, self._running()
        try:
            is_checked = self._checks.check(step, due)
        except exactness.ExactnessError as error:
            failed = error
        if self._account is not None:
            failed = self._account.shared(due.step, failed)
        if failed is not None:
            self._is_checked = False
            ledger.check_failed(due.step, failed)
            raise failed.with_traceback(None) from None
        if is_checked:
            self._is_checked = True
            ledger.check_passed(due.step)

    def _seal(
        self, step: int, trained: list[Any] | None, sums: list[Any] | None, **counts: int
    ) -> Seal:
        """The seal of a recorded step, the same on all processes.

        Sums that nobody shows us, in a loop of the user's own, are never a known replay.
        """
        facts: dict[str, Any] = {"stack": _STACK, **counts}
        if self._account is not None:
            return self._account.sealed(self._running(), step, trained, sums, facts)
        if sums is None:
            return self._running().seal(step, None, **facts)
        parts = lambda: [piece for array in sums for piece in pieces(array)]  # noqa: E731
        return self._running().seal(step, parts, **facts)

    def written(self, place: str, whole: Callable[[], Any], write: Callable[[Any], Any]) -> Any:
        """What comes of writing a checkpoint, which the first of several processes does for all.

        Args:
            place: where all processes stand.
            whole: makes what is written, on every process.
            write: writes it, on the first.
        """
        self._running()
        if self._account is None:
            return write(whole())
        return self._account.written(place, whole, write)

    def detach(self) -> None:
        """End the run: step and loader refuse, the ledger's file is free; the record stays."""
        self._running().close()
        self._is_detached, self._run, self._last = True, None, None

    def stages(self) -> Stages:
        """The gradients of the last step on their way to the optimizer, for inspection only.

        They are computed once more from the step's parameters and batch, of which the engine keeps
        the last; with `keep_per_sample` also the per-sample gradients.

        Raises:
            AccountingError: no step was taken, or the noise is secure, which shows nothing else.
        """
        run = self._attached()
        if self._last is None:
            raise AccountingError("No step was taken yet. Call step first.")
        if run.plan.noise == "secure":
            raise AccountingError(
                "The stages of a gradient are not private, and noise='secure' keeps them closed. "
                "Expected another noise for inspection."
            )
        return run.stages(*self._last, per_sample=self.keep_per_sample)

    # ------------------------------------------------------------------ account

    def record(self, num_steps: int = 1) -> range:
        """Record the next releases, before a jitted or scanned run of so many steps.

        Returns:
            The indices of the steps that may be released now.

        Raises:
            AccountingError: one of them is past the plan; then none is recorded.
        """
        ledger = self._running()
        steps = ledger.steps_ahead(_validate.integer("num_steps", num_steps))
        for step in steps:
            ledger.record(step)
            self._seal(step, None, None)
        return steps

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Epsilon spent so far, an upper bound.

        Args:
            delta: in (0, 1); may be left out when a plan or target named it.
            accept_unverified: a run in which a spot check failed has an answer, too.

        Raises:
            AccountingError: there is no run; or steps of it were taken that are not on record, or a
                spot check failed.
            ValueError: no delta.
        """
        ledger = self.ledger
        if delta is None and not self._names_delta:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        if self._own_loop is not None:
            self._own_loop.handed_out.require_recorded(ledger.position)
        return ledger.get_epsilon(delta=delta, accept_unverified=accept_unverified)

    @property
    def plan(self) -> PrivacyPlan:
        """The plan of the run."""
        return self.ledger.plan

    @property
    def accountant(self) -> Any:
        """The accountant of the run."""
        return self.ledger.accountant

    @property
    def ledger(self) -> Ledger:
        """The record of the run.

        Raises:
            AccountingError: there is none.
        """
        if self._ledger is None:
            raise AccountingError(NO_RUN)
        return self._ledger

    def _running(self) -> Ledger:
        """The record of a run that may go on.

        Raises:
            AccountingError: there is none, or it was detached.
        """
        if self._is_detached:
            raise AccountingError(
                "The engine is detached, so its step and loader have ended. Make a new engine, or "
                "load a checkpoint."
            )
        return self.ledger

    def _attached(self) -> Run:
        """The run whose step is ours."""
        self._running()
        if self._run is None:
            raise AccountingError(
                "The step of this run is the user's own. Expected make_private instead of "
                "make_loader."
            )
        return self._run


def _try_one_example(run: Run, examples: tuple[Any, ...]) -> None:
    """Trace the loss of one example, so that a loss of another form is refused before the run.

    Raises:
        TypeError: `loss_fn` takes a key and `needs_key` does not say so, or the other way round.
    """
    _check_key_argument(run.loss_fn, run.needs_key, examples)
    leaves, _, rebuild = split_batch(examples)
    kind = lambda dtype: jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((1, *x.shape[1:]), kind(x.dtype)) for x in leaves]

    def loss_fn(*arguments: Any, **kwargs: Any) -> Any:
        try:
            return run.loss_fn(*arguments, **kwargs)
        except (TypeError, ValueError, IndexError) as error:
            got = ", ".join(f"{s.dtype}{list(s.shape[1:])}" for s in shapes)
            error.add_note(f"loss_fn gets ONE example, without a batch axis: here {got}.")
            raise

    def loss(trained: list[Any], others: list[Any], rows: list[Any], key: Any) -> Any:
        parameters = replace(run.parameters, trained=trained, others=others)
        key = key if run.needs_key else None
        call = build(
            loss_fn, parameters, rebuild(rows), has_aux=run.has_aux, key=key, trainable=None
        )
        return call.loss(trained, jax.tree.map(lambda leaf: leaf[0], call.rows))[0]

    arrays = run.parameters.trained, run.parameters.others
    jax.eval_shape(loss, *arrays, shapes, jax.random.key(0))


def _try_update(run: Run, state: TrainState) -> None:
    """Trace an update of the optimizer, so that one which needs more is refused before the run.

    Raises:
        TypeError: the optimizer wants more than gradients, its state and the parameters.
    """
    trained = run.parameters.like(run.parameters.arrays(state.params)[0])
    try:
        jax.eval_shape(run.optimizer.update, trained, state.opt_state, trained)
    except TypeError as error:
        error.add_note("An optimizer gets the noisy gradients, its state and the parameters only.")
        raise


def _check_key_argument(
    loss_fn: Callable[..., Any], needs_key: bool, examples: tuple[Any, ...]
) -> None:
    """Refuse a `loss_fn` whose argument `key` and `needs_key` do not fit."""
    try:
        signature = inspect.signature(loss_fn)
        given = signature.bind_partial(None, *examples).arguments
    except (TypeError, ValueError):  # no signature, or another number of arguments
        return
    wanted = signature.parameters.get("key")
    if wanted is None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        if needs_key and not takes_any:
            raise TypeError(
                "needs_key=True, but loss_fn takes no key. Expected loss_fn(params, *example, key)."
            )
    elif not needs_key and wanted.default is wanted.empty and "key" not in given:
        if wanted.kind in (wanted.POSITIONAL_OR_KEYWORD, wanted.KEYWORD_ONLY):
            raise TypeError("loss_fn takes key, which nothing gives. Pass needs_key=True.")

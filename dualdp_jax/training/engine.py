# SPDX-License-Identifier: Apache-2.0
"""Engine of a private training run: assembles plan, ledger, loader and step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import optax

from dualdp import _validate, exactness
from dualdp._validate import AccountingError
from dualdp.accountants import require_bound
from dualdp.ledger.ledger import Ledger, claimed
from dualdp.ledger.release_record import Seal
from dualdp.plan.arguments import (
    KNOWN,
    NO_RUN,
    SECOND_RUN,
    names_delta,
    plan_of,
    refuse_beside_target,
)
from dualdp.plan.correlated.noise import require_affordable
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.units import UserRows, rows_digest
from dualdp.randomness import run_registry
from dualdp_jax import compat
from dualdp_jax.noise.recursion import size_of
from dualdp_jax.parallel.mesh import data_mesh_of, local_shards, shardings
from dualdp_jax.parallel.process_group import Group
from dualdp_jax.parallel.sum_hash import hash_sums
from dualdp_jax.per_sample.open_loops import close_loop, open_loop
from dualdp_jax.per_sample.parameters import split
from dualdp_jax.training.arguments import (
    arguments_of,
    check_loss,
    check_optimizer,
    num_units,
    rows_of,
)
from dualdp_jax.training.ema import average_in
from dualdp_jax.training.loader import LogicalBatch, PlannedLoader, examples_of
from dualdp_jax.training.rank_consistency import check_data, check_run, one_plan
from dualdp_jax.training.run_ledger import SharedLedger
from dualdp_jax.training.step import (
    CompiledStep,
    ComputedStep,
    Stages,
    TrainState,
    check_step,
    continued,
    first_state,
    warn_of_older,
)
from dualdp_jax.training.step_checks import StepChecks
from dualdp_jax.training.views import check_views

Step = Callable[[TrainState, LogicalBatch], tuple[TrainState, dict[str, Any]]]
_STACK = f"jax {jax.__version__}"  # the generators of "fast" noise change between releases


class PrivacyEngine:
    """Engine of one private training run and its privacy accounting.

    Args:
        accountant: str, "pld", "rdp" or a registered name; None for the plan's, or "pld" without a
            plan.
        secure_mode: bool, True for noise="secure".

    Raises:
        AccountingError: the accountant gives no upper bound (`"gdp"`).

    Attributes:
        keep_per_sample: bool, True if `stages` forms the per-sample gradients too, which takes the
            memory of n models.

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
        self._is_detached = False
        self._run: CompiledStep | None = None
        self._loader: PlannedLoader | None = None
        self._is_own_loop = False  # True if the step is the user's own
        self._checks: StepChecks | None = None
        self._rate = 0.0  # share of checked steps
        self._is_checked = False  # a check passed since the start or the last failure
        self._shared: SharedLedger | None = None  # with several processes
        self._loaded: TrainState | None = None  # state from a checkpoint
        self._interrupted = 0  # end of the pass in which that was saved
        self._saved: Mapping[str, Any] = {}  # what a checkpoint says of the step, see `step_saved`
        self._last: tuple[Any, LogicalBatch, Any] | None = None  # params, batch, seal
        self._returned: int | None = None  # step of the state that was returned last

    @classmethod
    def loaded(
        cls,
        ledger: Ledger,
        state: TrainState,
        shared: SharedLedger | None = None,
        pass_end: int = 0,
        saved: Mapping[str, Any] | None = None,
    ) -> PrivacyEngine:
        """Return the engine of a run from a checkpoint, saved in a pass that ends at `pass_end`.

        `saved` may hold what `step_saved` was.
        """
        engine = cls()
        engine._saved = saved or {}
        engine._ledger, engine._loaded, engine._shared = ledger, state, shared
        engine._names_delta, engine._interrupted = True, pass_end
        return engine

    @property
    def step_saved(self) -> dict[str, Any]:
        """What a checkpoint says of the step: its "views" and the names of its "trained" leaves."""
        if self._run is None:
            return {key: self._saved[key] for key in ("views", "trained") if key in self._saved}
        return {"views": self._run.views, "trained": sorted(self._run.parameters.names)}

    @compat.promoting
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
        keep_batch_dim: bool = False,
        views: int = 1,
        augment: Callable[..., Any] | None = None,
        users: Any = None,
        method: str = "auto",
        data_sharding: Any = None,
        ledger: str | os.PathLike[str] | None = None,
        checks: float | None = None,
        **plan_arguments: Any,
    ) -> tuple[Step, TrainState, PlannedLoader]:
        """Return the step, first state and loader of a private run.

        Args:
            loss_fn: callable (params, *example) -> scalar loss of one example; with `needs_key` it
                is called with `key=`, one key per (plan, step, example).
            params: pytree of parameters, or an `nnx.Module`, which is not changed.
            optimizer: optax transformation, applied to the noisy mean.
            data: tuple of arrays (arguments of the loss after params), examples on axis 0; a list
                is one argument, unless `loss_fn` takes as many as it holds.
            plan: `PrivacyPlan`; None to make one of `plan_arguments`.
            needs_key: bool, True if `loss_fn` takes `key=`.
            has_aux: bool, True if `loss_fn` returns (loss, aux).
            trainable: pytree of bools like `params`, False freezes.
            keep_batch_dim: bool, True for a `loss_fn` of batches of one, see `clipped_grad_sum`.
            views: int, views made of each example by `augment`. Their gradients are averaged before
                the clip, so epsilon is that of one view; mask, losses, norms and
                physical_batch_size count examples, time and memory views; aux is (n, views, ...).
            augment: callable (example, key) -> one view of it, both a tuple of the arguments of
                `loss_fn` after params, without a batch axis; written with jax, one key per (plan,
                step, example, view). None for the examples as they are.
            users: (rows,) integers, the id of the user of each row, or `dualdp.units.UserRows`, for
                a plan with unit="user": a step draws users and at most K = rows_per_unit rows of
                each. Their gradients are averaged before the clip; mask, losses, norms and batch
                sizes count users, aux is (users, K, ...), and a key is one per (plan, step, user,
                place of the row).
            method: str, see `clipped_grad_sum`.
            data_sharding: sharding of a batch on a mesh, `NamedSharding(mesh,
                PartitionSpec("data"))`; None for one device. Parameters on the mesh keep their
                sharding, others are replicated. Every process gets the whole data and reads only
                the rows of its devices.
            ledger: path of a new ledger file; None keeps the ledger in memory until a checkpoint.
            checks: float, share of steps at which two examples are compared with plain autodiff
                before anything is released; one of five of these checks covers the whole batch.
                None for 1/50, 0 for none; the ledger records it. Unless 0, the first step is
                checked too.
            **plan_arguments: arguments of `PrivacyPlan` (expected_batch_size, noise_multiplier,
                max_grad_norm, target_epsilon, on_budget, ...), if `plan` is None; also epochs=
                instead of num_steps=, target_delta= instead of delta=, and
                max_physical_batch_size= (examples processed at once).

        Returns:
            `(step, state, loader)`; call `state, metrics = step(state, batch)` for each batch of
            the loader. One pass over it is an epoch, `loader.remaining()` the rest of the plan.
            Metrics named `unprotected_*` are not private; noise="secure" omits them.

        Raises:
            AccountingError: the engine has a run already.
            TypeError: arguments that nobody knows, or that are missing; `loss_fn` takes a key and
                `needs_key` does not say so, or the other way round; `augment` is no such function.
            ValueError: arguments beside a plan that holds them, or that contradict each other;
                views without augment; no id of a user for each row, or other users than before.

        Guarantees:
            `loss_fn` is traced with one example before the plan's key is taken and the ledger is
                opened.  [test_a_loss_for_a_batch_is_told_so_before_anything_is_recorded]
        """
        self._refuse_a_second_run()
        if checks is None and self._loaded is not None:
            checks = self.ledger.check_rate
        rate = exactness.checked_rate(checks)
        if not callable(loss_fn):
            raise TypeError(
                f"loss_fn is {_validate.kind(loss_fn)}. Expected a function (params, *example) -> "
                "loss of one example."
            )
        parameters = split(params, trainable)
        if not parameters.trained:
            kinds = sorted({_validate.kind(leaf) for leaf in jax.tree.leaves(params)})
            raise ValueError(
                f"No leaf of params is trained; it holds {', '.join(kinds) or 'nothing'}. Expected "
                "at least one floating JAX or NumPy array, such as what init of a model returns; "
                "see trainable=."
            )
        data_mesh = data_mesh_of(data_sharding, parameters)
        group = None if data_mesh is None else data_mesh.group
        rows = rows_of(data, users, augment)
        plan = self._plan_of(plan, data, rows, plan_arguments, group)
        parameters = parameters if data_mesh is None else data_mesh.model(parameters)
        examples = arguments_of(data, loss_fn, needs_key)
        views = check_views(views, augment, plan.num_examples)
        loader = PlannedLoader(examples, plan, self._span, data_mesh, self._interrupted, rows)
        state = first_state(parameters, optimizer)
        if self._loaded is not None:
            self._refuse_another_step(views, parameters.names)
            state = continued(self._loaded, state)
        if data_mesh is not None:
            state = data_mesh.state(state)
        run = CompiledStep(
            plan=plan,
            parameters=parameters,
            loss_fn=loss_fn,
            optimizer=optimizer,
            needs_key=bool(needs_key),
            has_aux=bool(has_aux),
            keep_batch_dim=bool(keep_batch_dim),
            method=method,
            rebuild=loader.rebuild,
            augment=augment,
            views=views,
            data_mesh=data_mesh,
            opt_shardings=None if data_mesh is None else shardings(state.opt_state),
        )
        if self._loaded is not None:
            size = size_of(parameters.trained)
            require_affordable(plan.correlation, self.ledger.position, size)
        check_loss(run, examples)
        check_optimizer(run, state)
        if group is not None:
            check_run(group, run, state)
        self._begin(loader, ledger, group, "PrivacyEngine.make_private", run_registry.OWN_STEP)
        self._run = run
        self._checks, self._rate = StepChecks(run), rate
        self.ledger.note(checks=rate)
        return self._step, state, loader

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, data: Any, **arguments: Any
    ) -> tuple[Step, TrainState, PlannedLoader]:
        """`make_private` with the noise multiplier that spends at most `target_epsilon`.

        Args:
            target_epsilon: float, epsilon at the end of the run.
            target_delta: float, delta of that epsilon.
            data: tuple of arrays, see `make_private`.
            **arguments: keyword arguments of `make_private` without noise_multiplier and plan;
                num_steps or epochs is required.

        Raises:
            TypeError: an argument that nobody knows, or that is missing.
            ValueError: one that contradicts these, or neither or both of num_steps and epochs.
        """
        self._refuse_a_second_run()
        arguments |= {"target_epsilon": target_epsilon, "target_delta": target_delta}
        given = {name: arguments.pop(name) for name in KNOWN & arguments.keys()}
        refuse_beside_target(arguments.pop("plan", None), given)
        rows = rows_of(data, arguments.get("users"), arguments.get("augment"))
        plan = plan_of(
            None,
            given,
            num_examples=num_units(data, rows),
            accountant=self._accountant,
            secure_mode=self._secure_mode,
            calibrates=True,
            method="make_private_with_epsilon",
        )
        return self.make_private(plan=plan, data=data, **arguments)

    def resume(self, **arguments: Any) -> tuple[Step, TrainState, PlannedLoader]:
        """Continue a run loaded by `load_checkpoint`.

        Args:
            **arguments: those of `make_private` that describe the run and not its plan: loss_fn,
                params (for their structure; the values are the loaded ones), optimizer, data, ...

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
        users: Any = None,
        ledger: str | os.PathLike[str] | None = None,
        **plan_arguments: Any,
    ) -> PlannedLoader:
        """Open the ledger and return the loader of a run whose step is the user's own.

        Call `record()` before each release, and `noisy_mean` or `add_noise(plan)` for its noise.
        The arguments are those of `make_private`; with `users`, `clipped_grad_sum` must get the
        plan's rows_per_unit, and the row_weights of each chunk.
        """
        self._refuse_a_second_run()
        data_mesh = data_mesh_of(data_sharding)
        group = None if data_mesh is None else data_mesh.group
        rows = rows_of(data, users)
        plan = self._plan_of(plan, data, rows, plan_arguments, group)
        loader = PlannedLoader(
            examples_of(data), plan, self._span, data_mesh, self._interrupted, rows
        )
        self._begin(loader, ledger, group, "PrivacyEngine.make_loader", "")
        loader.handed_out.begun = self.ledger.position
        open_loop(loader, loader.needs())
        return loader

    def _plan_of(
        self,
        plan: PrivacyPlan | None,
        data: Any,
        rows: UserRows | None,
        given: Mapping[str, Any],
        group: Group | None,
    ) -> PrivacyPlan:
        """Plan given, made of the arguments, or loaded; the same on all processes."""
        if self._loaded is None:
            self._names_delta = names_delta(plan, given)
            plan = plan_of(
                plan,
                given,
                num_examples=num_units(data, rows),
                accountant=self._accountant,
                secure_mode=self._secure_mode,
            )
            return plan if group is None else one_plan(group, plan)
        if plan is not None or given:
            raise ValueError(
                f"{sorted(given) or 'plan'} came for a run that was loaded from a checkpoint, "
                "which holds its plan. Expected none of it."
            )
        return self.plan

    def _refuse_a_second_run(self) -> None:
        if self._loader is not None:
            raise AccountingError(SECOND_RUN)

    def _refuse_another_step(self, views: int, names: list[str]) -> None:
        """Refuse to resume with other views or trained leaves than those of the checkpoint."""
        if views != self._saved.get("views", views):
            raise ValueError(
                f"views={views}, but the checkpoint's run has views={self._saved['views']}. "
                "Expected the views and the augment of its make_private."
            )
        trained = self._saved.get("trained", sorted(names))
        if trained != sorted(names):
            raise ValueError(
                f"The leaves {sorted(set(trained) ^ set(names))} are trained either here or in the "
                "checkpoint's run. Expected trainable= as in its make_private."
            )

    def _begin(
        self,
        loader: PlannedLoader,
        path: str | os.PathLike[str] | None,
        group: Group | None,
        recorder: str,
        source: str,
    ) -> None:
        """Claim the plan's key and open its ledger, unless the ledger was loaded."""
        if loader.plan.noise != "secure":
            compat.check_counter_layout()
        digest = rows_digest(loader.plan, loader.users)
        if group is not None:
            check_data(group, loader.arrays, digest)
        if self._ledger is not None:
            self._ledger.bind_users(digest)
            if source:
                run_registry.draw_by_engine(self._ledger)
        else:
            run = (loader.plan, self._accountant, path)
            if group is None:
                self._ledger = claimed(Ledger(*run), recorder=recorder, source=source)
            else:
                self._shared = SharedLedger(group)
                self._ledger = self._shared.opened(*run, recorder=recorder, source=source)
            self._ledger.bind_users(digest)
        self._loader, self._is_own_loop = loader, not source

    def _span(self) -> tuple[int, int | None]:
        """Next step, and the first step that the loader must not draw."""
        ledger = self._running()
        end = ledger.end if ledger.plan.on_budget == "stop" else ledger.plan.num_steps
        return ledger.position, end

    @compat.promoting
    def _step(self, state: TrainState, batch: LogicalBatch) -> tuple[TrainState, dict[str, Any]]:
        """Perform one release: sum, check, record, seal, add noise, update.

        Raises:
            ExactnessError: the spot check of this step failed. Nothing of it was recorded or
                released, and the same batch may be tried again.
        """
        run, ledger = self._attached(), self._running()
        assert self._loader is not None
        check_step(self._loader, state, batch)
        ledger.expect(batch.step)
        warn_of_older(state, self._returned)
        with nullcontext() if self._shared is None else self._shared.at(batch.step):
            bound = ledger.max_grad_norm
            computed = run.computed(state.params, batch, bound)
            due = exactness.check_at(
                ledger.plan, batch.step, self._rate, is_first=not self._is_checked
            )
            if due is not None:
                self._check(computed, due)
            totals, answers, counts = computed.totals, computed.answers, {}
            del computed  # frees the inputs of the sums
            if ledger.plan.is_adaptive:
                counts = {"num_below": int(totals.num_below), "num_rows": int(totals.num_rows)}
            trained = run.parameters.arrays(state.params)[0]
            ledger.record(batch.step)
            seal = self._seal(batch.step, trained, totals.sums, **counts)
        self._last = (state.params, batch, seal)
        state, metrics = run.release(state, totals, batch.step, seal)
        if run.has_aux:
            metrics["unprotected_aux"] = [answer.aux for answer in answers]
        if ledger.plan.noise == "secure":
            metrics = {}
        self._returned = state.step
        return state, {"step": batch.step, **metrics}

    def _check(self, step: ComputedStep, due: exactness.SpotCheck) -> None:
        """Check a step whose totals are known, on all processes together."""
        assert self._checks is not None
        failed, is_checked, ledger = None, False, self._running()
        try:
            is_checked = self._checks.check(step, due, is_first=not self._is_checked)
        except exactness.ExactnessError as error:
            failed = error
        if self._shared is not None:
            failed = self._shared.failure(due.step, failed)
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
        """Seal of a recorded step, the same on all processes.

        In a loop of the user's own the sums are unknown, so a step is never taken for a replay.
        """
        facts: dict[str, Any] = {"stack": _STACK, **counts}
        if self._shared is not None:
            return self._shared.sealed(self._running(), step, trained, sums, facts)
        if sums is None:
            return self._running().seal(step, None, **facts)
        hashes = partial(hash_sums, sums=sums)
        return self._running().seal(step, partial(local_shards, sums), hashes=hashes, **facts)

    def written(self, name: str, whole: Callable[[], Any], write: Callable[[Any], Any]) -> Any:
        """Write a checkpoint on the first process and return the result on all of them.

        `whole` () -> content is called on every process, `write` (content) on the first.
        """
        self._running()
        if self._shared is None:
            return write(whole())
        return self._shared.written(name, whole, write)

    def detach(self) -> None:
        """End the run: step and loader refuse, the ledger's file is closed, the record stays."""
        self._running().close()
        if self._loader is not None:
            close_loop(self._loader)
        self._is_detached, self._run, self._last = True, None, None

    @compat.promoting
    def stages(self) -> Stages:
        """Return the gradients of the last step at each stage, for inspection only.

        They are recomputed from the last step's parameters and batch, which the engine keeps; with
        `keep_per_sample` also the per-sample gradients.

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

    def record(self, num_steps: int = 1) -> range:
        """Record the next releases, before a jitted or scanned run of that many steps.

        Returns:
            The indices of the steps that may be released now.

        Raises:
            AccountingError: one of them is past the plan; then none is recorded.
        """
        ledger = self._running()
        steps = ledger.steps_ahead(_validate.integer("num_steps", num_steps))
        if len(steps) == 1 and self._loader is not None:
            self._loader.handed_out.record(steps[0])
        for step in steps:
            ledger.record(step)
            self._seal(step, None, None)
        return steps

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Return the epsilon spent so far, an upper bound.

        Args:
            delta: float in (0, 1); may be omitted if a plan or target named it.
            accept_unverified: bool, True to get an answer for a run with a failed spot check.

        Raises:
            AccountingError: there is no run; or steps of it were taken that are not on record, or a
                spot check failed.
            ValueError: no delta.
        """
        ledger = self.ledger
        if delta is None and not self._names_delta:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        if self._is_own_loop and self._loader is not None:
            self._loader.handed_out.require_recorded(ledger.position)
            self._loader.handed_out.warn_of_undrawn(ledger.plan, ledger.position)
        return ledger.get_epsilon(delta=delta, accept_unverified=accept_unverified)

    def model(self, state: TrainState) -> Any:
        """Return an `nnx.Module` with the parameters of a state, the rest as it came.

        Raises:
            AccountingError: the step is the user's own.
            TypeError: `params` was no `nnx.Module`.
        """
        module = self._attached().parameters.module
        if module is None:
            raise TypeError("params was no nnx.Module. Expected state.params, which is like it.")
        return module(state.params)

    def ema(self, state: TrainState) -> Any:
        """Return the average of the parameters that `with_ema` keeps, for evaluation.

        Args:
            state: `TrainState` of this run.

        Returns:
            Pytree like `state.params`, what is not trained as there.

        Raises:
            AccountingError: the step is the user's own.
            ValueError: the optimizer keeps no average.
        """
        parameters = self._attached().parameters
        trained, others = parameters.arrays(state.params)
        averages = zip(jax.tree.leaves(average_in(state.opt_state)), trained, strict=True)
        return parameters.whole([mean.astype(leaf.dtype) for mean, leaf in averages], others)

    @property
    def pass_end(self) -> int:
        """Step where the current pass over the loader ends; 0 before the first."""
        return self._interrupted if self._loader is None else self._loader.handed_out.pass_end

    @property
    def plan(self) -> PrivacyPlan:
        """Plan of the run."""
        return self.ledger.plan

    @property
    def accountant(self) -> Any:
        """Accountant of the run."""
        return self.ledger.accountant

    @property
    def ledger(self) -> Ledger:
        """Ledger of the run.

        Raises:
            AccountingError: there is none.
        """
        if self._ledger is None:
            raise AccountingError(NO_RUN)
        return self._ledger

    def _running(self) -> Ledger:
        """Ledger of a run that has not been detached."""
        if self._is_detached:
            raise AccountingError(
                "The engine is detached, so its step and loader have ended. Make a new engine, or "
                "load a checkpoint."
            )
        return self.ledger

    def _attached(self) -> CompiledStep:
        """Run with a step made by `make_private`; refuses other runs."""
        self._running()
        if self._run is None:
            raise AccountingError(
                "The step of this run is the user's own. Expected make_private instead of "
                "make_loader."
            )
        return self._run

# SPDX-License-Identifier: Apache-2.0
"""Engine of a private training run: assembles plan, ledger, loader and step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from dualdp import _validate, exactness
from dualdp._validate import AccountingError
from dualdp.accountants import require_bound
from dualdp.accountants.base import Accountant
from dualdp.ledger import own_loops
from dualdp.ledger.ledger import Ledger
from dualdp.plan.arguments import KNOWN, NO_RUN, SECOND_RUN, names_delta, plan_of
from dualdp.plan.plan import PrivacyPlan
from dualdp_jax import compat
from dualdp_jax.compat import PyTree
from dualdp_jax.noise.noise import NoiseSource
from dualdp_jax.parallel.mesh import DataMesh, data_mesh_of
from dualdp_jax.parallel.process_group import Group, on_first
from dualdp_jax.per_sample.parameters import split
from dualdp_jax.training.arguments import (
    agreed,
    check_loss,
    check_optimizer,
    check_run,
    check_views,
    units_of,
)
from dualdp_jax.training.loader import PlannedLoader, examples_of
from dualdp_jax.training.step import (
    DETACHED,
    Augment,
    PrivateStep,
    Stages,
    TrainState,
    continued,
    first_state,
)

Path = str | os.PathLike[str]


class Loaded(NamedTuple):
    """Run of a checkpoint that `resume` goes on with."""

    state: TrainState
    pass_end: int  # step that ends the pass in which it was saved
    saved: Mapping[str, Any]  # what it says of the step, see `PrivacyEngine.step_saved`


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
        is_secure = bool(secure_mode)
        self._plan_of = partial(plan_of, accountant=self._accountant, secure_mode=is_secure)
        self.keep_per_sample = False
        self._names_delta = False  # a plan or a target named it
        self._ledger: Ledger | None = None
        self._group: Group | None = None
        self._is_detached = False
        self._loaded: Loaded | None = None
        self._loader: PlannedLoader | None = None
        self._run: PrivateStep | None = None  # None if the step is the user's own

    @classmethod
    def loaded(cls, loaded: Loaded, ledger: Ledger, group: Group | None) -> PrivacyEngine:
        """Return the engine of a checkpoint's run."""
        engine = cls()
        engine._loaded, engine._ledger, engine._group = loaded, ledger, group
        engine._names_delta = True
        return engine

    @compat.promoting
    def make_private(
        self,
        *,
        loss_fn: Callable[..., PyTree],
        params: PyTree,
        optimizer: optax.GradientTransformation,
        data: PyTree,
        plan: PrivacyPlan | None = None,
        needs_key: bool = False,
        has_aux: bool = False,
        trainable: PyTree = None,
        keep_batch_dim: bool = False,
        views: int = 1,
        augment: Augment | None = None,
        users: PyTree = None,
        method: str = "auto",
        data_sharding: jax.sharding.Sharding | None = None,
        ledger: Path | None = None,
        checks: float | None = None,
        **plan_arguments: Any,
    ) -> tuple[PrivateStep, TrainState, PlannedLoader]:
        """Return the step, first state and loader of a private run.

        Args:
            loss_fn: callable (params, *example) -> scalar loss of one example; with `needs_key` it
                is called with `key=`, one key per (plan, step, example).
            params: pytree of parameters, or an `nnx.Module`, which is not changed.
            optimizer: optax transformation, applied to the noisy mean.
            data: tuple or list of arrays (arguments of the loss after params), examples on axis 0;
                anything else is one argument.
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
            checks: float, share of steps at which examples are compared with plain autodiff before
                anything is released. None for 1/50, 0 for none; the ledger records it. Unless 0,
                the first step is checked too.
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
                `needs_key` does not say so, or the other way round; `augment` is no such function,
                or is missing; the optimizer's updates are not like the parameters.
            ValueError: arguments beside a plan that holds them, or that contradict each other;
                no id of a user for each row; leaves that the optimizer
                freezes.

        Guarantees:
            `loss_fn` is traced with one example before the ledger is opened.
                [test_a_mistake_is_refused_by_its_fix]
        """
        if checks is None and self._loaded is not None:
            checks = self._loaded.saved.get("checks")
        rate, parameters = exactness.checked_rate(checks), split(params, trainable)
        if not parameters.trained:
            kinds = sorted({_validate.kind(leaf) for leaf in jax.tree.leaves(params)})
            raise ValueError(
                f"No leaf of params is trained; it holds {', '.join(kinds) or 'nothing'}. Expected "
                "a floating JAX or NumPy array, such as what init of a model returns."
            )
        mesh = data_mesh_of(data_sharding, parameters)
        loader = self._planned(data, plan, plan_arguments, mesh, users, augment)
        state = first_state(parameters, optimizer)
        num_views = check_views(views, augment)
        if self._loaded is not None:
            if num_views != (before := self._loaded.saved.get("views", num_views)):
                raise ValueError(
                    f"views={num_views}, but the checkpoint's run has views={before}. Expected the "
                    "views and the augment of its make_private."
                )
            was = set(self._loaded.saved["trained"] or parameters.names)
            if was != set(parameters.names):
                raise ValueError(
                    f"The leaves {sorted(was ^ set(parameters.names))} are trained either here or "
                    "in the checkpoint's run. Expected trainable= as in its make_private."
                )
            state = continued(self._loaded.state, state)
        if mesh is not None:
            state = mesh.state(state)
            trained, others = parameters.arrays(state.params)
            others = [mesh.placed("params", leaf) for leaf in others]
            parameters = replace(parameters, trained=trained, others=others)
        run = PrivateStep(
            loader=loader,
            parameters=parameters,
            loss_fn=loss_fn,
            optimizer=optimizer,
            opt_state=state.opt_state,
            needs_key=bool(needs_key),
            has_aux=bool(has_aux),
            keep_batch_dim=bool(keep_batch_dim),
            method=method,
            augment=augment,
            views=num_views,
            rate=rate,
        )
        check_loss(run, examples_of(data))
        check_optimizer(run)
        if self._group is not None:
            check_run(self._group, run, state)
        self._begin(loader, ledger)
        self._run, run.ledger = run, self.ledger
        self.ledger.note(checks=rate)
        return run, state, loader

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, data: PyTree, **arguments: Any
    ) -> tuple[PrivateStep, TrainState, PlannedLoader]:
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
        arguments |= {"target_epsilon": target_epsilon, "target_delta": target_delta}
        given = {name: arguments.pop(name) for name in KNOWN & arguments.keys()}
        _, num_units = units_of(data, arguments.get("users"), arguments.get("augment"))
        plan = self._plan_of(
            arguments.pop("plan", None),
            given,
            num_examples=num_units,
            calibrates=True,
            method="make_private_with_epsilon",
        )
        return self.make_private(plan=plan, data=data, **arguments)

    def resume(
        self, *, recalibrate: bool = False, **arguments: Any
    ) -> tuple[PrivateStep, TrainState, PlannedLoader]:
        """Go on with the run of a checkpoint.

        A segment begins: its batches and noise are drawn anew, and steps that were released after
        the checkpoint and run again are further releases, which are accounted.

        Args:
            recalibrate: bool, True for such noise in the steps that are left that all planned steps
                fit the plan's target_epsilon.
            **arguments: those of `make_private` that describe the run and not its plan: loss_fn,
                params (for their structure; the values are the loaded ones), optimizer, data, ...

        Returns:
            `(step, state, loader)`, the state being the loaded one.

        Raises:
            AccountingError: the engine was not loaded, or goes on already.
        """
        if self._loaded is None or self._loader is not None:
            raise AccountingError(
                "There is no loaded run to go on with. Expected the engine of load_checkpoint, "
                "once."
            )
        if recalibrate:
            self.ledger.recalibrate()
        return self.make_private(**arguments)

    def make_loader(
        self,
        *,
        data: PyTree,
        plan: PrivacyPlan | None = None,
        data_sharding: jax.sharding.Sharding | None = None,
        users: PyTree = None,
        ledger: Path | None = None,
        **plan_arguments: Any,
    ) -> PlannedLoader:
        """Open the ledger and return the loader of a run whose step is the user's own.

        Its batches are `Chunk`s, arguments of `clipped_grad_sum`. Call `record()` before each
        release, and `noisy_mean` or `add_noise(plan)` for its noise. The arguments are those of
        `make_private`.
        """
        loader = self._planned(data, plan, plan_arguments, data_mesh_of(data_sharding), users)
        self._begin(loader, ledger)
        loader.origin.loop = loop = own_loops.open_loop(self.ledger)
        loop.source = NoiseSource(loader.plan, self.ledger.segments[-1].noise_scale)
        loader.handed_out.begun = self.ledger.position
        return loader

    def _planned(
        self,
        data: PyTree,
        plan: PrivacyPlan | None,
        given: Mapping[str, Any],
        mesh: DataMesh | None,
        users: PyTree,
        augment: Augment | None = None,
    ) -> PlannedLoader:
        """Loader of a run, with bits of its segment that are the same on all processes."""
        if self._loader is not None:
            raise AccountingError(SECOND_RUN)
        (rows, num_units), examples = units_of(data, users, augment), examples_of(data)
        if self._loaded is None:
            self._names_delta = names_delta(plan, given)
            plan = self._plan_of(plan, given, num_examples=num_units)
        elif plan is not None or given:
            raise ValueError(
                f"{sorted(given) or 'plan'} came for a run that was loaded from a checkpoint, "
                "which holds its plan. Expected none of it."
            )
        else:
            plan = self.plan
        self._group = None if mesh is None else mesh.group
        bits = agreed(self._group, plan, self._accountant, examples, rows)
        return PlannedLoader(examples, plan, bits, self._running, mesh, self.pass_end, rows)

    def _begin(self, loader: PlannedLoader, path: Path | None) -> None:
        """Open the ledger of a run, unless it was loaded; process 0 has the file."""
        if self._ledger is None:
            opened, new = list[Ledger](), partial(Ledger, loader.plan)
            on_first(self._group, "the ledger", lambda: opened.append(new(path)))
            self._ledger = opened[0] if opened else new()
        self._loader = loader

    def detach(self) -> None:
        """End the run: step and loader refuse, the ledger's file is closed, the record stays."""
        self._running().close()
        if self._run is not None:
            self._run.ledger = self._run.last = None
        self._is_detached, self._run = True, None

    @compat.promoting
    def stages(self) -> Stages:
        """Return the gradients of the last step at each stage, for inspection only.

        They are recomputed from the last step's parameters and batch, which the engine keeps; with
        `keep_per_sample` also the per-sample gradients.

        Raises:
            AccountingError: no step was taken, or the noise is secure, which shows nothing else.
        """
        self._running()
        if self._run is None or self._run.last is None:
            raise AccountingError(
                "There are no stages: No step was taken yet by make_private's step, or "
                "noise='secure' keeps them closed."
            )
        return self._run.last(grads=self.keep_per_sample)

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
            on_first(self._group, f"the record of step {step}", partial(ledger.record, step))
            if self._group is not None and not self._group.is_first:
                ledger.record(step)
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
        if self._loader is not None and self._loader.origin.loop is not None:
            handed_out = self._loader.handed_out
            handed_out.require_recorded(ledger.position)
            handed_out.warn_of_undrawn(ledger.plan, ledger.position, len(ledger.waiting))
        return ledger.get_epsilon(delta=delta, accept_unverified=accept_unverified)

    @property
    def group(self) -> Group | None:
        """Group of the processes of the run, which goes on; None for one."""
        self._running()
        return self._group

    @property
    def pass_end(self) -> int:
        """Step where the current pass over the loader ends; 0 before the first."""
        if self._loader is not None:
            return self._loader.handed_out.pass_end
        return 0 if self._loaded is None else self._loaded.pass_end

    @property
    def step_saved(self) -> Mapping[str, Any]:
        """What a checkpoint says of the step: "views", "checks", names of "trained" leaves."""
        if self._run is None:
            return {} if self._loaded is None else self._loaded.saved
        names = sorted(self._run.parameters.names)
        return {"views": self._run.views, "checks": self._run.rate, "trained": names}

    @property
    def plan(self) -> PrivacyPlan:
        """Plan of the run."""
        return self.ledger.plan

    @property
    def accountant(self) -> Accountant:
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
            raise AccountingError(DETACHED)
        return self.ledger

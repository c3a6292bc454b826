# SPDX-License-Identifier: Apache-2.0
"""The few-lines entry point: makes a model, its optimizer and its loader train privately."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import AccountingError, run_registry
from dualdp.accountants import require_bound
from dualdp.exactness import checked_rate
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.run_arguments import names_delta, refuse_beside_target

from .agreement import agreed
from .arguments import Settings, check, plan_of
from .attached import Attached
from .data import ALONE, PlannedLoader, Share, as_dataset, check_loader
from .distributed import Group, group_of, on_all, unwrapped
from .optimizer import Stages
from .own_loop import OwnLoopLoader
from .run import following_ledger, new_ledger
from .same_data import described

Parts = tuple[nn.Module, torch.optim.Optimizer, PlannedLoader]


class PrivacyEngine(Attached):
    """Trains privately what it is given, without wrapping it.

    Args:
        accountant: "pld", "rdp" or one that was registered; None for the plan's, or "pld" without a
            plan.
        secure_mode: noise from a cryptographic generator.

    Raises:
        AccountingError: the accountant gives no upper bound (`"gdp"`).

    Attributes:
        keep_per_sample: whether `stages` holds the per-sample gradients of steps from now on,
            which takes the memory of n models.
        noise_layout: `dualdp.port.match(model, params)` lets portable noise be what that JAX model
            draws, for a run that changes stacks; a checkpoint of JAX's brings it along.

    Guarantees:
        Every release is recorded before the parameters change.  [test_ledger_comes_first]
        `detach` leaves module and optimizer as they were.
            [test_the_same_objects_come_back_and_nothing_is_left_after_detach]

    Source: Abadi et al. 2016, Algorithm 1.
    """

    def __init__(self, accountant: str | None = None, secure_mode: bool = False) -> None:
        accountant = accountant if accountant is None else require_bound(accountant)
        self._of_plans: dict[str, Any] = {
            "accountant": accountant,
            "secure_mode": bool(secure_mode),
        }
        super().__init__()
        self._saved: tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]] | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: Any = None,
        max_grad_norm: Any = None,
        loss_reduction: str = "mean",
        plan: PrivacyPlan | None = None,
        clipping: str | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        on_budget: str | None = None,
        max_physical_batch_size: int | None = None,
        poisson_sampling: bool | None = None,
        grad_sample_mode: str = "auto",
        ledger: str | os.PathLike[str] | None = None,
        checks: float | None = None,
        **others: Any,
    ) -> Parts:
        """Set up DP-SGD; the loop stays the user's.

        Args:
            module: the model, returned as it is.
            optimizer: holds every trainable parameter; returned as it is.
            data_loader: a `DataLoader`; its batch size becomes the expected batch size.
            noise_multiplier: noise standard deviation / max_grad_norm; a number or a schedule.
            max_grad_norm: C, the bound on one example's gradient; a number, a schedule, or
                `dualdp.schedules.AdaptiveNorm`.
            loss_reduction: "mean" or "sum": what the criterion does over the batch.
            plan: the run, written down; then none of the arguments it holds may be given.
            clipping: "flat", "per_layer" or "automatic".
            target_epsilon: what the run may spend; the step that would exceed it is refused.
            target_delta: at this delta.
            on_budget: what ends such a run: "raise" an error, or "stop" the loader.
            max_physical_batch_size: examples that are worked on at once; `optimizer.step()` then
                comes after each physical batch, see `BatchMemoryManager`.
            poisson_sampling: False for shuffled batches, accounted without amplification.
            grad_sample_mode: "auto" or one of `GRAD_SAMPLE_MODES`.
            ledger: a new file for the record of releases; None keeps it in memory.
            checks: share of steps at which examples are checked against plain autodiff of their
                own losses, in [0, 1]; None for `dualdp.exactness.RATE`, 0 for never. The ledger
                holds it.
            **others: further fields of `PrivacyPlan` (sampler, neighboring_relation, seed, noise,
                delta, num_steps, ...), epochs= instead of num_steps=, and arguments of Opacus'
                method, as far as they have a meaning here.

        Returns:
            `(module, optimizer, loader)`. With `plan` one pass over the loader is what remains of
            the plan; else it is as many steps as `data_loader` has batches.

        Raises:
            AccountingError: the engine has a run already.
            TypeError: an argument that nobody knows, or that is missing.
            UnsupportedLayerError: the model mixes examples.
            ValueError: a wrong value, arguments beside a plan that holds them, or that contradict
                each other.
        """
        self._refuse_second()
        given = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "clipping": clipping,
            "target_epsilon": target_epsilon,
            "target_delta": target_delta,
            "on_budget": on_budget,
            "max_physical_batch_size": max_physical_batch_size,
            "poisson_sampling": poisson_sampling,
            **others,
        }
        settings = Settings(loss_reduction, grad_sample_mode, checks=checked_rate(checks))
        settings.whole, settings.has_target = plan is not None, names_delta(plan, given)
        plan = plan_of(data_loader, plan, given, **self._of_plans)
        return self._start(module, optimizer, data_loader, plan, settings, ledger)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        num_steps: int | None = None,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "auto",
        ledger: str | os.PathLike[str] | None = None,
        checks: float | None = None,
        **others: Any,
    ) -> Parts:
        """`make_private` with the noise that spends `target_epsilon` in so many epochs or steps.

        Args:
            module: as in `make_private`.
            optimizer: as there.
            data_loader: as there.
            target_epsilon: what the whole run may spend.
            target_delta: at this delta.
            epochs: passes over the loader; a further one is refused.
            num_steps: or the number of steps.
            loss_reduction: as there.
            grad_sample_mode: as there.
            ledger: as there.
            checks: as there.
            **others: further arguments of `make_private`, max_grad_norm among them.

        Returns:
            `(module, optimizer, loader)`.

        Raises:
            TypeError: an argument that nobody knows, or that is missing.
            ValueError: a wrong value, or neither or both of epochs and num_steps.
        """
        self._refuse_second()
        given = {"target_epsilon": target_epsilon, "target_delta": target_delta, **others}
        refuse_beside_target(given.pop("plan", None), given)
        given |= {"epochs": epochs, "num_steps": num_steps}
        plan = plan_of(
            data_loader,
            None,
            given,
            calibrates=True,
            method="make_private_with_epsilon",
            **self._of_plans,
        )
        settings = Settings(
            loss_reduction, grad_sample_mode, has_target=True, checks=checked_rate(checks)
        )
        return self._start(module, optimizer, data_loader, plan, settings, ledger)

    def _start(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        plan: PrivacyPlan,
        settings: Settings,
        ledger: str | os.PathLike[str] | None,
    ) -> Parts:
        """Check everything, then open the ledger and attach."""
        self._refuse_shared(unwrapped(module), optimizer)
        self._group = group_of(module)
        plan = self._agreed((module, optimizer, loader), plan, settings)

        def prepared() -> PlannedLoader:
            check(unwrapped(module), optimizer, plan, settings)
            return self._planned(loader, plan, settings)

        planned = on_all(self._group, "make_private", prepared)
        open_ledger = partial(new_ledger, plan, ledger)
        if not self._is_first:
            open_ledger = partial(following_ledger, plan)
        self._ledger = on_all(self._group, "the ledger", open_ledger)
        self._ledger.note(checks=settings.checks)
        self._settings = settings
        self._attach(module, optimizer)
        return module, optimizer, planned

    def _agreed(self, parts: Any, plan: PrivacyPlan, settings: Settings) -> PrivacyPlan:
        """The plan of all processes, once they agree on everything."""
        module, optimizer, loader = parts
        check_loader(loader)
        if self._group is None:
            return plan
        stated = {
            **asdict(settings),
            "steps in a pass": len(loader),
            "noise_layout": repr(self.noise_layout),
        }
        data = described(as_dataset(loader.dataset))
        return agreed(self._group, unwrapped(module), optimizer, plan, data=data, **stated)

    @classmethod
    def loaded(
        cls,
        ledger: Ledger,
        settings: Settings,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        at_resume: Callable[[], None],
        group: Group | None = None,
    ) -> Self:
        """The engine of a run that goes on; `resume` brings the data.

        Args:
            ledger: of the run.
            settings: as it was saved.
            module: the model with its parameters of then.
            optimizer: with its state of then.
            at_resume: called last, when the loop is about to go on.
            group: the processes that train together.

        Raises:
            TypeError, ValueError: as `make_private`.
        """
        check(unwrapped(module), optimizer, ledger.plan, settings)
        engine = cls()
        engine._group = group
        engine._ledger, engine._settings = ledger, settings
        engine._saved = module, optimizer, at_resume
        return engine

    def resume(self, *, data_loader: DataLoader[Any]) -> Parts:
        """Go on with a run that `load_checkpoint` brought back.

        Args:
            data_loader: over the same data as before.

        Returns:
            `(module, optimizer, loader)`, the first two being those that were loaded into.

        Raises:
            AccountingError: the engine was not loaded, or goes on already.
            ValueError: the loader has other data.
        """
        if self._saved is None:
            raise AccountingError(
                "There is no loaded run to go on with. Expected load_checkpoint's engine, once."
            )
        self._agreed((*self._saved[:2], data_loader), self.plan, self._settings)
        until = self._settings.pass_end
        planned = on_all(
            self._group,
            "resume",
            lambda: self._planned(data_loader, self.plan, self._settings, until),
        )
        run_registry.draw_by_engine(self.ledger)
        (module, optimizer, at_resume), self._saved = self._saved, None
        self._attach(module, optimizer)
        at_resume()
        return module, optimizer, planned

    def make_loader(
        self,
        *,
        data_loader: DataLoader[Any],
        plan: PrivacyPlan | None = None,
        ledger: str | os.PathLike[str] | None = None,
        **plan_arguments: Any,
    ) -> OwnLoopLoader:
        """The plan's batches and account for a loop of your own, in one process.

        Call `record()` before each release, `clipped_grad_sum` for its sum (with the mask of each
        chunk) and `noisy_mean(sum, plan, step)` for its noise.

        Args:
            data_loader: as in `make_private`.
            plan: as there.
            ledger: as there.
            **plan_arguments: as there.

        Returns:
            The loader of `LogicalBatch`es.

        Raises:
            AccountingError: the engine has a run already, or several processes train together.
            TypeError, ValueError: as `make_private`.
        """
        self._refuse_second()
        if Group.current() is not None:
            raise AccountingError(
                "make_loader came in a group of several processes, whose loops would not be one "
                "run. Expected make_private, which accounts them together."
            )
        self._settings.has_target = names_delta(plan, plan_arguments)
        plan = plan_of(data_loader, plan, plan_arguments, method="make_loader", **self._of_plans)
        per_pass = len(data_loader)
        self._settings.whole = plan.num_steps is not None
        loader = OwnLoopLoader(data_loader, plan, lambda: self._span(per_pass, 0))
        self._ledger = new_ledger(plan, ledger, "PrivacyEngine.make_loader", "")
        self._own_loop = loader
        return loader

    def _planned(
        self, loader: DataLoader[Any], plan: PrivacyPlan, settings: Settings, until: int = 0
    ) -> PlannedLoader:
        """The loader of the plan's batches; `until` ends a pass that a checkpoint interrupted."""
        span = partial(self._span, len(loader), until)

        def begin() -> int:
            number = self._require_step().begin()
            self._settings.pass_end = span()[1]
            return number

        return PlannedLoader(
            loader,
            plan,
            span,
            begin,
            lambda *drawn: self._require_step().announce(*drawn),
            ALONE if self._group is None else Share(self._group.rank, self._group.size),
            lambda number: self._step.leave(number) if self._step is not None else None,
            settings.checks,
        )

    def detach(self) -> None:
        """Take every hook off module and optimizer; plan, ledger and epsilon stay readable."""
        if self._own_loop is None:
            self._require_step().detach()
        self.ledger.close()
        if self._recorder is not None:
            self._recorder.detach()
        self._lent.give_back()
        self._release_parts()
        self._step = self._recorder = None

    def stages(self) -> Stages:
        """Per-sample gradients (see `keep_per_sample`), clipped sum, noisy mean of the last step.

        They are kept until the next batch is handed out. Norms and per-sample gradients are those
        of this process, sum and mean those of all that train together.

        Raises:
            AccountingError: no step was taken, or the noise is secure, which shows nothing else.
        """
        step = self._require_step()
        if self.plan.noise == "secure":
            raise AccountingError(
                "The stages of a gradient are not private, and noise='secure' keeps them closed. "
                "Expected another noise for inspection."
            )
        stages = step.stages
        if stages is None:
            raise AccountingError(
                "No step was taken since a batch was handed out. Call optimizer.step() first."
            )
        return stages

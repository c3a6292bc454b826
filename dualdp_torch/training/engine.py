# SPDX-License-Identifier: Apache-2.0
"""`PrivacyEngine`: entry point that makes a model, its optimizer and its loader train privately."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.accountants import require_bound
from dualdp.exactness import checked_rate
from dualdp.ledger import own_loops
from dualdp.ledger.ledger import Ledger
from dualdp.plan.arguments import NO_RUN, SECOND_RUN, names_delta
from dualdp.plan.batches import end_of_pass, require_end
from dualdp.plan.plan import PrivacyPlan
from dualdp.porting.parameter_map import ParameterMap
from dualdp.randomness import SegmentBits
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.parallel.process_group import QUIET, Group, group_of, unwrapped
from dualdp_torch.training.arguments import RunSettings, agreed, check, check_kinds, plan_of
from dualdp_torch.training.compiled_step import CompiledStep, compiled_sums
from dualdp_torch.training.loader import Augment, Data, OwnLoopLoader, PlannedLoader, Span
from dualdp_torch.training.opacus_names import missing_in
from dualdp_torch.training.rehearsal import rehearse
from dualdp_torch.training.step import PrivateStep, Stages, set_temporarily

Path = str | os.PathLike[str]
#: Module, optimizer and loader that the user's loop goes on with.
Private = tuple[nn.Module, torch.optim.Optimizer, PlannedLoader]
AtResume = Callable[[], None]
_ATTACHED = "_dualdp_engine"  # attribute of a model and an optimizer in a run


class Attached:
    """Engine of the run that a model or an optimizer is in; nothing in their copies and pickles."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class PrivacyEngine:
    """DP-SGD for a model, optimizer and loader, none of which is wrapped.

    Args:
        accountant: "pld", "rdp" or a registered name; None for the plan's, or "pld" without a
            plan.
        secure_mode: bool, True for noise from a cryptographic generator.

    Raises:
        AccountingError: the accountant gives no upper bound (`"gdp"`).

    Attributes:
        group: `Group` of the processes that train together.
        keep_per_sample: bool, True if `stages` holds the per-sample gradients of later steps,
            which takes the memory of n models.
        settings: `RunSettings` of the run.
        noise_layout: `dualdp.port.match(model, params)`, so that portable noise is that of this
            JAX model in a run that changes backends; a JAX checkpoint sets it. None otherwise.

    Guarantees:
        Every release is recorded before the parameters change.  [test_ledger_comes_first]
        `detach` leaves module and optimizer as they were.
            [test_the_same_objects_come_back_and_detach_cleans_up]

    Source: Abadi et al. 2016, Algorithm 1.
    """

    if not TYPE_CHECKING:  # a type checker refuses unknown names by itself
        __getattr__ = missing_in("PrivacyEngine", "PrivacyEngine")

    def __init__(self, accountant: str | None = None, secure_mode: bool = False) -> None:
        accountant = accountant if accountant is None else require_bound(accountant)
        self._plan_options = {"accountant": accountant, "secure_mode": bool(secure_mode)}
        self.group = Group()
        self.keep_per_sample = False
        self.noise_layout: Sequence[ParameterMap] | None = None
        self.settings = RunSettings("mean", "auto")
        self._ledger: Ledger | None = None
        self._step: PrivateStep | None = None
        self._own_loop: OwnLoopLoader | None = None
        self._loaded: tuple[nn.Module, torch.optim.Optimizer, AtResume] | None = None
        self._undo = ExitStack()

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        plan: PrivacyPlan | None = None,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "auto",
        ledger: Path | None = None,
        checks: float | None = None,
        views: int = 1,
        augment: Augment | None = None,
        users: Any = None,
        calibrates: bool = False,
        **plan_arguments: Any,
    ) -> Private:
        """Set up DP-SGD; the training loop stays the user's.

        Args:
            module: model, returned as it is.
            optimizer: optimizer of every trainable parameter, returned as it is.
            data_loader: `DataLoader`; its batch size becomes the expected batch size. With
                rows_per_unit=K and without users, an item of its data holds K rows of the model,
                such as the two of a pair, and is one example: all tensors of an item are (K, ...),
                those of a batch (items K, ...), and the loss may join the rows of an item.
            plan: `PrivacyPlan` in place of all the arguments that it holds.
            loss_reduction: "mean" or "sum", the reduction of the criterion over the batch.
            grad_sample_mode: "auto" or one of `GRAD_SAMPLE_MODES`; "loop" takes every model.
            ledger: path of a new file for the record of releases; None keeps it in memory.
            checks: share of steps, in [0, 1], at which examples are checked against plain autodiff
                of their own losses; None for `dualdp.exactness.RATE`, 0 for never. Noted in the
                ledger.
            views: int K, number of views of each example; a batch then holds K rows of each, side
                by side, and an example's gradient is the mean of theirs. Batch sizes still count
                examples.
            augment: function (example, generator) -> view, of an item of the data set and a
                `torch.Generator` keyed by (step, example, view); None for the example itself.
            users: (rows,) integers, the id of the user of each row, or `dualdp.units.UserRows`, for
                a plan with unit="user": a step draws users and at most K = rows_per_unit rows of
                each. A batch holds K rows of each user, side by side; users with fewer are padded
                with a row of theirs that weighs 0 in the user's gradient, whatever the loss of the
                loop. Batch sizes, also the loader's, count users.
            calibrates: bool, True to find the noise that spends target_epsilon by the last step.
            **plan_arguments: fields of `PrivacyPlan`: noise_multiplier (noise standard deviation /
                max_grad_norm), max_grad_norm (C, the bound on one example's gradient; both numbers
                or schedules, the bound also `dualdp.plan.schedules.AdaptiveNorm`), clipping
                ("flat", "per_layer", "automatic"), target_epsilon (the step that would exceed it is
                refused; with on_budget="stop" the loader ends), sampler, seed, num_steps, ...; also
                epochs= instead of num_steps=, target_delta= instead of delta=,
                max_physical_batch_size= (examples that are processed at once; `optimizer.step()`
                then comes after each physical batch, see `BatchMemoryManager`), poisson_sampling=
                (False for shuffled batches, accounted without amplification), and those arguments
                of Opacus' method that have a meaning here.

        Returns:
            `(module, optimizer, loader)`. One pass over the loader is an epoch,
            ceil(num_examples / expected_batch_size) steps or what is left of the plan;
            `loader.remaining()` runs to its end. With `drop_last` an epoch is `len(data_loader)`.

        Raises:
            AccountingError: the engine has a run already.
            TypeError: an argument that nobody knows, or that is missing.
            UnsupportedLayerError: the model mixes examples.
            ValueError: a wrong value, arguments beside a plan that holds them, or that contradict
                each other.
        """
        self._refuse_second_run()
        data = Data.of(data_loader, views, augment, users)
        has_target = names_delta(plan, plan_arguments)
        name = "make_private_with_epsilon" if calibrates else "make_private"
        options = {**self._plan_options, "calibrates": calibrates}
        made = plan_of(data, plan, plan_arguments, name, self.make_private, options)
        self.settings = settings = RunSettings(
            loss_reduction, grad_sample_mode, has_target, 0, checked_rate(checks), data.views.count
        )
        check_kinds(module, optimizer)
        self.group = group = group_of(module)
        _earlier(unwrapped(module), optimizer)  # refuses

        def opened() -> Ledger:
            check(unwrapped(module), optimizer, made, settings)
            return Ledger(made, path=ledger if group.is_first else None)

        private = self._attached(name, module, optimizer, data, group.on_all(name, opened))
        self.ledger.note(checks=settings.checks)
        if settings.views > 1:
            self.ledger.note(views=settings.views)
        return private

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, **arguments: Any
    ) -> Private:
        """`make_private` with the noise that spends `target_epsilon` in the given epochs or steps.

        The target is the epsilon of the whole run at `target_delta`. A pass beyond the given epochs
        is refused.

        Args:
            target_epsilon: epsilon at the end of the run.
            target_delta: delta of that epsilon.
            **arguments: those of `make_private` without noise_multiplier and plan; epochs or
                num_steps is required.

        Raises:
            TypeError: an argument that nobody knows, or that is missing.
            ValueError: a wrong value, or neither or both of epochs and num_steps.
        """
        arguments |= {"target_epsilon": target_epsilon, "target_delta": target_delta}
        return self.make_private(**arguments, calibrates=True)

    def _attached(
        self,
        name: str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Data,
        ledger: Ledger,
    ) -> Private:
        """Hook into model and optimizer for a segment; engines that took no step leave them."""
        model, settings, group, plan = unwrapped(module), self.settings, self.group, ledger.plan
        earlier = _earlier(model, optimizer)
        bits = agreed(group, model, optimizer, data, plan, settings, self.noise_layout)
        given = data, plan, bits, self._spans(data), group, self._require_step
        loader = group.on_all(name, lambda: PlannedLoader(*given))
        self._ledger = ledger
        for engine in earlier:
            if engine._step is not None:
                engine.detach()
        self._step = PrivateStep(self, model, optimizer, bits)
        for owner in (model, optimizer):
            set_temporarily(self._undo, owner, **{_ATTACHED: Attached(self)})
        if module is not model:
            set_temporarily(self._undo, module, **QUIET)
        self._undo.callback(self._step.detach)
        return module, optimizer, loader

    @classmethod
    def loaded(
        cls,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: RunSettings,
        ledger: Ledger,
        at_resume: AtResume,
    ) -> Self:
        """Return the engine of a loaded run, whose `resume` takes the data and calls `at_resume`.

        The caller loads parameters and optimizer state, and begins a segment of the run's ledger.
        What `make_private` would refuse is refused here, and the ledger is closed.
        """
        engine = cls()
        engine.group, engine.settings, engine._ledger = group_of(module), settings, ledger
        try:
            check(unwrapped(module), optimizer, ledger.plan, settings)
        except BaseException:
            ledger.close()
            raise
        engine._loaded = module, optimizer, at_resume
        return engine

    def resume(
        self,
        *,
        data_loader: DataLoader[Any],
        augment: Augment | None = None,
        users: Any = None,
        recalibrate: bool = False,
    ) -> Private:
        """Continue a run that `load_checkpoint` loaded, with the arguments of its `make_private`.

        A segment begins: its batches and noise are drawn anew, and steps that were released after
        the checkpoint and run again are further releases, which are accounted.

        Args:
            data_loader: `DataLoader` over the run's data.
            augment: function of the run's views, see `make_private`.
            users: ids of the users of the rows, see `make_private`.
            recalibrate: bool, True for such noise in the steps that are left that all planned steps
                fit the plan's target_epsilon.

        Returns:
            `(module, optimizer, loader)`, the first two being those that were loaded into.

        Raises:
            AccountingError: the engine was not loaded, or goes on already.
            ValueError: the loader has other data, or the run has views and `augment` is missing; or
                `recalibrate` came to a plan without target_epsilon.
        """
        if self._loaded is None:
            raise AccountingError(
                "There is no loaded run to go on with. Expected load_checkpoint's engine, once."
            )
        module, optimizer, at_resume = self._loaded
        data = Data.of(data_loader, self.settings.views, augment, users)
        if recalibrate:
            self.ledger.recalibrate()
        private = self._attached("resume", module, optimizer, data, self.ledger)
        self._loaded = None
        at_resume()
        return private

    def make_loader(
        self,
        *,
        data_loader: DataLoader[Any],
        plan: PrivacyPlan | None = None,
        ledger: Path | None = None,
        views: int = 1,
        augment: Augment | None = None,
        users: Any = None,
        **plan_arguments: Any,
    ) -> OwnLoopLoader:
        """Return the plan's batches for a loop of your own in one process, and keep its account.

        Call `record()` before each release, `clipped_grad_sum` for its sum (with the mask of each
        chunk) and `noisy_mean(sum, plan, step)` for its noise. With views, `clipped_grad_sum` must
        get their number as rows_per_unit, or each view is clipped alone and an example moves the
        sum by views times C; with users, it must get the plan's rows_per_unit and the row_weights
        of each chunk. Arguments are those of `make_private`.

        Returns:
            loader of `LogicalBatch`es.

        Raises:
            AccountingError: the engine has a run already, or several processes train together.
            TypeError, ValueError: as `make_private`.
        """
        self._refuse_second_run()
        if Group().size > 1:
            raise AccountingError(
                "make_loader came in a group of several processes, whose loops would not be one "
                "run. Expected make_private, which accounts them together."
            )
        data = Data.of(data_loader, views, augment, users)
        self.settings.has_target = names_delta(plan, plan_arguments)
        name, options = "make_loader", self._plan_options
        plan = plan_of(data, plan, plan_arguments, name, self.make_loader, options)
        bits = SegmentBits(plan.seed)
        self._own_loop = loader = OwnLoopLoader(data, plan, bits, self._spans(data), self.group)
        self._ledger = Ledger(plan, path=ledger)
        own_loops.open_loop(self._ledger).source = NoiseSource(plan)
        loader.handed_out.begun = self._ledger.position
        return loader

    def _spans(self, data: Data) -> Span:
        """Function that returns the steps of the coming pass, or of the rest of the plan.

        A pass has at most `data.most_steps`, and ends with one that a checkpoint interrupted.
        """
        most, until = data.most_steps, self.settings.pass_end

        def span(is_whole: bool) -> tuple[int, int]:
            plan, start = self.plan, self.ledger.position
            end = self.ledger.end if plan.on_budget == "stop" else plan.num_steps
            if is_whole:
                return start, require_end(end)
            stop = end_of_pass(plan, start, end, until)
            return start, stop if most is None else min(stop, start + most)

        return span

    def _refuse_second_run(self) -> None:
        if self._ledger is not None:
            raise AccountingError(SECOND_RUN)

    def detach(self) -> None:
        """Remove every hook from module and optimizer; plan, ledger and epsilon stay readable."""
        if self._own_loop is None:
            self._require_step()
        self._undo.close()
        self.ledger.close()
        self._step = None

    @property
    def plan(self) -> PrivacyPlan:
        """`PrivacyPlan` of the run; an `AccountingError` if there is none."""
        return self.ledger.plan

    @property
    def ledger(self) -> Ledger:
        """Ledger of all releases so far; an `AccountingError` if there is none."""
        if self._ledger is None:
            raise AccountingError(NO_RUN)
        return self._ledger

    @property
    def accountant(self) -> Any:
        """Accountant of the releases so far."""
        return self.ledger.accountant

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Mapping from name to trained parameter; empty before `make_private`."""
        return {} if self._step is None else self._step.recorder.parameters

    @property
    def is_between_steps(self) -> bool:
        """True if no logical batch is under way, so that the run can be saved."""
        return self._step is not None and self._step.is_between_steps()

    @property
    def pass_end(self) -> int:
        """Step where the current pass over the loader ends."""
        return self.settings.pass_end

    def settings_to_save(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> RunSettings:
        """Return the settings of a run that is between two steps, for a checkpoint.

        Raises:
            AccountingError: not attached.
            RuntimeError: in the middle of a logical batch.
            ValueError: another model or optimizer than the run's.
        """
        step = self._require_step()
        if step.recorder.model is not unwrapped(module):
            raise ValueError("model is not the one that this engine trains. Expected that one.")
        if step.optimizer is not optimizer:
            raise ValueError("optimizer is not the one that this engine uses. Expected that one.")
        if not step.is_between_steps():
            raise RuntimeError(
                "A logical batch is half done. Save after its last optimizer.step(), when "
                "engine.is_between_steps."
            )
        return self.settings

    def _require_step(self) -> PrivateStep:
        if self._step is None:
            raise AccountingError(
                "The engine is not attached. Call make_private first; after detach() the loader "
                "that it returned has ended."
            )
        return self._step

    def record(self, num_steps: int = 1) -> range:
        """Record the next releases of a loop of your own, before they are made.

        Returns:
            range of the steps that may be released now.

        Raises:
            AccountingError: one of them is past the plan; then none is recorded. Or several
                processes train together, whose steps `make_private` records.
        """
        ledger = self.ledger
        if self.group.size > 1:
            raise AccountingError(
                "record() came in a run of several processes, whose loops would not be one run. "
                "Expected the loader and optimizer of make_private, which account them together."
            )
        steps = ledger.steps_ahead(_validate.integer("num_steps", num_steps))
        if len(steps) == 1 and self._own_loop is not None:
            self._own_loop.handed_out.record(steps[0])
        for step in steps:
            ledger.record(step)
        return steps

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which forwards and backwards of the model are not recorded.

        A generator's step goes through the private model here. Gradients that such a backward
        leaves in `p.grad` are never released: the next private step replaces them. What is trained
        on results of private examples in here is not private.

        Raises:
            AccountingError: the engine is not attached.
            RuntimeError: inside a recorded forward of the model.
        """
        with self._require_step().pause():
            yield

    def rehearse(self, step: Callable[[Any], torch.Tensor], batch: Any) -> list[str]:
        """Try a loss on single rows and on other rows; nothing is recorded or released.

        The thorough look before a long run: it sees what goes through NumPy, Python numbers and
        functions of one's own, too, which the checks of a run only note.

        Args:
            step: function of a batch that calls the model and returns the scalar loss.
            batch: at least two examples as the loader gives them, of any data.

        Returns:
            Sentences that say what depends on other examples; none if nothing was found.

        Raises:
            AccountingError: the engine is not attached.
            ValueError: fewer than two examples.
        """
        private = self._require_step()
        with private.pause():
            return rehearse(private.recorder.model, step, batch, self.settings.loss_reduction)

    def compile(
        self,
        loss_fn: Callable[..., Any],
        *,
        physical_batch_size: int | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> CompiledStep:
        """Return a function that takes the place of forward, loss and backward in the loop.

        Forward, backward, norms, clip factors and sums are one graph, see
        `compile_clipped_grad_sum`. A batch whose forward has no graph runs eagerly; the reason is
        logged once.

        Args:
            loss_fn: callable, `loss_fn(model, *batch)` -> (n,) losses, one per example.
            physical_batch_size: int, rows that a graph takes: larger batches are split, and absent
                rows masked. None: the plan's, or the expected batch size and three standard
                deviations of a Poisson draw.
            backend: str or callable, a backend of `torch.compile`.

        Returns:
            `CompiledStep`, called as `losses = step(*batch)` on the loader's tensors as they came,
            before `optimizer.step()`.

        Raises:
            AccountingError: the engine is not attached.
            ValueError: a run of several processes, of several rows per example, or of a method
                without graphs.

        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3))
        >>> model = torch.nn.Linear(3, 2)
        >>> model, optimizer, loader = (engine := PrivacyEngine()).make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        ...     noise_multiplier=1.0, max_grad_norm=1.0)
        >>> step = engine.compile(lambda model, x: model(x).square().sum(1), backend="eager")
        >>> for (x,) in loader:
        ...     losses = step(x)
        ...     optimizer.step()
        """
        step = self._require_step()
        if self.group.size > 1:
            raise ValueError(
                "engine.compile came in a run of several processes, which check their sums "
                "together. Expected one process, or the loop without it."
            )
        model = step.recorder.model
        sums = compiled_sums(loss_fn, model, self.plan, self.settings, physical_batch_size, backend)
        step.is_compiled = True
        return CompiledStep(sums, step.compute)

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Return an upper bound of the epsilon spent so far.

        Args:
            delta: number in (0, 1); optional if a plan or target named it.
            accept_unverified: bool, True for an answer even if a spot check of the run failed.

        Raises:
            AccountingError: there is no run; or steps of it were taken that are not on record, or a
                spot check failed.
            ValueError: no delta.
        """
        ledger = self.ledger
        if delta is None and not self.settings.has_target:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        if self._own_loop is not None:
            handed_out = self._own_loop.handed_out
            handed_out.require_recorded(ledger.position)
            handed_out.warn_of_undrawn(ledger.plan, ledger.position, len(ledger.waiting))
        return ledger.get_epsilon(delta, accept_unverified=accept_unverified)

    def stages(self) -> Stages:
        """Return per-sample gradients (see `keep_per_sample`), clipped sum, noisy mean of a step.

        They are kept from a step until the loader yields the next batch. Norms and per-sample
        gradients are those of this process, sum and mean those of all that train together.

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


def _earlier(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[PrivacyEngine]:
    """Return the engines of a model and an optimizer that took no step; refuse one that did."""
    engines = list[PrivacyEngine]()
    for name, owner in (("module", model), ("optimizer", optimizer)):
        attached = vars(owner).get(_ATTACHED)
        if attached is None:
            continue
        if len(attached.engine.ledger):
            raise AccountingError(
                f"{name} is trained by another PrivacyEngine, which has released "
                f"{len(attached.engine.ledger)} steps. Expected its detach() before make_private, "
                "or a new model and optimizer."
            )
        engines.append(attached.engine)
    return engines

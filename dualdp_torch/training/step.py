# SPDX-License-Identifier: Apache-2.0
"""Private optimizer step: the user's own optimizer gets the noisy mean of clipped gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp.exactness import ExactnessError
from dualdp.ledger.ledger import Ledger, Release
from dualdp.randomness import SegmentBits, noise_bits
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.parallel.process_group import Group, fingerprints
from dualdp_torch.per_sample.api import ClippedGradSum
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.per_sample.checks.twin import Twins
from dualdp_torch.per_sample.clip import (
    Terms,
    clip_factors,
    clipped_sums,
    clipping_bounds,
)
from dualdp_torch.per_sample.compiled import CompiledGradSum
from dualdp_torch.per_sample.numbers import numbers_of
from dualdp_torch.per_sample.parameter_use import trainable_parameters
from dualdp_torch.per_sample.recorder import Recorder, Zeroing
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.adam_bc import AdamBC
from dualdp_torch.training.arguments import GRAD_SAMPLE_MODES, RunSettings, check_holds
from dualdp_torch.training.compiled_step import YieldedBatch
from dualdp_torch.training.loader import Draw
from dualdp_torch.training.opacus_names import advice, optimizer_values
from dualdp_torch.training.step_checks import StepChecks

_AMP = "_step_supports_amp_scaling"  # makes GradScaler.step call `step` without unscaling


@dataclass
class Stages:
    """Gradients of the last step from example to optimizer, for inspection only.

    Attributes:
        unprotected_norms: (n,) norms of the examples' gradients, not private.
        unprotected_sum: mapping from parameter name to clipped sum, not private.
        noisy_mean: mapping from parameter name to the gradient that the optimizer got.
        unprotected_grads: mapping from parameter name to (n, *shape) gradients, not private; None
            unless `engine.keep_per_sample` was set before the step, and for models in pieces and
            compiled steps.
    """

    unprotected_norms: Tensor
    unprotected_sum: dict[str, Tensor]
    noisy_mean: dict[str, Tensor]
    unprotected_grads: dict[str, Tensor] | None = None


@dataclass
class LogicalSum:
    """What the physical batches of a logical batch have given so far."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    failure: Exception | None = None  # of a check, which all processes will hear of


def set_temporarily(undo: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of an object until `undo.close()`, which restores them."""
    own = vars(owner)
    for name, value in values.items():
        if name in own:
            undo.callback(own.update, {name: own[name]})
        else:
            undo.callback(partial(own.pop, name))
        own[name] = value


def _once(optimizer: torch.optim.Optimizer, loss: Any) -> Callable[[], Any]:
    """Closure that returns a loss computed earlier; at other parameters it is refused."""
    name, calls = type(optimizer).__name__, list[bool]()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    versions = [p._version for p in params]

    def closure() -> Any:
        has_moved = versions != [p._version for p in params]
        if has_moved or calls:
            what = "at other parameters than those of the batch's gradient, as SAM does"
            raise RuntimeError(
                f"{name} evaluates its closure {what if has_moved else 'more than once a step'}, "
                "but one release gives one gradient. Expected an optimizer that needs one, at the "
                "current parameters, such as SGD or Adam."
            )
        calls.append(True)
        return loss

    return closure


class PrivateStep:
    """Hook before every `optimizer.step()` that clips, sums, records and adds noise.

    The model has no wrapper of DDP. `keep_per_sample` and `noise_layout` of the engine are read at
    every step. Of several processes, rank 0 records a step when all have
    agreed on it and the sums are reduced, and sends the bits of the noise in the same message; the
    others record it in ledgers in memory.

    Attributes:
        recorder: recorder of the model's forward and backward.
        stages: gradients of the last step, or None.
        is_compiled: True if compiled graphs may take a batch instead of a recorded backward.

    Guarantees:
        No process draws noise before the release is recorded in the ledger of rank 0.
            [test_the_ledger_is_written_before_any_rank_draws_noise]
        A check that fails on one process stops all before the record, and so do parameters that
            differ.  [test_what_differs_between_ranks_is_named]
    """

    def __init__(
        self, engine: Any, model: nn.Module, optimizer: torch.optim.Optimizer, bits: SegmentBits
    ) -> None:
        settings: RunSettings = engine.settings
        method = GRAD_SAMPLE_MODES[settings.grad_sample_mode]
        ledger: Ledger = engine.ledger
        group: Group = engine.group
        self.optimizer, self._ledger, self._options = optimizer, ledger, engine
        self._settings, self._keep = settings, METHODS[method] or "all"
        plan, rows = ledger.plan, settings.views * (ledger.plan.rows_per_unit or 1)
        self.recorder = recorder = Recorder(
            model, method=method, twins=Twins(plan.rows_per_item or 1), rows_per_unit=rows
        )
        # What a row adds to a sum counts by 1 / K of views and of users, and whole of an item.
        self._scale_of_sum = (plan.rows_per_item or 1) / rows
        self._shards, self._group = recorder.shards, group
        self._world = Group().size
        purpose, reduction = (method, plan.clipping), settings.loss_reduction
        self._checks = StepChecks(recorder, ledger, bits, settings.checks, reduction, purpose)
        recorder.is_due = self._checks.may_be_due
        recorder.usual_size = round(plan.expected_batch_size_at(0))
        self._noise = NoiseSource(plan)
        self._pass, self._pid = 0, os.getpid()
        self._lost: int | None = None  # step of which a part is lost, until the next pass
        self.is_compiled = False
        self._yielded: YieldedBatch | None = None
        self._draw: Draw | None = None
        self.stages: Stages | None = None
        self._undo = ExitStack()
        self._undo.callback(recorder.detach)
        self._opacus = optimizer_values(optimizer, plan)
        zeroing = Zeroing(recorder.zeroed, optimizer.zero_grad)
        set_temporarily(self._undo, optimizer, zero_grad=zeroing, **{_AMP: True}, **self._opacus)
        self._undo.callback(self._checks.end)
        self._undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self._forget()
        self._expect(None)

    def detach(self) -> None:
        """Remove all hooks, and restore the attributes of optimizer and model."""
        self._undo.close()
        self._draw = None
        self._pass += 1  # no pass goes on

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which the model is not recorded."""
        if self.recorder.is_inside:
            raise RuntimeError(
                "pause() came inside a recorded forward of the model, of which a part would be "
                "lost. Expected it in the loop, around whole calls of the model."
            )
        return self.recorder.pause()

    def _forget(self) -> None:
        """Begin the sums of a logical batch."""
        self._whole, self._checks.has_passed = LogicalSum(), False

    def _expect(self, draw: Draw | None) -> None:
        """Record the model's forward on this batch; None for no batch."""
        terms = factors = None
        if draw is not None:  # may raise, before anything changed
            plan, mask = self._ledger.plan, draw.mask
            bounds = plan.clipping_bounds(self._ledger.max_grad_norm)
            is_mean = self._settings.loss_reduction == "mean"
            terms = Terms(
                float(len(mask)) if is_mean else self._scale_of_sum,
                clipping_bounds(self.recorder.parameters, plan.clipping, bounds),
                plan.clipping,
                None if bool(mask.numpy().all()) else mask,
            )
            factors = draw.row_factors()
            self.recorder.guard()
        self._computed: ClippedGradSum | None = None  # by compiled graphs
        self._draw, self.recorder.terms, self.recorder.row_factors = draw, terms, factors
        self.recorder.is_active = draw is not None

    def is_between_steps(self) -> bool:
        """True if no logical batch is under way."""
        return self._draw is None and not self._whole.norms

    def batches(self, drawn: Iterable[tuple[Draw, Any]], stop: int) -> Generator[tuple[Draw, Any]]:
        """Yield the batches of a pass that ends at step `stop`; an abandoned pass is dropped.

        Raises:
            RuntimeError: the batch before was not stepped on, or another pass has begun.
        """
        self._expect(None)
        self._lost = None
        self._forget()
        self._checks.end()
        self.recorder.clear()
        self._settings.pass_end = stop
        self._pid = os.getpid()
        self._pass = number = self._pass + 1
        try:
            for draw, batch in self.recorder.twins.each_unheard(drawn):
                self._require_whole(number)
                if self._draw is not None:
                    raise RuntimeError(
                        f"The batch of step {self._draw.step} got no optimizer.step(). Expected "
                        "one for every batch of the loader: which batches count must not depend on "
                        "the data. Evaluate on batches of another DataLoader; accumulate by a "
                        "larger batch_size and max_physical_batch_size= in make_private, with a "
                        "step for each physical batch."
                    )
                with self.recorder.twins.unheard():
                    self._expect(draw)
                    self.stages = None  # frees the memory of two models
                    self._checks.begin(draw, batch)
                self._yielded = YieldedBatch(batch) if self.is_compiled else None
                yield draw, batch
        finally:
            if number == self._pass:
                self._checks.leave_loader()

    def compute(self, sums: CompiledGradSum, batch: tuple[Any, ...]) -> Tensor:
        """Compute the current batch's clipped sum by compiled graphs; return its (n,) losses."""
        self._require_whole()
        draw, yielded, ledger, recorder = self._draw, self._yielded, self._ledger, self.recorder
        if draw is None or yielded is None:
            raise RuntimeError(
                "The compiled step was called without a batch of the loader that make_private "
                "returned, yielded after engine.compile. Train on its batches only, one call and "
                "one optimizer.step() for each."
            )
        self._refuse_second_way(self._computed is not None)
        with recorder.twins.suspended():
            recorder.require_unchanged()
            current = trainable_parameters(recorder.model)
        if any(current.get(name) is not p for name, p in recorder.parameters.items()):
            raise RuntimeError(
                "Parameters were renamed after set-up, as by layers that swap places or one put "
                "between others. Set up again, so that what is clipped is what is trained."
            )
        recorder.twins.enter_model(batch, {}, len(draw.mask), recorder.model)
        recorder.twins.end_forward()
        bounds = ledger.plan.clipping_bounds(ledger.max_grad_norm)
        mask = None if bool(draw.mask.all()) else draw.mask
        device, check = next(iter(recorder.parameters.values())).device, self._checks.of_compiled()
        try:
            with recorder.hidden():
                batch = yielded.moved(batch, device)
                found, was_compared = sums.of_batch(batch, bounds, mask, *check)
                if len(found.norms) != len(draw.mask):
                    raise _other_number(len(found.norms), draw)
        except ExactnessError as error:
            ledger.check_failed(draw.step, error)
            raise
        self._checks.has_passed |= was_compared
        self._computed = found
        return found.losses

    def _refuse_second_way(self, is_computed: bool) -> None:
        """Refuse a batch whose gradients would be counted twice."""
        if is_computed or self.recorder.forwards:
            raise RuntimeError(
                "This batch has a sum of the compiled step and another call of the model. Expected "
                "one call of the compiled step, then optimizer.step(); put other calls of the "
                "model under torch.no_grad() or engine.pause()."
            )

    def _require_whole(self, number: int | None = None) -> None:
        """Refuse to go on with a pass that is over, lost a part, or is that of the parent."""
        if number not in (None, self._pass):
            why = "another one began, and examples would count twice, or the engine was detached"
        elif self._pid != os.getpid():
            why = "its batch was drawn before the process was forked, and the parent releases it"
        elif self._lost is not None:
            why = f"step {self._lost} failed after a part of its logical batch was added up"
        else:
            return
        raise RuntimeError(
            f"This pass over the loader can't go on: {why}. Begin a new pass, one at a time, which "
            "begins with the first step that is not on record."
        )

    def _refuse_changed(self) -> None:
        """Refuse a setting that the user changed on the optimizer: the run would not follow it."""
        for name, value in self._opacus.items():
            came = vars(self.optimizer).get(name)
            if came is not value:
                raise ValueError(
                    f"optimizer.{name} became {came!r}, but the plan has {value!r}"
                    f"{advice(f'DPOptimizer.{name}')}"
                )

    @torch._disable_dynamo
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Replace the gradients by the noisy mean, or by None within a logical batch."""
        _refuse_scaler(optimizer)
        self._refuse_changed()
        if self._draw is None:
            raise RuntimeError(
                "optimizer.step() came without a batch of the loader that make_private returned. "
                "Train on its batches only, one step for each."
            )
        if "noise_stddev" in kwargs:
            raise TypeError(
                "optimizer.step() came with noise_stddev, which the engine passes by itself. "
                "Expected optimizer.step()."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                args, kwargs = (args[0],), {**kwargs, "closure": _once(optimizer, closure())}
        with self.recorder.twins.suspended():
            draw, bound = self._draw, self._step(self._draw)
        if bound is not None and isinstance(optimizer, AdamBC):
            plan = self._ledger.plan  # of independent noise; this is that of the mean
            stddev = plan.draw_stddev(draw.step, bound) / plan.expected_batch_size_at(draw.step)
            kwargs = {**kwargs, "noise_stddev": stddev}
        return args, kwargs

    def _step(self, draw: Draw) -> float | None:
        """Add one physical batch to the sums; release the logical batch if it is complete.

        Returns the bound C of the release, or None.

        Nothing of a failed step is kept, and it can begin again from its forward. If it loses sums
        of earlier physical batches, or if its release is on record, the logical batch begins again
        with the next pass.
        """
        self._require_whole()
        if self._computed is None:
            n = self.recorder.require_backward()
            self.recorder.drop_unused()
            if n != len(draw.mask):
                raise _other_number(n, draw)
        check_holds(self.optimizer, self.recorder.parameters)
        bound = None
        try:
            with torch.no_grad():
                self._add(draw)
                self.recorder.clear()
                if draw.is_last:
                    bound = self._release(draw.step)
                else:
                    self._set_gradients({})
            self._expect(None)
            return bound
        except ExactnessError as error:
            self._ledger.check_failed(draw.step, error)
            raise
        finally:
            if self._draw is None:
                self._checks.end()
            else:
                if draw.chunk or self._ledger.position > draw.step:
                    self._lost = draw.step
                self._forget()
                self._computed = None
                self.recorder.begin_again()

    def _add(self, draw: Draw) -> None:
        """Check the loop of one physical batch, and add its clipped gradients to the sums."""
        whole, terms, computed = self._whole, self.recorder.terms, self._computed
        assert terms is not None
        self._check(lambda: self._checks.criterion(draw))
        if computed is None:
            sums, norms = self._clipped(draw, terms)
        else:  # checked where it was computed
            self._refuse_second_way(False)
            sums, norms = computed.grads, computed.norms
        if terms.mask is not None:  # its rows are found on the host, where the mask lies
            norms = norms[terms.mask.nonzero().flatten().to(norms.device)]
        whole.norms.append(norms)
        before = whole.sums
        whole.sums = {k: before[k] + v for k, v in sums.items()} if before else dict(sums)

    def _clipped(self, draw: Draw, terms: Terms) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the clipped sum and the norms (n,) of a recorded backward, checked if due."""
        recorder, whole = self.recorder, self._whole
        gradients = recorder.gradients(terms.scale, self._keep)
        if self._options.keep_per_sample and recorder.shards is None:
            grads = gradients.grads()
            whole.grads.append({name: g[draw.mask.to(g.device)] for name, g in grads.items()})
        n, second_pass = len(draw.mask), recorder.second_pass(terms.scale)
        if whole.failure is not None or not self._checks.is_due():
            factors = clip_factors(gradients, n, terms.bounds, terms.clipping, terms.mask)
            return clipped_sums(gradients, factors, second_pass, recorder.shards), factors.norms
        numbers = numbers_of(
            gradients,
            recorder.losses(terms.scale),
            terms,
            second_pass=second_pass,
            is_definition=recorder.method == "loop",
        )
        found = [numbers]
        self._check(lambda: found.append(self._checks.model(draw, numbers, terms)))
        return found[-1].sums or numbers.sums or {}, found[-1].norms

    def _check(self, check: Callable[[], None]) -> None:
        """Run a check; with several processes its error is kept until `_together` shares it."""
        try:
            check()
        except (ExactnessError, ValueError) as failure:
            if self._group.size == 1:
                raise
            self._whole.failure = self._whole.failure or failure

    def _release(self, step: int) -> float:
        """Release the logical batch, give the optimizer the noisy mean, and return its bound."""
        ledger, whole, has_passed = self._ledger, self._whole, self._checks.has_passed
        sums, norms, counts = whole.sums, torch.cat(whole.norms), (0, 0)
        self._forget()
        if ledger.plan.is_adaptive:
            counts = int((norms <= ledger.max_grad_norm).sum()), len(norms)
        if self._group.size > 1:
            sums, has_passed, counts = self._together(step, whole, has_passed, counts)
        elif Group().size > self._world:
            raise RuntimeError(
                "A process group was initialised after make_private, so each process would train a "
                "model of its own on the same data and account only that one. Call "
                "init_process_group before make_private."
            )
        if has_passed:
            ledger.check_passed(step)
        release, bits = self._recorded(step, counts)
        layout = self._options.noise_layout
        pieces = None if self._shards is None else self._shards.pieces
        mean = self._noise.noisy_mean(sums, release, bits, layout=layout, pieces=pieces)
        if ledger.plan.noise != "secure":
            names = whole.grads[0] if whole.grads else ()
            grads = {name: torch.cat([part[name] for part in whole.grads]) for name in names}
            self.stages = Stages(norms, dict(sums), dict(mean), grads or None)
        self._set_gradients(mean)
        return release.max_grad_norm

    def _together(
        self, step: int, whole: LogicalSum, has_passed: bool, counts: tuple[int, int]
    ) -> tuple[dict[str, Tensor], bool, tuple[int, int]]:
        """Return sums, `has_passed` and counts of all processes, which have checked the step.

        Parameters are compared unless sharded, and on checked steps the sums with what each had.

        Raises:
            ExactnessError: a spot check failed, here or on another process.
            RuntimeError: a process is lost, or at another step.
            ValueError: a loss was refused, or parameters differ between processes.
        """
        group, at, parameters = self._group, f"step {step}", self.recorder.parameters
        compared = parameters if self._shards is None else {}
        ours = fingerprints(compared.values())
        message = hash(tuple(ours)), whole.failure, has_passed, counts
        prints, failures, passed, each = zip(*group.gather(at, message), strict=True)
        for error in (whole.failure, *failures):
            if error is not None:
                raise error from None
        if len(set(prints)) > 1:
            group.require_same(
                "parameters before " + at,
                dict(zip(compared, ours, strict=True)),
                "Give all the same optimizer and learning rates, and change parameters nowhere "
                "else.",
                shown=False,
            )
        self._ledger.require(step)
        sums = whole.sums
        if self._shards is None:  # else reduced as they were formed
            own = {name: sums[name] for name in parameters}  # in the order of all
            sums = group.summed(at, own)
            if self._checks.is_step_checked(step):
                group.compare_sums(at, own, sums, step)
        below, rows = map(sum, zip(*each, strict=True))
        return sums, any(passed), (below, rows)

    def _recorded(self, step: int, counts: tuple[int, int]) -> tuple[Release, bytes]:
        """Record the step and return its release and the bits of its noise, those of rank 0.

        Raises:
            AccountingError: the step may not be released.
            RuntimeError: a process is lost, or rank 0 could not record the step.
        """
        ledger, group = self._ledger, self._group

        def first() -> tuple[Release, float | None, bytes]:
            fraction = ledger.noisy_fraction(*counts) if ledger.plan.is_adaptive else None
            release = ledger.record(step, noisy_fraction=fraction)
            return release, fraction, noise_bits(ledger.plan.seed, step)

        release, fraction, bits = group.word(f"the record of step {step}", first)
        if not group.is_first:
            release = ledger.record(step, noisy_fraction=fraction)
        return release, bits

    def _set_gradients(self, mean: Mapping[str, Tensor]) -> None:
        """Set `p.grad` of every parameter; None makes the optimizer skip it."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:  # frozen parameters may hold gradients from before the run
                p.grad = None
        for name, value in mean.items():
            p = self.recorder.parameters[name]
            if self._shards is None:
                p.grad = value.to(p.dtype).view_as(p)
            else:
                p.grad = self._shards.gradient(name, value)


def _other_number(n: int, draw: Draw) -> RuntimeError:
    """Return the error of a model that saw another number of examples than the loader gave."""
    times, rest = divmod(n, len(draw.mask))
    items = f"; rows_per_unit={times} in make_private, if an item holds {times} rows"
    return RuntimeError(
        f"The model saw {n} examples but the loader gave {len(draw.mask)}. Expected the whole "
        f"batch, once{'' if rest or times < 2 else items}."
    )


def _refuse_scaler(optimizer: Any) -> None:
    """Refuse a step made through a `GradScaler`."""
    if "found_inf" not in vars(optimizer):
        return
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    raise RuntimeError(
        "A GradScaler scaled the loss: every gradient would be clipped at the scaled bound. Train "
        "in bfloat16 or float32, which need no scaler, and call loss.backward() and "
        "optimizer.step()."
    )

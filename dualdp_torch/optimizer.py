# SPDX-License-Identifier: Apache-2.0
"""Makes the user's own optimizer step on the noisy mean of clipped gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp.exactness import ExactnessError
from dualdp.ledger import Ledger

from .choices import of_run
from .clip import clip_factors, clipped_sums, clipping_bounds, passes_again
from .data import Draw
from .distributed import device_kind
from .noise import noised_mean
from .normals import STREAM
from .recorder import Recorder
from .release import Alone, Together
from .rules.base import Tensor
from .sharded import Terms
from .spot_check import Engine
from .step_checks import StepChecks

Formed = Callable[[str, Tensor], Tensor]
_STACK = f"torch {torch.__version__}, stream {STREAM}"  # whose generator the noise comes from
_AMP = "_step_supports_amp_scaling"  # makes GradScaler.step call `step` and leave the rest to it


@dataclass
class Stages:
    """The gradients of the last step on their way to the optimizer, for inspection only.

    Attributes:
        unprotected_norms: (n,) norms of the examples' gradients, not private.
        unprotected_sum: name -> clipped sum, not private.
        noisy_mean: name -> what the optimizer got.
        unprotected_grads: name -> (n, *shape), not private; None unless
            `engine.keep_per_sample` was set before the step.
    """

    unprotected_norms: Tensor
    unprotected_sum: dict[str, Tensor]
    noisy_mean: dict[str, Tensor]
    unprotected_grads: dict[str, Tensor] | None = None


def check_holds(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that updates other parameters than those that are clipped.

    Raises:
        ValueError: a trainable parameter it lacks, or one that is no trainable one of the model.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ours, theirs = {id(p) for p in parameters.values()}, {id(p) for p in held}
    missing = [n for n, p in parameters.items() if id(p) not in theirs]
    if missing:
        raise ValueError(
            f"The optimizer does not hold the trainable parameters {missing}. Freeze them "
            "(requires_grad_(False)) or give the optimizer all of model.parameters()."
        )
    strange = [tuple(p.shape) for p in held if id(p) not in ours and p.requires_grad]
    if strange:
        raise ValueError(
            f"The optimizer holds parameters of shapes {strange} that are not trainable parameters "
            "of the model. Give them an optimizer of their own."
        )


class _Once:
    """A closure that was evaluated already."""

    def __init__(self, loss: Any) -> None:
        self._loss, self._asked = loss, False

    def __call__(self) -> Any:
        if self._asked:
            raise RuntimeError(
                "The optimizer evaluates its closure more than once a step, but one release gives "
                "one gradient. Expected an optimizer that needs one, such as SGD or Adam."
            )
        self._asked = True
        return self._loss


class PrivateStep:
    """Runs before every `optimizer.step()`: clips, adds up, records, adds noise.

    Args:
        recorder: listens to the model.
        optimizer: the user's.
        ledger: of the run.
        release: completes, records and seals the sum of each step before the update.
        loss_reduction: "mean" or "sum".
        keep: as in `Captured`.
        keep_per_sample: () -> whether `stages` is to hold the per-sample gradients.
        choices: table of `choices.of_run`, filled as the layers are met.
        decides: as there.
        checks: spot checks of the run.
        noise_layout: () -> as `layout` of `noised_mean`.
    """

    def __init__(
        self,
        recorder: Recorder,
        optimizer: torch.optim.Optimizer,
        ledger: Ledger,
        release: Alone | Together,
        *,
        loss_reduction: str,
        keep: str,
        keep_per_sample: Callable[[], bool],
        choices: dict[str, str],
        checks: StepChecks,
        decides: bool = True,
        noise_layout: Callable[[], Any] = lambda: None,
    ) -> None:
        self._checks = checks
        self._recorder, self.optimizer, self._ledger = recorder, optimizer, ledger
        self._shards = recorder.shards
        self._reduction, self._keep, self._complete = loss_reduction, keep, release
        self._keep_per_sample, self._noise_layout = keep_per_sample, noise_layout
        self._choices, self._decides, self._pass = choices, decides, 0
        self._seeded = ledger.plan.seed is not None
        self._draw: Draw | None = None
        self._lost: int | None = None
        self._forget()
        self.stages: Stages | None = None
        self._scaled_itself = vars(optimizer).get(_AMP)
        setattr(optimizer, _AMP, True)
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def detach(self) -> None:
        """Leave the optimizer as it was."""
        self._handle.remove()
        self._checks.end()
        delattr(self.optimizer, _AMP)
        if self._scaled_itself is not None:
            setattr(self.optimizer, _AMP, self._scaled_itself)

    def _forget(self) -> None:
        """No part of a logical batch was added up."""
        self._failure: Exception | None = None
        self._checks.has_passed = False
        self._sums: dict[str, Tensor] = {}
        self._norms: list[Tensor] = []
        self._grads: list[dict[str, Tensor]] = []

    # ------------------------------------------------------------------ the loader's side

    def is_waiting(self) -> bool:
        """Whether a batch was handed out and not stepped on."""
        return self._draw is not None

    def is_between_steps(self) -> bool:
        """Whether no part of a logical batch was handed out."""
        return self._draw is None and not self._norms

    def begin(self) -> int:
        """The number of the pass that begins; what an abandoned pass left behind is dropped."""
        self._draw = self._lost = None
        self._forget()
        self._checks.end()
        self._recorder.clear()
        self._pass += 1
        return self._pass

    def leave(self, number: int) -> None:
        """A pass ends or is given up.

        Args:
            number: of the pass.
        """
        if number == self._pass:
            self._checks.leave_loader()

    def announce(self, draw: Draw, batch: Any, number: int) -> None:
        """The loader hands out a batch.

        Raises:
            RuntimeError: the batch before was not stepped on, or another pass has begun.
        """
        if number != self._pass:
            raise RuntimeError(
                "Another pass over the loader has begun, so this one cannot go on: examples would "
                "count twice. Expected one iterator at a time."
            )
        self._require_whole()
        if self._draw is not None:
            raise RuntimeError(
                f"The batch of step {self._draw.step} got no optimizer.step(). Expected one for "
                "every batch of the loader: which batches count must not depend on the data."
            )
        self._draw = draw
        self.stages = None  # as much memory as two models
        self._checks.begin(draw, batch)

    def _require_whole(self) -> None:
        """Refuse to go on with a logical batch of which a part was lost.

        Raises:
            RuntimeError: one was.
        """
        if self._lost is not None:
            raise RuntimeError(
                f"Step {self._lost} failed after a part of its logical batch was added up, and the "
                "sums are dropped. Begin a new pass over the loader, which begins this step again "
                "with the same examples."
            )

    # ------------------------------------------------------------------ the optimizer's side

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Replace the gradients by the noisy mean, or by nothing inside a logical batch."""
        _refuse_scaler(optimizer)
        if self._draw is None:
            raise RuntimeError(
                "optimizer.step() came without a batch of the loader that make_private returned. "
                "Train on its batches only, one step for each."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                once = _Once(closure())
            args, kwargs = (args[0],), {**kwargs, "closure": once}
        with self._recorder.tape.aside():
            self._step(self._draw)
        return args, kwargs

    def _step(self, draw: Draw) -> None:
        """Carry out the step of a batch; one that fails leaves nothing of it behind."""
        self._require_whole()
        self._require_all(draw)
        check_holds(self.optimizer, self._recorder.parameters)
        try:
            self._carry_out(draw)
        except ExactnessError as error:
            self._ledger.check_failed(draw.step, error)
            raise
        finally:
            self._end(draw)

    def _carry_out(self, draw: Draw) -> None:
        """Add up one physical batch; release the logical one that it completes."""
        with torch.no_grad(), of_run(self._choices, seeded=self._seeded, decides=self._decides):
            self._add(draw)
        self._recorder.clear()
        if draw.is_last:
            self._release(draw.step)
        else:
            self._set_gradients({})
        self._draw = None

    def _require_all(self, draw: Draw) -> None:
        """Refuse a step without a backward over the whole batch."""
        n = self._recorder.require_backward()
        if n != len(draw.mask):
            raise RuntimeError(
                f"The model saw {n} examples but the loader gave {len(draw.mask)}. Expected the "
                "whole batch, once."
            )

    def _end(self, draw: Draw) -> None:
        """The batch was stepped on, or the step failed: then it begins again from its forward.

        Nothing of a step that failed is used. Sums that other parts of its logical batch were added
        to may be incomplete.
        """
        if self._draw is None:
            self._checks.end()
            return
        if draw.part or self._ledger.position > draw.step:
            self._lost = draw.step
        self._forget()
        self._recorder.begin_again()

    def terms(self) -> Terms:
        """What the batch that was handed out is clipped with.

        Raises:
            RuntimeError: there is none.
        """
        if self._draw is None:
            raise RuntimeError(
                "No batch was handed out, so nothing says what to clip with. Expected one of the "
                "loader that make_private returned."
            )
        plan, mask = self._ledger.plan, self._draw.mask
        limits = plan.clipping_bounds(self._ledger.max_grad_norm)
        return Terms(
            float(len(mask)) if self._reduction == "mean" else 1.0,
            clipping_bounds(self._recorder.parameters, plan.clipping, limits),
            plan.clipping,
            None if bool(mask.all()) else mask,
        )

    def _add(self, draw: Draw) -> None:
        """Add the clipped gradients of one physical batch to the logical batch's sum.

        They are checked before the step is recorded as a release, and before any of them is sent.
        """
        recorder, terms = self._recorder, self.terms()
        formed = partial(self._formed, is_whole=draw.is_last)
        self._check(lambda: self._checks.criterion(draw))
        if recorder.layered is not None:
            recorder.refuse_written()
            self._begin(draw)
            sums, norms = recorder.layered.finish()
            self._sums = {name: formed(name, total) for name, total in sums.items()}
        else:
            norms = self._add_captured(draw, terms, formed)
        self._norms.append(norms if terms.mask is None else norms[terms.mask.to(norms.device)])

    def _add_captured(self, draw: Draw, terms: Terms, formed: Formed) -> Tensor:
        """As `_add`, of gradients that are there once the backward is over; their norms (n,)."""
        recorder = self._recorder
        gradients = recorder.gradients(terms.scale, self._keep)
        if self._keep_per_sample() and recorder.shards is None:
            grads = gradients.grads()
            self._grads.append({name: g[draw.mask.to(g.device)] for name, g in grads.items()})
        n, second_pass = len(draw.mask), recorder.second_pass(terms.scale, gradients.forget)
        factors = clip_factors(gradients, n, terms.bounds, terms.clipping, terms.mask)
        if self._failure is not None or not self._checks.is_due(recorder.known):
            self._begin(draw)
            self._sums = clipped_sums(gradients, factors, second_pass, recorder.shards, formed)
            return factors.norms
        passes = second_pass is not None and passes_again(gradients, factors.rows)
        sums = clipped_sums(gradients, factors, second_pass, recorder.shards)

        def contribution(row: int) -> dict[str, Tensor]:
            only = factors.only(row)
            found = second_pass(next(iter(only.of.values()))) if passes and second_pass else None
            return clipped_sums(gradients, only) if found is None else found

        numbers = Engine(
            factors.norms,
            recorder.losses(terms.scale),
            contribution,
            sums=sums,
            factors=factors.of,
            bounds=terms.bounds,
            clipping=terms.clipping,
            doubt=gradients.doubt,
        )
        self._check(lambda: self._checks.model(draw, numbers, terms))
        self._begin(draw)
        self._sums = {name: formed(name, total) for name, total in sums.items()}
        return factors.norms

    def _check(self, check: Callable[[], None]) -> None:
        """Carry out a check; of several processes, all are told before one of them stops."""
        try:
            check()
        except (ExactnessError, ValueError) as failure:
            if self._complete.is_alone:
                raise
            self._failure = self._failure or failure

    def _begin(self, draw: Draw) -> None:
        """Begin the release that this batch completes, unless a check failed on some process.

        Raises:
            ExactnessError, ValueError: one did.
        """
        if draw.is_last:
            self._complete.agree(draw.step, self._failure)
            self._complete.begin(draw.step)

    def _formed(self, name: str, total: Tensor, is_whole: bool) -> Tensor:
        """One sum with what came before in the logical batch; it may be sent while others form."""
        if self._sums:  # the noise may be drawn in place, so the sums are ours alone
            total = self._sums[name] + total
        if is_whole:
            self._complete.formed(name, total)
        return total

    def _release(self, step: int) -> None:
        """Put the step on record, then hand the optimizer the noisy mean."""
        ledger, sums, norms = self._ledger, self._sums, torch.cat(self._norms)
        grads = {
            name: torch.cat([part[name] for part in self._grads])
            for name in (self._grads[0] if self._grads else ())
        }
        has_passed = self._checks.has_passed
        self._forget()
        counts: tuple[int, ...] = ()
        if ledger.plan.is_adaptive:
            counts = int((norms <= ledger.max_grad_norm).sum()), len(norms)
        layout = self._noise_layout()
        # What decides the normals beside the key: a repeated release must repeat them too.
        places = [(device_kind(total.device), str(total.dtype)) for total in sums.values()]
        stack = repr((_STACK, places, layout))
        sums, seal = self._complete(
            step,
            sums,
            counts=counts,
            stack=stack,
            is_checked=self._checks.of_step(step),
            has_passed=has_passed,
        )
        with torch.no_grad():
            mean = noised_mean(
                sums,
                ledger.plan,
                step,
                branch=seal.branch,
                max_grad_norm=seal.max_grad_norm,
                layout=layout,
                pieces=None if self._shards is None else self._shards.pieces,
            )
        if ledger.plan.noise != "secure":
            self.stages = Stages(norms, sums, mean, grads or None)
        self._set_gradients(mean)

    def _set_gradients(self, mean: Mapping[str, Tensor]) -> None:
        """What the optimizer will see; None makes it skip a parameter."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:  # a frozen one may hold a gradient from before the run
                p.grad = None
        for name, value in mean.items():
            p = self._recorder.parameters[name]
            if self._shards is not None:
                p.grad = self._shards.gradient(name, value)
            else:
                p.grad = value.to(p.dtype).view_as(p)


def _refuse_scaler(optimizer: Any) -> None:
    """Refuse a step that a `GradScaler` makes.

    Raises:
        RuntimeError: it does.
    """
    if "found_inf" not in vars(optimizer):
        return
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    raise RuntimeError(
        "A GradScaler scaled the loss: every gradient would be clipped at the scaled bound. Train "
        "in bfloat16 or float32, which need no scaler, and call loss.backward() and "
        "optimizer.step()."
    )

# SPDX-License-Identifier: Apache-2.0
"""A run whose hooks are on a model and its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dualdp import AccountingError
from dualdp.leaves import Leaf

from .arguments import GRAD_SAMPLE_MODES, Settings
from .call import METHODS
from .distributed import QUIET, unwrapped
from .optimizer import PrivateStep
from .recorder import Recorder
from .release import Alone, Together
from .run import Lent, Run
from .step_checks import StepChecks
from .tape import Tape

#: Models and optimizers that an engine trains.
_in_use: weakref.WeakSet[Any] = weakref.WeakSet()


class Attached(Run):
    """Puts recorder and step on model and optimizer, and knows where the run stands."""

    def __init__(self) -> None:
        super().__init__()
        self.keep_per_sample = False
        self.noise_layout: Sequence[Leaf] | None = None
        self._lent = Lent()
        self._step: PrivateStep | None = None
        self._recorder: Recorder | None = None

    def _refuse_shared(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a model or an optimizer that an engine trains already.

        Raises:
            AccountingError: one does.
        """
        for name, part in (("module", module), ("optimizer", optimizer)):
            if part in _in_use:
                raise AccountingError(
                    f"{name} is trained by another PrivacyEngine. Expected its detach() before "
                    "make_private, or a new model and optimizer."
                )

    def _release_parts(self) -> None:
        """Let another engine train what this one did."""
        if self._step is not None and self._recorder is not None:
            _in_use.discard(self._recorder.model)
            _in_use.discard(self._step.optimizer)

    def _attach(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the hooks on module and optimizer."""
        _in_use.update((unwrapped(module), optimizer))
        method = GRAD_SAMPLE_MODES[self._settings.grad_sample_mode]
        if module is not unwrapped(module):
            self._lent.set(module, **QUIET)
        reduction, rate = self._settings.loss_reduction, self._settings.checks
        checks = StepChecks(self.ledger, rate, reduction, (method, self.plan.clipping))
        self._recorder = recorder = Recorder(
            unwrapped(module),
            method=method,
            when=lambda: self._step is not None and self._step.is_waiting(),
            tape=Tape(),
            terms=lambda: self._require_step().terms(),
            is_due=checks.is_due,
        )
        checks.attach(recorder)
        choices, shards = self._settings.choices, recorder.shards
        release: Alone | Together = Alone(self.ledger, shards)
        if self._group is not None:
            release = Together(self.ledger, self._group, recorder.parameters, choices, shards)
        self._step = PrivateStep(
            recorder,
            optimizer,
            self.ledger,
            release,
            loss_reduction=reduction,
            keep=METHODS[method] or "all",
            keep_per_sample=lambda: self.keep_per_sample,
            choices=choices,
            checks=checks,
            decides=self._is_first,
            noise_layout=lambda: self.noise_layout,
        )

    def standing(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Settings:
        """The settings of a run that stands between two steps, for a checkpoint.

        Raises:
            AccountingError: not attached.
            RuntimeError: in the middle of a logical batch.
            ValueError: another model or optimizer than the run's.
        """
        step = self._require_step()
        if self._recorder is None or self._recorder.model is not unwrapped(module):
            raise ValueError("model is not the one that this engine trains. Expected that one.")
        if step.optimizer is not optimizer:
            raise ValueError("optimizer is not the one that this engine uses. Expected that one.")
        if not step.is_between_steps():
            raise RuntimeError(
                "A logical batch is half done. Save after its last optimizer.step(), when "
                "engine.is_between_steps."
            )
        return self._settings

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name."""
        return {} if self._recorder is None else self._recorder.parameters

    @property
    def is_between_steps(self) -> bool:
        """Whether no part of a logical batch is under way, so that the run can be saved."""
        return self._step is not None and self._step.is_between_steps()

    def _require_step(self) -> PrivateStep:
        """The attached step.

        Raises:
            AccountingError: not set up, or detached.
        """
        if self._step is None:
            raise AccountingError(
                "The engine is not attached. Call make_private first; after detach() the loader "
                "that it returned has ended."
            )
        return self._step

# SPDX-License-Identifier: Apache-2.0
"""The few-lines entry point: makes a model, its optimizer and its loader train privately."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import _validate
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan

from .call import METHODS
from .clip import refuse_two_pass
from .data import PlannedLoader, check_loader
from .optimizer import PrivateStep, Stages, check_holds
from .recorder import RECORDED, Recorder
from .reduction import REDUCTIONS, check_reduction
from .validate import refuse_mixing_modules

Parts = tuple[nn.Module, torch.optim.Optimizer, PlannedLoader]

#: Opacus' words for ways to per-sample gradients, and ours.
GRAD_SAMPLE_MODES = {
    **{method: method for method in RECORDED},
    "hooks": "materialize",
    "ew": "materialize",
    "functorch": "vmap",
    "ghost": "two_pass",
}
_DELTA = 1e-5  # of a plan built without a target; `get_epsilon` asks for its own


class PrivacyEngine:
    """Trains privately what it is given, without wrapping it.

    Args:
        accountant: "pld", "rdp" or "gdp".
        secure_mode: noise from a cryptographic generator.

    Guarantees:
        Every release is recorded before the parameters change.  [test_ledger_comes_first]
        `detach` leaves module and optimizer as they were.
            [test_the_same_objects_come_back_and_nothing_is_left_after_detach]

    Source: Abadi et al. 2016, Algorithm 1.
    """

    def __init__(self, accountant: str = "pld", secure_mode: bool = False) -> None:
        self._accountant, self._secure = accountant, secure_mode
        self._plan: PrivacyPlan | None = None
        self._step: PrivateStep | None = None
        self._recorder: Recorder | None = None
        self._ledger: Ledger | None = None
        self._has_target = False

    # ------------------------------------------------------------------ set-up

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        loss_reduction: str = "mean",
        plan: PrivacyPlan | None = None,
        clipping: str | None = None,
        grad_sample_mode: str = "auto",
        **others: Any,
    ) -> Parts:
        """Set up DP-SGD; the loop stays the user's.

        Args:
            module: the model, returned as it is.
            optimizer: holds every trainable parameter; returned as it is.
            data_loader: a `DataLoader`; its batch size becomes the expected batch size.
            noise_multiplier: noise standard deviation / max_grad_norm.
            max_grad_norm: C, the bound on one example's gradient.
            loss_reduction: "mean" or "sum": what the criterion does over the batch.
            plan: the run, written down; then none of the arguments it holds may be given.
            clipping: "flat", "per_layer" or "automatic".
            grad_sample_mode: "auto" or one of `GRAD_SAMPLE_MODES`.
            **others: arguments of Opacus' method, as far as they have a meaning here.

        Returns:
            `(module, optimizer, loader)`. With `plan` one pass over the loader is what remains of
            the plan; else it is as many steps as `data_loader` has batches.

        Raises:
            TypeError, ValueError: a wrong or missing argument.
            UnsupportedLayerError: the model mixes examples.
        """
        _refuse_others(others)
        if plan is None:
            _require("noise_multiplier", noise_multiplier)
            _require("max_grad_norm", max_grad_norm)
            check_loader(data_loader)
            plan = PrivacyPlan(
                noise_multiplier=noise_multiplier,  # type: ignore[arg-type]
                num_steps=None,
                delta=_DELTA,
                **self._common(data_loader, max_grad_norm, clipping),
            )
            return self._start(
                module, optimizer, data_loader, plan, loss_reduction, grad_sample_mode
            )
        given = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "clipping": clipping,
        }
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise ValueError(
                f"{', '.join(twice)} came together with plan=, which holds them. Expected one of "
                "the two."
            )
        self._has_target = True
        return self._start(
            module, optimizer, data_loader, plan, loss_reduction, grad_sample_mode, whole=True
        )

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        loss_reduction: str = "mean",
        clipping: str | None = None,
        grad_sample_mode: str = "auto",
        **others: Any,
    ) -> Parts:
        """`make_private` with the noise that spends `target_epsilon` in so many epochs.

        Args:
            module: as in `make_private`.
            optimizer: as there.
            data_loader: as there.
            target_epsilon: what the whole run may spend.
            target_delta: at this delta.
            epochs: passes over the loader; a further one is refused.
            max_grad_norm: as there.
            loss_reduction: as there.
            clipping: as there.
            grad_sample_mode: as there.
            **others: as there.

        Returns:
            `(module, optimizer, loader)`.

        Raises:
            TypeError, ValueError: a wrong argument.
        """
        _refuse_others(others)
        check_loader(data_loader)
        plan = PrivacyPlan.calibrate(
            target_epsilon=target_epsilon,
            delta=target_delta,
            num_steps=_validate.integer("epochs", epochs, minimum=1) * len(data_loader),
            **self._common(data_loader, max_grad_norm, clipping),
        )
        self._has_target = True
        return self._start(module, optimizer, data_loader, plan, loss_reduction, grad_sample_mode)

    def _common(
        self, loader: DataLoader[Any], max_grad_norm: Any, clipping: str | None
    ) -> dict[str, Any]:
        """What every plan made from a loader holds."""
        return {
            "num_examples": len(loader.dataset),  # type: ignore[arg-type]
            "expected_batch_size": min(loader.batch_size or 1, len(loader.dataset)),  # type: ignore[arg-type]
            "max_grad_norm": max_grad_norm,
            "clipping": clipping or "flat",
            "noise": "secure" if self._secure else "fast",
            "accountant": self._accountant,
        }

    def _start(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        plan: PrivacyPlan,
        loss_reduction: str,
        grad_sample_mode: str,
        whole: bool = False,
    ) -> Parts:
        """Check everything, then attach."""
        if self._step is not None:
            raise RuntimeError("This engine is in use. Call detach(), or make another engine.")
        _validate.choice("loss_reduction", loss_reduction, REDUCTIONS)
        _validate.choice("grad_sample_mode", grad_sample_mode, GRAD_SAMPLE_MODES)
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}. Expected a torch.nn.Module.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}. Expected a torch one.")
        refuse_mixing_modules(module)
        check_holds(optimizer, {n: p for n, p in module.named_parameters() if p.requires_grad})
        check_loader(loader)
        refuse_two_pass(GRAD_SAMPLE_MODES[grad_sample_mode], plan.clipping)
        per_pass = len(loader)

        def span() -> tuple[int, int]:
            done, end = len(self.ledger), plan.num_steps
            stop = done + per_pass if end is None or not whole else end
            return done, stop if end is None else min(stop, end)

        planned = PlannedLoader(
            loader,
            plan,
            span,
            lambda: self._require_step().begin(),
            lambda draw: self._require_step().announce(draw),
        )
        method = GRAD_SAMPLE_MODES[grad_sample_mode]
        plan.claim()
        self._ledger = Ledger(plan)
        self._recorder = Recorder(
            module,
            method=method,
            when=lambda: self._step is not None and self._step.is_waiting(),
            check=lambda loss: check_reduction(loss, loss_reduction),
        )
        self._plan = plan
        self._step = PrivateStep(
            self._recorder, optimizer, plan, self._ledger, loss_reduction, METHODS[method] or "all"
        )
        return module, optimizer, planned

    def _require_step(self) -> PrivateStep:
        """The attached step.

        Raises:
            RuntimeError: not set up, or detached.
        """
        if self._step is None:
            raise RuntimeError(
                "The engine is not attached. Call make_private first; after detach() the loader "
                "that it returned has ended."
            )
        return self._step

    def detach(self) -> None:
        """Take every hook off module and optimizer; plan, ledger and epsilon stay readable."""
        self._require_step().detach()
        if self._recorder is not None:
            self._recorder.detach()
        self._step = self._recorder = None

    # ------------------------------------------------------------------ reading

    @property
    def plan(self) -> PrivacyPlan:
        """The run, written down.

        Raises:
            RuntimeError: nothing was set up.
        """
        if self._plan is None:
            raise RuntimeError("There is no plan yet. Call make_private first.")
        return self._plan

    @property
    def ledger(self) -> Ledger:
        """Every release so far.

        Raises:
            RuntimeError: nothing was set up.
        """
        if self._ledger is None:
            raise RuntimeError("There is no ledger yet. Call make_private first.")
        return self._ledger

    @property
    def accountant(self) -> Any:
        """The accountant of what was released so far."""
        return self.ledger.accountant

    def get_epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far.

        Args:
            delta: in (0, 1); may be left out when a plan or target named it.

        Raises:
            ValueError: no delta.
        """
        if delta is None and not self._has_target:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        return self.ledger.get_epsilon(self.plan.delta if delta is None else delta)

    def stages(self) -> Stages:
        """Per-sample norms, clipped sum and noisy mean of the last step, for inspection only.

        Raises:
            RuntimeError: no step was taken.
        """
        stages = self._require_step().stages
        if stages is None:
            raise RuntimeError("No step was taken yet. Call optimizer.step() first.")
        return stages


def _require(name: str, value: Any) -> None:
    """Refuse a missing argument of a run without a plan."""
    if value is None:
        raise ValueError(f"{name} is missing. Expected a number, or plan=.")


#: Arguments of Opacus' make_private: the value that means nothing here, and what to do else.
_OPACUS = {
    "poisson_sampling": (True, "Poisson sampling is what is accounted; pass plan= for another"),
    "batch_first": (True, "where the examples lie inside the model is found by itself"),
    "criterion": (None, "the criterion stays in your loop"),
    "noise_generator": (None, "noise has its own key; pass plan= with seed= for a fixed one"),
}


def _refuse_others(others: dict[str, Any]) -> None:
    """Accept what means nothing, refuse the rest by one sentence each."""
    for name, value in others.items():
        if name not in _OPACUS:
            raise TypeError(
                f"make_private has no argument {name!r}. Known from Opacus: {sorted(_OPACUS)}."
            )
        neutral, why = _OPACUS[name]
        if value != neutral:
            raise ValueError(f"{name}={value!r} is not supported: {why}.")

# SPDX-License-Identifier: Apache-2.0
"""The few-lines entry point: assembles plan, ledger, loader and step; owns no mathematics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from dualdp import AccountingError, _validate
from dualdp.ledger import Ledger
from dualdp.mechanisms import num_steps_of
from dualdp.plan import PrivacyPlan
from dualdp_jax import compat
from dualdp_jax.call import split_batch
from dualdp_jax.data import Loader, LogicalBatch, examples_of
from dualdp_jax.parameters import split
from dualdp_jax.training import Run, TrainState

Step = Callable[[TrainState, LogicalBatch], tuple[TrainState, dict[str, Any]]]
_RUN_ARGUMENTS = (
    "loss_fn",
    "params",
    "optimizer",
    "data",
    "needs_key",
    "has_aux",
    "trainable",
    "method",
)


class PrivacyEngine:
    """Makes one training run private and keeps its account.

    Args:
        accountant: "pld", "rdp" or "gdp"; None for the plan's, or "pld" without a plan.
        secure_mode: asks for noise="secure".

    Guarantees:
        A release is recorded before it is computed, once per step, in order.
            [test_step_records_before_it_dispatches]
    """

    def __init__(self, accountant: str | None = None, secure_mode: bool = False) -> None:
        self._accountant, self._secure_mode = accountant, bool(secure_mode)
        self._ledger: Ledger | None = None

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
        **plan_arguments: Any,
    ) -> tuple[Step, TrainState, Loader]:
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
            **plan_arguments: without a plan, those of `PrivacyPlan` (expected_batch_size,
                noise_multiplier, max_grad_norm, ...), or epochs= instead of num_steps=.

        Returns:
            `(step, state, loader)`; `state, metrics = step(state, batch)` for each batch of the
            loader. The metrics called `unprotected_*` are not private.

        Raises:
            AccountingError: the engine has a run already.
            TypeError: arguments that the plan holds, or that nobody knows.
        """
        if self._ledger is not None:
            raise AccountingError(
                "This engine has a run already, and a second one would not be in its account. "
                "Make a new PrivacyEngine."
            )
        if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}. Expected an optax transformation, "
                "such as optax.sgd(0.1)."
            )
        plan = self._plan_of(plan, data, plan_arguments)
        parameters = split(params, trainable)
        if not parameters.trained:
            raise ValueError("No leaf of params is trained. Expected at least one; see trainable=.")
        ledger = Ledger(plan, self._accountant)
        loader = Loader(examples_of(data), plan, lambda: len(ledger))
        run = Run(
            plan=plan,
            parameters=parameters,
            loss_fn=loss_fn,
            optimizer=optimizer,
            needs_key=bool(needs_key),
            has_aux=bool(has_aux),
            method=method,
            rebuild=loader.rebuild,
        )
        state = run.first_state()
        plan.claim()
        self._ledger = ledger

        def step(state: TrainState, batch: LogicalBatch) -> tuple[TrainState, dict[str, Any]]:
            _check_step(plan, state, batch)
            ledger.record(batch.step)
            return run.step(state, batch)

        return step, state, loader

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        num_steps: int | None = None,
        epochs: float | None = None,
        **arguments: Any,
    ) -> tuple[Step, TrainState, Loader]:
        """`make_private` with the noise multiplier that spends at most `target_epsilon`.

        Args:
            target_epsilon: at the end of the run.
            target_delta: its delta.
            num_steps: length of the run; or
            epochs: the same in passes over the data.
            **arguments: of `make_private`, without noise_multiplier and plan.

        Raises:
            TypeError: an argument that contradicts these came too.
            ValueError: noise_multiplier came too, or neither num_steps nor epochs.
        """
        run = {name: arguments.pop(name) for name in _RUN_ARGUMENTS if name in arguments}
        if "delta" in arguments:
            raise TypeError("delta came together with target_delta. Expected the latter alone.")
        if "plan" in arguments:
            raise TypeError(
                "plan came together with target_epsilon. Expected make_private(plan=...), or "
                "PrivacyPlan.calibrate."
            )
        settings = arguments | {"num_steps": num_steps, "epochs": epochs, "delta": target_delta}
        required = ("expected_batch_size", "max_grad_norm")
        plan = PrivacyPlan.calibrate(
            target_epsilon=target_epsilon, **self._settings(run.get("data"), settings, required)
        )
        return self.make_private(plan=plan, **run)

    def _plan_of(
        self, plan: PrivacyPlan | None, data: Any, given: Mapping[str, Any]
    ) -> PrivacyPlan:
        """The plan, or one made of the arguments."""
        if plan is None:
            required = ("expected_batch_size", "noise_multiplier", "max_grad_norm")
            return PrivacyPlan(**self._settings(data, given, required))
        if given:
            raise TypeError(
                f"{sorted(given)} came together with plan=, which holds them. Expected them in the "
                "plan alone."
            )
        if self._secure_mode and plan.noise != "secure":
            raise ValueError(
                f"secure_mode=True with a plan whose noise={plan.noise!r}. Expected noise='secure' "
                "in the plan."
            )
        return plan

    def _settings(
        self, data: Any, given: Mapping[str, Any], required: Sequence[str]
    ) -> dict[str, Any]:
        """Arguments of `PrivacyPlan`, from those of the engine."""
        known = {field.name for field in dataclasses.fields(PrivacyPlan)} - {"num_examples"}
        unknown = sorted(set(given) - known - {"epochs"})
        missing = [name for name in required if name not in given]
        if unknown or missing:
            raise TypeError(
                f"make_private got unknown arguments {unknown} and misses {missing}. Expected "
                f"plan=, or {', '.join(required)} and any of {sorted(known - set(required))}."
            )
        num_examples = split_batch(examples_of(data))[1]
        settings = {"accountant": self._accountant or "pld", "delta": 1 / (num_examples + 1)}
        if self._secure_mode:
            settings["noise"] = "secure"
        settings |= {"num_steps": None, "num_examples": num_examples, **given}
        epochs = settings.pop("epochs", None)
        if epochs is not None:
            settings["num_steps"] = _steps_of(epochs, settings)
        return settings

    # ------------------------------------------------------------------ account

    def record(self, num_steps: int = 1) -> range:
        """Record the next releases, before a jitted or scanned run of so many steps.

        Returns:
            The indices of the steps that may be released now.

        Raises:
            AccountingError: one of them is past the plan; then none is recorded.
        """
        num_steps = _validate.integer("num_steps", num_steps)
        ledger = self._running()
        first = len(ledger)
        end = ledger.plan.num_steps
        if end is not None and first + num_steps > end:
            raise AccountingError(
                f"num_steps={num_steps} after {first} recorded releases is past the plan's "
                f"num_steps={end}. Plan more steps, or num_steps=None for an open-ended run."
            )
        steps = range(first, first + num_steps)
        for step in steps:
            ledger.record(step)
        return steps

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far, an upper bound at `delta`."""
        return self._running().get_epsilon(delta=delta)

    @property
    def plan(self) -> PrivacyPlan:
        """The plan of the run."""
        return self._running().plan

    @property
    def accountant(self) -> Any:
        """The accountant of the run."""
        return self._running().accountant

    @property
    def ledger(self) -> Ledger:
        """The record of the run."""
        return self._running()

    def _running(self) -> Ledger:
        if self._ledger is None:
            raise AccountingError("The engine has no run yet. Call make_private first.")
        return self._ledger


def _steps_of(epochs: Any, settings: Mapping[str, Any]) -> int:
    """Length of a run that was given in epochs."""
    if settings["num_steps"] is not None:
        raise TypeError("num_steps and epochs came together. Expected one of the two.")
    return num_steps_of(
        epochs=epochs,
        num_examples=settings["num_examples"],
        batch_size=settings["expected_batch_size"],
    )


def _check_step(plan: PrivacyPlan, state: TrainState, batch: LogicalBatch) -> None:
    """Refuse what the ledger could not account."""
    if compat.is_traced(state) or compat.in_trace():
        raise TypeError(
            "step was called inside jit, scan or grad, where it would be recorded once for many "
            "releases. Call it from Python; for a jitted loop use clipped_grad_sum, "
            "add_noise(plan) and engine.record(num_steps=k)."
        )
    if not isinstance(batch, LogicalBatch) or batch.plan is not plan:
        raise TypeError(
            f"batch is a {type(batch).__name__} that this engine's loader did not draw. Expected "
            "one of its batches: only they are what the accountant assumes."
        )

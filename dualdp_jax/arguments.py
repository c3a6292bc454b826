# SPDX-License-Identifier: Apache-2.0
"""From the arguments of the engine to a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dualdp.mechanisms import num_steps_of
from dualdp.plan import PrivacyPlan
from dualdp_jax.call import split_batch
from dualdp_jax.data import examples_of

_REQUIRED = ("expected_batch_size", "noise_multiplier", "max_grad_norm")
_NOT_ARGUMENTS = {"num_examples", "root"}
#: Words of both stacks' engines, and the plan's for the same.
_WORDS = {"target_delta": "delta", "max_physical_batch_size": "physical_batch_size"}


def plan_of(
    plan: PrivacyPlan | None,
    data: Any,
    given: Mapping[str, Any],
    accountant: str | None,
    secure_mode: bool,
) -> PrivacyPlan:
    """The plan, or one made of the arguments.

    Args:
        plan: the user's, or None.
        data: for the number of examples.
        given: arguments of `PrivacyPlan`, and epochs; noise_multiplier=None is found for the
            target epsilon.
        accountant: of the engine.
        secure_mode: of the engine.

    Raises:
        TypeError: arguments beside a plan, unknown or missing ones.
        ValueError: secure mode with a plan of other noise.
    """
    if plan is None:
        complete = _complete(data, given, accountant, secure_mode)
        if complete["noise_multiplier"] is None:
            del complete["noise_multiplier"]
            return PrivacyPlan.calibrate(**complete)
        return PrivacyPlan(**complete)
    if given:
        raise TypeError(
            f"{sorted(given)} came together with plan=, which holds them. Expected them in the "
            "plan alone."
        )
    if secure_mode and plan.noise != "secure":
        raise ValueError(
            f"secure_mode=True with a plan whose noise={plan.noise!r}. Expected noise='secure' "
            "in the plan."
        )
    return plan


def _complete(
    data: Any, given: Mapping[str, Any], accountant: str | None, secure_mode: bool
) -> dict[str, Any]:
    """Arguments of `PrivacyPlan`, from those of the engine."""
    given = dict(given)
    for word, name in _WORDS.items():
        if word in given:
            if name in given:
                raise TypeError(f"{word} and {name} came together. Expected one of the two.")
            given[name] = given.pop(word)
    known = {field.name for field in dataclasses.fields(PrivacyPlan)} - _NOT_ARGUMENTS
    unknown = sorted(set(given) - known - {"epochs"})
    missing = [name for name in _REQUIRED if name not in given]
    if unknown or missing:
        raise TypeError(
            f"make_private got unknown arguments {unknown} and misses {missing}. Expected "
            f"plan=, or {', '.join(_REQUIRED)} and any of {sorted(known - set(_REQUIRED))}."
        )
    num_examples = split_batch(examples_of(data))[1]
    settings: dict[str, Any] = {"accountant": accountant or "pld", "delta": 1 / (num_examples + 1)}
    if secure_mode:
        settings["noise"] = "secure"
    settings |= {"num_steps": None, "num_examples": num_examples, **given}
    epochs = settings.pop("epochs", None)
    if epochs is not None:
        if settings["num_steps"] is not None:
            raise TypeError("num_steps and epochs came together. Expected one of the two.")
        settings["num_steps"] = num_steps_of(
            epochs=epochs, num_examples=num_examples, batch_size=settings["expected_batch_size"]
        )
    return settings

# SPDX-License-Identifier: Apache-2.0
"""Conversion of engine arguments to a plan, the same for both backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from dualdp import _validate, accountants
from dualdp.mechanisms import num_steps_of
from dualdp.plan.plan import PrivacyPlan, require_plan

#: Errors of both engines about a missing or a second run.
NO_RUN = "The engine has no run yet. Call make_private first."
SECOND_RUN = (
    "This engine has a run already, and a second one would not be in its account. Make a new "
    "PrivacyEngine; one that was loaded from a checkpoint goes on by resume()."
)
#: Names of engine arguments, and the names of the same plan fields.
SYNONYMS = {"target_delta": "delta", "max_physical_batch_size": "physical_batch_size"}
#: Fields of a plan that an engine takes as arguments.
FIELDS = {field.name for field in dataclasses.fields(PrivacyPlan)} - {"num_examples"}
#: All accepted argument names.
KNOWN = FIELDS | set(SYNONYMS) | {"epochs"}
#: Delta of a plan made without one; `get_epsilon` then requires a delta.
_DELTA = 1e-5


def plan_of(
    plan: PrivacyPlan | None,
    given: Mapping[str, Any],
    *,
    num_examples: int,
    accountant: str | None,
    secure_mode: bool,
    calibrates: bool = False,
    method: str = "make_private",
    also: Collection[str] = (),
) -> PrivacyPlan:
    """Return the user's plan, or one made of the other arguments of an engine.

    Args:
        plan: the user's plan, or None.
        given: mapping from the name of an argument to its value; None counts as not given.
        num_examples: size of the data, in units.
        accountant: that of the engine, or None.
        secure_mode: bool, that of the engine.
        calibrates: bool, True if the noise multiplier follows from target_epsilon.
        method: name of the engine's method, for errors.
        also: further arguments of the method, which are not passed on, for errors.

    Raises:
        AccountingError: the accountant gives no upper bound.
        TypeError: an unknown argument, a missing one, or a plan that is none.
        ValueError: an argument beside a plan that holds it, or two that contradict each other.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _require_known(given, method, also)
    if plan is not None:
        _check_plan(plan, given, accountant, secure_mode)
        return plan
    if num_examples == 0:
        raise ValueError("The data has no examples. Expected at least one.")
    settings = _plan_arguments(given, num_examples, accountant, secure_mode)
    wanted = ["expected_batch_size", "max_grad_norm"]
    wanted += ["target_epsilon"] if calibrates else ["noise_multiplier"]
    missing = [name for name in wanted if name not in settings]
    if missing:
        raise TypeError(
            f"{method} misses {', '.join(missing)}. Expected plan=, or {', '.join(wanted)} and any "
            f"of {', '.join(sorted(KNOWN - set(wanted)))}."
        )
    epochs, num_steps = settings.pop("epochs", None), settings.get("num_steps")
    if (epochs is None) == (num_steps is None) and (calibrates or epochs is not None):
        raise ValueError(
            f"epochs={epochs} and num_steps={num_steps}. Expected one of the two: how long the run "
            "will be."
        )
    if epochs is not None:
        num_steps = num_steps_of(
            epochs=_validate.positive("epochs", epochs),
            num_examples=num_examples,
            batch_size=settings["expected_batch_size"],
        )
    settings |= {"num_examples": num_examples, "num_steps": num_steps}
    return PrivacyPlan.calibrate(**settings) if calibrates else PrivacyPlan(**settings)


def _require_known(given: Mapping[str, Any], method: str, also: Collection[str]) -> None:
    """Raise on arguments that no plan has, with the name that was meant where it is known."""
    unknown = sorted(set(given) - KNOWN)
    if not unknown:
        return
    known = sorted(KNOWN.union(also))
    near = get_close_matches(unknown[0], known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise TypeError(
        f"{method} has no argument {', '.join(map(repr, unknown))}{hint}. Expected any of "
        f"{', '.join(known)}."
    )


def names_delta(plan: PrivacyPlan | None, given: Mapping[str, Any]) -> bool:
    """Return True if the user chose a delta, so that `get_epsilon` needs none."""
    return plan is not None or any(
        given.get(name) is not None for name in ("delta", "target_delta")
    )


def _check_plan(
    plan: PrivacyPlan, given: Mapping[str, Any], accountant: str | None, secure_mode: bool
) -> None:
    """Raise if the user's plan is none, or another argument contradicts it."""
    require_plan(plan)
    if given:
        raise ValueError(
            f"{', '.join(sorted(given))} came together with plan=, which holds such things. "
            "Expected one of the two."
        )
    own = accountants.create(accountant or plan.accountant).name  # "prv" is "pld"
    if own != accountants.create(plan.accountant).name:
        raise ValueError(
            f"accountant={accountant!r} of the engine beside a plan with accountant="
            f"{plan.accountant!r}. Expected the plan's, or none for the engine."
        )
    if secure_mode and plan.noise != "secure":
        raise ValueError(
            f"secure_mode=True with a plan whose noise={plan.noise!r}. Expected a plan with "
            "noise='secure'."
        )


def _plan_arguments(
    given: Mapping[str, Any], num_examples: int, accountant: str | None, secure_mode: bool
) -> dict[str, Any]:
    """Plan arguments from engine arguments, including `epochs`."""
    settings = dict(given)
    for synonym, name in SYNONYMS.items():
        if synonym in settings and name in settings:
            raise ValueError(f"{synonym} and {name} came together. Expected one of the two.")
        if synonym in settings:
            settings[name] = settings.pop(synonym)
    for name, value in (("accountant", accountant), ("noise", "secure" if secure_mode else None)):
        if value is not None and settings.setdefault(name, value) != value:
            raise ValueError(
                f"{name}={settings[name]!r} came together with {value!r} of the engine. Expected "
                "one of the two."
            )
    if "target_epsilon" in settings and "delta" not in settings:
        raise ValueError(
            "target_epsilon came without target_delta. Expected both: a target is an epsilon at a "
            "delta."
        )
    settings.setdefault("delta", min(_DELTA, 1 / (num_examples + 1)))
    return settings

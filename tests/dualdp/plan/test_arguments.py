# SPDX-License-Identifier: Apache-2.0
"""Arguments of both engines become one plan, or one sentence."""

import math

from dualdp.plan.arguments import names_delta, plan_of
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused

GIVEN = {"expected_batch_size": 50, "max_grad_norm": 1.0, "noise_multiplier": 2.0, "num_steps": 9}
SETTING = {"num_examples": 1000, "accountant": None, "secure_mode": False}


def test_a_plan_is_made_of_the_arguments():
    run = plan_of(None, GIVEN | {"max_physical_batch_size": 10, "seed": None}, **SETTING)
    assert (run.num_examples, run.num_steps, run.physical_batch_size) == (1000, 9, 10)
    assert (run.accountant, run.noise, run.delta) == ("pld", "fast", 1e-5)
    given = {**GIVEN, "num_steps": None, "epochs": 2.5, "target_delta": 1e-3}
    run = plan_of(None, given, num_examples=1000, accountant="rdp", secure_mode=True)
    assert (run.num_steps, run.accountant, run.noise, run.delta) == (50, "rdp", "secure", 1e-3)
    given = {**GIVEN, "noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-4}
    assert 1.9 < plan_of(None, given, **SETTING, calibrates=True).epsilon() <= 2
    small = plan_of(None, GIVEN | {"expected_batch_size": 5}, **SETTING | {"num_examples": 9})
    assert math.isclose(small.delta, 1e-5)


def test_a_plan_comes_alone():
    plan = make(accountant="pld")
    assert plan_of(plan, {"epochs": None}, **SETTING | {"accountant": "prv"}) is plan
    assert names_delta(plan, {})
    assert names_delta(None, {"target_delta": 1e-5})
    assert not names_delta(None, {"delta": None})
    for given, changes, words in (
        ({"epochs": 3}, {}, "epochs came together with plan=, which holds such things"),
        ({}, {"accountant": "rdp"}, "accountant='rdp' of the engine beside a plan with accountant"),
        ({}, {"secure_mode": True}, "secure_mode=True with a plan whose noise='fast'"),
    ):
        given_and_set = {"given": given, **SETTING, **changes}
        refused(lambda: plan_of(plan, **given_and_set), ValueError, words)  # noqa: B023


def test_wrong_arguments_are_one_sentence():
    for given, changes, error, words in (
        ({"steps": 3}, {}, TypeError, "no argument 'steps'.* Expected any of .* num_steps"),
        ({"max_grad_nrom": 3}, {}, TypeError, "did you mean max_grad_norm"),
        (
            {"max_grad_norm": None},
            {},
            TypeError,
            "make_private misses max_grad_norm. Expected plan",
        ),
        ({}, {"num_examples": 0}, ValueError, "The data has no examples"),
        ({"epochs": 3}, {}, ValueError, "epochs=3 and num_steps=9. Expected one of the two"),
        ({"target_delta": 1, "delta": 1}, {}, ValueError, "target_delta and delta came toge"),
        ({"noise": "fast"}, {"secure_mode": True}, ValueError, "noise='fast' came together with"),
        ({"target_epsilon": 3.0}, {}, ValueError, "target_epsilon came without target_delta"),
    ):
        settings = SETTING | changes
        refused(lambda: plan_of(None, GIVEN | given, **settings), error, words)  # noqa: B023

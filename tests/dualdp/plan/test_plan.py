# SPDX-License-Identifier: Apache-2.0
"""The plan: one value per step for everyone, no secret, and errors before any harm."""

import dataclasses
import json
import math
import pickle
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dualdp
from dualdp import get_epsilon
from dualdp.plan import schedules
from dualdp.plan.batches import drawn_indices
from dualdp.randomness import SegmentBits
from tests.mistakes import refused

BASE = {
    "num_examples": 1000,
    "expected_batch_size": 50,
    "num_steps": 100,
    "noise_multiplier": 1.1,
    "max_grad_norm": 0.5,
    "delta": 1e-5,
    "accountant": "rdp",
}


def make(**changes):
    return dualdp.PrivacyPlan(**{**BASE, **changes})


def test_plan_is_a_pure_function():
    plan, again = make(seed=3), make(seed=3)
    assert plan == again
    for step in (0, 7, 99):
        np.testing.assert_array_equal(plan.batch_indices(step), again.batch_indices(step))
    assert plan.batch_indices(0).tolist() != plan.batch_indices(1).tolist()
    assert plan.batch_indices(0).tolist() != make(seed=4).batch_indices(0).tolist()


def test_values_of_a_step():
    plan = make(
        seed=0,
        noise_multiplier=schedules.Exponential(2.0, 0.5),
        max_grad_norm=lambda step: 1.0 + step,
        expected_batch_size=schedules.Step(100, 0.5, 10),
        num_steps=20,
    )
    assert plan.noise_multiplier_at(2) == 0.5
    assert plan.max_grad_norm_at(2) == 3.0
    assert plan.noise_stddev(2) == 1.5
    assert plan.sample_rate_at(9) == 0.1
    assert plan.sample_rate_at(10) == 0.05
    with pytest.raises(ValueError, match="there is no one sample_rate"):
        _ = plan.sample_rate
    assert make().sample_rate == 0.05


def test_a_plan_says_its_seed_and_holds_no_secret():
    seeded, plan = make(seed=9), make()
    assert "seed=9" in repr(seeded)
    assert json.loads(seeded.to_json())["seed"] == 9
    assert "seed=None" in repr(plan)
    assert plan == make()  # nothing is drawn when a plan is made
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert dataclasses.replace(plan, seed=9) == seeded


@pytest.mark.parametrize("seed", [3, 2**100, None])
def test_json_restores_the_plan(seed):
    plan = make(
        noise_multiplier=schedules.Exponential(2.0, 0.99), max_grad_norm=lambda k: 1 + k, seed=seed,
        unit="user", rows_per_unit=2,
    )  # fmt: skip
    again = dualdp.PrivacyPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.epsilon() == plan.epsilon()


@pytest.mark.parametrize(("examples", "size"), [(6_000, 256), (7, 7)])
def test_a_shuffled_pass_is_accounted_as_one_pass(examples, size):
    """Its batches were counted by rounding n / B down, so that a pass was charged as two."""
    sizes = {"num_examples": examples, "expected_batch_size": size}
    of_pass = math.ceil(examples / size)
    for passes in (1, 3):
        plan = make(
            **sizes, sampler="shuffle", num_steps=passes * of_pass, accountant="pld", seed=1
        )
        used = np.zeros(examples, int)
        for step in range(passes * of_pass):
            used[plan.batch_indices(step)] += 1
        assert set(used) == {passes}
        whole = {"noise_multiplier": plan.noise_multiplier_at(0), "sample_rate": 1.0}
        assert plan.epsilon() == get_epsilon(**whole, num_steps=passes, delta=plan.delta)
        assert plan.epsilon(step=of_pass * (passes - 1) + 1) == plan.epsilon()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "num_examples=0 is out of range. Expected an integer >= 1"),
        ({"num_examples": "many"}, "num_examples='many' is a str"),
        ({"expected_batch_size": 1001}, "Expected a finite number > 0, at most num_examples=1000"),
        ({"expected_batch_size": 0}, "expected_batch_size=0.0 is out of range"),
        ({"num_steps": -1}, "num_steps=-1 is out of range"),
        ({"num_steps": 1.5}, "num_steps=1.5 is a float"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 is out of range"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier=nan is not a number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan is not a number"),
        ({"max_grad_norm": 0}, "max_grad_norm=0.0 is out of range. Expected a finite number > 0"),
        ({"max_grad_norm": True}, "max_grad_norm=True is a bool"),
        ({"max_grad_norm": (1.0,)}, "max_grad_norm=(1.0,) is a tuple. Expected a number"),
        ({"delta": 0}, "delta=0 is out of range"),
        ({"delta": 0.5}, "delta=0.5 is above 1 / num_examples. Expected less."),
        ({"sampler": "random"}, "sampler='random' is unknown. Expected one of balls_in_bins"),
        ({"max_batch_size": 70}, "max_batch_size=70 with sampler='poisson'"),
        ({"sampler": "truncated_poisson"}, "max_batch_size=None with sampler='truncated_poisson'"),
        ({"sampler": "shuffle", "noise_multiplier": lambda k: 1 + k}, "noise_multiplier follows a"),
        ({"sampler": "fixed_size", "expected_batch_size": 0.5}, "Expected one integer"),
        ({"clipping": "global"}, "clipping='global' is unknown"),
        ({"noise": "loud"}, "noise='loud' is unknown. Expected one of fast, portable"),
        ({"accountant": "moments"}, "accountant='moments' is unknown"),
        ({"neighboring_relation": "near"}, "neighboring_relation='near' is unknown"),
        ({"physical_batch_size": 0}, "physical_batch_size=0 is out of range"),
        ({"seed": "abc"}, "seed='abc' is a str"),
        ({"target_epsilon": -1.0}, "target_epsilon=-1.0 is out of range"),
        ({"on_budget": "warn"}, "on_budget='warn' is unknown. Expected one of raise"),
        ({"unit": "person"}, "unit='person' is unknown. Expected one of example, user"),
        ({"unit": "user"}, "rows_per_unit is missing beside unit='user'"),
        ({"unit": "user", "rows_per_unit": 0}, "rows_per_unit=0 is out of range"),
    ],
)
def test_bad_arguments_are_one_sentence(changes, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        make(**changes)
    assert message in str(caught.value)


def test_secure_batches_come_from_the_cipher():
    plan, bits = make(noise="secure"), SegmentBits(None)
    np.testing.assert_array_equal(drawn_indices(plan, bits, 3), drawn_indices(plan, bits, 3))
    assert drawn_indices(plan, bits, 3).tolist() != drawn_indices(make(), bits, 3).tolist()
    sizes = [len(drawn_indices(plan, bits, step)) for step in range(400)]
    assert np.mean(sizes) == pytest.approx(50, abs=6 * (50 * 0.95 / 400) ** 0.5)


def test_a_small_delta_above_one_in_n_is_a_warning():
    with pytest.warns(UserWarning, match="delta=1e-05 is above 1 / num_examples"):
        make(num_examples=1_281_167, delta=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(num_examples=1_000, delta=1e-3)


def test_epsilon_grows_with_the_steps_and_ends_at_the_plan():
    spent = [make().epsilon(step) for step in (0, 1, 10, 100)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    run = {"noise_multiplier": 1.1, "sample_rate": 0.05, "num_steps": 100, "delta": 1e-5}
    assert make().epsilon() == spent[-1] == get_epsilon(**run, accountant="rdp")
    secure = make(noise="secure", accountant="pld")  # which accounts its grid
    assert secure.epsilon() > make(accountant="pld").epsilon()


def test_bounds_of_groups_are_one_sensitivity():
    plan = make(clipping="per_layer", max_grad_norm={"a": 3.0, "b": 4.0})
    assert (plan.max_grad_norm_at(7), plan.noise_stddev(7)) == (5.0, 5.5)
    assert plan.clipping_bounds(10.0) == {"a": 6.0, "b": 8.0}
    assert make().clipping_bounds(10.0) == 10.0
    assert dualdp.PrivacyPlan.from_json(plan.to_json()).to_json() == plan.to_json()
    shared = make(clipping="per_layer", group_shares={"a": 3, "b": 4})
    assert shared.clipping_bounds(5.0) == pytest.approx({"a": 3.0, "b": 4.0})


def grouped(**changes):
    return lambda: make(clipping="per_layer", **changes)


def test_what_does_not_fit_is_refused():
    read, plan, calibrate = dualdp.PrivacyPlan.from_json, make(), dualdp.PrivacyPlan.calibrate
    for version in (1, 2, 4):
        text = plan.to_json().replace('"dualdp_plan": 3', f'"dualdp_plan": {version}')
        words = f"is a plan of format {version}, and .* reads format 3"
        refused(lambda: read(text), ValueError, words)  # noqa: B023
    for text in ("", "[]", "{}", '{"dualdp_plan": 3}', '{"dualdp_plan": "2"}'):
        refused(lambda: read(text), ValueError, "The text is not a plan .* Expected what")  # noqa: B023
    more = json.dumps({**json.loads(plan.to_json()), "extra": 1})
    refused(lambda: read(more), ValueError, r"unknown or missing fields \['extra'\]")
    refused(lambda: plan.epsilon(101), ValueError, "step=101 is past the plan's num_steps=100")
    no_end = make(num_steps=None)
    refused(no_end.epsilon, ValueError, "the run has no end. Pass step=")
    both = "noise_multiplier and target_epsilon came together"
    refused(lambda: calibrate(target_epsilon=3.0, **BASE), ValueError, both)
    rest = {name: value for name, value in BASE.items() if name != "noise_multiplier"}
    rest |= {"num_steps": None, "target_epsilon": 3.0}
    refused(lambda: calibrate(**rest), TypeError, "num_steps=None. Expected an integer")
    for use in (plan.batch_indices, plan.row_indices):
        words = "has no seed.* Expected the loader of make_private"
        refused(lambda: use(0), ValueError, words)  # noqa: B023
    refused(lambda: make(seed=0).batch_indices(-1), ValueError, "step=-1 is out of range")
    words = "seed=3 with noise='secure'. Expected no seed"
    refused(lambda: make(noise="secure", seed=3), ValueError, words)
    words = "Bounds of groups came with clipping='flat'"
    refused(lambda: make(max_grad_norm={"a": 1.0}), ValueError, words)
    words = "clipping='per_layer' and group_shares=. Expected one"
    refused(grouped(max_grad_norm={"a": 1.0}, group_shares={"a": 1.0}), ValueError, words)
    refused(grouped(group_shares={}), TypeError, "group_shares={} holds no group")
    words = r"max_grad_norm\['a'\]=0.0 is out of range"
    refused(grouped(max_grad_norm={"a": 0.0}), ValueError, words)


RUN = {
    **{"num_examples": 50_000, "expected_batch_size": 512, "num_steps": 2000},
    **{"max_grad_norm": 1.0, "delta": 1e-5},
}


@pytest.mark.parametrize(
    ("use", "most", "files"),
    [
        (dualdp.PrivacyPlan(noise_multiplier=1.1, **RUN).epsilon, 240, 8),
        (lambda: dualdp.PrivacyPlan(noise_multiplier=1.1, **RUN), 90, 6),
        (lambda: dualdp.PrivacyPlan.calibrate(target_epsilon=3.0, **RUN), 3000, 8),
    ],
    ids=["epsilon", "new", "calibrate"],
)
def test_a_plan_makes_few_calls(use, most, files):
    """Calls of our Python functions, and files entered: the same numbers on every machine."""
    folder, found = str(Path(dualdp.__file__).parent), Counter()

    def note(frame, event, argument):
        if event == "call" and folder in frame.f_code.co_filename:
            found[frame.f_code.co_filename] += 1

    use()  # what is computed once
    sys.setprofile(note)
    try:
        use()
    finally:
        sys.setprofile(None)
    assert 0 < found.total() <= most, found
    assert len(found) <= files, found

# SPDX-License-Identifier: Apache-2.0
"""Schedules are pure functions of the step and survive JSON."""

import json

import numpy as np
import pytest

from dualdp.plan import schedules
from tests.dualdp.plan.test_plan import make

EXAMPLES = [
    (schedules.Step(1.0, 0.5, 2), [1.0, 1.0, 0.5, 0.5]),
    (schedules.Exponential(4.0, 0.5), [4.0, 2.0, 1.0, 0.5]),
    (schedules.Linear(1.0, 2.0, 2), [1.0, 1.5, 2.0, 2.0]),
    (schedules.Cosine(3.0, 1.0, 2), [3.0, 2.0, 1.0, 1.0]),
    (schedules.Table((3.0, 1.0, 4.0, 1.0)), [3.0, 1.0, 4.0, 1.0]),
    (schedules.Warmup(6.0, 3), [2.0, 4.0, 6.0, 6.0]),
    (schedules.Warmup(schedules.Exponential(8.0, 0.5), 2), [4.0, 4.0, 2.0, 1.0]),
]


@pytest.mark.parametrize(("schedule", "expected"), EXAMPLES)
def test_values(schedule, expected):
    np.testing.assert_allclose(schedule.at(np.arange(4)), expected)
    np.testing.assert_allclose([float(schedule.at(step)) for step in range(4)], expected)


@pytest.mark.parametrize(("schedule", "expected"), EXAMPLES)
def test_json_round_trip(schedule, expected):
    data = json.loads(json.dumps(schedules.to_json(schedule)))
    assert schedules.from_json("x", data) == schedule


def test_a_constant_is_a_number():
    assert schedules.to_json(1.1) == schedules.from_json("x", 1.1) == 1.1
    assert type(make(noise_multiplier=2).noise_multiplier) is float
    assert schedules.Warmup(6, 3) == schedules.Warmup(6.0, 3)
    assert make(noise_multiplier=schedules.Constant(2)) == make(noise_multiplier=2)

    class Own(schedules.Schedule):
        """One that no file can name."""

    with pytest.raises(TypeError, match="noise_multiplier=.* is an Own. Expected a number"):
        make(noise_multiplier=Own())
    for then, text in (
        ("1.1", " is a str. Expected a number"),
        (lambda step: 1.0, " is a function. Expected a number or a schedule"),
        (None, "None. Expected a number"),
    ):
        with pytest.raises(TypeError, match=f"then=.*{text}"):
            schedules.Warmup(then, 3)
    with pytest.raises(TypeError, match="final=None. Expected a number"):
        schedules.Linear(1.0, None, 3)


def test_a_callable_is_tabulated_once():
    calls = []

    def value(step):
        calls.append(step)
        return 1.0 / (1 + step)

    schedule = schedules.tabulated("noise_multiplier", value, 3)
    assert calls == [0, 1, 2]
    np.testing.assert_allclose(schedule.at(np.arange(3)), [1, 1 / 2, 1 / 3])
    assert calls == [0, 1, 2]


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="x is a callable and num_steps is None"):
        schedules.tabulated("x", lambda step: 1.0, None)
    with pytest.raises(TypeError, match=r"x\(1\)='a' is a str. Expected a number"):
        schedules.tabulated("x", lambda step: "a" if step else 1.0, 2)
    with pytest.raises(IndexError, match="index 4 is out of bounds .* size 4"):
        schedules.Table((1.0,) * 4).at(4)
    with pytest.raises(ValueError, match="rate=0.0 is out of range"):
        schedules.Exponential(1.0, 0.0)
    for kind in (schedules.Linear, schedules.Cosine):
        with pytest.raises(ValueError, match="over=0 is out of range"):
            kind(1.0, 0.5, 0)
    with pytest.raises(ValueError, match="every=0 is out of range"):
        schedules.Step(1.0, 0.5, 0)
    with pytest.raises(
        ValueError, match="x='cosinus' is unknown. Expected one of adaptive, cosine"
    ):
        schedules.from_json("x", {"schedule": "cosinus"})
    with pytest.raises(ValueError, match="is not a schedule. Expected a number or one of"):
        schedules.from_json("x", {"schedule": "step", "initial": 1.0})

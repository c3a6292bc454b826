# SPDX-License-Identifier: Apache-2.0
"""Schedules are pure functions of the step and survive JSON."""

import json

import numpy as np
import pytest

from dualdp.plan import schedules
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused

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
def test_values_survive_json(schedule, expected):
    np.testing.assert_allclose(schedule.at(np.arange(4)), expected)
    np.testing.assert_allclose([float(schedule.at(step)) for step in range(4)], expected)
    data = json.loads(json.dumps(schedules.to_json(schedule)))
    assert schedules.from_json("x", data) == schedule


def test_a_constant_is_a_number():
    assert schedules.to_json(1.1) == schedules.from_json("x", 1.1) == 1.1
    assert type(make(noise_multiplier=2).noise_multiplier) is float
    assert schedules.Warmup(6, 3) == schedules.Warmup(6.0, 3)
    assert make(noise_multiplier=schedules.Constant(2)) == make(noise_multiplier=2)


def test_a_callable_is_tabulated_once():
    calls = []
    schedule = schedules.tabulated("x", lambda step: calls.append(step) or 1 / (1 + step), 3)
    np.testing.assert_allclose(schedule.at(np.arange(3)), [1, 1 / 2, 1 / 3])
    assert calls == [0, 1, 2]


def test_errors_say_what_to_do():
    class Own(schedules.Schedule):
        """One that no file can name."""

    own, made, read = Own(), schedules.tabulated, schedules.from_json
    words = "noise_multiplier=.* is an Own. Expected a number"
    refused(lambda: make(noise_multiplier=own), TypeError, words)
    warmup, text = schedules.Warmup, "then=.* is a str. Expected a number"
    refused(lambda: warmup("1.1", 3), TypeError, text)
    text = "then=.* is a function. Expected a number or a schedule"
    refused(lambda: warmup(lambda step: 1.0, 3), TypeError, text)
    refused(lambda: warmup(None, 3), TypeError, "then=None. Expected a number")
    linear, cosine = schedules.Linear, schedules.Cosine
    refused(lambda: linear(1.0, None, 3), TypeError, "final=None. Expected a number")
    refused(lambda: linear(1.0, 0.5, 0), ValueError, "over=0 is out of range")
    refused(lambda: cosine(1.0, 0.5, 0), ValueError, "over=0 is out of range")
    refused(lambda: schedules.Step(1.0, 0.5, 0), ValueError, "every=0 is out of range")
    refused(lambda: schedules.Exponential(1.0, 0.0), ValueError, "rate=0.0 is out of range")
    endless = "x is a callable and num_steps is None"
    refused(lambda: made("x", lambda step: 1.0, None), ValueError, endless)
    text = r"x\(1\)='a' is a str. Expected a number"
    refused(lambda: made("x", lambda step: "a" if step else 1.0, 2), TypeError, text)
    with pytest.raises(IndexError, match="index 4 is out of bounds .* size 4"):
        schedules.Table((1.0,) * 4).at(4)
    text = "x='cosinus' is unknown. Expected one of adaptive, cosine"
    refused(lambda: read("x", {"schedule": "cosinus"}), ValueError, text)
    text = "is not a schedule. Expected a number or one of"
    refused(lambda: read("x", {"schedule": "step", "initial": 1.0}), ValueError, text)

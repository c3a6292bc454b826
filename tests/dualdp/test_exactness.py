# SPDX-License-Identifier: Apache-2.0
"""Checks in plain numbers: when they are due, and how a fault is told."""

import pickle
import traceback

import numpy as np

import dualdp
from dualdp import exactness
from dualdp.randomness import SegmentBits
from tests.mistakes import refused


def test_checked_steps_are_drawn_from_the_key():
    bits = SegmentBits(None)
    drawn = lambda bits: [exactness.check_at(bits, step, 1 / 50) for step in range(2000)]  # noqa: E731
    checks = drawn(bits)
    assert drawn(bits) == checks != drawn(SegmentBits(None))
    due = [check for check in checks if check]
    assert [check.step // 50 for check in due] == list(range(40))  # one of every fifty
    assert len({check.step % 50 for check in due}) > 10
    assert all(0 <= f < 1 for check in due for f in check.fractions)


def test_a_rate_is_a_share_of_the_steps():
    bits = SegmentBits(None)
    assert not any(exactness.check_at(bits, step, 0) for step in range(100))
    assert exactness.check_at(bits, 0, 0, is_first=True) is None
    assert all(exactness.check_at(bits, step, 1) for step in range(100))
    first = exactness.check_at(bits, 3, 1 / 1000, is_first=True)
    assert (first.step, {first.draw(3) for _ in range(5)} <= {0, 1, 2}) == (3, True)
    assert exactness.checked_rate(None) == exactness.RATE
    wrong = lambda: exactness.checked_rate(1.5)  # noqa: E731
    refused(wrong, ValueError, "checks=1.5 is not a probability")


def test_a_failure_tells_nothing_of_the_data():
    error = dualdp.ExactnessError(
        "A check failed by 1e+00 of the clipping bound.",
        parameters=["a.weight"],
        relative_error="1e+00",
        unprotected_details={"norm": 3.25, "gaps": {"a.weight": 0.0123}},
    )
    assert error.parameters == ("a.weight",)
    assert error.unprotected_details["norm"] == 3.25
    try:
        raise error
    except dualdp.ExactnessError as caught:
        shown = "".join(traceback.format_exception(caught)) + repr(caught)
    copy = pickle.loads(pickle.dumps(error))
    for text in (shown, repr(copy), str(copy.unprotected_details)):
        assert "3.25" not in text
        assert "0.0123" not in text
    assert (str(copy), copy.parameters) == (str(error), ("a.weight",))
    assert copy.relative_error == "1e+00"
    assert copy.unprotected_details == {}


def test_an_error_is_published_as_a_power_of_ten():
    assert exactness.power_of_ten(0.013) == "1e-02"
    assert exactness.power_of_ten(28.0) == "1e+01"
    assert exactness.power_of_ten(0.0) == "1e-99"
    assert exactness.power_of_ten(np.inf) == exactness.power_of_ten(np.nan) == "inf"

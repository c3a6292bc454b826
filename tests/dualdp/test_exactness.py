# SPDX-License-Identifier: Apache-2.0
"""Spot checks in plain numbers: when they are due, what counts as equal, how a fault is told."""

import pickle
import traceback

import numpy as np
import pytest

import dualdp
from dualdp import exactness
from dualdp.randomness import SegmentBits


def sides(**changed):
    """Both sides of one example, equal unless changed."""
    equal = {
        "norm": 2.0,
        "expected_norm": 2.0,
        "gaps": {"a.weight": 0.0, "b.weight": 0.0},
        "sizes": {"a.weight": 0.6, "b.weight": 0.8},
        "groups": {"a.weight": "", "b.weight": ""},
        "bounds": {"": 1.0},
        "scale": 2.0,
    }
    return exactness.Sides(**{**equal, **changed})


def never():
    """What must not be asked for."""
    raise AssertionError("asked for")


def test_checked_steps_are_drawn_from_the_key():
    bits = SegmentBits(None)
    checks = [exactness.check_at(bits, step, 1 / 50) for step in range(2000)]
    steps = [check.step for check in checks if check]
    assert len(steps) == 40
    assert [step // 50 for step in steps] == list(range(40))  # one of every fifty
    assert sum(check.is_whole for check in checks if check) == 8
    again = [exactness.check_at(bits, step, 1 / 50) for step in range(2000)]
    assert again == checks
    other = SegmentBits(None)
    assert steps != [s for s in range(2000) if exactness.check_at(other, s, 1 / 50)]
    assert all(0 <= f < 1 for check in checks if check for f in check.fractions)


def test_a_rate_is_a_share_of_the_steps():
    bits = SegmentBits(None)
    assert not any(exactness.check_at(bits, step, 0) for step in range(100))
    assert exactness.check_at(bits, 0, 0, is_first=True) is None
    assert all(exactness.check_at(bits, step, 1) for step in range(100))
    first = exactness.check_at(bits, 3, 1 / 1000, is_first=True)
    assert first.step == 3
    assert first.is_whole
    assert {first.draw(3) for _ in range(5)} <= {0, 1, 2}
    with pytest.raises(ValueError, match="checks=1.5 is not a probability"):
        exactness.checked_rate(1.5)
    assert exactness.checked_rate(None) == exactness.RATE


@pytest.mark.parametrize("precision", exactness.TOLERANCE)
def test_twice_the_tolerance_is_found_and_half_passes(precision):
    tolerance = exactness.TOLERANCE[precision]
    for share, wrong in ((0.5, False), (2.0, True)):
        error = share * tolerance
        in_norm = sides(norm=2.0 * (1 + error))
        in_sum = sides(gaps={"a.weight": error, "b.weight": 0.0})
        for found in (in_norm, in_sum):
            repeated = lambda error=error: error  # noqa: E731
            assert exactness.is_wrong(found, precision, repeated, lambda: 0.0) is wrong


def test_the_bound_of_a_group_measures_its_own_error():
    """A layer with a small bound is not hidden behind one with a large bound."""
    groups = {"a.weight": "a", "b.weight": "b"}
    gaps = {"a.weight": 1e-4, "b.weight": 0.0}
    found = sides(groups=groups, bounds={"a": 1e-5, "b": 1.0}, gaps=gaps)
    assert found.error == pytest.approx(10)
    assert found.parameters == ["a.weight"]


def test_only_rounding_that_the_loss_amplifies_is_excused():
    found = sides(gaps={"a.weight": 0.05, "b.weight": 0.0})
    assert not exactness.is_wrong(found, "float32", lambda: 1e-8, lambda: 0.03)
    assert exactness.is_wrong(found, "float32", lambda: 1e-8, lambda: 0.001)  # not rounding
    assert exactness.is_wrong(found, "float32", lambda: 1e-2, lambda: 0.03)  # wrong in float64
    assert exactness.is_wrong(found, "float32", lambda: None, lambda: 0.0)
    assert exactness.is_wrong(found, "float32", lambda: np.nan, lambda: 1.0)
    large = sides(gaps={"a.weight": 0.5, "b.weight": 0.0}, sizes={"a.weight": 2.0, "b.weight": 0.0})
    assert exactness.is_wrong(large, "float32", never, never)  # beyond C, whatever the reason


def test_an_example_without_a_finite_norm_must_not_contribute():
    dropped = sides(norm=np.inf, sizes={"a.weight": 0.0, "b.weight": 0.0})
    assert not exactness.is_wrong(dropped, "float32", never, never)
    assert exactness.is_wrong(sides(norm=np.nan), "float32", lambda: None, lambda: 0.0)
    assert sides(gaps={"a.weight": np.nan, "b.weight": 0.0}).error == np.inf


def test_a_failure_tells_nothing_of_the_data():
    found = sides(norm=3.25, gaps={"a.weight": 0.0123, "b.weight": 0.0})
    error = exactness.failure(found, "the contribution of one example", 'Use method="loop".')
    assert error.relative_error == "1e+00"
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
    assert (str(copy), copy.parameters, copy.relative_error) == (
        str(error),
        ("a.weight",),
        "1e+00",
    )
    assert copy.unprotected_details == {}


def test_an_error_is_published_as_a_power_of_ten():
    assert exactness.power_of_ten(0.013) == "1e-02"
    assert exactness.power_of_ten(28.0) == "1e+01"
    assert exactness.power_of_ten(0.0) == "1e-99"
    assert exactness.power_of_ten(np.inf) == exactness.power_of_ten(np.nan) == "inf"

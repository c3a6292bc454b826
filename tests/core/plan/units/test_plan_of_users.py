# SPDX-License-Identifier: Apache-2.0
"""Plans that name their unit: files, epsilon, and the choice between rows and users."""

import json
import math

import numpy as np
import pytest

from dualdp import AccountingError, Ledger, PrivacyPlan, get_epsilon, units


def plan(**changes):
    settings = {"num_examples": 100, "expected_batch_size": 10, "num_steps": 40, "delta": 1e-5}
    settings |= {"noise_multiplier": 1.5, "max_grad_norm": 1.0, "seed": 1}
    return PrivacyPlan(**settings | {"unit": "user", "rows_per_unit": 4} | changes)


def test_a_plan_of_users_is_accounted_as_dp_sgd_on_users():
    assert plan().epsilon() == get_epsilon(
        noise_multiplier=1.5, sample_rate=0.1, num_steps=40, delta=1e-5
    )
    assert plan().epsilon() == plan(rows_per_unit=1).epsilon()


def test_files_name_the_unit_and_older_ones_mean_examples():
    text = plan().to_json()
    again = PrivacyPlan.from_json(text)
    assert (again.unit, again.rows_per_unit) == ("user", 4)
    assert again == plan()
    assert json.loads(text)["dualdp_plan"] == 2
    header = Ledger(plan()).chain.records[0]["plan"]
    assert (header["unit"], header["rows_per_unit"]) == ("user", 4)
    old = plan(unit="example", rows_per_unit=None)
    data = json.loads(old.to_json())
    assert data["dualdp_plan"] == 1
    assert "unit" not in data
    assert PrivacyPlan.from_json(old.to_json()).unit == "example"
    data["unit"] = "user"  # of a file that says version 1: no such plan was ever written
    with pytest.raises(ValueError, match="The text is not a plan"):
        PrivacyPlan.from_json(json.dumps(data))
    with pytest.raises(
        ValueError, match="is a plan of format 3, and this version of dualdp reads format 2"
    ):
        PrivacyPlan.from_json(text.replace('"dualdp_plan": 2', '"dualdp_plan": 3'))


def test_wrong_units_are_refused():
    with pytest.raises(ValueError, match="unit='person' is unknown. Expected one of example, user"):
        plan(unit="person")
    with pytest.raises(ValueError, match="rows_per_unit is missing beside unit='user'"):
        plan(rows_per_unit=None)
    with pytest.raises(ValueError, match="rows_per_unit=0 is out of range"):
        plan(rows_per_unit=0)


COUNTS = np.repeat([1, 3, 4, 4], 25)


@pytest.fixture(scope="module")
def found():
    return plan(rows_per_unit=2).compare_units(COUNTS)


def test_all_options_cost_the_same(found):
    per_step = 0.1 * np.minimum(COUNTS, 2).sum()
    assert {option.rows_per_user for option in found.options} == {1, 2, 4}
    for o in found.options:
        kept = np.minimum(COUNTS, o.rows_per_user)
        rate = per_step / kept.sum()
        if o.sampling == "user":
            batch, group, ever = rate * 100, 1, COUNTS
            differ = o.noise_multiplier / batch / math.sqrt(kept.mean())
        else:
            batch, group, ever = rate * kept.sum(), o.rows_per_user, kept
            differ = o.noise_multiplier / batch
        assert o.unprotected_batch_size == pytest.approx(batch)
        assert o.unprotected_rows_kept == ever.sum() / COUNTS.sum()
        assert o.noise_if_rows_agree == pytest.approx(o.noise_multiplier / batch)
        assert o.noise_if_rows_differ == pytest.approx(differ)
        spent = get_epsilon(
            noise_multiplier=o.noise_multiplier,
            sample_rate=rate,
            num_steps=40,
            delta=1e-5,
            group_size=group,
        )
        assert 0.999 * found.epsilon < spent <= found.epsilon * (1 + 1e-9)
    own = next(o for o in found.options if o[:2] == ("user", 2))
    assert own.noise_multiplier == pytest.approx(1.5, rel=1e-4)
    one = [o for o in found.options if o.rows_per_user == 1]
    assert one[0][2:6] == one[1][2:6]  # one row of each: the two are the same
    assert found.epsilon == plan().epsilon()
    assert [o.noise_if_rows_agree for o in found.options] == sorted(
        o.noise_if_rows_agree for o in found.options
    )


def test_the_table_names_what_is_private(found):
    text = str(found)
    assert "unprotected_rows_kept" in text
    assert text.splitlines()[-1] == found.verdict
    assert len(text.splitlines()) == 2 + len(found.options)


def verdict(*rows):
    made = [units.UnitOption(*row[:2], 1.0, *row[2:], 1.0, 1.0) for row in rows]
    return units.UnitComparison(tuple(made), 1.0, 1e-5).verdict


def test_the_verdict_is_the_least_noise():
    rows = ("example", 2, 0.5, 0.5)
    assert verdict(rows, ("user", 4, 0.2, 0.4)).startswith(
        "User-level sampling with rows_per_unit=4: "
    )
    assert verdict(rows, ("user", 4, 0.6, 0.9)).startswith(
        "Example-level sampling of at most 2 rows"
    )
    assert verdict(rows, ("user", 4, 0.4, 0.9)) == (
        "User-level sampling with rows_per_unit=4 if the rows of a user differ from each other, "
        "example-level sampling of at most 2 rows a user if they are alike."
    )


def test_one_row_of_a_user_is_never_noisier_than_a_binomial_number(found):
    noise = {o[:2]: o.noise_if_rows_agree for o in found.options}
    for (sampling, _), value in noise.items():
        assert sampling == "user" or value >= noise["user", 1] * (1 - 1e-9)


def test_a_plan_of_rows_can_be_compared_too():
    rows = plan(unit="example", rows_per_unit=None, num_examples=175)
    found = rows.compare_units(np.minimum(COUNTS, 2))
    assert {o.unprotected_batch_size for o in found.options if o.sampling == "example"} == {10.0}
    lone = next(o for o in found.options if o[:2] == ("example", 1))
    assert lone.noise_multiplier > rows.noise_multiplier_at(0)  # fewer rows, a higher rate


@pytest.mark.parametrize(
    ("changes", "counts", "error", "message"),
    [
        (
            {},
            COUNTS[1:],
            ValueError,
            "counts has 99 users but the plan has unit='user' and num_exa",
        ),
        ({}, COUNTS / 2, TypeError, "dtype float64. Expected a one-dimensional array of integers"),
        ({}, COUNTS - 2, ValueError, "counts holds a negative number"),
        ({}, 0 * COUNTS, ValueError, "or no rows"),
        ({"sampler": "shuffle"}, COUNTS, AccountingError, "groups of rows have no bound there"),
        ({"neighboring_relation": "replace"}, COUNTS, AccountingError, "groups of rows have no"),
        ({"num_steps": None}, COUNTS, ValueError, "num_steps=None, or a schedule in the plan"),
        ({"noise_multiplier": 0.0}, COUNTS, ValueError, "The plan's epsilon is inf"),
        ({"noise_multiplier": lambda t: 1.0 + t}, COUNTS, ValueError, "or a schedule in the plan"),
    ],
)
def test_what_can_not_be_compared_is_refused(changes, counts, error, message):
    with pytest.raises(error, match=message):
        plan(**changes).compare_units(counts)

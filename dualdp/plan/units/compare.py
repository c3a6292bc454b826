# SPDX-License-Identifier: Apache-2.0
"""Example-level and user-level sampling at the same epsilon, delta, steps and rows per step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.accountants.solve import get_noise_multiplier
from dualdp.plan.accounting import constant_target

if TYPE_CHECKING:
    from dualdp.plan.plan import PrivacyPlan

_MOST_ROWS = 64  # of one user: the noise for a larger group takes seconds


class UnitOption(NamedTuple):
    """One way to protect users; columns that show their counts of rows are `unprotected_`."""

    sampling: str  # "user": users are drawn; "example": rows are, of which a user has few
    rows_per_user: int  # K in one step, or G in the data
    noise_multiplier: float
    noise_if_rows_differ: float  # see `UnitComparison`
    noise_if_rows_agree: float
    unprotected_batch_size: float  # expected number of users, or of rows, in a step
    unprotected_rows_kept: float  # share of all rows that are ever drawn


@dataclass(frozen=True)
class UnitComparison:
    """Ways to protect users at one (epsilon, delta), the least noise first.

    The noise is that in the mean gradient of a step, per coordinate, in units of the norm to
    which the gradient of one row is clipped. `noise_if_rows_agree` takes the rows of a user for
    copies of each other. `noise_if_rows_differ` takes them for as different as those of two users:
    the average of m gradients is then smaller by about sqrt(m), and so may be its bound. The truth
    lies between.

    The whole table is computed from the counts of rows, which are private: it is for the choice of
    a run, and not for publication.
    """

    options: tuple[UnitOption, ...]
    epsilon: float
    delta: float

    @property
    def verdict(self) -> str:
        """One sentence: which of them to take."""
        differ = min(self.options, key=lambda o: o.noise_if_rows_differ)
        agree = min(self.options, key=lambda o: o.noise_if_rows_agree)
        if differ == agree:
            return f"{_name(agree)}: the least noise, however alike the rows of a user are."
        first, second = _name(differ), _name(agree)
        return (
            f"{first} if the rows of a user differ from each other, "
            f"{second[0].lower()}{second[1:]} if they are alike."
        )

    def __str__(self) -> str:
        """Return the table and the verdict as text."""
        head = (
            f"{'sampling':<10}{'rows a user':>12}{'noise multiplier':>18}{'if rows differ':>16}"
            f"{'if they agree':>15}{'unprotected_batch_size':>24}{'unprotected_rows_kept':>23}"
        )
        lines = [
            f"{o.sampling:<10}{o.rows_per_user:>12}{o.noise_multiplier:>18.4g}"
            f"{o.noise_if_rows_differ:>16.3g}{o.noise_if_rows_agree:>15.3g}"
            f"{o.unprotected_batch_size:>24.5g}{o.unprotected_rows_kept:>23.1%}"
            for o in self.options
        ]
        return "\n".join([head, *lines, self.verdict])


def _name(option: UnitOption) -> str:
    """Words for one option."""
    if option.sampling == "user":
        return f"User-level sampling with rows_per_unit={option.rows_per_user}"
    return f"Example-level sampling of at most {option.rows_per_user} rows a user"


def compare_units(plan: PrivacyPlan, counts: Any) -> UnitComparison:
    """Compare example-level with user-level sampling for a plan: the same steps, rows, epsilon.

    Example-level sampling keeps at most G rows of each user and draws rows; a user's number of
    hits is then binomial, which the mixture accountant takes as it is. User-level sampling draws
    users, and K rows of each, averages and clips once.

    Args:
        plan: `PrivacyPlan` with sampler "poisson" and a constant batch size; its epsilon is the
            target if it has one, else what the whole plan spends.
        counts: (users,) integers >= 0, number of rows of each user.

    Raises:
        AccountingError: a sampler or relation without a bound for groups.
        TypeError, ValueError: counts of another form, or a plan that is not constant.

    Guarantees:
        A user is protected by the same epsilon in every line.  [test_all_options_cost_the_same]

    Source: Charles et al. 2024 (arXiv 2407.07737), section 4.
    """
    rows = _checked_counts(plan, counts)
    if plan.sampler != "poisson" or plan.neighboring_relation == "replace" or plan.correlation:
        raise AccountingError(
            f"sampler={plan.sampler!r}, neighboring_relation={plan.neighboring_relation!r}, "
            f"correlation={plan.correlation}: groups of rows have no bound there. Expected "
            "'poisson', 'add_or_remove' or 'zero_out', and no correlation."
        )
    target = constant_target(plan)
    rate = plan.sample_rate
    per_step = rate * float(rows.sum())
    if plan.unit == "user":
        per_step = rate * float(np.minimum(rows, plan.rows_per_unit or 1).sum())
    sizes = {1, plan.rows_per_unit or int(rows.max())}
    sizes |= {1 << i for i in range(7) if 1 << i < 2 * int(rows.max())}
    run: dict[str, Any] = {"target_epsilon": target, "target_delta": plan.delta}
    run |= {"num_steps": plan.num_steps, "neighboring_relation": plan.neighboring_relation}
    found = []
    for size in sorted(sizes):
        kept = np.minimum(rows, size)
        run["sample_rate"] = per_step / kept.sum()  # of a user, and of a row
        if run["sample_rate"] > 1:
            continue
        users = run["sample_rate"] * len(rows)
        sigma = get_noise_multiplier(**run)
        noise = sigma / users
        smaller = math.sqrt(float(kept[kept > 0].mean()))
        found.append(UnitOption("user", size, sigma, noise / smaller, noise, users, 1.0))
        if size > _MOST_ROWS:
            continue
        sigma = get_noise_multiplier(**run, group_size=size)
        noise = sigma / per_step
        share = float(kept.sum() / rows.sum())
        found.append(UnitOption("example", size, sigma, noise, noise, per_step, share))
    found.sort(key=lambda option: option.noise_if_rows_agree)
    return UnitComparison(tuple(found), target, plan.delta)


def _checked_counts(plan: PrivacyPlan, counts: Any) -> Any:
    """(users,) counts, which agree with the plan's number of units."""
    rows = np.asarray(counts)
    if rows.dtype.kind not in "iu" or rows.ndim != 1:
        raise TypeError(
            f"counts is {_validate.kind(counts)} of shape {rows.shape} and dtype {rows.dtype}. "
            "Expected a one-dimensional array of integers, the number of rows of each user."
        )
    if rows.min(initial=0) < 0 or not rows.sum():
        raise ValueError(
            "counts holds a negative number, or no rows. Expected the number of rows of each user."
        )
    number = len(rows) if plan.unit == "user" else int(rows.sum())
    if number != plan.num_examples:
        what = "users" if plan.unit == "user" else "rows"
        raise ValueError(
            f"counts has {number} {what} but the plan has unit={plan.unit!r} and num_examples="
            f"{plan.num_examples}. Expected a plan for these {what}."
        )
    return rows

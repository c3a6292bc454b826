# SPDX-License-Identifier: Apache-2.0
"""Epsilon grows with steps and rate, falls with noise and delta; parts compose to the whole.

To one part in 1e9, in ordinary settings and in the corners; the one corner with a larger tolerance
is `is_rounding_bound`, as docs/accounting.md says in section 8.
"""

import numpy as np
import pytest

from dualdp import accountants
from dualdp.accountants.pld_engine import certified
from dualdp.accountants.solve import (
    get_delta,
    get_epsilon,
)
from tests.cases import accounting as cases
from tests.dualdp.accountants.lower import lower

RELATIVE, ABSOLUTE = 1e-9, 1e-10
CORNER = 0.03


def is_rounding_bound(run):
    """Rare, huge losses decide a tiny delta: no tilt lifts them above rounding everywhere."""
    return run["delta"] < 1e-13 * run["num_steps"] and run["sample_rate"] < 0.01


def tolerance(run, epsilon):
    """How much larger the epsilon of an easier run may be reported."""
    if is_rounding_bound(run):
        return CORNER * epsilon
    return (RELATIVE if epsilon < 2e3 else 1e-4) * epsilon + ABSOLUTE


def easier(run, factor):
    """The run with more noise, a smaller rate, fewer steps, or a larger delta."""
    yield run | {"noise_multiplier": run["noise_multiplier"] * factor}
    yield run | {"sample_rate": run["sample_rate"] / factor}
    yield run | {"num_steps": int(run["num_steps"] / factor)}
    yield run | {"delta": min(0.9, run["delta"] * factor)}


def account(*steps):
    made = accountants.create("pld")
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count)
    return made


@pytest.mark.parametrize(
    ("count", "seed", "extreme", "options"),
    [
        (40, 1, False, {}),
        (12, 50, False, {"neighboring_relation": "replace"}),
        (12, 51, False, {"accountant": "rdp"}),
        pytest.param(40, 2, True, {}, marks=pytest.mark.slow),
    ],
)
def test_epsilon_is_monotone(count, seed, extreme, options):
    """Random settings, each made easier by a factor from 1 + 1e-6 to 2."""
    factors = 1 + 10 ** np.random.default_rng(seed).uniform(-6, 0, count)
    runs = cases.settings(count, seed, extreme=extreme)
    for run, factor in zip(runs, factors.tolist(), strict=True):
        base = get_epsilon(**run, **options)
        assert base >= 0
        for other in easier(run, factor):
            found = get_epsilon(**other, **options)
            assert found <= base + tolerance(run, base), (run, other, found / base - 1)


@pytest.mark.parametrize(
    ("count", "extreme"), [(20, False), pytest.param(40, True, marks=pytest.mark.slow)]
)
def test_an_added_step_never_lowers_epsilon(count, extreme):
    pairs = (cases.settings(count, seed, extreme=extreme) for seed in (40, 41))
    for run, other in zip(*pairs, strict=True):
        run["num_steps"] = min(run["num_steps"], certified.FEW - 2)
        sizes = (run["noise_multiplier"], run["sample_rate"], run["num_steps"])
        base = get_epsilon(**run)
        added = (other["noise_multiplier"], other["sample_rate"], 1 + run["num_steps"] % 2)
        more = account(sizes, added).get_epsilon(delta=run["delta"])
        assert more >= base - tolerance(run, base), (run, other)


@pytest.mark.parametrize("extreme", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_upper_is_above_every_lower_bound(extreme):
    """The lower bound is below the upper one, which is what get_epsilon says; halves compose."""
    for run in cases.settings(8, seed=30, extreme=extreme):
        sizes, delta = (run["noise_multiplier"], run["sample_rate"], run["num_steps"]), run["delta"]
        _, estimate, upper = account(sizes).epsilon_bounds(delta=delta)
        assert 0 <= lower(account(sizes), delta) <= estimate == upper == get_epsilon(**run)
        half = sizes[2] // 2
        parts = (*sizes[:2], half), (*sizes[:2], sizes[2] - half)
        both = account(parts[0])
        both.merge(account(parts[1]))
        assert both.get_epsilon(delta=delta) == account(*parts).get_epsilon(delta=delta) == upper


RARE = {
    "noise_multiplier": 0.690496038701488,
    "sample_rate": 8.743603263749174e-06,
    "num_steps": 5002235,
    "delta": 4.8135517946900376e-26,
}
CERTAIN = {
    "noise_multiplier": 0.08523210626780636,
    "sample_rate": 0.30501521208173554,
    "num_steps": 843791,
    "delta": 1.1729827073254217e-07,
}


@pytest.mark.parametrize(
    ("run", "easier_one"),
    [
        (RARE, {"noise_multiplier": RARE["noise_multiplier"] * 1.001}),
        (CERTAIN, {"sample_rate": 0.21319290169889882}),
    ],
)
def test_monotone_where_a_window_fails(run, easier_one):
    """Rounding above delta; a direction with no window, but with a largest loss."""
    assert get_epsilon(**(run | easier_one)) <= get_epsilon(**run)


def test_the_largest_losses_are_cut_off_where_rounding_decides():
    """A bound of 0.03, not 0.44: above the lower bound, and no step of another kind lowers it."""
    run = {"noise_multiplier": 0.8542574816215336, "sample_rate": 8.99521260045251e-08}
    delta = 1.098510275e-27
    account_ = account((*run.values(), 1601))
    upper = account_.get_epsilon(delta=delta)
    assert 0 <= lower(account_, delta) <= upper < 0.04
    account_.step(noise_multiplier=5.175876836163716, sample_rate=0.02223640330579644, num_steps=2)
    assert account_.get_epsilon(delta=delta) >= upper * (1 - CORNER)


@pytest.mark.slow
def test_delta_is_monotone():
    rng = np.random.default_rng(3)
    for run in cases.settings(30, 60, extreme=False):
        run.pop("delta")
        epsilon, factor = 10 ** rng.uniform(-2, 1), 1 + 10 ** rng.uniform(-6, 0)
        base = get_delta(**run, epsilon=epsilon)
        resolved = base > 1e-13 * run["num_steps"]
        most = base * (1 + 1e-8) if resolved else 1e-13 * run["num_steps"]
        for other in easier(run | {"delta": 1.0}, factor):
            other.pop("delta")
            assert get_delta(**other, epsilon=epsilon) <= most, (run, other)
        assert get_delta(**run, epsilon=epsilon * factor) <= most


def test_a_memo_tells_other_mechanisms_apart():
    """A kind that came with no release at first, and has some later, stands in the middle then."""
    grown, steps = (
        accountants.create("pld"),
        [(2.0 - 0.01 * i, 0.02, int(i != 3)) for i in range(70)],
    )
    for sigma, rate, count in steps:
        grown.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count)
    grown.get_epsilon(delta=1e-5)
    grown.step(noise_multiplier=1.97, sample_rate=0.02)
    whole = account(*(step if step[2] else (*step[:2], 1) for step in steps))
    assert grown.get_epsilon(delta=1e-5) == pytest.approx(whole.get_epsilon(delta=1e-5), rel=1e-9)


@pytest.mark.slow
def test_asking_after_every_step_gives_the_same():
    grown = accountants.create("pld")
    steps = [(2.0 * 0.995**i, 0.02, 1) for i in range(72)]
    for sigma, rate, _ in steps:
        grown.step(noise_multiplier=sigma, sample_rate=rate)
        now = grown.get_epsilon(delta=1e-5)
    assert now == pytest.approx(account(*steps).get_epsilon(delta=1e-5), rel=1e-8)
    grown.step(noise_multiplier=2.0, sample_rate=0.02, num_steps=5)  # more of an early one
    more = account((2.0, 0.02, 6), *steps[1:])
    assert grown.get_epsilon(delta=1e-5) == pytest.approx(more.get_epsilon(delta=1e-5), rel=1e-8)


@pytest.mark.slow
def test_epsilon_after_every_step_reads_the_new_step_only(monkeypatch):
    """3,000 mechanisms, and at each of the last 20 questions one of them goes into a sum."""
    read, right = [], certified.PrefixMemo.total

    def total(self, key, terms, empty, pmfs):
        def counted(rest):
            read.append(sum(term.counts.size for term in rest))
            return pmfs(rest)

        return right(self, key, terms, empty, counted)

    monkeypatch.setattr(certified.PrefixMemo, "total", total)
    made, steps, last = accountants.create("pld"), 3_000, 0.0
    for i in range(steps):
        made.step(noise_multiplier=2.0 - 1.2 * i / steps, sample_rate=0.01 * (1 - 0.5 * i / steps))
        if i == steps - 21:
            made.get_epsilon(delta=1e-5)
            read.clear()
        if i > steps - 21:
            now = made.get_epsilon(delta=1e-5)
            assert now >= last * (1 - RELATIVE)
            last = now
    assert len(read) >= 20
    assert np.median(read) <= 1

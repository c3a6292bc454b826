# SPDX-License-Identifier: Apache-2.0
"""Epsilon grows with steps and rate, falls with noise and delta; parts compose to the whole.

To one part in 1e9, in ordinary settings and in the corners; the one corner with a larger tolerance
is `is_rounding_bound`, as docs/accounting.md says in section 8.
"""

import math
import tracemalloc

import numpy as np
import pytest

from dualdp import accountants
from dualdp.accountants.pld_engine import certified
from dualdp.accountants.pld_engine.composition import Grid
from dualdp.accountants.solve import (
    get_delta,
    get_epsilon,
    get_noise_multiplier,
    get_num_steps,
    get_sample_rate,
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


def check_monotone(run, factor, **options):
    """Epsilon of the easier runs, beside the run's own."""
    base = get_epsilon(**run, **options)
    assert base >= 0
    for other in easier(run, factor):
        found = get_epsilon(**other, **options)
        assert found <= base + tolerance(run, base), (run, other, found / base - 1)


def check_many(count, seed, *, extreme, **options):
    """Random settings, each made easier by a factor from 1 + 1e-6 to 2."""
    factors = 1 + 10 ** np.random.default_rng(seed).uniform(-6, 0, count)
    for run, factor in zip(
        cases.settings(count, seed, extreme=extreme), factors.tolist(), strict=True
    ):
        check_monotone(run, factor, **options)


def account(*steps):
    made = accountants.create("pld")
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count)
    return made


def check_bounds(run):
    """The lower bound is below the upper one, which is what get_epsilon says; halves compose."""
    sizes = (run["noise_multiplier"], run["sample_rate"], run["num_steps"])
    _, estimate, upper = account(sizes).epsilon_bounds(delta=run["delta"])
    assert 0 <= lower(account(sizes), run["delta"]) <= estimate == upper == get_epsilon(**run)
    half = sizes[2] // 2
    both = account((*sizes[:2], half))
    both.merge(account((*sizes[:2], sizes[2] - half)))
    assert both.get_epsilon(delta=run["delta"]) == upper
    parts = account((*sizes[:2], half), (*sizes[:2], sizes[2] - half))
    assert parts.get_epsilon(delta=run["delta"]) == upper


def check_added(run, other, count):
    """Steps of another kind, added to a run, never lower its epsilon."""
    sizes = (run["noise_multiplier"], run["sample_rate"], run["num_steps"])
    base = get_epsilon(**run)
    more = account(sizes, (other["noise_multiplier"], other["sample_rate"], count))
    assert more.get_epsilon(delta=run["delta"]) >= base - tolerance(run, base), (run, other)


def check_all_added(count, seed, *, extreme):
    for run, other in zip(
        cases.settings(count, seed, extreme=extreme),
        cases.settings(count, seed + 1, extreme=extreme),
        strict=True,
    ):
        run["num_steps"] = min(run["num_steps"], certified.FEW - 2)
        check_added(run, other, 1 + run["num_steps"] % 2)


def test_monotone_in_ordinary_settings():
    check_many(80, 1, extreme=False)


@pytest.mark.slow
def test_monotone_in_corners():
    check_many(20, 2, extreme=True)


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
def test_monotone_in_many_settings():
    check_many(60, 10, extreme=False)


@pytest.mark.slow
def test_monotone_in_many_corners():
    check_many(20, 20, extreme=True)


@pytest.mark.slow
def test_bounds_in_many_settings():
    for extreme in (False, True):
        for run in cases.settings(15, seed=30, extreme=extreme):
            check_bounds(run)


def test_an_added_step_never_lowers_epsilon():
    check_all_added(25, 40, extreme=False)


@pytest.mark.slow
def test_added_steps_never_lower_epsilon_in_many_settings():
    check_all_added(60, 42, extreme=False)
    check_all_added(38, 44, extreme=True)


@pytest.mark.slow
def test_one_more_step_never_costs_less():
    made = accountants.create("pld")
    last = 0.0
    for step in range(60):
        made.step(noise_multiplier=2.0 * 0.98**step, sample_rate=0.02)
        now = made.get_epsilon(delta=1e-5)
        assert now >= last
        last = now


@pytest.mark.parametrize("relation", ["replace", "zero_out"])
def test_every_relation_is_monotone(relation):
    check_many(12, 50, extreme=False, neighboring_relation=relation)


@pytest.mark.slow
def test_the_renyi_bound_is_monotone():
    check_many(30, 51, extreme=False, accountant="rdp")
    check_many(30, 52, extreme=True, accountant="rdp")


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


@pytest.mark.slow
def test_calibrated_noise_is_monotone():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000}
    base = get_noise_multiplier(**target)
    for factor in (1 + 1e-6, 1.003, 1.9):
        for harder in (
            {"target_epsilon": 1 / factor},
            {"target_delta": 1e-5 / factor},
            {"sample_rate": 0.01 * factor},
            {"num_steps": math.ceil(1000 * factor)},
        ):
            assert get_noise_multiplier(**(target | harder)) >= base * (1 - 1e-9)


@pytest.mark.slow
def test_calibrated_steps_and_rates_are_monotone():
    steps = {"target_epsilon": 1.0, "target_delta": 1e-5, "noise_multiplier": 1.4}
    rates = steps | {"num_steps": 1000}
    steps |= {"sample_rate": 0.01}
    for factor in (1 + 1e-6, 1.003, 1.9):
        easy = {"noise_multiplier": 1.4 * factor}
        assert get_num_steps(**(steps | easy)) >= get_num_steps(**steps)
        assert get_sample_rate(**(rates | easy)) >= get_sample_rate(**rates) * (1 - 1e-9)


def test_coarse_edges_are_edges_of_every_finer_grid():
    for low, high in ((-3, 5), (-17, 1000), (-100, 64), (0, 65), (0, 0)):
        for octave in (4, 32):
            coarse = Grid(1.0, octave).edges(low, high)
            assert coarse[0] <= low
            assert coarse[-1] >= high
            finer = Grid(0.25, 2 * octave).edges(4 * low, 4 * high)
            assert set(4 * coarse[1:-1]) <= set(finer)


def test_a_lattice_that_follows_the_steps_is_caught(monkeypatch):
    """With a lattice from each history's own mean variance, small steps would lower epsilon."""
    monkeypatch.setattr(certified, "FEW", 1)
    monkeypatch.setattr(certified, "POINTS", (1 << 13,) * 3)
    with pytest.raises(AssertionError):
        check_added(
            {"noise_multiplier": 1.0, "sample_rate": 0.1, "num_steps": 3, "delta": 1e-5},
            {"noise_multiplier": 50.0, "sample_rate": 1e-4},
            40,
        )


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


@pytest.fixture
def mechanisms_read(monkeypatch):
    """Counts the mechanisms of each question that go into a sum, over all sums of the question."""
    read, right = [], certified.PrefixMemo.total

    def total(self, key, terms, empty, pmfs):
        def counted(rest):
            read.append(sum(term.counts.size for term in rest))
            return pmfs(rest)

        return right(self, key, terms, empty, counted)

    monkeypatch.setattr(certified.PrefixMemo, "total", total)
    return read


def usually_read(steps, asked, read):
    """Median of mechanisms that a question at the end of a long schedule puts into a sum."""
    made = accountants.create("pld")

    def grow(i):
        noise = 2.0 - 1.2 * i / steps
        made.step(noise_multiplier=noise, sample_rate=0.01 * (1 - 0.5 * i / steps))

    for i in range(steps - asked):
        grow(i)
    last = made.get_epsilon(delta=1e-5)
    read.clear()
    for i in range(steps - asked, steps):
        grow(i)
        now = made.get_epsilon(delta=1e-5)
        assert now >= last * (1 - RELATIVE)
        last = now
    assert len(read) >= asked
    return float(np.median(read))


@pytest.mark.slow
def test_epsilon_after_every_step_reads_the_new_step_only(mechanisms_read):
    assert usually_read(3_000, 40, mechanisms_read) <= 1


@pytest.mark.slow
def test_epsilon_after_every_step_of_a_long_run_takes_little_memory(mechanisms_read):
    tracemalloc.start()
    try:
        assert usually_read(20_000, 100, mechanisms_read) <= 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_without_its_memory_a_question_reads_every_step(monkeypatch, mechanisms_read):
    monkeypatch.setattr(certified, "beyond", lambda terms, earlier: None)
    assert usually_read(3_000, 3, mechanisms_read) >= 2_998

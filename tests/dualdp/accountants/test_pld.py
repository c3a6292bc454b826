# SPDX-License-Identifier: Apache-2.0
"""The default accountant: published values, exact cases, monotonicity, state, refusals."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from dualdp import AccountingError, accountants, mechanisms
from dualdp.accountants.solve import get_epsilon
from tests.cases import accounting as cases
from tests.dualdp.accountants.lower import lower


def account(*steps, name="pld", relation="add_or_remove", **step):
    made = accountants.create(name, neighboring_relation=relation)
    for sigma, rate, *count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=(count or [1])[0], **step)
    return made


@pytest.mark.parametrize("row", cases.PUBLISHED["dp_sgd"], ids=lambda row: row["source"])
def test_published_runs(row):
    low, high = row["bracket"]
    assert low <= get_epsilon(**cases.run_of(row)) <= 1.01 * high
    sigma, rate, steps = row["noise_multiplier"], row["sample_rate"], row["num_steps"]
    made = account((sigma, rate, steps))
    below, (_, estimate, upper) = (
        lower(made, row["delta"], 2e-4),
        made.epsilon_bounds(delta=row["delta"], rtol=2e-4),
    )
    assert below <= estimate <= upper
    assert below <= high
    assert upper >= low
    assert upper <= 1.0015 * below


def test_two_different_steps():
    (row,) = cases.PUBLISHED["exact_two_step"]
    made = account(*row["steps"])
    below, upper = lower(made, row["delta"], 1e-3), made.get_epsilon(delta=row["delta"])
    assert below <= row["remove"] <= upper
    assert upper - below < 2e-3 * upper


def test_full_batches_are_one_gaussian():
    mixed = account((2.0, 1.0, 3), (1.0, 1.0, 2))
    assert mixed.get_epsilon(delta=1e-5) == pytest.approx(
        account((1 / math.sqrt(2.75), 1.0)).get_epsilon(delta=1e-5), rel=1e-9
    )


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_schedules(n):
    low, high = cases.PUBLISHED["schedule_2.0_to_0.8_exponential_q0.01_delta1e-5"][str(n)]
    made = account(*((2.0 * 0.4 ** (i / (n - 1)), 0.01) for i in range(n)))
    below, upper = lower(made, 1e-5), made.get_epsilon(delta=1e-5)
    assert low <= upper <= 1.01 * high
    assert below <= high
    assert upper <= 1.011 * below


@pytest.mark.parametrize("delta", ["1e-12", "1e-20"])
def test_tiny_deltas(delta):
    low, high = cases.PUBLISHED["tiny_delta_1_0.01_1000"][delta]
    upper = account((1.0, 0.01, 1000)).get_epsilon(delta=float(delta))
    assert low <= upper <= 1.01 * high


def test_a_replaced_example_costs_its_exact_pair():
    replaced = account((1.0, 0.01, 1000), relation="replace")
    assert 3.1 < lower(replaced, 1e-6) < 3.3
    assert replaced.get_epsilon(delta=1e-6) > 15


def test_shuffling_is_not_amplified():
    run = {"noise_multiplier": 2.0, "sample_rate": 0.01, "delta": 1e-5}
    whole = get_epsilon(**(run | {"sample_rate": 1.0}), num_steps=3)
    assert get_epsilon(**run, num_steps=300, sampler="shuffle") == whole
    assert get_epsilon(**run, num_steps=201, sampler="shuffle") == whole
    assert get_epsilon(**run, num_steps=300) < 0.1 * whole


def test_truncation_costs_a_delta_where_it_can_happen():
    run = {"noise_multiplier": 1.0, "sample_rate": 0.01, "num_steps": 1000, "delta": 1e-5}
    sizes = {"num_examples": 10_000, "sampler": "truncated_poisson"}
    plain = get_epsilon(**run)
    assert get_epsilon(**run, **sizes, max_batch_size=10_001) == pytest.approx(plain, rel=1e-9)
    some = get_epsilon(**run, **sizes, max_batch_size=200)
    assert plain <= some < 1.01 * plain
    assert get_epsilon(**run, **sizes, max_batch_size=100) == math.inf
    with pytest.raises(TypeError, match="num_examples=None. Expected an integer"):
        get_epsilon(**run, sampler="truncated_poisson")


def test_truncation_costs_as_much_among_billions_of_examples():
    """The binomial tail of SciPy that takes 32-bit integers gave 0 for them."""
    run = {"noise_multiplier": 1.0, "num_steps": 100, "sampler": "truncated_poisson"}
    for most in (1100, 1200):
        fewer, more = (
            cases.get_delta(
                **run, epsilon=1.0, num_examples=n, sample_rate=1000 / n, max_batch_size=most
            )
            for n in (2 * 10**9, 10**10)
        )
        assert fewer == pytest.approx(more, rel=1e-3)
        assert more >= 0.999 * min(1, 100 * (1 + math.e) * poisson_tail(1000, most))


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(3.0, 0.1, 100), (4.0, 0.01, 2000)])
def test_a_tiny_delta_is_not_told_as_a_large_one(sigma, rate, steps):
    """Below 1e-100 a lattice says little; it said 0.17 where 1e-66 is proved."""
    run, renyi = account((sigma, rate, steps)), account((sigma, rate, steps), name="rdp")
    for epsilon in (2.0, 4.5, 7.8, 11.8, 23.0):
        delta = run.get_delta(epsilon=epsilon)
        assert delta <= renyi.get_delta(epsilon=epsilon) * (1 + 1e-9)


def test_sizes_of_another_sampler_are_refused():
    """Poisson's epsilon was printed for batches that are cut."""
    run = {"noise_multiplier": 1.0, "sample_rate": 0.03, "num_steps": 30, "delta": 1e-5}
    with pytest.raises(AccountingError, match="max_batch_size=20 with sampler='poisson', whose"):
        get_epsilon(**run, num_examples=1000, max_batch_size=20)
    with pytest.raises(AccountingError, match="epochs_per_assignment=5 with sampler='poisson'"):
        account((1.0, 0.1, 50), epochs_per_assignment=5)


def poisson_tail(mean, most):
    """P(Poisson(mean) > most), which a binomial of a small rate has within its rate."""
    term, total, k = math.exp((most + 1) * math.log(mean) - mean - math.lgamma(most + 2)), 0.0, most
    while term > 1e-20 * total:
        k += 1
        total, term = total + term, term * mean / (k + 1)
    return total


def test_sampling_without_replacement_needs_its_relation():
    run = {"noise_multiplier": 4.0, "sample_rate": 0.01, "num_steps": 100, "delta": 1e-5}
    with pytest.raises(AccountingError, match="Use neighboring_relation='replace'"):
        get_epsilon(**run, sampler="fixed_size")
    fixed = get_epsilon(**run, sampler="fixed_size", neighboring_relation="replace")
    assert fixed > get_epsilon(**run, neighboring_relation="replace") > get_epsilon(**run)
    whole = get_epsilon(
        **(run | {"sample_rate": 1.0}), sampler="fixed_size", neighboring_relation="replace"
    )
    assert whole == get_epsilon(**(run | {"sample_rate": 1.0, "noise_multiplier": 2.0}))


@pytest.mark.parametrize("name", ["pld", "rdp"])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_replacing_doubles_the_sensitivity_everywhere(name, rate):
    run = {"sample_rate": rate, "num_steps": 200, "delta": 1e-6, "accountant": name}
    doubled = get_epsilon(noise_multiplier=3.0, neighboring_relation="replace", **run)
    assert doubled == pytest.approx(get_epsilon(noise_multiplier=1.5, **run), rel=1e-6)
    zero = get_epsilon(noise_multiplier=1.5, neighboring_relation="zero_out", **run)
    assert zero == get_epsilon(noise_multiplier=1.5, **run)


def test_groups_that_have_no_bound_are_refused():
    run = {"noise_multiplier": 3.0, "sample_rate": 0.01, "num_steps": 100}
    full = run | {"sample_rate": 1.0, "delta": 1e-6}
    assert get_epsilon(**full, group_size=3) == get_epsilon(**(full | {"noise_multiplier": 1.0}))
    with pytest.raises(AccountingError, match="has no proved bound here"):
        accountants.create("pld", neighboring_relation="replace", group_size=2)
    with pytest.raises(AccountingError, match="one example added, removed or zeroed"):
        get_epsilon(**run, delta=1e-6, group_size=2, sampler="balls_in_bins")
    with pytest.raises(AccountingError, match="Expected at most 1000"):
        get_epsilon(**run, delta=1e-6, group_size=1001)


OTHERS = [
    (mechanisms.Laplace(1.0), 20, 1e-4, 18.0938),  # dp-accounting 0.6.0, PLD
    (mechanisms.Laplace(1.0), 500, 1e-4, 248.9433),
    (mechanisms.DiscreteGaussian(2.0), 10, 1e-4, None),
    (mechanisms.RandomizedResponse(0.5, 3), 10, 1e-4, None),
    (mechanisms.ApproximateDP(0.1, 1e-9), 50, 1e-5, None),
    (mechanisms.MassTable((0.6, 0.4), (0.4, 0.6)), 10, 1e-4, None),
]


@pytest.mark.parametrize(("event", "count", "delta", "peer"), OTHERS)
def test_other_mechanisms(event, count, delta, peer):
    made = accountants.create("pld")
    made.compose(event, count)
    below, upper = lower(made, delta), made.get_epsilon(delta=delta)
    assert 0 < below <= upper <= 1.011 * below
    if peer is not None:
        assert below <= peer <= upper
    made.compose(event)
    assert made.get_epsilon(delta=delta) >= upper * (1 - 1e-9)


def test_huge_discrete_noise_is_refused_and_not_enumerated():
    made = accountants.create("pld")
    with pytest.raises(AccountingError, match="Expected at most 10000, or use accountant='rdp'"):
        made.compose(mechanisms.DiscreteGaussian(1e7))
    made.compose(mechanisms.DiscreteGaussian(1e3), 20)
    same = accountants.create("pld")
    same.compose(mechanisms.Gaussian(1e3), 20)
    assert made.get_epsilon(delta=1e-5) == pytest.approx(same.get_epsilon(delta=1e-5), rel=0.01)
    other = accountants.create("rdp")
    other.compose(mechanisms.DiscreteGaussian(1e7), 20)
    assert 0 < other.get_epsilon(delta=1e-9) < 0.01


def test_pure_bounds_at_delta_zero():
    made = accountants.create("pld")
    made.compose(mechanisms.Laplace(2.0), 4)
    made.compose(mechanisms.RandomizedResponse(0.5, 2), 1)
    assert made.get_epsilon(delta=0) == pytest.approx(2 + math.log(3), rel=1e-9)
    assert made.get_delta(epsilon=3.2) == 0
    made.step(noise_multiplier=1.0, sample_rate=0.1)
    assert made.get_epsilon(delta=0) == math.inf
    table = accountants.create("pld")
    table.compose(mechanisms.MassTable((0.5, 0.5), (1.0, 0.0)))
    assert table.get_epsilon(delta=0) == math.inf


DEGENERATE = [
    (mechanisms.RandomizedResponse(1.0), (0, 0)),
    (mechanisms.ApproximateDP(0.0, 1e-3), (math.inf, 1 - 0.999**3)),
    (mechanisms.ApproximateDP(0.0, 1e-7), (0, -math.expm1(3 * math.log1p(-1e-7)))),
    (mechanisms.MassTable((1.0, 0.0), (0.5, 0.5)), (math.inf, 1 - 0.5**3)),
    (mechanisms.MassTable((0.5, 0.5), (0.5, 0.5)), (0, 0)),
    (mechanisms.Laplace(1e9), (0, 0)),
    (mechanisms.Laplace(1e-6), (3e6, 1)),  # losses beyond all that a lattice holds
    (mechanisms.ApproximateDP(1e5), (3e5, 1)),
    (mechanisms.PoissonSubsampledGaussian(1.0, 1e-300), (0, 0)),
]


@pytest.mark.parametrize(("event", "truth"), DEGENERATE)
def test_degenerate_mechanisms(event, truth):
    made = accountants.create("pld")
    made.compose(event, 3)
    upper = made.get_epsilon(delta=1e-5)
    assert truth[0] <= upper * (1 + 1e-12)
    assert upper == pytest.approx(truth[0], rel=1e-9, abs=1e-8)
    assert truth[1] <= made.get_delta(epsilon=1.0) <= truth[1] * 1.001 + 1e-9


@pytest.mark.parametrize(
    ("p", "q"), [((0.9999, 0.0001), (0.9, 0.1)), ((0.6, 0.3999, 0.0001), (0.3, 0.6, 0.1))]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_a_table_may_be_either_way_round(p, q, delta):
    """Of two examples that replace each other, either may be the one with the table p."""
    made = accountants.create("pld", neighboring_relation="replace")
    made.step(noise_multiplier=1.0, sample_rate=0.01)
    made.compose(mechanisms.MassTable(p, q))
    edges = np.linspace(-14, 14, 28_001)
    masses = lambda mean: np.diff(ndtr(edges - mean))  # noqa: E731
    one, other = (0.99 * masses(0) + 0.01 * masses(mean) for mean in (1, -1))
    epsilon = made.get_epsilon(delta=delta)
    for left, right in ((p, q), (q, p)):
        excess = np.outer(one, left) - math.exp(epsilon) * np.outer(other, right)
        assert np.maximum(excess, 0).sum() <= delta


def test_limits():
    assert account().epsilon_bounds(delta=1e-5) == (0, 0, 0)
    assert account().get_delta(epsilon=1.0) == 0
    assert account((1.0, 0.0, 100)).get_epsilon(delta=0) == 0
    assert account((0.0, 0.01, 1)).get_epsilon(delta=1e-5) == math.inf
    assert account((0.0, 0.01, 1)).get_delta(epsilon=1.0) == 1
    assert account((1.0, 0.01, 1)).get_epsilon(delta=1.0) == 0
    assert account((10.0, 1e-4, 10)).get_epsilon(delta=0.1) < 1e-9
    assert account((1e-4, 0.5, 10)).get_epsilon(delta=1e-5) > 1e6
    assert account((1e-320, 0.5, 10)).get_epsilon(delta=1e-5) > 1e16
    with pytest.raises(AccountingError, match="is below 1e-150"):
        account((1.0, 0.1, 2)).get_epsilon(delta=1e-200)


def test_bad_questions():
    made = account((1.0, 0.1, 3))
    for delta in (-1e-5, 1.5, math.nan):
        with pytest.raises(ValueError, match="delta="):
            made.get_epsilon(delta=delta)
    with pytest.raises(ValueError, match="epsilon=-1.0 is out of range"):
        made.get_delta(epsilon=-1.0)
    with pytest.raises(ValueError, match="rtol=0 is out of range"):
        made.epsilon_bounds(delta=1e-5, rtol=0)
    with pytest.raises(ValueError, match="Expected one of pld, prv, rdp"):
        accountants.create("plv")
    with pytest.raises(ValueError, match="Expected one of add_or_remove, replace, zero_out"):
        accountants.create("pld", neighboring_relation="add")


@pytest.mark.parametrize("row", cases.PUBLISHED["balls_in_bins_upper"])
def test_balls_in_bins(row):
    run = {"noise_multiplier": row["noise_multiplier"], "sample_rate": 1 / row["t"]}
    run |= {"num_steps": row["t"] * row["epochs"], "delta": row["delta"]}
    ours = get_epsilon(**run, sampler="balls_in_bins")
    assert 0.97 * row["epsilon"] < ours < 1.01 * row["epsilon"]
    run["num_steps"] -= 1  # an unfinished epoch counts whole
    assert ours == get_epsilon(**run, sampler="balls_in_bins")

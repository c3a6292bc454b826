# SPDX-License-Identifier: Apache-2.0
"""The default accountant: published values, exact cases, monotonicity, state, refusals."""

import math

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import poisson

from dualdp import AccountingError, accountants, mechanisms
from dualdp.accountants.solve import get_epsilon
from tests.cases import accounting as cases
from tests.dualdp.accountants.lower import lower
from tests.mistakes import refused


def account(*steps, name="pld", relation="add_or_remove", **step):
    made = accountants.create(name, neighboring_relation=relation)
    for sigma, rate, *count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=(count or [1])[0], **step)
    return made


def composed(*events, name="pld", **options):
    """An accountant with (mechanism, count) pairs."""
    made = accountants.create(name, **options)
    for event, count in events:
        made.compose(event, count)
    return made


@pytest.mark.parametrize("row", cases.PUBLISHED["dp_sgd"], ids=lambda row: row["source"])
def test_published_runs(row):
    low, high = row["bracket"]
    assert low <= get_epsilon(**cases.run_of(row)) <= 1.01 * high
    made = account((row["noise_multiplier"], row["sample_rate"], row["num_steps"]))
    below = lower(made, row["delta"], 2e-4)
    _, estimate, upper = made.epsilon_bounds(delta=row["delta"], rtol=2e-4)
    assert below <= estimate <= upper <= 1.0015 * below
    assert below <= high
    assert upper >= low


def test_two_different_steps():
    (row,) = cases.PUBLISHED["exact_two_step"]
    made = account(*row["steps"])
    below, upper = lower(made, row["delta"], 1e-3), made.get_epsilon(delta=row["delta"])
    assert below <= row["remove"] <= upper
    assert upper - below < 2e-3 * upper


@pytest.mark.parametrize("n", [10, 100, pytest.param(1000, marks=pytest.mark.slow)])
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
    assert low <= account((1.0, 0.01, 1000)).get_epsilon(delta=float(delta)) <= 1.01 * high


@pytest.mark.parametrize("row", cases.PUBLISHED["balls_in_bins_upper"])
def test_balls_in_bins(row):
    run = {"noise_multiplier": row["noise_multiplier"], "sample_rate": 1 / row["t"]}
    run |= {"num_steps": row["t"] * row["epochs"], "delta": row["delta"]}
    ours = get_epsilon(**run, sampler="balls_in_bins")
    assert 0.97 * row["epsilon"] < ours < 1.01 * row["epsilon"]
    run["num_steps"] -= 1  # an unfinished epoch counts whole
    assert ours == get_epsilon(**run, sampler="balls_in_bins")


def test_a_replaced_example_costs_its_exact_pair():
    replaced = account((1.0, 0.01, 1000), relation="replace")
    assert 3.1 < lower(replaced, 1e-6) < 3.3
    assert replaced.get_epsilon(delta=1e-6) > 15


def test_truncation_costs_a_delta_where_it_can_happen():
    run = {"noise_multiplier": 1.0, "sample_rate": 0.01, "num_steps": 1000, "delta": 1e-5}
    sizes = {"num_examples": 10_000, "sampler": "truncated_poisson"}
    plain = get_epsilon(**run)
    assert get_epsilon(**run, **sizes, max_batch_size=10_001) == pytest.approx(plain, rel=1e-9)
    assert plain <= get_epsilon(**run, **sizes, max_batch_size=200) < 1.01 * plain
    assert get_epsilon(**run, **sizes, max_batch_size=100) == math.inf


@pytest.mark.parametrize("most", [1100, 1200])
def test_truncation_costs_as_much_among_billions_of_examples(most):
    """The binomial tail of SciPy that takes 32-bit integers gave 0 for them."""
    run = {"noise_multiplier": 1.0, "num_steps": 100, "sampler": "truncated_poisson"}
    run |= {"epsilon": 1.0, "max_batch_size": most}
    sizes = (2 * 10**9, 10**10)
    fewer, more = (cases.get_delta(**run, num_examples=n, sample_rate=1000 / n) for n in sizes)
    assert fewer == pytest.approx(more, rel=1e-3)
    assert more >= 0.999 * min(1, 100 * (1 + math.e) * poisson.sf(most, 1000))


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(3.0, 0.1, 100), (4.0, 0.01, 2000)])
def test_a_tiny_delta_is_not_told_as_a_large_one(sigma, rate, steps):
    """Below 1e-100 a lattice says little; it said 0.17 where 1e-66 is proved."""
    run, renyi = account((sigma, rate, steps)), account((sigma, rate, steps), name="rdp")
    for epsilon in (2.0, 4.5, 7.8, 11.8, 23.0):
        assert run.get_delta(epsilon=epsilon) <= renyi.get_delta(epsilon=epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["pld", "rdp"])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_replacing_doubles_the_sensitivity_everywhere(name, rate):
    run = {"sample_rate": rate, "num_steps": 200, "delta": 1e-6, "accountant": name}
    doubled = get_epsilon(noise_multiplier=3.0, neighboring_relation="replace", **run)
    assert doubled == pytest.approx(get_epsilon(noise_multiplier=1.5, **run), rel=1e-6)
    zero = get_epsilon(noise_multiplier=1.5, neighboring_relation="zero_out", **run)
    assert zero == get_epsilon(noise_multiplier=1.5, **run)


def test_groups_of_whole_batches_multiply_the_sensitivity():
    run = {"sample_rate": 1.0, "num_steps": 100, "delta": 1e-6}
    alone = get_epsilon(noise_multiplier=1.0, **run)
    assert get_epsilon(noise_multiplier=3.0, group_size=3, **run) == alone


@pytest.mark.parametrize(
    ("event", "count", "delta", "peer"),
    [
        (mechanisms.Laplace(1.0), 20, 1e-4, 18.0938),  # dp-accounting 0.6.0, PLD
        (mechanisms.Laplace(1.0), 500, 1e-4, 248.9433),
        (mechanisms.DiscreteGaussian(2.0), 10, 1e-4, None),
        (mechanisms.RandomizedResponse(0.5, 3), 10, 1e-4, None),
        (mechanisms.ApproximateDP(0.1, 1e-9), 50, 1e-5, None),
        (mechanisms.MassTable((0.6, 0.4), (0.4, 0.6)), 10, 1e-4, None),
    ],
)
def test_other_mechanisms(event, count, delta, peer):
    made = composed((event, count))
    below, upper = lower(made, delta), made.get_epsilon(delta=delta)
    assert 0 < below <= upper <= 1.011 * below
    assert below <= (peer or below) <= upper
    made.compose(event)
    assert made.get_epsilon(delta=delta) >= upper * (1 - 1e-9)


def test_huge_discrete_noise_is_nearly_gaussian():
    made, same = (
        composed((mechanisms.DiscreteGaussian(1e3), 20)),
        composed((mechanisms.Gaussian(1e3), 20)),
    )
    assert made.get_epsilon(delta=1e-5) == pytest.approx(same.get_epsilon(delta=1e-5), rel=0.01)
    other = composed((mechanisms.DiscreteGaussian(1e7), 20), name="rdp")
    assert 0 < other.get_epsilon(delta=1e-9) < 0.01


def test_pure_bounds_at_delta_zero():
    made = composed((mechanisms.Laplace(2.0), 4), (mechanisms.RandomizedResponse(0.5, 2), 1))
    assert made.get_epsilon(delta=0) == pytest.approx(2 + math.log(3), rel=1e-9)
    assert made.get_delta(epsilon=3.2) == 0
    made.step(noise_multiplier=1.0, sample_rate=0.1)
    assert made.get_epsilon(delta=0) == math.inf
    assert (
        composed((mechanisms.MassTable((0.5, 0.5), (1.0, 0.0)), 1)).get_epsilon(delta=0) == math.inf
    )


@pytest.mark.parametrize(
    ("event", "epsilon", "delta"),
    [
        (mechanisms.RandomizedResponse(1.0), 0, 0),
        (mechanisms.ApproximateDP(0.0, 1e-3), math.inf, 1 - 0.999**3),
        (mechanisms.ApproximateDP(0.0, 1e-7), 0, -math.expm1(3 * math.log1p(-1e-7))),
        (mechanisms.MassTable((1.0, 0.0), (0.5, 0.5)), math.inf, 1 - 0.5**3),
        (mechanisms.MassTable((0.5, 0.5), (0.5, 0.5)), 0, 0),
        (mechanisms.Laplace(1e9), 0, 0),
        (mechanisms.Laplace(1e-6), 3e6, 1),  # losses beyond all that a lattice holds
        (mechanisms.ApproximateDP(1e5), 3e5, 1),
        (mechanisms.PoissonSubsampledGaussian(1.0, 1e-300), 0, 0),
    ],
)
def test_degenerate_mechanisms(event, epsilon, delta):
    """Three of them: (epsilon at 1e-5, delta at 1)."""
    made = composed((event, 3))
    upper = made.get_epsilon(delta=1e-5)
    assert epsilon <= upper * (1 + 1e-12)
    assert upper == pytest.approx(epsilon, rel=1e-9, abs=1e-8)
    assert delta <= made.get_delta(epsilon=1.0) <= delta * 1.001 + 1e-9


@pytest.mark.parametrize(
    ("p", "q"), [((0.9999, 0.0001), (0.9, 0.1)), ((0.6, 0.3999, 0.0001), (0.3, 0.6, 0.1))]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_a_table_may_be_either_way_round(p, q, delta):
    """Of two examples that replace each other, either may be the one with the table p."""
    made = composed((mechanisms.MassTable(p, q), 1), neighboring_relation="replace")
    made.step(noise_multiplier=1.0, sample_rate=0.01)
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


def test_what_has_no_answer_is_refused():
    def epsilon(**changes):
        run = {"noise_multiplier": 1.0, "sample_rate": 0.01, "num_steps": 100, "delta": 1e-5}
        return get_epsilon(**run | changes)

    create, wrong, three = accountants.create, AccountingError, account((1.0, 0.1, 3))
    words = "num_examples=None. Expected an integer"
    refused(lambda: epsilon(sampler="truncated_poisson"), TypeError, words)
    words = (
        "max_batch_size=20 with sampler='poisson', whose"  # its epsilon was printed for cut ones
    )
    refused(lambda: epsilon(num_examples=1000, max_batch_size=20), wrong, words)
    words = "epochs_per_assignment=5 with sampler='poisson'"
    refused(lambda: account((1.0, 0.1), epochs_per_assignment=5), wrong, words)
    words = "Use neighboring_relation='replace'"
    refused(lambda: epsilon(sampler="fixed_size"), wrong, words)
    pairs = {"neighboring_relation": "replace", "group_size": 2}
    refused(lambda: create("pld", **pairs), wrong, "has no proved bound here")
    words = "one example added, removed or zeroed"
    refused(lambda: epsilon(group_size=2, sampler="balls_in_bins"), wrong, words)
    refused(lambda: epsilon(group_size=1001), wrong, "Expected at most 1000")
    words = "Expected at most 10000, or use accountant='rdp'"  # and is not enumerated
    refused(lambda: composed((mechanisms.DiscreteGaussian(1e7), 1)), wrong, words)
    refused(lambda: three.get_epsilon(delta=1e-200), wrong, "is below 1e-150")
    for delta in (-1e-5, 1.5, math.nan):
        refused(lambda: three.get_epsilon(delta=delta), ValueError, "delta=")  # noqa: B023
    refused(lambda: three.get_delta(epsilon=-1.0), ValueError, "epsilon=-1.0 is out of range")
    bounds = lambda: three.epsilon_bounds(delta=1e-5, rtol=0)  # noqa: E731
    refused(bounds, ValueError, "rtol=0 is out of range")
    refused(lambda: create("plv"), ValueError, "Expected one of pld, prv, rdp")
    words = "Expected one of add_or_remove, replace, zero_out"
    refused(lambda: create("pld", neighboring_relation="add"), ValueError, words)

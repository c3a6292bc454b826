# SPDX-License-Identifier: Apache-2.0
"""What plans and segments cost: correlated noise, fixed order, cyclic Poisson, resumed runs."""

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

import dualdp
from dualdp import accountants, correlated, mechanisms
from dualdp.plan import accounting
from dualdp.plan.accounting import Segment
from dualdp.plan.batches import drawn_indices
from dualdp.randomness import SegmentBits
from tests.mistakes import refused

BASE = {
    **{"num_examples": 60, "expected_batch_size": 10, "num_steps": 18, "noise_multiplier": 2.0},
    **{"max_grad_norm": 1.5, "delta": 1e-5, "sampler": "fixed_order", "seed": 3},
}
CYCLIC = {"sampler": "cyclic_poisson", "min_separation": 3}
BISR = correlated.bisr(bands=3)
BAND = correlated.band((1.0, 0.5, 0.25))
BLT = correlated.blt(decays=(0.9, 0.4), scales=(0.3, 0.2))
LINEAR = dualdp.schedules.Linear(1.0, 2.0, 18)
SIGNED = correlated.window((1.0, 0.6, -0.3))
FAMILIES = {"none": None, "bisr": BISR, "band": BAND, "blt": BLT, "signed": SIGNED}


def make(**changes):
    return dualdp.PrivacyPlan(**{**BASE, **changes})


def gaussian_epsilon(noise_multiplier, delta=BASE["delta"]):
    accountant = accountants.create("pld")
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return accountant.get_epsilon(delta=delta)


def matrix(column, steps):
    """(steps, steps) C."""
    return toeplitz(column[:steps], np.zeros(steps))


def modes(column, steps, gap):
    """(batches, steps) what a unit of each batch may add to each row."""
    c = matrix(np.abs(column), steps)
    return np.array([c[:, first::gap].sum(axis=1) for first in range(min(gap, steps))])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 7, 18])
def test_no_pattern_costs_more(family, steps):
    """A segment against the units of every batch."""
    plan = make(correlation=FAMILIES[family])
    (((event, count),),) = accounting.pattern(plan, steps)
    total = plan.sensitivity / event.noise_multiplier
    assert (type(event), count) == (mechanisms.Gaussian, 1)
    bound = np.linalg.norm(modes(plan.strategy.strategy(18), steps, 6), axis=1).max()
    if family == "signed":  # the bound of the whole run may be the smaller one
        assert total <= bound * (1 + 1e-9)
    else:
        assert total == pytest.approx(bound, rel=1e-9)


#: Segments of a run of 18 steps that was resumed: (first step, step after the last).
RESUMED = [
    [(0, 18)],
    [(0, 12), (8, 18)],
    [(0, 1), (0, 1), (1, 18)],
    [(0, 9), (9, 18)],
    [(0, 17), (5, 7), (6, 18)],
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spans", RESUMED)
def test_segments_against_brute_force(family, spans):
    """Sum of squared sensitivities: in each segment its own batch of a unit, and its own signs."""
    plan = make(correlation=FAMILIES[family])
    total = 0.0
    for start, stop in spans:
        c, largest = matrix(plan.strategy.strategy(stop - start), stop - start), 0.0
        for first in range(6):
            joined = range(first, stop - start, 6)
            for signs in itertools.product((-1, 1), repeat=len(joined)):
                largest = max(largest, np.linalg.norm(c[:, joined] @ np.array(signs)) ** 2)
        total += largest
    spent = accounting.spent_by(plan, [Segment(*span) for span in spans])
    epsilon = spent.get_epsilon(delta=plan.delta)
    truth = gaussian_epsilon(2.0 * plan.sensitivity / math.sqrt(total))
    assert epsilon >= truth * (1 - 1e-9)
    if family != "signed":  # whose prefixes are bounded by absolute values
        assert epsilon == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("sampler", ["shuffle", "fixed_order"])
@pytest.mark.parametrize(
    "spans", [[(0, 18)], [(0, 8), (6, 18)], [(3, 9)], [(0, 7), (7, 14), (7, 9)]]
)
def test_participations_before_and_after_a_restart(sampler, spans):
    """k before and l after it: as many as the batches that are drawn really have, and no fewer."""
    plan = make(sampler=sampler, seed=None)
    most = 0
    for _ in range(60):
        joined = np.zeros(60, int)
        for span in spans:
            bits = SegmentBits(None)
            for step in range(*span):
                joined[drawn_indices(plan, bits, step)] += 1
        most = max(most, joined.max())
    spent = accounting.spent_by(plan, [Segment(*span) for span in spans])
    sensitivity = plan.sensitivity if sampler == "fixed_order" else 1.0
    expected = gaussian_epsilon(2.0 * sensitivity / math.sqrt(most))
    assert spent.get_epsilon(delta=plan.delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sampler", ["poisson", "fixed_size", "truncated_poisson"])
def test_releases_of_fresh_draws_are_composed(sampler):
    """Steps that run again are further releases; schedules count from the start of the plan."""
    changes = {"sampler": sampler, "noise_multiplier": lambda t: 2.0 + t % 3}
    changes |= {"max_batch_size": 12} if sampler == "truncated_poisson" else {}
    changes |= {"neighboring_relation": "replace"} if sampler == "fixed_size" else {}
    plan = make(**changes)
    segments = [Segment(0, 7), Segment(4, 5), Segment(5, 18, noise_scale=1.5)]
    spent = accountants.create("pld", neighboring_relation=plan.neighboring_relation)
    for segment in segments:
        for step in range(segment.start, segment.stop):
            spent.step(**accounting.release(plan, step, segment.noise_scale))
    found = accounting.spent_by(plan, segments)
    assert len(found) == len(spent) == 21
    assert found.get_epsilon(delta=1e-5) == pytest.approx(spent.get_epsilon(delta=1e-5), rel=1e-9)


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_assignment_begun_in_its_middle_is_one_more(epochs):
    """Steps 4 to 20 at 6 bins: of passes of one epoch 4, of two epochs 2, where 17 steps have 3."""
    plan = make(sampler="balls_in_bins", epochs_per_assignment=epochs, num_steps=24)
    spent = accountants.create("pld")
    event = mechanisms.BallsInBinsGaussian(2.0, 6, epochs)
    spent.compose(event, event.releases * {1: 4, 2: 2}[epochs])
    found = accounting.spent_by(plan, [Segment(4, 21)])
    assert found.get_epsilon(delta=1e-5) == pytest.approx(spent.get_epsilon(delta=1e-5), rel=1e-9)
    twice = accounting.spent_by(plan, [Segment(0, 4), Segment(4, 24)])
    assert twice.get_epsilon(delta=1e-5) > plan.epsilon()


def test_bins_of_two_segments_are_not_below_monte_carlo():
    """A unit of steps 0 to 3 and 2 to 5, 3 bins: its likelihood ratio, assignment by assignment."""
    sizes = {"num_examples": 30, "num_steps": 6, "delta": 1e-2, "noise_multiplier": 1.0}
    plan = make(sampler="balls_in_bins", **sizes)
    spans, rng, samples, losses = [(0, 4), (2, 6)], np.random.default_rng(0), 200_000, []
    for is_member in (True, False):
        loss = np.zeros(samples)
        for start, stop in spans:
            for first in range(start - start % 3, stop, 3):  # every assignment
                steps = [t for t in range(first, first + 3) if start <= t < stop]
                own = first + rng.integers(0, 3, samples)
                x = {t: rng.normal(size=samples) + is_member * (own == t) for t in steps}
                ratio = sum(np.exp(x[t] - 0.5) for t in steps) + 3 - len(steps)
                loss += np.log(ratio / 3)
        losses.append(loss if is_member else -loss)
    spent = accounting.spent_by(plan, [Segment(*span) for span in spans])
    epsilon = spent.get_epsilon(delta=plan.delta)
    for loss in losses:
        assert np.maximum(-np.expm1(epsilon - loss), 0).mean() < plan.delta
    assert np.maximum(-np.expm1(0.5 * epsilon - losses[0]), 0).mean() > plan.delta  # it can fail


COUNTED = dualdp.schedules.AdaptiveNorm(1.0, count_noise_multiplier=20.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "poisson", "noise_multiplier": lambda t: 2.0 + t / 10},
        {"sampler": "balls_in_bins"},
        {**CYCLIC, "correlation": BAND},
        {"correlation": BISR},
        {"sampler": "poisson", "max_grad_norm": COUNTED},
    ],
    ids=["schedule", "balls_in_bins", "band", "window", "adaptive"],
)
def test_noise_is_recalibrated_for_what_is_left(changes):
    target = 1.02 * make(**changes).epsilon()
    plan = make(**changes, target_epsilon=target)
    assert accounting.recalibrated(plan, [Segment(0, 6)], 6) == 1.0 or plan.sampler != "poisson"
    segments = [Segment(0, 9), Segment(6, 12)]
    scale = accounting.recalibrated(plan, segments, 9)
    assert scale > 1
    whole = accounting.spent_by(plan, [*segments, Segment(9, 18, scale)])
    assert 0.99 * target < whole.get_epsilon(delta=plan.delta) <= target
    assert accounting.recalibrated(plan, segments, 18) == 1.0


def test_what_can_not_be_recalibrated_is_refused():
    again, wrong = accounting.recalibrated, dualdp.AccountingError
    few = dualdp.schedules.AdaptiveNorm(1.0, count_noise_multiplier=0.5)
    counted = make(sampler="poisson", max_grad_norm=few)
    words = "is out of reach: no noise multiplier up to"
    refused(lambda: again(counted, [Segment(0, 9)], 3), wrong, words)
    spent = make(sampler="poisson", target_epsilon=0.1)
    words = "on record have spent epsilon=.*larger target"
    refused(lambda: again(spent, [Segment(0, 9)], 9), wrong, words)
    sizes = {"num_examples": 1000, "expected_batch_size": 200, "num_steps": 7}
    signs = make(**sizes, noise_multiplier=0.8, correlation=correlated.band((1.0, -0.4)))
    all_but_bits = lambda: again(signs, [Segment(0, 4), Segment(1, 6)], 6)  # noqa: E731
    refused(all_but_bits, wrong, "larger target")
    no_end = make(sampler="poisson", num_steps=None)
    refused(lambda: again(no_end, [], 0), TypeError, "num_steps=None. Expected an integer")


@pytest.mark.parametrize("family", FAMILIES)
def test_epsilon_of_prefixes_is_monotone(family):
    plans = [make(correlation=FAMILIES[family]), make(sampler="cyclic_poisson", min_separation=3)]
    for plan in plans:
        spent = [plan.epsilon(step) for step in range(19)]
        assert spent[0] == 0
        assert spent[-1] == plan.epsilon()
        assert all(low <= high for low, high in itertools.pairwise(spent))
        assert spent[1] > 0


@pytest.mark.parametrize(
    ("noise", "steps", "classes", "rate", "epsilon"),
    [
        (1.0, 1000, 4, 0.04, 4.185153218478676),
        (2.0, 500, 16, 0.5, 7.35718078997516),
    ],
)
def test_epsilon_of_bands_elsewhere(noise, steps, classes, rate, epsilon):
    """The event of jax_privacy 2.0.0 (`amplified_bandmf_event`) in dp-accounting 0.6.0's PLD."""
    plan = make(
        **{**CYCLIC, "min_separation": classes, "correlation": BAND, "noise_multiplier": noise},
        num_steps=steps,
        num_examples=40_000,
        expected_batch_size=40_000 * rate / classes,
    )
    assert plan.epsilon() == pytest.approx(epsilon, rel=2e-3)


@pytest.mark.parametrize("stop", [1, 5, 13, 17, 18])
def test_rounds_of_cyclic_poisson_count_what_holds_their_draw(stop):
    """Each class by itself, by plain loops: no class has a round with less noise than reported."""
    plan = make(**CYCLIC, correlation=BAND)
    (rounds,) = accounting.pattern(plan, stop)
    found = sorted(event.noise_multiplier for event, count in rounds for _ in range(count))
    column, worst_of_round = (1.0, 0.5, 0.25), []
    for start in range(0, stop, 3):
        precisions = [
            sum(c * c for j, c in enumerate(column) if t + j < stop)
            for t in range(start, start + 3)
        ]
        worst_of_round.append(plan.sensitivity / math.sqrt(max(precisions)))
    np.testing.assert_allclose(found, sorted(worst_of_round), rtol=1e-9)


@pytest.mark.parametrize("changes", [{}, CYCLIC, {"sampler": "shuffle"}, {"sampler": "poisson"}])
def test_no_steps_cost_nothing(changes):
    plan = make(**changes, num_steps=0)
    assert plan.epsilon() == 0
    assert accounting.spent_by(make(**changes), [Segment(4, 4)]).history == ()


@pytest.mark.parametrize("changes", [{}, CYCLIC, {"sampler": "balls_in_bins", "correlation": BISR}])
def test_a_segment_longer_than_its_plan_is_refused(changes):
    plan, words = make(**changes), "segment of 19 steps .* num_steps=18. Expect"
    refused(lambda: accounting.spent_by(plan, [Segment(0, 19)]), dualdp.AccountingError, words)


def test_noise_stddev_counts_the_weights_so_far():
    plan = make(correlation=BISR)
    drawn = 2.0 * plan.sensitivity * 1.5
    for step, weights in ((0, 1.0), (1, 1 + 1 / 4), (2, 1 + 1 / 4 + 1 / 64), (9, 81 / 64)):
        assert plan.noise_stddev(step) == pytest.approx(drawn * math.sqrt(weights))


def test_a_bound_that_is_refused_at_a_delta_leaves_the_others():
    plan = make(sampler="balls_in_bins", correlation=BAND, delta=1e-160)
    assert 0 < plan.epsilon() < 100

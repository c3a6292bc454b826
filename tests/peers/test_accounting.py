# SPDX-License-Identifier: Apache-2.0
"""Beside dp-accounting and Opacus, where they are installed."""

import pytest

import dualdp
from dualdp import accountants, correlated, mechanisms
from tests.cases import accounting as cases
from tests.dualdp.accountants.lower import lower

dp_accounting = pytest.importorskip("dp_accounting")
dp_events = pytest.importorskip("tests.peers.dp_events")


def account(event, count=1):
    made = accountants.create("pld")
    made.compose(event, count)
    return made


def optimistic(event, count, delta):
    """dp-accounting's lower estimate of epsilon."""
    kwargs = {"pessimistic_estimate": False, "value_discretization_interval": 1e-3}
    pld = dp_accounting.pld.privacy_loss_distribution
    one = pld.from_gaussian_mechanism(
        event.noise_multiplier, sampling_prob=event.sample_rate, **kwargs
    )
    return one.self_compose(count).get_epsilon_for_delta(delta)


@pytest.mark.slow
def test_upper_is_above_the_optimistic_estimate():
    for run in cases.settings(50, seed=11, extreme=False):
        sigma, rate = max(0.6, run["noise_multiplier"]), run["sample_rate"]
        steps, delta = min(run["num_steps"], 3000), max(run["delta"], 1e-8)
        event = mechanisms.PoissonSubsampledGaussian(sigma, rate)
        made = account(event, steps)
        below, upper = lower(made, delta), made.get_epsilon(delta=delta)
        peer = dp_accounting.pld.PLDAccountant()
        peer.compose(dp_events.to_dp_event(made.history))
        assert upper >= optimistic(event, steps, delta) * (1 - 1e-9)
        assert below <= peer.get_epsilon(delta) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (mechanisms.Laplace(1.0), 20),
        # once: dp-accounting 0.6.0 gives 10 randomised responses the epsilon of one
        (mechanisms.RandomizedResponse(0.5, 3), 1),
        (mechanisms.Gaussian(2.0), 3),
        (mechanisms.PoissonSubsampledGaussian(1.0, 0.05), 50),
        (mechanisms.TruncatedPoissonSubsampledGaussian(2.0, 0.05, 1000, 120), 50),
    ],
)
def test_the_same_mechanism_has_the_same_epsilon(event, count):
    ours = account(event, count)
    relations = dp_accounting.NeighboringRelation
    theirs = {
        mechanisms.TruncatedPoissonSubsampledGaussian: relations.REPLACE_SPECIAL,
        mechanisms.RandomizedResponse: relations.REPLACE_ONE,
    }
    relation = theirs.get(type(event), relations.ADD_OR_REMOVE_ONE)
    peer = dp_accounting.pld.PLDAccountant(relation)
    peer.compose(dp_events.to_dp_event(ours.history))
    assert ours.get_epsilon(delta=1e-5) == pytest.approx(peer.get_epsilon(1e-5), rel=2e-2)


@pytest.mark.parametrize(("bands", "steps"), [(1, 40), (4, 44), (4, 8)])
def test_bands_under_cyclic_poisson_are_rounds_of_poisson(bands, steps):
    """The event of BandMF in jax_privacy: ceil(n / b) releases at b times the rate."""
    plan = dualdp.PrivacyPlan(
        **{"num_examples": 1000, "expected_batch_size": 20, "num_steps": steps, "seed": 1},
        **{"noise_multiplier": 1.1, "max_grad_norm": 1.0, "delta": 1e-5},
        **{"sampler": "cyclic_poisson", "min_separation": 4},
        correlation=correlated.band([0.6**j for j in range(bands)]),
    )
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.08, dp_accounting.GaussianDpEvent(1.1)),
        -(-steps // 4),
    )
    peer = dp_accounting.pld.PLDAccountant().compose(event)
    assert plan.epsilon() == pytest.approx(peer.get_epsilon(1e-5), rel=1e-2)


def test_opacus_agrees_on_rdp():
    opacus = pytest.importorskip("opacus.accountants")
    theirs, ours = opacus.RDPAccountant(), accountants.create("rdp")
    theirs.history = [(1.5, 0.04, 2250), (1.0, 0.01, 100)]
    for noise, rate, steps in theirs.history:
        ours.step(noise_multiplier=noise, sample_rate=rate, num_steps=steps)
    assert ours.get_epsilon(delta=1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)

# SPDX-License-Identifier: Apache-2.0
"""`make_private` on both stacks: it is SGD in the limit, and the plan is what happens."""

import numpy as np
import pytest

from dualdp import AccountingError
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import fold_in, key_of, normal, seeded_bits
from tests.backends.runs import RATE, START, Run, X, Y, make_plan, stacks
from tests.closeness import factors_of
from tests.conftest import BACKENDS


def by_hand(plan):
    """DP-SGD in NumPy: Abadi et al. 2016, Algorithm 1, from the plan's batches and noise."""
    w, path = START.astype(float), []
    for step in range(plan.num_steps):
        rows = plan.batch_indices(step)
        grads = (X[rows] @ w - Y[rows])[:, None] * X[rows]
        norms = np.linalg.norm(grads, axis=1, keepdims=True)
        total = (grads * factors_of(norms, plan.max_grad_norm_at(step))).sum(0)
        key = key_of(seeded_bits(plan.seed, "noise", step))
        stddev = plan.noise_multiplier_at(step) * plan.max_grad_norm_at(step)
        noisy = total + stddev * normal(fold_in(key, 0), 5)
        w = w - RATE * noisy / plan.expected_batch_size_at(step)
        path.append(w)
    return np.array(path)


@stacks
@pytest.mark.parametrize(
    "changes",
    [
        {"physical_batch_size": 5},
        {"noise_multiplier": lambda step: 1.0 / (1 + step), "max_grad_norm": lambda k: 0.5 + k},
        {"expected_batch_size": lambda step: 4.0 + 2 * step},
        {"expected_batch_size": 0.5, "num_steps": 12},  # most draws are empty
    ],
    ids=["physical", "schedules", "batch schedule", "empty draws"],
)
def test_training_is_algorithm_1_by_hand(stack, changes):
    """Batches, clipping, noise and division of every step; each is spent before it is seen."""
    plan = make_plan(**changes)
    run, path = Run(stack, plan=plan), []
    assert run.engine.get_epsilon(delta=1e-5) == 0
    for done, weights in enumerate(run.train(), 1):
        path.append(weights)
        assert run.engine.get_epsilon(delta=1e-5) == pytest.approx(plan.epsilon(done), rel=1e-12)
    np.testing.assert_allclose(path, by_hand(plan), rtol=2e-5, atol=2e-6)
    assert len(run.engine.accountant) == plan.num_steps


@stacks
def test_without_noise_it_is_gradient_descent(stack):
    plan = make_plan(noise_multiplier=0.0, max_grad_norm=1e6, expected_batch_size=60)
    w, path = START.astype(float), []
    for _ in range(8):
        w = w - RATE * X.T @ (X @ w - Y) / 60
        path.append(w)
    np.testing.assert_allclose([*Run(stack, plan=plan).train()], path, rtol=1e-5, atol=1e-6)


def test_both_stacks_walk_the_same_path():
    """With an adaptive bound: one count, one ledger; only rounding of the norms could differ."""
    plan = make_plan(max_grad_norm=AdaptiveNorm(0.5, quantile=0.6))
    paths, bounds, spent = [], [], []
    for stack in BACKENDS:
        run = Run(stack, plan=plan)
        paths.append([*run.train()])
        bounds.append([entry["max_grad_norm"] for entry in run.engine.ledger.entries])
        spent.append(run.engine.get_epsilon(delta=1e-5))
    assert bounds[0] == bounds[1]
    assert len(set(bounds[0])) == 8
    np.testing.assert_allclose(*paths, rtol=1e-5, atol=1e-6)
    assert spent[0] == spent[1] == pytest.approx(plan.epsilon())


@stacks
def test_runs_of_one_plan_have_noise_of_their_own(stack):
    """known_failures 15: the difference of two runs would show the gradients otherwise."""
    plan, ends = make_plan(seed=None, noise_multiplier=100.0), []
    for other in (stack, stack, *BACKENDS):
        ends.append(next(Run(other, plan=plan).train()))
    for number, end in enumerate(ends):
        assert all(np.abs(end - other).max() > 1e-3 for other in ends[:number]), ends


@stacks
def test_secure_mode_trains_with_secure_noise(stack):
    """Numbers instead of a plan, whose sample rate is that of the batches."""
    numbers = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "num_steps": 3}
    run = Run(stack, engine={"secure_mode": True}, **numbers)
    assert run.engine.plan.noise == "secure"
    assert run.engine.plan.noise_multiplier_at(0) == 1.1
    assert run.engine.plan.sample_rate == 0.2
    assert not np.allclose(next(run.train()), START, atol=1e-4)
    assert 0 < run.engine.get_epsilon(delta=1e-5) < np.inf


@stacks
@pytest.mark.parametrize("on_budget", ["stop", "raise"])
def test_a_target_epsilon_holds(stack, on_budget):
    target = make_plan().epsilon(5) * (1 + 1e-9)
    run = Run(stack, plan=make_plan(target_epsilon=target, on_budget=on_budget))
    if on_budget == "stop":
        assert len([*run.train()]) == 5
    else:
        with pytest.raises(AccountingError, match="5 releases have spent"):
            [*run.train()]
    assert len(run.engine.accountant) == 5
    assert run.engine.get_epsilon(delta=1e-5) <= target

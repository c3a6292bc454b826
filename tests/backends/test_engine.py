# SPDX-License-Identifier: Apache-2.0
"""`make_private` on both stacks: it is SGD in the limit, and the plan is what happens."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import AccountingError, PrivacyPlan
from dualdp.plan.schedules import AdaptiveNorm
from tests.closeness import factors_of
from tests.conftest import BACKENDS, DEVICE

stacks = pytest.mark.parametrize("stack", BACKENDS)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5)).astype(np.float32)
Y = RNG.normal(size=60).astype(np.float32)
START = RNG.normal(size=5).astype(np.float32)
RATE = 0.05


def make_plan(**changes):
    arguments = {
        "num_examples": 60,
        "expected_batch_size": 12,
        "num_steps": 8,
        "noise_multiplier": 0.7,
        "max_grad_norm": 1.3,
        "delta": 1e-5,
        "noise": "portable",
        "accountant": "rdp",
        "seed": 11,
    }
    return PrivacyPlan(**{**arguments, **changes})


class LinearModel(torch.nn.Module):
    """One weight vector, so that both stacks have one leaf of the same shape."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(START))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.w[None])[:, 0]


def rest_of(engine, loader):
    """The rest of the plan; one epoch if it has no end."""
    return loader if engine.plan.num_steps is None else loader.remaining()


def make_private(stack, *, secure_mode=False, **arguments):
    """(engine, train): train(steps) does so many steps and returns the weights after each."""
    if stack == "torch":
        model = LinearModel().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        engine = dpt.PrivacyEngine(accountant="rdp", secure_mode=secure_mode)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(data, batch_size=12),
            loss_reduction="sum",
            **arguments,
        )

        def train():
            for x, y in rest_of(engine, loader):  # physical batches; a release ends a logical one
                released = len(engine.accountant)
                optimizer.zero_grad()
                x, y = x.to(DEVICE), y.to(DEVICE)
                (0.5 * (model(x) - y) ** 2).sum().backward()
                optimizer.step()
                if len(engine.accountant) == released:
                    continue
                yield model.w.detach().cpu().numpy().copy()

        return engine, train
    engine = dpj.PrivacyEngine(accountant="rdp", secure_mode=secure_mode)
    step, state, loader = engine.make_private(
        loss_fn=lambda w, x, y: 0.5 * (x @ w - y) ** 2,
        params=jnp.asarray(START),
        optimizer=optax.sgd(RATE),
        data=(X, Y),
        **({"expected_batch_size": 12} if "plan" not in arguments else {}),
        **arguments,
    )

    def train():
        current = state
        for batch in rest_of(engine, loader):
            current, _ = step(current, batch)
            yield np.asarray(current.params)

    return engine, train


def by_hand(plan):
    """DP-SGD in NumPy: Abadi et al. 2016, Algorithm 1, from the plan's batches and noise."""
    from dualdp.randomness import fold_in, key_of, normal, seeded_bits

    w, path = START.astype(float), []
    for step in range(plan.num_steps):
        rows = plan.batch_indices(step)
        grads = (X[rows] @ w - Y[rows])[:, None] * X[rows]
        norms = np.linalg.norm(grads, axis=1, keepdims=True)
        total = (grads * factors_of(norms, plan.max_grad_norm_at(step))).sum(0)
        key = key_of(seeded_bits(plan.seed, "noise", step))
        noise = normal(fold_in(key, 0), 5)
        stddev = plan.noise_multiplier_at(step) * plan.max_grad_norm_at(step)
        mean = (total + stddev * noise) / plan.expected_batch_size_at(step)
        w = w - RATE * mean
        path.append(w)
    return np.array(path)


@stacks
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"physical_batch_size": 5},
        {"noise_multiplier": lambda step: 1.0 / (1 + step), "max_grad_norm": lambda k: 0.5 + k},
        {"expected_batch_size": lambda step: 4.0 + 2 * step},
        {"expected_batch_size": 0.5, "num_steps": 12},  # most draws are empty
    ],
    ids=["plain", "physical", "schedules", "batch schedule", "empty draws"],
)
def test_training_is_algorithm_1_by_hand(stack, changes):
    """Batches, clipping, noise and division of every step, including empty ones."""
    plan = make_plan(**changes)
    engine, train = make_private(stack, plan=plan)
    path = np.array(list(train()))
    np.testing.assert_allclose(path, by_hand(plan), rtol=2e-5, atol=2e-6)
    assert engine.get_epsilon(delta=1e-5) == pytest.approx(plan.epsilon(), rel=1e-12)
    assert len(engine.accountant) == plan.num_steps


@stacks
def test_without_noise_and_with_all_examples_it_is_gradient_descent(stack):
    plan = make_plan(noise_multiplier=0.0, max_grad_norm=1e6, expected_batch_size=60)
    _, train = make_private(stack, plan=plan)
    w, path = START.astype(float), []
    for _ in range(8):
        w = w - RATE * X.T @ (X @ w - Y) / 60
        path.append(w)
    np.testing.assert_allclose(np.array(list(train())), path, rtol=1e-5, atol=1e-6)


def test_both_stacks_walk_the_same_path():
    paths = [np.array(list(make_private(stack, plan=make_plan())[1]())) for stack in BACKENDS]
    np.testing.assert_allclose(*paths, rtol=1e-6, atol=1e-7)


@stacks
def test_epsilon_is_spent_before_the_step_is_seen(stack):
    plan = make_plan()
    engine, train = make_private(stack, plan=plan)
    assert engine.get_epsilon(delta=1e-5) == 0
    for done, _ in enumerate(train(), 1):
        assert engine.get_epsilon(delta=1e-5) == pytest.approx(plan.epsilon(done), rel=1e-12)


@stacks
def test_numbers_that_the_plan_holds_are_refused_beside_it(stack):
    with pytest.raises((TypeError, ValueError), match="came together with plan="):
        make_private(stack, plan=make_plan(), noise_multiplier=1.0)


@stacks
def test_numbers_instead_of_a_plan(stack):
    engine, train = make_private(stack, noise_multiplier=1.1, max_grad_norm=1.0)
    assert engine.plan.noise_multiplier_at(0) == 1.1
    assert engine.plan.sample_rate == 0.2
    next(iter(train()))
    assert 0 < engine.get_epsilon(delta=1e-5) < np.inf


@stacks
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -1.0, "max_grad_norm": 1.0}, "noise_multiplier=-1.0 is out of range"),
        ({"noise_multiplier": 1.0, "max_grad_norm": float("nan")}, "max_grad_norm=nan is not a"),
        ({"plan": make_plan(num_examples=61)}, "61"),
    ],
)
def test_bad_set_ups_are_refused(stack, changes, message):
    with pytest.raises(ValueError, match=message):
        make_private(stack, **changes)


@stacks
def test_runs_of_one_plan_have_noise_of_their_own(stack):
    """known_failures 15: the difference of two runs would show the gradients otherwise."""
    plan, ends = make_plan(seed=None, noise_multiplier=100.0), []
    for other in (stack, stack, *BACKENDS):
        engine, train = make_private(other, plan=plan)
        ends.append(next(iter(train())))
        assert len(engine.ledger) == 1
    for number, end in enumerate(ends):
        assert all(np.abs(end - other).max() > 1e-3 for other in ends[:number]), ends


@stacks
def test_secure_mode_trains_with_secure_noise(stack):
    engine, train = make_private(stack, secure_mode=True, noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.plan.noise == "secure"
    assert not np.allclose(next(iter(train())), START, atol=1e-4)
    with pytest.raises(ValueError, match="Expected no seed"):
        make_plan(noise="secure")


def test_the_adaptive_bound_is_the_same_on_both_stacks():
    """One count, one key, one ledger: only rounding of the norms at the bound could differ."""
    plan = make_plan(max_grad_norm=AdaptiveNorm(0.5, quantile=0.6), num_steps=8)
    found = {}
    for stack in BACKENDS:
        engine, train = make_private(stack, plan=plan)
        path = np.array(list(train()))
        bounds = [entry["max_grad_norm"] for entry in engine.ledger.entries]
        found[stack] = path, bounds, engine.get_epsilon(delta=1e-5)
    assert found["torch"][1] == found["jax"][1]
    assert len(set(found["jax"][1])) == 8
    np.testing.assert_allclose(found["torch"][0], found["jax"][0], rtol=1e-5, atol=1e-6)
    assert found["torch"][2] == found["jax"][2] == pytest.approx(plan.epsilon())


@stacks
@pytest.mark.parametrize("on_budget", ["stop", "raise"])
def test_a_target_epsilon_holds(stack, on_budget):
    target = make_plan().epsilon(5) * (1 + 1e-9)
    plan = make_plan(target_epsilon=target, on_budget=on_budget)
    engine, train = make_private(stack, plan=plan)
    if on_budget == "stop":
        assert len(list(train())) == 5
    else:
        with pytest.raises(AccountingError, match="5 releases have spent"):
            list(train())
    assert len(engine.accountant) == 5
    assert engine.get_epsilon(delta=1e-5) <= target

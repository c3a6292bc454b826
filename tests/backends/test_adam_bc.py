# SPDX-License-Identifier: Apache-2.0
"""AdamW whose second moment is that of the gradient without the noise, on both stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, adam, correlated
from dualdp.plan.clipping import factors_for
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import fold_in, key_of, normal, seeded_bits
from tests.conftest import BACKENDS
from tests.tiers import first

stacks = pytest.mark.parametrize("stack", BACKENDS)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 5)), RNG.normal(size=60)
START = RNG.normal(size=(2, 5))
STEPS = 20
SETTINGS = {"b1": 0.8, "b2": 0.97, "floor": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
RATE = 0.05


def make_plan(**changes):
    arguments = {
        "num_examples": 60,
        "expected_batch_size": 12,
        "num_steps": STEPS,
        "noise_multiplier": 0.7,
        "max_grad_norm": 1.3,
        "delta": 1e-5,
        "noise": "portable",
        "accountant": "rdp",
        "seed": 11,
    }
    return PrivacyPlan(**{**arguments, **changes})


class Half(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return nn.functional.linear(x, self.w[None])[:, 0]


class Model(nn.Module):
    """Two modules of one weight vector each, so that both stacks have the same leaves."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Half(START[0]), Half(START[1])

    def forward(self, x):
        return self.a(x) + self.b(x * x)


def on_torch(plan, settings=SETTINGS):
    """(bound, parameters) of every step."""
    b1, b2, *others = settings.values()
    model = Model()
    names = ("floor", "eps", "weight_decay")
    optimizer = dpt.AdamBC(
        model.parameters(), RATE, (b1, b2), **dict(zip(names, others, strict=True))
    )
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    engine = dpt.PrivacyEngine()
    loader = torch.utils.data.DataLoader(data)
    *_, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, plan=plan
    )
    for x, y in loader.remaining():
        bound, before = engine.ledger.max_grad_norm, engine.ledger.position
        optimizer.zero_grad()
        (0.5 * (model(x) - y) ** 2).mean().backward()
        optimizer.step()
        if engine.ledger.position > before:
            yield bound, np.stack([p.detach().numpy().copy() for p in model.parameters()])


def loss_fn(params, x, y):
    return 0.5 * (x @ params["a"]["w"] + (x * x) @ params["b"]["w"] - y) ** 2


def start_jax(optimizer, plan=None, **options):
    params = {"a": {"w": jnp.asarray(START[0])}, "b": {"w": jnp.asarray(START[1])}}
    engine = dpj.PrivacyEngine()
    return engine, *engine.make_private(
        loss_fn=loss_fn, params=params, optimizer=optimizer, data=(X, Y), checks=0,
        plan=plan or make_plan(num_steps=3), **options,
    )  # fmt: skip


def on_jax(plan, settings=SETTINGS):
    """(bound, parameters) of every step."""
    engine, step, state, loader = start_jax(dpj.adam_bc(RATE, **settings), plan)
    for batch in loader.remaining():
        bound = engine.ledger.max_grad_norm
        state, _ = step(state, batch)
        yield bound, np.stack([np.asarray(leaf["w"]) for leaf in state.params.values()])


def by_hand(plan, bounds):
    """The paper's algorithm: noise is subtracted from the corrected average of the squares."""
    b1, b2, floor, eps, decay = SETTINGS.values()
    w, first, second, noise = START.copy(), 0.0, 0.0, 0.0
    for step, bound in enumerate(bounds):
        rows = plan.batch_indices(step)
        inputs = np.stack([X[rows], X[rows] ** 2], 1)  # (n, 2, 5)
        residuals = np.einsum("npi,pi->n", inputs, w) - Y[rows]
        grads = residuals[:, None, None] * inputs
        if plan.clipping == "per_layer":
            norms, share = np.linalg.norm(grads, axis=2), bound / np.sqrt(2)  # (n, 2)
            total = (grads * factors_for("flat", norms, share, xp=np)[..., None]).sum(0)
        else:
            norms = np.linalg.norm(grads, axis=(1, 2))
            total = (grads * factors_for("flat", norms, bound, xp=np)[:, None, None]).sum(0)
        key = key_of(seeded_bits(plan.seed, "noise", step))
        drawn = np.stack([normal(fold_in(key, leaf), 5, dtype=np.float64) for leaf in range(2)])
        size, stddev = plan.expected_batch_size_at(step), plan.noise_multiplier_at(step) * bound
        grad = (total + stddev * drawn) / size
        first = b1 * first + (1 - b1) * grad
        second = b2 * second + (1 - b2) * grad**2
        noise = b2 * noise + (1 - b2) * (stddev / size) ** 2
        signal = (second - noise) / (1 - b2 ** (step + 1))
        direction = first / (1 - b1 ** (step + 1)) / (np.sqrt(np.maximum(signal, floor)) + eps)
        w = (1 - RATE * decay) * w - RATE * direction
        yield w


PLANS = {
    "schedules": {
        "noise_multiplier": lambda step: 2.0 / (1 + step),
        "max_grad_norm": lambda step: 0.5 + step / 10,
        "expected_batch_size": lambda step: 4.0 + step,
    },
    "adaptive": {"max_grad_norm": AdaptiveNorm(1.0, quantile=0.5, learning_rate=0.5)},
    "plain": {},
    "physical": {"physical_batch_size": 5},
    "per layer": {"clipping": "per_layer"},
}


@pytest.mark.parametrize("name", first(2, PLANS))
def test_both_stacks_are_the_textbook_loop(name):
    """Twenty steps in float64, each with the noise of its own."""
    plan = make_plan(**PLANS[name])
    with jax.enable_x64(True):
        ours, theirs = list(on_torch(plan)), list(on_jax(plan))
    bounds = [bound for bound, _ in ours]
    assert bounds == [bound for bound, _ in theirs]
    expected = np.stack(list(by_hand(plan, bounds)))
    assert expected.shape == (STEPS, 2, 5)
    for found in (ours, theirs):
        np.testing.assert_allclose(np.stack([w for _, w in found]), expected, atol=1e-10)
    moved = np.stack([w for _, w in on_torch(plan, {**SETTINGS, "floor": 1e3})])
    assert np.abs(moved - expected).max() > 0.1  # the second moment is above its floor


@stacks
def test_without_noise_and_floor_it_is_adamw(stack):
    """The same numbers as the framework's optimizer, to rounding."""
    grads = RNG.normal(size=(STEPS, 5))
    if stack == "torch":
        kinds = (
            dpt.AdamBC([nn.Parameter(torch.tensor(START[0]))], floor=0.0, eps=1e-8, **WD),
            torch.optim.AdamW([nn.Parameter(torch.tensor(START[0]))], **WD),
        )
        for grad in grads:
            for optimizer, noise in zip(kinds, ({"noise_stddev": 0.0}, {}), strict=True):
                optimizer.param_groups[0]["params"][0].grad = torch.tensor(grad)
                optimizer.step(**noise)
        ends = [optimizer.param_groups[0]["params"][0].detach().numpy() for optimizer in kinds]
    else:
        with jax.enable_x64(True):
            kinds = (
                (dpj.adam_bc(1e-3, floor=0.0, eps=1e-8, **WD), {"noise_stddev": 0.0}),
                (optax.adamw(1e-3, **WD), {}),
            )
            ends = []
            for optimizer, noise in kinds:
                params = jnp.asarray(START[0])
                state = optimizer.init(params)
                for grad in grads:
                    updates, state = optimizer.update(jnp.asarray(grad), state, params, **noise)
                    params = optax.apply_updates(params, updates)
                ends.append(np.asarray(params))
    np.testing.assert_allclose(*ends, rtol=1e-12)
    assert np.abs(ends[0] - START[0]).max() > 1e-3


WD = {"weight_decay": 0.1}


def test_the_second_moment_is_that_of_the_gradient():
    """Over many coordinates it is unbiased, where Adam's is that of the noise."""
    rng, grad, noise = np.random.default_rng(1), 0.3, 2.0
    first = second = squares = np.zeros(20_000)
    settings = {"b1": 0.9, "b2": 0.99, "floor": 1e-8, "eps": 0.0, "xp": np}
    for count in range(1, 201):
        noisy = grad + noise * rng.normal(size=first.size)
        _, first, second = adam.adam_bc(noisy, first, second, count, noise, **settings)
        squares = 0.99 * squares + 0.01 * noisy**2
    second, squares = (np.mean(v) / (1 - 0.99**200) for v in (second, squares))
    assert abs(second - grad**2) < 0.02
    assert squares > 40 * grad**2


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"floor": 0.0}, ValueError, "floor=0 and eps=0 would divide by zero"),
        ({"floor": -1.0}, ValueError, "floor=-1.0 is out of range"),
        ({"eps": float("inf")}, ValueError, "eps=inf is out of range"),
        ({"weight_decay": -1}, ValueError, "weight_decay=-1 is out of range"),
        ({"b1": 1.0}, ValueError, "b1=1 would never change"),
        ({"b2": 1.5}, ValueError, "b2=1.5 is not a probability"),
        ({"floor": "1"}, TypeError, "floor='1' is a str"),
    ],
)
def test_wrong_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        dpj.adam_bc(0.1, **settings)
    decays = (settings.pop("b1", 0.9), settings.pop("b2", 0.999))
    with pytest.raises(error, match=message):
        dpt.AdamBC(Model().parameters(), betas=decays, **settings)


def test_settings_and_parameters_that_become_wrong_are_refused():
    model = Model()
    optimizer = dpt.AdamBC(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["floor"] = 0.0
    with pytest.raises(ValueError, match="floor=0 and eps=0"):
        optimizer.step(noise_stddev=0.1)
    optimizer.param_groups[0]["floor"] = 1e-8
    model.bfloat16()
    with pytest.raises(ValueError, match="parameters of torch.bfloat16"):
        optimizer.step(noise_stddev=0.1)
    assert not optimizer.state
    with pytest.raises(ValueError, match="AdamBC has no 'maximize'"):
        dpt.AdamBC([{"params": list(Model().parameters()), "maximize": True}])


def test_wrong_settings_of_torch_are_refused():
    for options, message in (
        ({"lr": -1.0}, "lr=-1.0 is out of range"),
        ({"betas": 0.9}, r"betas=0.9 is no pair"),
    ):
        with pytest.raises(ValueError, match=message):
            dpt.AdamBC(Model().parameters(), **options)
    with pytest.raises(ValueError, match=r"got parameters of torch.bfloat16.* rounded away"):
        dpt.AdamBC(nn.Linear(2, 2).bfloat16().parameters())


@stacks
def test_correlated_noise_is_refused(stack):
    plan = make_plan(sampler="fixed_order", correlation=correlated.window((1.0, -0.5)))
    with pytest.raises(ValueError, match="AdamBC came with a plan whose noise is correlated"):
        next(on_torch(plan) if stack == "torch" else on_jax(plan))


def test_a_step_without_its_noise_is_refused():
    """And changes nothing; a state of another optimizer is told, too."""
    p = nn.Parameter(torch.ones(2))
    optimizer = dpt.AdamBC([p])
    assert optimizer.step(lambda: 3) == 3  # no gradient: within a logical batch
    p.grad = torch.ones(2)
    with pytest.raises(TypeError, match="AdamBC.step.. came without noise_stddev"):
        optimizer.step()
    with pytest.raises(ValueError, match="noise_stddev=-1 is out of range"):
        optimizer.step(noise_stddev=-1)
    assert not optimizer.state
    other = torch.optim.AdamW([p])
    other.step()
    saved = other.state_dict()
    with pytest.raises(ValueError, match="no 'floor', so another optimizer made it"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    tree = jnp.ones(2)
    optimizer = dpj.adam_bc(0.1)
    with pytest.raises(TypeError, match="adam_bc came without noise_stddev"):
        optimizer.update(tree, optimizer.init(tree), tree)


def test_noise_that_the_user_gives_to_an_engine_is_refused():
    model = Model()
    optimizer = dpt.AdamBC(model.parameters())
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    engine = dpt.PrivacyEngine()
    loader = torch.utils.data.DataLoader(data)
    *_, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, plan=make_plan()
    )
    x, y = next(iter(loader))
    ((model(x) - y) ** 2).mean().backward()
    with pytest.raises(TypeError, match="with noise_stddev, which the engine passes by itself"):
        optimizer.step(noise_stddev=1.0)
    assert engine.ledger.position == 0
    optimizer.step()


def test_what_changes_the_gradient_before_it_is_refused():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), dpj.adam_bc(RATE))
    with pytest.raises(TypeError, match="gradients that another transformation has changed"):
        start_jax(clipped)


@pytest.mark.parametrize("is_object", [True, False])
def test_a_wrapper_that_does_not_pass_the_noise_on_is_refused(is_object):
    """Of several gradients the noise would be another one."""
    several = optax.MultiSteps(dpj.adam_bc(RATE), 2)
    with pytest.raises((TypeError, ValueError), match="what wraps it|has changed"):
        start_jax(several if is_object else several.gradient_transformation())


LABELS = {"a": "one", "b": "two"}
ALIKE = {
    "groups": lambda: optax.multi_transform(
        {"one": dpj.adam_bc(RATE), "two": dpj.adam_bc(RATE)}, LABELS
    ),
    "injected": lambda: optax.inject_hyperparams(dpj.adam_bc)(RATE),
    "schedule": lambda: dpj.adam_bc(optax.constant_schedule(RATE)),
    "finite": lambda: optax.apply_if_finite(dpj.adam_bc(RATE), 3),
    "scaled": lambda: optax.chain(dpj.adam_bc(2 * RATE), optax.scale(0.5)),
}


@pytest.mark.parametrize("name", first(2, ALIKE))
def test_usual_optax_around_it_is_the_same_run(name):
    ends = []
    for optimizer in (dpj.adam_bc(RATE), ALIKE[name]()):
        _, step, state, loader = start_jax(optimizer)
        for batch in loader.remaining():
            state, _ = step(state, batch)
        ends.append(np.stack([np.asarray(leaf["w"]) for leaf in state.params.values()]))
    np.testing.assert_allclose(*ends, rtol=1e-5)
    assert np.abs(ends[0] - START).max() > 0.01


@pytest.mark.slow
def test_a_jitted_loop_of_ones_own_passes_the_noise():
    """Behind `add_noise` in a chain; it ends where the engine does."""
    plan, optimizer = make_plan(num_steps=3, seed=12), dpj.adam_bc(RATE)
    _, step, state, loader = start_jax(optimizer, plan)
    for batch in loader.remaining():
        state, _ = step(state, batch)
    plan, engine = make_plan(num_steps=3, seed=12), dpj.PrivacyEngine()
    loader = engine.make_loader(data=(X, Y), plan=plan)
    optimizer = optax.chain(dpj.add_noise(plan), optimizer)
    params = {"a": {"w": jnp.asarray(START[0])}, "b": {"w": jnp.asarray(START[1])}}
    opt_state = optimizer.init(params)

    @jax.jit
    def update(sums, opt_state, params, key, noise_stddev):
        given = {"key": key, "noise_stddev": noise_stddev}
        updates, opt_state = optimizer.update(sums, opt_state, params, **given)
        return optax.apply_updates(params, updates), opt_state

    for batch in loader.remaining():
        engine.record()
        parts = [
            dpj.clipped_grad_sum(loss_fn, params, *c.batch, max_grad_norm=1.3, mask=c.mask).grads
            for c in batch.chunks
        ]
        sums = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        stddev = plan.noise_stddev(batch.step) / plan.expected_batch_size_at(batch.step)
        (key,) = dpj.noise_keys(1)
        params, opt_state = update(sums, opt_state, params, key, stddev)
    ends = [
        np.stack([np.asarray(leaf["w"]) for leaf in p.values()]) for p in (params, state.params)
    ]
    np.testing.assert_allclose(*ends, rtol=1e-4, atol=1e-5)
    assert np.abs(ends[0] - START).max() > 0.01

# SPDX-License-Identifier: Apache-2.0
"""AdamW whose second moment is that of the gradient without the noise, on both stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import correlated
from dualdp.plan.clipping import factors_for
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import fold_in, key_of, normal, seeded_bits
from tests.backends.runs import RATE, make_plan, stacks

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 5)), RNG.normal(size=60)
START = RNG.normal(size=(2, 5))
STEPS = 20
SETTINGS = {"b1": 0.8, "b2": 0.97, "floor": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
BFLOAT = "parameters of torch.bfloat16"


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


def start_torch(plan, b1=0.9, b2=0.999, **settings):
    model = Model()
    optimizer = dpt.AdamBC(model.parameters(), RATE, (b1, b2), **settings)
    engine, loader = (
        dpt.PrivacyEngine(),
        DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y))),
    )
    given = {"module": model, "optimizer": optimizer, "data_loader": loader}
    return engine, *engine.make_private(**given, plan=plan)


def on_torch(plan, settings=SETTINGS):
    """(bound, parameters) of every step."""
    engine, model, optimizer, loader = start_torch(plan, **settings)
    for x, y in loader.remaining():
        bound, before = engine.ledger.max_grad_norm, engine.ledger.position
        optimizer.zero_grad()
        (0.5 * (model(x) - y) ** 2).mean().backward()
        optimizer.step()
        if engine.ledger.position > before:
            yield bound, np.stack([p.detach().numpy().copy() for p in model.parameters()])


def loss_fn(params, x, y):
    return 0.5 * (x @ params["a"]["w"] + (x * x) @ params["b"]["w"] - y) ** 2


def params():
    return {"a": {"w": jnp.asarray(START[0])}, "b": {"w": jnp.asarray(START[1])}}


def weights(tree):
    return np.stack([np.asarray(leaf["w"]) for leaf in tree.values()])


def on_jax(plan, optimizer=None):
    """(bound, parameters) of every step."""
    engine = dpj.PrivacyEngine()
    given = {"loss_fn": loss_fn, "params": params(), "data": (X, Y), "checks": 0}
    optimizer = optimizer or dpj.adam_bc(RATE, **SETTINGS)
    step, state, loader = engine.make_private(**given, optimizer=optimizer, plan=plan)
    for batch in loader.remaining():
        bound = engine.ledger.max_grad_norm
        state, _ = step(state, batch)
        yield bound, weights(state.params)


def by_hand(plan, bounds):
    """The paper's algorithm: noise is subtracted from the corrected average of the squares."""
    b1, b2, floor, eps, decay = SETTINGS.values()
    w, first, second, noise = START.copy(), 0.0, 0.0, 0.0
    for step, bound in enumerate(bounds):
        rows = plan.batch_indices(step)
        inputs = np.stack([X[rows], X[rows] ** 2], 1)  # (n, 2, 5)
        residuals = np.einsum("npi,pi->n", inputs, w) - Y[rows]
        grads = residuals[:, None, None] * inputs
        is_by_layer = plan.clipping == "per_layer"
        norms = np.linalg.norm(grads, axis=2 if is_by_layer else (1, 2), keepdims=True)
        share = bound / np.sqrt(2) if is_by_layer else bound
        total = (grads * factors_for("flat", norms, share, xp=np)).sum(0)
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
    "adaptive, physical": {
        "max_grad_norm": AdaptiveNorm(1.0, quantile=0.5, learning_rate=0.5),
        "physical_batch_size": 5,
    },
    "per layer": {"clipping": "per_layer"},
}


@pytest.mark.parametrize(
    "name", ["schedules", *(pytest.param(n, marks=pytest.mark.slow) for n in [*PLANS][1:])]
)
def test_both_stacks_are_the_textbook_loop(name):
    """Twenty steps in float64, each with the noise of its own."""
    plan = make_plan(num_steps=STEPS, **PLANS[name])
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
    grads, options = RNG.normal(size=(STEPS, 5)), {"weight_decay": 0.1}
    ours = {"floor": 0.0, "eps": 1e-8, **options}
    ends = []
    for noise in ({"noise_stddev": 0.0}, {}):
        if stack == "torch":
            w = nn.Parameter(torch.tensor(START[0]))
            optimizer = dpt.AdamBC([w], **ours) if noise else torch.optim.AdamW([w], **options)
            for grad in grads:
                w.grad = torch.tensor(grad)
                optimizer.step(**noise)
            ends.append(w.detach().numpy())
            continue
        with jax.enable_x64(True):
            optimizer = dpj.adam_bc(1e-3, **ours) if noise else optax.adamw(1e-3, **options)
            w = jnp.asarray(START[0])
            state = optimizer.init(w)
            for grad in grads:
                updates, state = optimizer.update(jnp.asarray(grad), state, w, **noise)
                w = optax.apply_updates(w, updates)
            ends.append(np.asarray(w))
    np.testing.assert_allclose(*ends, rtol=1e-12)
    assert np.abs(ends[0] - START[0]).max() > 1e-3


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"floor": 0.0}, "floor=0 and eps=0 would divide by zero"),
        ({"floor": -1.0}, "floor=-1.0 is out of range"),
        ({"eps": float("inf")}, "eps=inf is out of range"),
        ({"weight_decay": -1}, "weight_decay=-1 is out of range"),
        ({"b1": 1.0}, "b1=1 would never change"),
        ({"b2": 1.5}, "b2=1.5 is not a probability"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dpj.adam_bc(0.1, **settings)
    with pytest.raises(ValueError, match=message):
        start_torch(make_plan(), **settings)


def test_wrong_settings_of_torch_are_refused():
    bad = [{"params": list(Model().parameters()), "maximize": True}]
    for parameters, options, message in (
        (Model().parameters(), {"lr": -1.0}, "lr=-1.0 is out of range"),
        (Model().parameters(), {"betas": 0.9}, r"betas=0.9 is no pair"),
        (bad, {}, "AdamBC has no 'maximize'"),
        (nn.Linear(2, 2).bfloat16().parameters(), {}, rf"got {BFLOAT}.* rounded away"),
    ):
        with pytest.raises(ValueError, match=message):
            dpt.AdamBC(parameters, **options)


@stacks
def test_correlated_noise_is_refused(stack):
    plan = make_plan(sampler="fixed_order", correlation=correlated.window((1.0, -0.5)))
    with pytest.raises(ValueError, match="AdamBC came with a plan whose noise is correlated"):
        next(on_torch(plan) if stack == "torch" else on_jax(plan))


def test_a_step_without_its_noise_is_refused():
    """And one whose settings, parameters or state became wrong; none changes anything."""
    p = nn.Parameter(torch.ones(2))
    optimizer = dpt.AdamBC([p])
    assert optimizer.step(lambda: 3) == 3  # no gradient: within a logical batch
    p.grad = torch.ones(2)
    with pytest.raises(TypeError, match="AdamBC.step.. came without noise_stddev"):
        optimizer.step()
    with pytest.raises(ValueError, match="noise_stddev=-1 is out of range"):
        optimizer.step(noise_stddev=-1)
    optimizer.param_groups[0]["floor"] = 0.0
    with pytest.raises(ValueError, match="floor=0 and eps=0"):
        optimizer.step(noise_stddev=0.1)
    optimizer.param_groups[0]["floor"] = 1e-8
    other = torch.optim.AdamW([p])
    other.step()
    with pytest.raises(ValueError, match="no 'floor', so another optimizer made it"):
        optimizer.load_state_dict(other.state_dict())
    p.data, p.grad = p.data.bfloat16(), p.grad.bfloat16()
    with pytest.raises(ValueError, match=BFLOAT):
        optimizer.step(noise_stddev=0.1)
    assert not optimizer.state
    tree, optimizer = jnp.ones(2), dpj.adam_bc(0.1)
    with pytest.raises(TypeError, match="adam_bc came without noise_stddev"):
        optimizer.update(tree, optimizer.init(tree), tree)


def test_noise_that_the_user_gives_to_an_engine_is_refused():
    engine, model, optimizer, loader = start_torch(make_plan())
    x, y = next(iter(loader))
    ((model(x) - y) ** 2).mean().backward()
    with pytest.raises(TypeError, match="with noise_stddev, which the engine passes by itself"):
        optimizer.step(noise_stddev=1.0)
    assert engine.ledger.position == 0
    optimizer.step()


SEVERAL = optax.MultiSteps(dpj.adam_bc(RATE), 2)


def test_what_changes_the_gradient_before_it_is_refused():
    """Of several gradients the noise would be another one."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), dpj.adam_bc(RATE))
    with pytest.raises(TypeError, match="gradients that another transformation has changed"):
        next(on_jax(make_plan(num_steps=3), clipped))
    for several in (SEVERAL, SEVERAL.gradient_transformation()):
        with pytest.raises((TypeError, ValueError), match="what wraps it|has changed"):
            next(on_jax(make_plan(num_steps=3), several))


def test_usual_optax_around_it_is_the_same_run():
    """A schedule, hyperparameters that are injected, what skips, groups and scales."""
    scheduled = optax.apply_if_finite(dpj.adam_bc(optax.constant_schedule(RATE)), 3)
    scaled = optax.chain(dpj.adam_bc(2 * RATE), optax.scale(0.5))
    of = {"one": scheduled, "two": optax.inject_hyperparams(dpj.adam_bc)(RATE)}
    for alike in (scaled, optax.multi_transform(of, {"a": "one", "b": "two"})):
        plan = make_plan(num_steps=3)
        ends = [[*on_jax(plan, optimizer)][-1][1] for optimizer in (dpj.adam_bc(RATE), alike)]
        np.testing.assert_allclose(*ends, rtol=1e-5)
        assert np.abs(ends[0] - START).max() > 0.01


@pytest.mark.slow
def test_a_jitted_loop_of_ones_own_passes_the_noise():
    """Behind `add_noise` in a chain; it ends where the engine does."""
    plan = make_plan(num_steps=3)
    _, expected = [*on_jax(plan, dpj.adam_bc(RATE))][-1]
    plan, engine = make_plan(num_steps=3, physical_batch_size=60), dpj.PrivacyEngine()
    loader = engine.make_loader(data=(X, Y), plan=plan)
    optimizer = optax.chain(dpj.add_noise(plan), dpj.adam_bc(RATE))
    found = params()
    opt_state = optimizer.init(found)

    @jax.jit
    def update(sums, opt_state, params, key, noise_stddev):
        given = {"key": key, "noise_stddev": noise_stddev}
        updates, opt_state = optimizer.update(sums, opt_state, params, **given)
        return optax.apply_updates(params, updates), opt_state

    for batch in loader.remaining():
        engine.record()
        (chunk,) = batch.chunks
        sums = dpj.clipped_grad_sum(
            loss_fn, found, *chunk.batch, max_grad_norm=1.3, mask=chunk.mask
        ).grads
        stddev = plan.noise_stddev(batch.step) / plan.expected_batch_size_at(batch.step)
        (key,) = dpj.noise_keys(1)
        found, opt_state = update(sums, opt_state, found, key, stddev)
    np.testing.assert_allclose(weights(found), expected, rtol=1e-4, atol=1e-5)

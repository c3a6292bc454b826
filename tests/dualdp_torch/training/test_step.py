# SPDX-License-Identifier: Apache-2.0
"""The optimizer stays the user's: groups, schedulers, hooks, closures, copies, frozen parts."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.plan import schedules
from dualdp.plan.clipping import factors_for
from dualdp_torch.noise.noise import NoiseSource
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import (
    NUM,
    assert_by_hand,
    assert_same,
    build,
    dataset,
    first_batch,
    plan,
    start,
    train,
)


def test_schedulers_follow_the_steps_of_the_loop():
    _, model, optimizer, loader = start(plan=plan())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=len(loader))
    rates = []
    for x, y, _ in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step() if len(rates) < 6 else None
    assert len(set(rates)) == 6
    assert max(rates) == pytest.approx(0.5, rel=0.2)


def test_the_users_hooks_see_what_is_released():
    engine, model, optimizer, loader = start(plan=plan(num_steps=2))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(len(engine.ledger)))
    train(model, optimizer, loader)
    assert torch.equal(seen[2], engine.stages().noisy_mean["0.weight"])
    assert (seen[1], seen[3]) == (1, 2)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_evaluated_once(by_name):
    _, model, optimizer, loader = start(plan=plan())
    calls = []

    def train_by_closure(x, y):
        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        with torch.no_grad():
            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert loss.item() > 0

    for x, y, _ in loader:
        train_by_closure(x, y)
    assert len(calls) == 6
    assert_by_hand(model, plan())


def test_an_optimizer_that_asks_twice_is_refused():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return closure()

    model, _, loader = build()
    optimizer = Twice(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = start((model, optimizer, loader), plan=plan())
    _, x, y = first_batch(loader)

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="evaluates its closure more than once a step"):
        optimizer.step(closure)
    assert len(engine.ledger) == 1


def test_an_optimizer_that_asks_elsewhere_is_refused_by_name():
    """SAM climbs before it asks for a second gradient, which no release gives."""

    class SAM(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=0.05)
            with torch.enable_grad():
                return closure()

    model, _, loader = build()
    parts = model, SAM(model.parameters(), lr=0.1), loader
    engine, model, optimizer, loader = start(parts, plan=plan())
    _, x, y = first_batch(loader)

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="SAM evaluates its closure at other parameters"):
        optimizer.step(closure)
    assert len(engine.ledger) == 1


def test_lbfgs_is_refused_at_set_up():
    model, _, loader = build()
    with pytest.raises(ValueError, match="optimizer is LBFGS, which evaluates its closure several"):
        start((model, torch.optim.LBFGS(model.parameters()), loader), plan=plan())


def test_a_climb_without_a_closure_is_refused_at_set_up():
    """SAM of two steps reads p.grad before `step`, where there is none yet."""

    class SAM(torch.optim.SGD):
        def first_step(self):
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=0.05)

    model, _, loader = build()
    with pytest.raises(ValueError, match="optimizer is SAM, which evaluates its closure several"):
        start((model, SAM(model.parameters(), lr=0.1), loader), plan=plan())


def test_copies_and_pickles_of_the_optimizer_are_plain():
    model, _, loader = build()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = start((model, adam, loader), plan=plan())
    train(model, optimizer, loader)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.Adam
        assert not twin._optimizer_step_pre_hooks
        kept = next(iter(twin.state.values()))
        assert torch.equal(kept["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
        twin.step()
    assert len(engine.ledger) == 6
    plain = torch.optim.Adam(build()[0].parameters(), lr=0.1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert plain.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("zeroed", [True, False])
def test_a_grad_scaler_is_refused(zeroed):
    """known_failures 19."""
    engine, model, optimizer, loader = start(plan=plan())
    train(model, optimizer, [next(iter(loader))])
    scaler = torch.amp.GradScaler("cpu")
    _, x, y = first_batch(loader)
    optimizer.zero_grad() if zeroed else None
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="A GradScaler scaled the loss"):
        scaler.step(optimizer)
    assert len(engine.ledger) == 1
    engine.detach()
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    assert vars(optimizer).keys() == vars(plain).keys()


def test_a_disabled_grad_scaler_does_nothing():
    _, model, optimizer, loader = start(plan=plan(num_steps=1))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y, _ in loader:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_by_hand(model, plan(num_steps=1), rtol=1.3e-6, atol=1e-5)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.layer.requires_grad_(False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("holds_all", [True, False])
def test_frozen_parameters_cost_and_release_nothing(holds_all, monkeypatch):
    model = randomise(Adapted())
    before = copy.deepcopy(model)
    held = [p for p in model.parameters() if holds_all or p.requires_grad]
    parts = model, torch.optim.SGD(held, lr=0.5), build()[2]
    noised = []
    real = NoiseSource.noisy_mean
    monkeypatch.setattr(
        NoiseSource,
        "noisy_mean",
        lambda self, sums, *a, **k: (noised.append(set(sums)), real(self, sums, *a, **k))[1],
    )
    engine, model, optimizer, loader = start(parts, plan=plan())
    train(model, optimizer, loader)
    assert noised == [{"down.weight", "up.weight"}] * 6
    assert_same(model.layer, before.layer, rtol=0, atol=0)
    assert model.layer.weight.grad is None
    assert_by_hand(model, plan(), before)


# ---------------------------------------------------------------------- stages


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("mode", ["auto", "functorch", "ghost"])
def test_per_sample_gradients_can_be_kept(mode, size):
    engine, model, optimizer, loader = start(
        plan=plan(physical_batch_size=size), grad_sample_mode=mode
    )
    engine.keep_per_sample = True
    before = None
    for x, y, _ in loader:
        before = copy.deepcopy(model) if engine.is_between_steps or before is None else before
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if len(engine.ledger) == 1 and engine.is_between_steps:
            break
    stages, rows = engine.stages(), torch.from_numpy(plan().batch_indices(0))
    x, y, _ = dataset().tensors
    truth = dpt.per_sample_grads(
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), build()[0], x[rows], y[rows]
    )
    assert stages.unprotected_grads.keys() == truth.keys()
    for name, grads in truth.items():
        torch.testing.assert_close(stages.unprotected_grads[name], grads)
    factors = factors_for("flat", stages.unprotected_norms, 0.5, xp=torch)
    for name, grads in stages.unprotected_grads.items():
        total = torch.tensordot(factors, grads, 1)
        torch.testing.assert_close(stages.unprotected_sum[name], total)
    engine.keep_per_sample = False
    train(model, optimizer, [next(iter(loader))])
    if size is None:
        assert engine.stages().unprotected_grads is None
    else:  # no step ended, and the stages of the one before are gone
        with pytest.raises(AccountingError, match="No step was taken since a batch"):
            engine.stages()


def test_secure_noise_shows_nothing_else():
    """known_failures 55."""
    model, optimizer, loader = build()
    engine = dpt.PrivacyEngine(accountant="rdp", secure_mode=True)
    words = {"module": model, "optimizer": optimizer, "data_loader": loader}
    with pytest.raises(ValueError, match="secure_mode=True with a plan whose noise='fast'"):
        engine.make_private(**words, plan=plan())
    model, optimizer, loader = engine.make_private(
        **words, plan=plan(noise="secure", seed=None, num_steps=1)
    )
    train(model, optimizer, loader)
    assert model[0].weight.grad is not None
    with pytest.raises(AccountingError, match="noise='secure' keeps them closed"):
        engine.stages()


# ---------------------------------------------------------------------- schedules


def test_schedules_and_adaptive_bounds_come_through_make_private():
    engine, model, optimizer, loader = start(
        noise_multiplier=schedules.Exponential(2.0, 0.9), max_grad_norm=schedules.Step(1.0, 0.5, 2)
    )
    bounds = []
    for batch in loader:
        bounds.append(engine.ledger.max_grad_norm)
        train(model, optimizer, [batch])
    assert bounds == [1.0, 1.0, 0.5, 0.5, 0.25]
    noises = [entry["noise_multiplier"] for entry in engine.ledger.entries]
    np.testing.assert_allclose(noises, 2.0 * 0.9 ** np.arange(5))


@pytest.mark.parametrize("size", [None, 4])
def test_an_adaptive_bound_follows_the_norms(size):
    """Andrew et al. 2021: one bound clips, scales the noise and is on record."""
    run = plan(
        max_grad_norm=schedules.AdaptiveNorm(0.01, quantile=0.5, learning_rate=1.0),
        physical_batch_size=size,
        num_steps=20,
    )
    model, _, loader = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, model, optimizer, loader = start((model, optimizer, loader), plan=run)
    used = []
    for x, y, _ in loader:
        bound = engine.ledger.max_grad_norm
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.is_between_steps:
            stages = engine.stages()
            used.append(bound)
            size_of_sum = sum(g.square().sum() for g in stages.unprotected_sum.values()).sqrt()
            assert size_of_sum <= bound * len(stages.unprotected_norms) * (1 + 1e-4)
            mean = dpt.noisy_mean(stages.unprotected_sum, run, len(used) - 1, max_grad_norm=bound)
            assert all(torch.equal(mean[n], g) for n, g in stages.noisy_mean.items())
    assert [entry["max_grad_norm"] for entry in engine.ledger.entries] == used
    median = dpt.per_sample_norms(
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), model, *dataset().tensors[:2]
    ).median()
    assert used[0] == 0.01
    assert 0.5 * median < used[-1] < 2 * median


def test_an_adaptive_bound_counts_no_padding():
    """A masked row has norm 0, which lies below every bound."""
    run = plan(
        expected_batch_size=0.01,
        num_steps=1,
        max_grad_norm=schedules.AdaptiveNorm(1.0, count_noise_multiplier=1e-9),
    )
    engine, model, optimizer, loader = start(plan=run)
    train(model, optimizer, loader)
    assert len(engine.stages().unprotected_norms) == 0
    # With nothing on either side the fraction is one half, which is the quantile.
    assert engine.ledger.max_grad_norm == pytest.approx(1.0, rel=1e-4)


def test_a_loader_of_all_examples_has_rate_one():
    model, optimizer, _ = build()
    loader = DataLoader(dataset(), batch_size=100)
    engine, *_ = start((model, optimizer, loader), noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.plan.expected_batch_size_at(0) == NUM


@pytest.mark.parametrize("norm", ["mapping", "schedule"])
def test_groups_have_bounds_of_their_own(norm):
    bounds = {"0": 0.1, "2": 0.4}
    if norm == "mapping":
        run = plan(clipping="per_layer", max_grad_norm=bounds)
        assert run.max_grad_norm_at(3) == pytest.approx((0.1**2 + 0.4**2) ** 0.5)
    else:
        norms = schedules.Exponential(0.5, 0.9)
        run = plan(clipping="per_layer", max_grad_norm=norms, group_shares=bounds)
    engine, model, optimizer, loader = start(plan=run)
    train(model, optimizer, loader)
    assert_by_hand(model, run, rtol=1e-5, atol=1e-6)


def test_bounds_of_other_groups_are_refused_at_set_up():
    with pytest.raises(ValueError, match=r"lacks \['2'\] and names \['1'\]"):
        start(plan=plan(clipping="per_layer", max_grad_norm={"0": 1.0, "1": 1.0}))

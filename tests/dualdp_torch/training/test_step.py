# SPDX-License-Identifier: Apache-2.0
"""The optimizer stays the user's: groups, schedulers, closures, copies, frozen parts."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.plan import schedules
from dualdp.plan.clipping import factors_for
from dualdp_torch.noise.noise import NoiseSource
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import (
    assert_by_hand,
    assert_same,
    build,
    dataset,
    plan,
    start,
    train,
)
from tests.dualdp_torch.training.runs import Open, sgd


def closure_of(run, calls):
    def closure():
        calls.append(1)
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    return closure


def test_a_closure_is_evaluated_once():
    run, calls = Open(), []
    for step in range(6):
        closure = closure_of(run, calls)
        with torch.no_grad():
            loss = run.optimizer.step(**{"closure": closure}) if step % 2 else None
            loss = run.optimizer.step(closure) if loss is None else loss
        assert loss.item() > 0
        run.x, run.y, _ = next(run.batches, (run.x, run.y, None))
    assert len(calls) == 6
    assert_by_hand(run.model, plan())


class Twice(torch.optim.SGD):
    def step(self, closure):
        closure()
        return closure()


class SAM(torch.optim.SGD):
    """Climbs before it asks for a second gradient, which no release gives."""

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            return closure()


class TwoSteps(torch.optim.SGD):
    """SAM that reads p.grad before `step`, where there is none yet."""

    def first_step(self):
        self.param_groups[0]["params"][0].data.add_(1.0)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Twice, "evaluates its closure more than once a step"),
        (SAM, "SAM evaluates its closure at other parameters"),
    ],
)
def test_an_optimizer_of_several_gradients_is_refused(kind, match):
    """known_failures 93."""
    model, _, loader = build()
    run = Open((model, kind(model.parameters(), lr=0.1), loader))
    with pytest.raises(RuntimeError, match=match):
        run.optimizer.step(closure_of(run, []))
    assert len(run.engine.ledger) == 1


def test_a_climb_without_a_closure_is_refused_at_set_up():
    model, _, loader = build()
    with pytest.raises(ValueError, match="optimizer is TwoSteps, which evaluates its closure sev"):
        start((model, TwoSteps(model.parameters(), lr=0.1), loader), plan=plan())


def test_copies_and_pickles_of_the_optimizer_are_plain():
    """known_failures 45 and 50."""
    model, _, loader = build()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = start(
        (model, adam, loader), plan=plan(physical_batch_size=3)
    )
    train(model, optimizer, loader)
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.Adam
        assert not twin._optimizer_step_pre_hooks
        kept = next(iter(twin.state.values()))
        assert torch.equal(kept["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
        twin.step()
    assert len(engine.ledger) == 6
    plain, file = torch.optim.Adam(build()[0].parameters()), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert plain.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("zeroed", [True, False])
def test_a_grad_scaler_is_refused(zeroed):
    """known_failures 19."""
    run = Open()
    run.step()
    scaler = torch.amp.GradScaler("cpu")
    run.x, run.y, _ = next(run.batches)
    run.optimizer.zero_grad() if zeroed else None
    scaler.scale(run.loss()).backward()
    with pytest.raises(RuntimeError, match="A GradScaler scaled the loss"):
        scaler.step(run.optimizer)
    assert len(run.engine.ledger) == 1
    run.engine.detach()
    assert vars(run.optimizer).keys() == vars(build()[1]).keys()


def test_a_disabled_grad_scaler_does_nothing():
    run, scaler = Open(plan=plan(num_steps=1)), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(run.loss()).backward()
    scaler.step(run.optimizer)
    scaler.update()
    assert_by_hand(run.model, plan(num_steps=1), rtol=1.3e-6, atol=1e-5)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("holds_all", [True, False])
def test_frozen_parameters_cost_and_release_nothing(holds_all, monkeypatch):
    model = randomise(Adapted())
    before, noised, real = copy.deepcopy(model), [], NoiseSource.noisy_mean
    held = [p for p in model.parameters() if holds_all or p.requires_grad]

    def noisy_mean(self, sums, *given, **options):
        noised.append(set(sums))
        return real(self, sums, *given, **options)

    monkeypatch.setattr(NoiseSource, "noisy_mean", noisy_mean)
    _, model, optimizer, loader = start(
        (model, torch.optim.SGD(held, lr=0.5), build()[2]), plan=plan()
    )
    train(model, optimizer, loader)
    assert noised == [{"down.weight", "up.weight"}] * 6
    assert_same(model.layer, before.layer, rtol=0, atol=0)
    assert model.layer.weight.grad is None
    assert_by_hand(model, plan(), before)


# ---------------------------------------------------------------------- stages


@pytest.mark.parametrize(("mode", "size"), [("auto", 4), ("functorch", None), ("ghost", 4)])
def test_per_sample_gradients_can_be_kept(mode, size):
    engine, model, optimizer, loader = start(
        plan=plan(physical_batch_size=size), grad_sample_mode=mode
    )
    engine.keep_per_sample = True
    for batch in loader:
        train(model, optimizer, [batch])
        if engine.is_between_steps:
            break
    stages, rows = engine.stages(), torch.from_numpy(plan().batch_indices(0))
    x, y, _ = dataset().tensors
    truth = dpt.per_sample_grads(
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), build()[0], x[rows], y[rows]
    )
    torch.testing.assert_close(stages.unprotected_grads, truth)
    factors = factors_for("flat", stages.unprotected_norms, 0.5, xp=torch)
    for name, grads in truth.items():
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
    engine, model, optimizer, loader = start(plan=plan(noise="secure", seed=None, num_steps=1))
    train(model, optimizer, loader)
    assert model[0].weight.grad is not None
    with pytest.raises(AccountingError, match="noise='secure' keeps them closed"):
        engine.stages()


# ---------------------------------------------------------------------- bounds


@pytest.mark.parametrize("size", [None, 4])
def test_an_adaptive_bound_follows_the_norms(size):
    """Andrew et al. 2021: one bound clips, scales the noise and is on record."""
    norm = schedules.AdaptiveNorm(0.01, quantile=0.5, learning_rate=1.0)
    run, used = plan(max_grad_norm=norm, physical_batch_size=size, num_steps=20), []
    model, _, loader = build()
    engine, model, optimizer, loader = start(sgd(model, loader, lr=0.0), plan=run)
    for batch in loader:
        bound = engine.ledger.max_grad_norm
        train(model, optimizer, [batch])
        if engine.is_between_steps:
            stages = engine.stages()
            used.append(bound)
            length = sum(g.square().sum() for g in stages.unprotected_sum.values()).sqrt()
            assert length <= bound * len(stages.unprotected_norms) * (1 + 1e-4)
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
    norm = schedules.AdaptiveNorm(1.0, count_noise_multiplier=1e-9)
    run = Open(plan=plan(expected_batch_size=0.01, num_steps=1, max_grad_norm=norm))
    run.step()
    assert len(run.engine.stages().unprotected_norms) == 0
    # With nothing on either side the fraction is one half, which is the quantile.
    assert run.engine.ledger.max_grad_norm == pytest.approx(1.0, rel=1e-4)


BOUNDS = {"0": 0.1, "2": 0.4}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": BOUNDS},
        {"max_grad_norm": schedules.Exponential(0.5, 0.9), "group_shares": BOUNDS},
    ],
)
def test_groups_have_bounds_of_their_own(changes):
    run = plan(clipping="per_layer", **changes)
    _, model, optimizer, loader = start(plan=run)
    train(model, optimizer, loader)
    assert_by_hand(model, run, rtol=1e-5, atol=1e-6)

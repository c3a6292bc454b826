# SPDX-License-Identifier: Apache-2.0
"""The engine: the user's loop, private; every way to lose the guarantee raises."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import AccountingError, UnsupportedLayerError
from dualdp.ledger.ledger import Ledger
from dualdp_torch.training import step as private_step
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.forks import in_both
from tests.dualdp_torch.loop import (
    NUM,
    assert_by_hand,
    assert_same,
    build,
    first_batch,
    plan,
    start,
    train,
)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ew", "functorch", "ghost", "book_keeping"])
@pytest.mark.parametrize("size", [None, 5])
def test_the_users_loop_is_dp_sgd(reduction, mode, size):
    run = plan(physical_batch_size=size)
    engine, model, optimizer, loader = start(
        plan=run, loss_reduction=reduction, grad_sample_mode=mode
    )
    train(model, optimizer, loader, reduction)
    assert len(engine.ledger) == 6
    assert_by_hand(model, plan())


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_other_clipping_follows_the_plan(clipping):
    _, model, optimizer, loader = start(plan=plan(clipping=clipping))
    train(model, optimizer, loader)
    assert_by_hand(model, plan(clipping=clipping))


def test_the_same_objects_come_back_and_nothing_is_left_after_detach():
    parts = build()
    before = set(vars(parts[0])), set(parts[0].state_dict()), type(parts[1])
    engine, model, optimizer, loader = start(parts, noise_multiplier=1.0, max_grad_norm=1.0)
    assert (model, optimizer) == parts[:2]
    assert set(model.state_dict()) == before[1]
    train(model, optimizer, loader)
    engine.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not model[0].weight._backward_hooks
    assert (set(vars(model)), type(optimizer)) == (before[0], before[2])
    copy.deepcopy(model)
    pickle.dumps(optimizer)
    x, y, _ = next(iter(parts[2]))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.get_epsilon(delta=1e-5) > 0
    with pytest.raises(AccountingError, match="The engine is not attached"):
        engine.detach()


def test_an_open_ended_run_takes_one_epoch_per_pass():
    engine, model, optimizer, loader = start(noise_multiplier=1.0, max_grad_norm=1.0)
    assert len(loader) == 5
    assert len(train(model, optimizer, loader)) == 5
    first = engine.get_epsilon(delta=1e-5)
    train(model, optimizer, loader)
    assert len(engine.ledger) == 10
    assert engine.get_epsilon(delta=1e-5) > first
    assert engine.plan.sample_rate == 12 / NUM
    assert len(engine.accountant) == 10


def test_the_target_is_met_and_a_further_epoch_is_refused():
    model, optimizer, loader = build()
    engine = dpt.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        train(model, optimizer, loader)
    assert 2.9 < engine.get_epsilon() <= 3.0
    assert len(loader) == 5  # of the last pass: loops divide by it
    with pytest.raises(AccountingError, match="All 10 planned steps are taken"):
        train(model, optimizer, loader)


def test_empty_draws_release_noise():
    run = plan(expected_batch_size=0.01, num_steps=2)
    assert [len(run.batch_indices(step)) for step in range(2)] == [0] * 2
    engine, model, optimizer, loader = start(plan=run)
    before = copy.deepcopy(model)
    rows = train(model, optimizer, loader)
    assert rows == [[0]] * 2
    assert len(engine.ledger) == 2
    expected = before
    with torch.no_grad():
        for step in range(2):
            zeros = {name: torch.zeros_like(p) for name, p in expected.named_parameters()}
            mean = dpt.noisy_mean(zeros, run, step)
            for name, p in expected.named_parameters():
                p -= 0.5 * mean[name]
    assert_same(model, expected)


def test_an_abandoned_pass_leaves_no_half_sum():
    """known_failures 9: break inside a logical batch, then start again."""
    run = plan(physical_batch_size=4, num_steps=1)
    _, model, optimizer, loader = start(plan=run)
    for x, y, _ in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    train(model, optimizer, loader)
    assert_by_hand(model, plan(num_steps=1))


def test_a_failure_while_a_batch_is_handed_out_leaves_nothing_half_done(monkeypatch):
    engine, model, optimizer, loader = start(plan=plan(num_steps=1))

    def failing(*_):
        raise ValueError("no bound")

    with monkeypatch.context() as patch:
        patch.setattr(private_step, "clipping_bounds", failing)
        with pytest.raises(ValueError, match="no bound"):
            next(iter(loader))
    assert engine.is_between_steps
    with pytest.raises(RuntimeError, match="came without a batch of the loader"):
        optimizer.step()
    train(model, optimizer, loader)
    assert len(engine.ledger) == 1


def test_ledger_comes_first():
    engine, model, optimizer, loader = start(noise_multiplier=1.0, max_grad_norm=1.0)
    seen = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(len(engine.ledger)))
    train(model, optimizer, loader)
    handle.remove()
    assert seen == [1, 2, 3, 4, 5]


def test_stages_show_the_way_of_the_last_step():
    engine, model, optimizer, loader = start(plan=plan())
    with pytest.raises(AccountingError, match="No step was taken since a batch"):
        engine.stages()
    train(model, optimizer, loader)
    stages = engine.stages()
    assert len(stages.unprotected_norms) == len(plan().batch_indices(5))
    size = sum(g.square().sum() for g in stages.unprotected_sum.values()).sqrt()
    assert float(size) <= 0.5 * len(stages.unprotected_norms) * (1 + 1e-4)
    mean = dpt.noisy_mean(stages.unprotected_sum, plan(), 5)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, mean[name])


def test_physical_batches_step_the_optimizer_once():
    model, _, loader = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _, model, optimizer, loader = start(
        (model, optimizer, loader), plan=plan(physical_batch_size=3)
    )
    train(model, optimizer, loader)
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}


def test_evaluation_between_batches_is_free():
    _, model, optimizer, loader = start(plan=plan())
    for x, y, _ in loader:
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(data(3, 6))
        model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model(data(3, 6))


# ---------------------------------------------------------------------- misuse


def test_two_backwards_are_refused():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice over one recorded forward"):
        loss.backward()


def test_a_step_without_backward_or_batch_is_refused():
    _, model, optimizer, loader = start(plan=plan())
    with pytest.raises(RuntimeError, match="without a batch of the loader"):
        optimizer.step()
    _batches, x, _ = first_batch(loader)
    with pytest.raises(RuntimeError, match="No forward was recorded"):
        optimizer.step()
    model(x)
    with pytest.raises(RuntimeError, match="No backward was recorded"):
        optimizer.step()


def test_a_batch_without_a_step_is_refused():
    _, model, _, loader = start(plan=plan())
    batches, x, y = first_batch(loader)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"step 0 got no optimizer.step"):
        next(batches)


def test_gradients_around_the_model_are_refused():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    loss = F.cross_entropy(model(x), y) + model[0].weight.square().mean()
    with pytest.raises(
        UnsupportedLayerError, match="'0.weight' reached the loss outside.*weight_d"
    ):
        loss.backward()


def test_gradients_of_parameters_are_not_for_a_log():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    with pytest.raises(RuntimeError, match="has not: what it gets is the noisy mean, in p.grad"):
        torch.autograd.grad(F.cross_entropy(model(x), y), model[0].weight)


def test_a_term_without_data_is_added_before_the_step():
    """The way out that the refusal of such a term in the loss names."""
    weights = {}
    for decay in (0.0, 0.5):
        model, _, loader = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
        _, model, optimizer, loader = start((model, optimizer, loader), plan=plan())
        if not decay:
            parameters = list(model.parameters())
            optimizer.register_step_pre_hook(
                lambda *_, ps=parameters: [p.grad.add_(p.detach(), alpha=0.5) for p in ps] and None
            )
        train(model, optimizer, loader)
        weights[decay] = model.state_dict()
    torch.testing.assert_close(*weights.values(), rtol=1e-5, atol=1e-6)


def test_other_data_outside_the_loader_cannot_be_trained_on():
    _, model, _, _ = start(plan=plan())
    with pytest.raises(RuntimeError, match="without a batch of the loader that make_private"):
        F.cross_entropy(model(data(4, 6)), ids(3, 4)).backward()


@pytest.mark.parametrize("change", [False, True])
def test_parameters_that_change_after_set_up_are_refused(change):
    model, optimizer, loader = build()
    model[0].bias.requires_grad_(change)
    if not change:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    _, model, _, loader = start((model, optimizer, loader), plan=plan())
    model[0].bias.requires_grad_(not change)
    _batches, x, _ = first_batch(loader)
    with pytest.raises(RuntimeError, match=r"\['0.bias'\] were frozen, unfrozen or replaced"):
        model(x)


def test_other_parameters_of_a_functional_call_are_refused():
    _, model, _, loader = start(plan=plan())
    _batches, x, y = first_batch(loader)

    def loss(parameters):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    with pytest.raises(RuntimeError, match=r"functional_call.*belongs under engine.pause\(\)"):
        torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


def test_an_optimizer_that_changes_after_set_up_is_refused():
    _, model, optimizer, loader = start(plan=plan())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    _, x, y = first_batch(loader)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"holds parameters of shapes \[\(2,\)\]"):
        optimizer.step()


def test_an_optimizer_without_all_parameters_is_refused():
    model, _, loader = build()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not hold .* \['2.weight', '2.bias'\]"):
        start((model, optimizer, loader), plan=plan())
    assert not model._forward_hooks


def test_mixing_models_are_refused_at_set_up():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedLayerError, match=r"BatchNorm1d \(layer '1'\)"):
        start((model, optimizer, build()[2]), plan=plan())
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"plan": plan(), "noise_multiplier": 1.0}, ValueError, "noise_multiplier came together"),
        ({"plan": plan(), "clipping": "flat"}, ValueError, "clipping came together with plan="),
        ({"noise_multiplier": 1.0}, TypeError, "make_private misses max_grad_norm"),
        ({"max_grad_norm": 1.0}, TypeError, "make_private misses noise_multiplier"),
        (
            {"noise_multiplier": -1.0, "max_grad_norm": 1.0},
            ValueError,
            "noise_multiplier=-1.0 is out of range",
        ),
        ({"plan": plan(), "loss_reduction": "none"}, ValueError, "loss_reduction='none'"),
        ({"plan": plan(), "grad_sample_mode": "magic"}, ValueError, "grad_sample_mode='magic'"),
        (
            {"plan": plan(clipping="per_layer"), "grad_sample_mode": "ghost"},
            ValueError,
            "can't clip per_layer",
        ),
        ({"plan": plan(), "poisson_sampling": False}, ValueError, "sampler came together with pl"),
        ({"plan": plan(), "criterion": F.mse_loss}, ValueError, "criterion=.* is not supported"),
        ({"plan": "plan"}, TypeError, "plan is a str"),
        ({"plan": plan(), "max_grad_nrom": 1.0}, TypeError, "no argument 'max_grad_nrom'"),
    ],
)
def test_wrong_arguments_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        start(**options)


def test_wrong_objects_are_refused():
    model, optimizer, loader = build()
    with pytest.raises(TypeError, match="module is a str"):
        start(("model", optimizer, loader), plan=plan())
    with pytest.raises(TypeError, match="optimizer is a str"):
        start((model, "sgd", loader), plan=plan())
    with pytest.raises(TypeError, match="optimizer is a list.*holds all parameters and steps each"):
        start((model, [optimizer], loader), plan=plan())
    engine, *_ = start((model, optimizer, loader), plan=plan())
    with pytest.raises(AccountingError, match="This engine has a run already"):
        engine.make_private(module=model, optimizer=optimizer, data_loader=loader, plan=plan())
    with pytest.raises(ValueError, match="The optimizer does not hold the trainable parameters"):
        start((model, build()[1], build()[2]), plan=plan())
    assert engine.is_between_steps  # what is refused leaves the run as it was


def one_step(parts):
    """An engine that made one release."""
    engine, model, optimizer, loader = start(parts, plan=plan(seed=None))
    _, x, y = first_batch(loader)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return engine


def test_a_cell_that_is_run_twice_begins_a_new_run():
    """Before any release the run before it is over; then it has to be ended by detach()."""
    model, optimizer, loader = build()
    first, *_ = start((model, optimizer, loader), plan=plan(seed=None))
    again = torch.optim.SGD(model.parameters(), lr=0.5)
    second = one_step((model, again, loader))
    with pytest.raises(AccountingError, match="The engine is not attached"):
        first.stages()
    assert (len(first.ledger), len(second.ledger)) == (0, 1)
    for parts, name in (((model, build()[1]), "module"), ((build()[0], again), "optimizer")):
        with pytest.raises(AccountingError, match=f"{name} is trained by another PrivacyEngine"):
            start((*parts, build()[2]), plan=plan())
    second.detach()
    third = one_step((model, again, build()[2]))
    third.detach()
    assert not {"_dualdp_engine", "zero_grad"} & {*vars(model), *vars(again)}


def test_a_plan_that_is_used_twice_has_batches_and_noise_of_its_own():
    run, seen = plan(seed=None, num_steps=1), []
    for _ in range(2):
        engine, model, optimizer, loader = start(plan=run)
        rows = train(model, optimizer, loader)
        stages = engine.stages()
        noise = 12 * stages.noisy_mean["0.weight"] - stages.unprotected_sum["0.weight"]
        seen.append((rows, noise))
        assert len(engine.ledger) == 1
    assert seen[0][0] != seen[1][0]
    assert abs(torch.corrcoef(torch.stack([noise.flatten() for _, noise in seen]))[0, 1]) < 0.9
    assert (seen[0][1] - seen[1][1]).abs().min() > 0


def test_reading_too_early_is_refused():
    engine = dpt.PrivacyEngine(accountant="rdp")
    for read in (lambda: engine.get_epsilon(delta=1e-5), lambda: engine.plan):
        with pytest.raises(AccountingError, match="The engine has no run yet. Call make_private"):
            read()
    engine, *_ = start(noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="delta is missing"):
        engine.get_epsilon()
    assert engine.get_epsilon(delta=1e-5) == 0


def test_two_runs_never_share_their_noise():
    """known_failures 15: the same arguments twice, as a user would."""
    means = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        engine, model, optimizer, loader = start(noise_multiplier=1.0, max_grad_norm=1e-6)
        train(model, optimizer, loader)
        means.append(engine.stages().noisy_mean["0.weight"].flatten())
    assert not torch.allclose(means[0], means[1])


def test_dropout_through_vmap_is_refused():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]
    _, model, optimizer, loader = start(parts, plan=plan(), grad_sample_mode="functorch")
    _, x, y = first_batch(loader)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(UnsupportedLayerError, match="draws its randomness .dropout. itself"):
        optimizer.step()


class Returns(nn.Module):
    """Returns what a function makes of its outputs."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda out: out.square().mean(), r"The model returned a tensor of shape \(\)"),
        (lambda out: (out, out[:2]), r"The model returned a tensor of shape \(2, 3\)"),
        (lambda out: "text", "The model returned no tensor"),
    ],
)
def test_outputs_without_the_examples_are_refused(function, match):
    model = Returns(function)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]
    _, model, _, loader = start(parts, plan=plan())
    _batches, x, _ = first_batch(loader)
    with pytest.raises(UnsupportedLayerError, match=match):
        model(x)


def test_the_ledger_is_a_file_if_asked_for(tmp_path):
    path = tmp_path / "run.ledger"
    engine, model, optimizer, loader = start(plan=plan(), ledger=path)
    lines = []
    for x, y, _ in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        lines.append(sum("r" in record for record in Ledger.read(path)))
    assert lines == [1, 2, 3, 4, 5, 6]
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    assert not (tmp_path / "run.ledger.ledger").exists()
    engine.detach()
    parts = build()
    again = dpt.load_checkpoint(tmp_path / "run", model=parts[0], optimizer=parts[1])
    assert again.ledger.path == str(path)
    with pytest.raises(FileExistsError, match="run.ledger"):
        start(plan=plan(), ledger=path)


def test_a_copy_of_the_model_is_not_recorded():
    _, model, optimizer, loader = start(plan=plan())
    twin = copy.deepcopy(model)
    for x, y, _ in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        twin(x)
        loss.backward()
        optimizer.step()
    F.cross_entropy(twin(x), y).backward()
    assert twin[0].weight.grad is not None
    assert pickle.loads(pickle.dumps(model))[0].weight.shape == (5, 6)


def test_a_frozen_parameter_is_not_moved_by_an_old_gradient():
    model, optimizer, loader = build()
    x, y, _ = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    model[0].bias.requires_grad_(False)
    before = model[0].bias.clone()
    _, model, optimizer, loader = start((model, optimizer, loader), plan=plan())
    _, x, y = first_batch(loader)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(model[0].bias, before, rtol=0, atol=0)


def stepped(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return model[0].weight.grad.flatten().numpy()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_a_fork_of_a_run_is_a_run_of_its_own(noise):
    """known_failures 81: what was drawn and not used is dropped, and a segment begins."""
    run = plan(seed=None, num_steps=60, noise=noise, noise_multiplier=100.0)
    engine, model, optimizer, loader = start(plan=run)
    batches = iter(loader)
    stepped(model, optimizer, *next(batches)[:2])
    x, y, _ = next(batches)

    def child():
        with pytest.raises(RuntimeError) as told:
            stepped(model, optimizer, x, y)
        *more, rows = next(iter(loader))
        release = stepped(model, optimizer, *more)
        of_ledger = len(engine.ledger), len(engine.ledger.segments)
        return str(told.value), rows.tolist(), release, *of_ledger

    def parent():
        return stepped(model, optimizer, x, y), next(iter(loader))[2].tolist()

    (told, theirs, release, releases, segments), (mine, rows) = in_both(child, parent)
    assert "its batch was drawn before the process was forked" in told
    assert theirs != rows
    assert abs(np.corrcoef(mine, release)[0, 1]) < 0.8
    assert (releases, segments) == (2, 2)
    assert (len(engine.ledger), len(engine.ledger.segments)) == (2, 1)


def test_a_fork_does_not_write_the_ledger_of_its_parent(tmp_path):
    engine, model, optimizer, loader = start(plan=plan(seed=None), ledger=tmp_path / "ledger")
    child = os.fork()
    if not child:
        try:
            stepped(model, optimizer, *next(iter(loader))[:2])
        except AccountingError as error:
            os._exit(7 if "This process is a fork of process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stepped(model, optimizer, *next(iter(loader))[:2])
    assert len(Ledger.read(tmp_path / "ledger")) >= 2

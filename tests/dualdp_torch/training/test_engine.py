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
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.forks import in_both
from tests.dualdp_torch.loop import assert_by_hand, assert_same, build, plan, start, train
from tests.dualdp_torch.training.runs import Open, forks, sgd

PARTS = {"physical_batch_size": 5}


@pytest.mark.parametrize(
    ("mode", "reduction", "changes"),
    [
        ("auto", "mean", {}),
        ("auto", "sum", PARTS),
        ("hooks", "sum", {}),
        ("ew", "mean", PARTS),
        ("functorch", "sum", PARTS),
        ("functorch", "mean", {}),
        ("ghost", "mean", PARTS),
        ("ghost", "sum", {}),
        ("book_keeping", "mean", PARTS),
        ("loop", "sum", {}),
        ("auto", "mean", {"clipping": "per_layer"}),
        ("auto", "sum", {"clipping": "automatic"}),
    ],
)
def test_the_users_loop_is_dp_sgd(mode, reduction, changes):
    engine, model, optimizer, loader = start(
        plan=plan(**changes), loss_reduction=reduction, grad_sample_mode=mode
    )
    train(model, optimizer, loader, reduction)
    assert len(engine.ledger) == 6
    assert_by_hand(model, plan(clipping=changes.get("clipping", "flat")))


def test_the_same_objects_come_back_and_detach_cleans_up():
    parts = build()
    before = set(vars(parts[0])), set(parts[0].state_dict()), type(parts[1])
    engine, model, optimizer, loader = start(parts, noise_multiplier=1.0, max_grad_norm=1.0)
    assert (model, optimizer) == parts[:2]
    assert set(model.state_dict()) == before[1]
    train(model, optimizer, loader)
    engine.detach()
    assert not [*model._forward_hooks, *model._forward_pre_hooks]
    assert not optimizer._optimizer_step_pre_hooks
    assert not model[0].weight._backward_hooks
    assert (set(vars(model)), type(optimizer)) == (before[0], before[2])
    assert vars(optimizer).keys() == vars(build()[1]).keys()
    pickle.dumps([copy.deepcopy(model), optimizer])
    train(model, optimizer, [next(iter(parts[2]))])
    assert engine.get_epsilon(delta=1e-5) > 0
    with pytest.raises(AccountingError, match="The engine is not attached"):
        engine.detach()


def test_the_target_is_met_and_a_further_epoch_is_refused():
    engine = dpt.PrivacyEngine(accountant="rdp")
    given = dict(zip(("module", "optimizer", "data_loader"), build(), strict=True))
    target = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2, "max_grad_norm": 1.0}
    model, optimizer, loader = engine.make_private_with_epsilon(**given, **target)
    for _ in range(2):
        assert len(train(model, optimizer, loader)) == 5
    assert 2.9 < engine.get_epsilon() <= 3.0
    assert len(loader) == 5  # of the last pass: loops divide by it
    with pytest.raises(AccountingError, match="All 10 planned steps are taken"):
        train(model, optimizer, loader)


def test_empty_draws_release_noise():
    run = plan(expected_batch_size=0.01, num_steps=2)
    assert [len(run.batch_indices(step)) for step in range(2)] == [0] * 2
    engine, model, optimizer, loader = start(plan=run)
    expected = copy.deepcopy(model)
    assert train(model, optimizer, loader) == [[0]] * 2
    assert len(engine.ledger) == 2
    with torch.no_grad():
        for step in range(2):
            zeros = {name: torch.zeros_like(p) for name, p in expected.named_parameters()}
            for name, mean in dpt.noisy_mean(zeros, run, step).items():
                expected.get_parameter(name).sub_(0.5 * mean)
    assert_same(model, expected)


def test_an_abandoned_pass_leaves_no_half_sum():
    """known_failures 9: break inside a logical batch, then start again."""
    run = Open(plan=plan(physical_batch_size=4, num_steps=1))
    run.step()
    train(run.model, run.optimizer, run.loader)
    assert_by_hand(run.model, plan(num_steps=1))


def test_ledger_comes_first():
    """And the user's hooks see what is released."""
    engine, model, optimizer, loader = start(plan=plan(num_steps=2))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(engine.ledger)))
    train(model, optimizer, loader)
    assert seen[1::2] == [1, 2]
    assert torch.equal(seen[2], engine.stages().noisy_mean["0.weight"])


# ---------------------------------------------------------------------- misuse


def twice(run):
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()


def after_the_step(run):
    loss = run.loss()
    loss.backward(retain_graph=True)
    run.optimizer.step()
    loss.backward()


def without_backward(run):
    run.loss()
    run.optimizer.step()


def without_step(run):
    run.loss().backward()
    next(run.batches)


def without_batch(run):
    run.batches.close()
    run.step()
    F.cross_entropy(run.model(data(4, 6)), ids(3, 4)).backward()


def other_parameters(run):
    named = {name: p.detach() for name, p in run.model.named_parameters()}

    def loss(parameters):
        return F.cross_entropy(torch.func.functional_call(run.model, parameters, (run.x,)), run.y)

    torch.func.grad(loss)(named)


def another_group(run):
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    run.step()


@pytest.mark.parametrize(
    ("loop", "error", "match"),
    [
        (twice, RuntimeError, "ran twice over one recorded forward"),
        (after_the_step, RuntimeError, "gradients were used by optimizer.step"),
        (lambda run: run.optimizer.step(), RuntimeError, "No forward was recorded"),
        (without_backward, RuntimeError, "No backward was recorded"),
        (without_step, RuntimeError, r"step 0 got no optimizer.step"),
        (without_batch, RuntimeError, "without a batch of the loader that make_private"),
        (
            lambda run: (run.loss() + run.model[0].weight.square().mean()).backward(),
            UnsupportedLayerError,
            "'0.weight' reached the loss outside.*weight_d",
        ),
        (
            lambda run: torch.autograd.grad(run.loss(), run.model[0].weight),
            RuntimeError,
            "has not: what it gets is the noisy mean, in p.grad",
        ),
        (other_parameters, RuntimeError, r"functional_call.*belongs under engine.pause\(\)"),
        (another_group, ValueError, r"holds parameters of shapes \[\(2,\)\]"),
    ],
)
def test_other_loops_are_refused(loop, error, match):
    run = Open()
    with pytest.raises(error, match=match):
        loop(run)


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_parameters_that_change_after_set_up_are_refused(is_frozen_first):
    model, _, loader = build()
    model[0].bias.requires_grad_(not is_frozen_first)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    _, model, _, loader = start((model, optimizer, loader), plan=plan())
    model[0].bias.requires_grad_(is_frozen_first)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"\['0.bias'\] were frozen, unfrozen or replaced"):
        model(next(batches)[0])


def test_wrong_optimizers_are_refused_at_set_up():
    """Other kinds of objects: tests/backends/test_mistakes.py."""
    model, _, loader = build()
    few, lbfgs = torch.optim.SGD(model[0].parameters()), torch.optim.LBFGS(model.parameters())
    for optimizer, error, match in (
        ([few], TypeError, "optimizer is a list.*holds all parameters and steps each"),
        (few, ValueError, r"does not hold the trainable parameters \['2.weight', '2.bias'\]"),
        (lbfgs, ValueError, "optimizer is LBFGS, which evaluates its closure several"),
    ):
        with pytest.raises(error, match=match):
            start((model, optimizer, loader), plan=plan())
        assert not [*model._forward_hooks, *getattr(optimizer, "_optimizer_step_pre_hooks", ())]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"plan": plan(), "grad_sample_mode": "magic"}, "grad_sample_mode='magic'"),
        (
            {"plan": plan(clipping="per_layer"), "grad_sample_mode": "ghost"},
            "can't clip per_layer",
        ),
        ({"plan": plan(), "poisson_sampling": False}, "sampler came together with pl"),
        (
            {"plan": plan(clipping="per_layer", max_grad_norm={"0": 1.0, "1": 1.0})},
            r"lacks \['2'\] and names \['1'\]",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, match):
    """Those of both stacks: tests/backends/test_engine_arguments.py."""
    with pytest.raises(ValueError, match=match):
        start(**options)


def test_a_cell_that_is_run_twice_begins_a_new_run():
    """Before any release the run before it is over; then it has to be ended by detach()."""
    model, optimizer, loader = build()
    first, *_ = start((model, optimizer, loader), plan=plan(seed=None))
    again = torch.optim.SGD(model.parameters(), lr=0.5)
    second = Open((model, again, loader), plan=plan(seed=None))
    second.step()
    with pytest.raises(AccountingError, match="The engine is not attached"):
        first.stages()
    assert (len(first.ledger), len(second.engine.ledger)) == (0, 1)
    for parts, name in (((model, build()[1]), "module"), ((build()[0], again), "optimizer")):
        with pytest.raises(AccountingError, match=f"{name} is trained by another PrivacyEngine"):
            start((*parts, build()[2]), plan=plan())
    second.engine.detach()
    third = Open((model, again, build()[2]), plan=plan(seed=None))
    third.step()
    third.engine.detach()
    assert not {"_dualdp_engine", "zero_grad"} & {*vars(model), *vars(again)}


def test_a_plan_that_is_used_twice_has_bits_of_its_own():
    """known_failures 15 and 16: other batches and other noise, whatever the user seeds."""
    run, seen = plan(seed=None, num_steps=1), []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        engine, model, optimizer, loader = start(plan=run)
        rows, stages = train(model, optimizer, loader), engine.stages()
        noise = 12 * stages.noisy_mean["0.weight"] - stages.unprotected_sum["0.weight"]
        seen.append((rows, noise.flatten()))
        assert len(engine.ledger) == 1
    (rows, noise), (others, other) = seen
    assert rows != others
    assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.9
    assert (noise - other).abs().min() > 0


def test_dropout_through_vmap_is_refused():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    run = Open(sgd(model, build()[2]), grad_sample_mode="functorch")
    with pytest.raises(UnsupportedLayerError, match="draws its randomness .dropout. itself"):
        run.step()


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
    run = Open(sgd(Returns(function), build()[2]))
    with pytest.raises(UnsupportedLayerError, match=match):
        run.model(run.x)


def test_the_ledger_is_a_file_if_asked_for(tmp_path):
    path = tmp_path / "run.ledger"
    engine, model, optimizer, loader = start(plan=plan(), ledger=path)
    for count, batch in enumerate(loader, 1):
        train(model, optimizer, [batch])
        assert sum("r" in record for record in Ledger.read(path)) == count
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    assert not (tmp_path / "run.ledger.ledger").exists()
    engine.detach()
    parts = build()
    again = dpt.load_checkpoint(tmp_path / "run", model=parts[0], optimizer=parts[1])
    assert again.ledger.path == str(path)
    with pytest.raises(FileExistsError, match="run.ledger"):
        start(plan=plan(), ledger=path)


def test_a_copy_of_the_model_is_not_recorded():
    run = Open()
    twin, loss = copy.deepcopy(run.model), run.loss()
    twin(run.x)
    loss.backward()
    run.optimizer.step()
    F.cross_entropy(twin(run.x), run.y).backward()
    assert twin[0].weight.grad is not None
    assert pickle.loads(pickle.dumps(run.model))[0].weight.shape == (5, 6)


def test_a_frozen_parameter_is_not_moved_by_an_old_gradient():
    parts = model, optimizer, loader = build()
    train(model, optimizer, [next(iter(loader))])
    before = model[0].bias.requires_grad_(False).clone()
    Open(parts).step()
    assert torch.equal(model[0].bias, before)


# ---------------------------------------------------------------------- forks


def stepped(run, batch):
    """The gradient of a step."""
    train(run.model, run.optimizer, [batch])
    return run.model[0].weight.grad.flatten().numpy()


@forks
def test_a_fork_of_a_run_is_a_run_of_its_own():
    """known_failures 81: what was drawn and not used is dropped, and a segment begins."""
    run = Open(plan=plan(seed=None, num_steps=60, noise_multiplier=100.0))
    run.step()
    batch, ledger = next(run.batches), run.engine.ledger

    def child():
        with pytest.raises(RuntimeError) as told:
            stepped(run, batch)
        with pytest.raises(RuntimeError, match="began before the process was forked"):
            next(run.batches)
        other = next(iter(run.loader))
        release = stepped(run, other)
        return str(told.value), other[2].tolist(), release, len(ledger), len(ledger.segments)

    def parent():
        return stepped(run, batch), next(iter(run.loader))[2].tolist()

    (told, theirs, release, *of_ledger), (mine, rows) = in_both(child, parent)
    assert "its batch was drawn before the process was forked" in told
    assert theirs != rows
    assert abs(np.corrcoef(mine, release)[0, 1]) < 0.8
    assert of_ledger == [2, 2]
    assert (len(ledger), len(ledger.segments)) == (2, 1)


@forks
def test_a_fork_does_not_write_the_ledger_of_its_parent(tmp_path):
    engine, model, optimizer, loader = start(plan=plan(seed=None), ledger=tmp_path / "ledger")
    child = os.fork()
    if not child:
        try:
            train(model, optimizer, [next(iter(loader))])
        except AccountingError as error:
            os._exit(7 if "This process is a fork of process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    train(model, optimizer, [next(iter(loader))])
    assert len(Ledger.read(tmp_path / "ledger")) >= 2

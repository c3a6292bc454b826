# SPDX-License-Identifier: Apache-2.0
"""What two data-parallel processes assert, each for itself: what they disagree on, or do alike."""

import datetime
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError
from dualdp_torch.parallel.process_group import Group, unwrapped
from dualdp_torch.rules import RULES
from dualdp_torch.training.step_checks import StepChecks

from . import models
from .spawn import LIMIT


def start(data=None, model=None, lr=0.2, kind=torch.optim.SGD, run=None, **options):
    """make_private on parts of which some may be other ones on this process."""
    made, rows = models.build()
    model, rows = model or made, data or rows
    optimizer, run = kind(model.parameters(), lr=lr), run or models.plan(num_steps=3)
    return models.begin(model, rows, run, optimizer=optimizer, **options)


def other_weights():
    """The usual model after another seed."""
    model = models.build()[0]
    torch.manual_seed(12)
    for p in model.parameters():
        nn.init.normal_(p)
    return {"model": model}


def rows_of(index):
    return {"data": TensorDataset(*models.build()[1][index])}


def of_users(users):
    run = models.plan(num_steps=3, num_examples=20, unit="user", rows_per_unit=2)
    return {"run": run, "users": users}


#: Name -> text of the error, parts of rank 1, and parts of rank 0 where they are not the usual.
DIFFERENT = {
    "plan": (
        r"plan\['noise_multiplier'\] is 0.4 on rank 0 and 0.5 on rank 1",
        lambda: {"run": models.plan(num_steps=3, noise_multiplier=0.5)},
    ),
    "settings": (
        r"settings\['loss_reduction'\] is 'mean' on rank 0 and 'sum' on rank 1",
        lambda: {"loss_reduction": "sum"},
    ),
    "dtype": (
        r"model\['0.bias'\]\[1\] is 'torch.float32' on rank 0 and 'torch.float64' on rank 1",
        lambda: {"model": models.build(dtype=torch.float64)[0]},
    ),
    "weights": (
        r"start of parameters\['0.bias'\] is one on rank 0 and another .* the same seed",
        other_weights,
    ),
    "learning rate": (
        r"optimizer\['groups'\]\[0\]\['lr'\] is '0.2' on rank 0 and '0.3' on rank 1",
        lambda: {"lr": 0.3},
    ),
    "length of the data": (
        r"data\['examples'\] is one on rank 0 and another on rank 1",
        lambda: rows_of(slice(35)),
    ),
    "order of the rows": (
        r"data\['rows'\]\[0\] is one on rank 0 and another on rank 1.* Row i must be",
        lambda: rows_of(torch.arange(39, -1, -1)),
    ),
    "users": (
        r"users is one on rank 0 and another on rank 1.* Give all of them the same users=",
        lambda: of_users(torch.arange(40).roll(1) // 2),
        lambda: of_users(torch.arange(40) // 2),
    ),
}


def is_named(text, odd, usual, patch, folder):
    """Rank 1 differs: found on both, before the first step."""
    with pytest.raises(ValueError, match=text):
        start(**(odd() if dist.get_rank() else usual()))


def train(engine, model, optimizer, loader, clock=None):
    for batch in loader:
        models.step(model, optimizer, batch)
        if clock is not None:
            clock[0] += 1


def a_later_learning_rate_is_noticed(patch, folder):
    """One that follows something of its own on one process."""
    engine, model, optimizer, loader = start(model=DistributedDataParallel(models.build()[0]))
    optimizer.param_groups[0]["lr"] = 0.2 + 0.1 * dist.get_rank()
    with pytest.raises(ValueError, match=r"before step 1\['0.bias'\] is one .* Give all the same"):
        train(engine, model, optimizer, loader)


def processes_at_different_places_stop(patch, folder):
    """Rank 0 saves a checkpoint that the other does not save."""
    engine, model, optimizer, loader = start()
    batches = iter(loader)
    models.step(model, optimizer, next(batches))
    text = r"Rank 0 is at save_checkpoint after 1 steps and rank 1 at step 1\. Expected every proc"

    def go_on():
        if dist.get_rank():
            models.step(model, optimizer, next(batches))
        parts = {"model": model, "optimizer": optimizer, "engine": engine}
        dpt.save_checkpoint(folder / "alone", **parts)

    with pytest.raises(RuntimeError, match=text):
        go_on()


def sums_that_arrive_differently_stop_both(patch, folder):
    real = Group.summed

    def summed(self, point, sums):
        totals = real(self, point, sums)
        totals["0.bias"][0] += self.rank
        return totals

    patch.setattr(Group, "summed", summed)
    text = r"the sum over the processes differs from what each .* \(parameter '0.bias'\)"
    with pytest.raises(ExactnessError, match=text):
        train(*start())


def a_check_that_fails_on_one_stops_both(patch, folder):
    """Before the step is on record."""
    real = StepChecks.criterion

    def criterion(self, draw):
        if dist.get_rank() and draw.step:
            raise ExactnessError("A spot check failed: planted.")
        return real(self, draw)

    patch.setattr(StepChecks, "criterion", criterion)
    run = start()
    with pytest.raises(ExactnessError, match="A spot check failed: planted."):
        train(*run)
    assert len(run[0].ledger) == 1


def a_hook_on_the_wrapper_is_refused(patch, folder):
    model = DistributedDataParallel(models.build()[0])
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="DistributedDataParallel came with a communication hook"):
        start(model=model)


def stops_both(call, failing, kind, text):
    """An error of one process is raised there as it is, and named on the other."""
    if dist.get_rank() == failing:
        with pytest.raises(kind, match=text):
            call()
    else:
        match = rf"^Rank {failing} stopped at .*{kind.__name__}: .*{text}"
        with pytest.raises(RuntimeError, match=match):
            call()


def a_ledger_that_exists_stops_both(patch, folder):
    path = folder / "taken.ledger"
    path.write_text("something")
    stops_both(lambda: start(ledger=path), 0, FileExistsError, "taken.ledger exists")


def what_fails_on_one_stops_both(patch, folder):
    rank = dist.get_rank()
    call = partial(Group().on_all, "a test", lambda: 1 / (1 - rank))
    stops_both(call, 1, ZeroDivisionError, "division by zero")


def a_sampler_of_other_processes_is_refused(patch, folder):
    model, rows = models.build()
    sampler = DistributedSampler(rows, 3, dist.get_rank())
    parts = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(rows, batch_size=5, sampler=sampler),
        "plan": models.plan(num_steps=3),
    }
    text = r"DistributedSampler of rank \d of 3 in process \d of 2. Expected that of the process gr"
    with pytest.raises(ValueError, match=text):
        dpt.PrivacyEngine().make_private(**parts)


def without_a_seed_all_share_batches_and_noise(patch, folder):
    """Rank 0 draws, and its word has the bits: shares of one batch, one noise on both."""
    engine, model, optimizer, loader = start(run=models.plan(num_steps=3, seed=None))
    rows, releases = [], []
    for draw, batch in loader.with_draws():
        models.step(model, optimizer, batch)
        rows.append(set(np.array(draw.indices)[draw.mask.numpy()].tolist()))
        releases.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    (mine, ours), (others, theirs) = Group().gather("a test", (rows, torch.stack(releases)))
    assert not any(one & other for one, other in zip(mine, others, strict=True))
    assert torch.equal(ours, theirs)
    assert ours.diff(dim=0).abs().min() > 0


def the_wrapper_is_as_it_was_after_detach(patch, folder):
    """Buffers stay each process's own during the run; afterwards DDP trains as usual."""
    rank = dist.get_rank()
    model, data = models.build(dtype=torch.float64)
    model.register_buffer("own", torch.zeros(2))
    module = DistributedDataParallel(model, find_unused_parameters=True)
    before = {name: value for name, value in vars(module).items() if "require" in name}
    model.own.fill_(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, same, optimizer, loader = models.begin(
        module, data, models.plan(num_steps=3), optimizer=optimizer
    )
    assert same is module
    assert next(iter(engine.parameters)) == "0.weight"  # as in the model, without "module."
    train(engine, module, optimizer, loader)
    assert model.own.tolist() == [rank, rank]
    engine.detach()
    assert before == {name: vars(module)[name] for name in before}
    assert module.find_unused_parameters
    x, y = data[:8]
    own = slice(4 * rank, 4 * rank + 4)
    optimizer.zero_grad()
    F.cross_entropy(module(x[own]), y[own]).backward()
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=1e-15)


def managed(folder=None):
    """A run under BatchMemoryManager, from a plain loader or one with a DistributedSampler."""
    model, data = models.build(dtype=torch.float64)
    sampler, size, count = None, 8, 0
    if folder is not None:  # the batch size is that of one process
        model, sampler, size = DistributedDataParallel(model), DistributedSampler(data), 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    run = models.plan(expected_batch_size=8, num_steps=None, seed=9)
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=size, sampler=sampler),
        plan=run,
    )
    sizes = {"max_physical_batch_size": 2, "optimizer": optimizer}
    with dpt.BatchMemoryManager(data_loader=loader, **sizes) as small:
        promised = len(small)
        for count, batch in enumerate(small, 1):  # noqa: B007
            models.step(model, optimizer, batch)
    assert (count, engine.ledger.position) == (promised, 5)
    return models.parameters(unwrapped(model)), count


BEGINS, STEPS = 11, 60


def a_fault_is_caught(fault, patch, folder):
    """It begins after some steps, stops both at one step, and is missed without checks."""
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(40, 20), torch.randint(3, (40,)))
    for checks in (0.3, 0.0):
        model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
        plan, clock = models.plan(num_steps=STEPS, expected_batch_size=20), [0]
        run = models.begin(model, data, plan, checks=checks)
        with patch.context() as planted:
            fault(planted, lambda clock=clock: clock[0] >= BEGINS)
            if not checks:
                train(*run, clock)
            else:
                with pytest.raises(ExactnessError, match="A spot check failed"):
                    train(*run, clock)
        failed = run[0].ledger.failed_check
        if not checks:
            assert (failed, clock[0]) == (None, STEPS)
            continue
        assert BEGINS <= clock[0] < STEPS
        assert failed["step"] == clock[0]
        assert failed["last_passed"] is None or failed["last_passed"] < clock[0]
        assert len(set(Group().gather("a test", clock[0]))) == 1


def wrong_reduction(factor, patch, has_begun):
    """Rank 1 sends another tensor than what it has."""
    real = dist.all_reduce

    def sent(tensor, *args, **options):
        if has_begun() and tensor.is_floating_point() and dist.get_rank():
            tensor.mul_(factor)
        return real(tensor, *args, **options)

    patch.setattr(dist, "all_reduce", sent)


def wrong_rule(patch, has_begun):
    """The rule of a linear layer is wrong on rank 1 alone, for one row in eight."""
    right = RULES[F.linear]

    def weight_sum(acts, grads_out, **options):
        if has_begun() and dist.get_rank():
            grads_out = grads_out.clone()
            grads_out[1::8] *= 3
        return right.sums["weight"](acts, grads_out, **options)

    patch.setitem(RULES, F.linear, replace(right, sums={**right.sums, "weight": weight_sum}))


def a_process_that_hangs_stops_the_other(patch, folder):
    """In the time limit of the group."""
    group = Group(dist.new_group(timeout=datetime.timedelta(seconds=1)))
    if group.is_first:
        with pytest.raises(RuntimeError, match="Rank 0 of 2 lost .* at a test .*start them again"):
            group.gather("a test", None)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=LIMIT / 2))


OTHERS = (
    a_later_learning_rate_is_noticed,
    processes_at_different_places_stop,
    sums_that_arrive_differently_stop_both,
    a_check_that_fails_on_one_stops_both,
    a_hook_on_the_wrapper_is_refused,
    a_ledger_that_exists_stops_both,
    what_fails_on_one_stops_both,
    a_sampler_of_other_processes_is_refused,
    without_a_seed_all_share_batches_and_noise,
    the_wrapper_is_as_it_was_after_detach,
)
CHECKS = {
    **{
        name: partial(is_named, text, odd, *(usual or [dict]))
        for name, (text, odd, *usual) in DIFFERENT.items()
    },
    **{check.__name__: check for check in OTHERS},
    "a rank is lost": partial(a_fault_is_caught, partial(wrong_reduction, 0.0)),
    "a rank sends a little too much": partial(a_fault_is_caught, partial(wrong_reduction, 1.02)),
    "a rule is wrong on one rank": partial(a_fault_is_caught, wrong_rule),
    "a process hangs": a_process_that_hangs_stops_the_other,
}

# SPDX-License-Identifier: Apache-2.0
"""Users in the loop: a user's rows are averaged and clipped once, whatever they are."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import units
from dualdp.ledger.verify import verify
from dualdp.plan.batches import drawn_rows
from dualdp.randomness import SegmentBits
from dualdp_torch.integrations.host_loop import HostedRun
from tests import tiers
from tests.dualdp_torch import loop
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.training.test_loader import forks

K, C, USERS = 3, 0.5, 25
MODES = ("auto", "book_keeping", "two_pass", "materialize", "vmap", "loop")
#: (60,) user of each row, in no order; most have one to three rows.
OWNERS = 2 * np.random.default_rng(3).permutation(
    [*range(USERS), *range(15), *([4] * 8), *([7] * 12)]
)


class Parts(nn.Module):
    """Layers whose rules take rows of a unit as positions, and some whose rules don't."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)
        self.scale, self.head = nn.Parameter(torch.zeros(4, 1)), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.norm(self.conv(x.view(-1, 2, 3))).tanh() * self.scale
        return self.head(hidden.flatten(1))


def parts(x=None, model=None, **options):
    model = randomise(model or Parts()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = data(60, 6).double() if x is None else x
    rows = TensorDataset(x, ids(3, 60), torch.arange(60))
    return model, optimizer, DataLoader(rows, batch_size=8, **options)


def plan(**changes):
    settings = {"unit": "user", "rows_per_unit": K, "num_examples": USERS}
    settings |= {"expected_batch_size": 8, "num_steps": 3, "seed": 1}
    return loop.plan(**settings | changes)


def start(given=None, users=OWNERS, **options):
    options = {"plan": plan(), "checks": 1.0} | options
    return loop.start(given or parts(), users=users, **options)


def by_hand(model, run):
    """Train by plain autograd: the mean over the rows that were drawn of a user, clipped once."""
    x, y, rows = data(60, 6).double(), ids(3, 60), units.user_rows(OWNERS)

    def loss_of(step, user):
        bits, few = SegmentBits(run.seed), np.array([user])
        drawn = drawn_rows(run, bits, step, few, rows, run.rows_per_unit)
        own = drawn.rows[drawn.weights > 0]
        return F.cross_entropy(model(x[own]), y[own])

    loop.train_units(model, run, loss_of)


def end_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", tiers.first(1, MODES))
def test_training_is_plain_autograd_of_the_mean_of_each_user(mode, reduction):
    engine, model, optimizer, loader = start(grad_sample_mode=mode, loss_reduction=reduction)
    truth = copy.deepcopy(model)
    loop.train(model, optimizer, loader, reduction)
    assert engine.ledger.last_check == 2
    assert engine.get_epsilon() == plan().epsilon()
    engine.detach()
    by_hand(truth, plan())
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)
    rows, run = units.user_rows(OWNERS), plan()
    drawn = [
        drawn_rows(run, SegmentBits(run.seed), step, run.batch_indices(step), rows, K)
        for step in range(3)
    ]
    assert {int(n) for some in drawn for n in (some.weights > 0).sum(1)} == {1, 2, 3}


@pytest.mark.parametrize("size", tiers.first(1, [3, 1]))
def test_physical_batches_count_users_and_split_none(size):
    run = plan(physical_batch_size=size)
    _, model, optimizer, loader = start(plan=run)
    truth, rows = copy.deepcopy(model), loop.train(model, optimizer, loader)
    assert {len(some) % K for some in rows} == {0}
    assert {len(set(OWNERS[some[i : i + K]])) for some in rows for i in range(0, len(some), K)} == {
        1
    }
    by_hand(truth, run)
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_layers_and_several_forwards_know_the_weights():
    run = plan(clipping="automatic")
    _, model, optimizer, loader = start(plan=run)
    seen = []
    for x, y, _ in loader:
        optimizer.zero_grad()
        (0.25 * F.cross_entropy(model(x), y) + 0.75 * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        seen.append(end_of(model))
    _, other, optimizer, loader = start(plan=plan(clipping="automatic"))
    loop.train(other, optimizer, loader)
    torch.testing.assert_close(end_of(other), seen[-1], rtol=1e-10, atol=1e-10)


def test_one_row_of_each_user_is_the_run_on_examples():
    ends = []
    for options in (
        {"plan": loop.plan(num_steps=3)},
        {
            "plan": plan(rows_per_unit=1, num_examples=60, expected_batch_size=12),
            "users": np.arange(60) + 7,
        },
    ):
        engine, model, optimizer, loader = loop.start(parts(), **options)
        rows = loop.train(model, optimizer, loader)
        engine.detach()
        ends.append((rows, end_of(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def sum_of_users(x):
    run = plan(expected_batch_size=USERS, num_steps=1, noise_multiplier=0.0)
    engine, model, optimizer, loader = start(parts(x), plan=run)
    loop.train(model, optimizer, loader)
    found = engine.stages().unprotected_sum
    engine.detach()
    return torch.cat([part.flatten() for part in found.values()])


def farthest():
    """Largest distance of two sums whose data differ in all rows of one user."""
    user = 2 * 4  # has ten rows
    x, apart = data(60, 6).double(), [0.0]
    before = sum_of_users(x)
    for value in (300.0, -30.0, float("nan"), data(10, 6, seed=9).double()):
        other = x.clone()
        other[OWNERS == user] = value
        apart.append(float((sum_of_users(other) - before).norm()))
    return max(apart)


def test_all_rows_of_a_user_move_the_sum_by_at_most_twice_the_bound():
    assert C / 2 < farthest() <= 2 * C


def batches(**options):
    engine, *_, loader = start(parts(**options))
    before = torch.get_rng_state()
    found = [rows for _, (_, _, rows) in loader.of_steps(0, 3)]
    assert torch.equal(torch.get_rng_state(), before)
    engine.detach()
    return found


@pytest.mark.slow
@forks
def test_batches_are_the_rows_of_the_plan_with_workers_too():
    rows = units.user_rows(OWNERS)
    for found in (batches(), batches(num_workers=2)):
        for step, ours in enumerate(found):
            drawn = drawn_rows(
                plan(), SegmentBits(plan().seed), step, plan().batch_indices(step), rows, K
            )
            assert ours.tolist() == drawn.rows.flatten().tolist()
            assert sorted({*ours.tolist()}) == sorted(plan().row_indices(step, OWNERS))


def test_users_without_rows_are_drawn_and_add_nothing():
    rows = units.user_rows(OWNERS // 2, num_users=2 * USERS)
    run = plan(num_examples=2 * USERS, expected_batch_size=16, physical_batch_size=2)
    x = data(60, 6).double()
    x[0] = torch.nan  # which pads masked batches
    engine, model, optimizer, loader = start(parts(x), users=rows, plan=run)
    before = end_of(model)
    counted = [[i for i in draw.indices if draw.mask.any()] for draw, _ in loader.of_steps(0, 3)]
    assert all(rows.counts[i] for some in counted for i in some)
    assert len(list(loader.of_steps(0, 3))) == loader.num_batches(0, 3)
    loop.train(model, optimizer, loader)
    assert engine.ledger.position == 3
    assert end_of(model).isfinite().all()
    assert not torch.equal(end_of(model), before)


def half_of(given, **options):
    engine, model, optimizer, loader = start(given, plan=plan(num_steps=4, **options))
    for count, (x, y, _) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if count == 1:
            break
    return engine, model, optimizer


def test_a_resumed_run_of_a_seed_is_the_uninterrupted_one(tmp_path):
    engine, whole, optimizer, loader = start(plan=plan(num_steps=4))
    loop.train(whole, optimizer, loader)
    engine.detach()
    engine, model, optimizer = half_of(parts())
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model, optimizer, data_loader = parts()
    engine = dpt.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    for users, match in ((None, "users is missing"), (np.arange(len(OWNERS)), "The data has")):
        with pytest.raises(ValueError, match=match):
            engine.resume(data_loader=data_loader, users=users)
    *_, loader = engine.resume(data_loader=data_loader, users=OWNERS)
    loop.train(model, optimizer, loader.remaining())
    assert torch.equal(end_of(model), end_of(whole))
    text = engine.ledger.to_json()
    assert '"unit":"user"' in text
    engine.detach()


def test_rows_of_a_loader_are_never_taken_for_examples():
    """Neither clipped one by one nor, if they are padding, counted."""
    model, _, data_loader = parts()
    loader = dpt.PrivacyEngine().make_loader(data_loader=data_loader, plan=plan(), users=OWNERS)
    chunk = next(iter(loader)).chunks[0]
    x, y, _ = chunk.args
    weights = {"row_weights": chunk.row_weights}
    for options in (
        {},
        {"rows_per_unit": 1},
        {"rows_per_unit": K},
        {"rows_per_unit": 1, **weights},
    ):
        with pytest.raises(ValueError, match=f"rows_per_unit={K}, row_weights=chunk.row_weights"):
            dpt.clipped_grad_sum(
                lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
                model,
                x,
                y,
                max_grad_norm=C,
                **options,
            )
    with pytest.raises(ValueError, match=f"rows_per_unit={K}, row_weights=chunk.row_weights"):
        dpt.compile_clipped_grad_sum(
            lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), model, backend="eager"
        )(x, y, max_grad_norm=C)


@pytest.mark.slow
def test_a_loop_of_ones_own_gets_rows_and_weights():
    engine, run = dpt.PrivacyEngine(), plan(physical_batch_size=3)
    model, _, data_loader = parts()
    truth = copy.deepcopy(model)
    loader = engine.make_loader(data_loader=data_loader, plan=run, users=OWNERS)
    for batch in loader.remaining():
        total = {}
        for chunk in batch.chunks:
            x, y, _ = chunk.args
            sums = dpt.clipped_grad_sum(
                lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
                model,
                x,
                y,
                max_grad_norm=C,
                mask=chunk.mask,
                rows_per_unit=K,
                row_weights=chunk.row_weights,
            ).grads
            total = {name: total.get(name, 0) + value for name, value in sums.items()}
        engine.record()
        mean = dpt.noisy_mean(total, run, batch.step)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.5 * mean[name]
    by_hand(truth, plan())
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_gradients_of_inputs_are_those_of_the_loop():
    """FGSM: the gradient that the loop asks for is not weighted, and the step is."""
    engine, model, optimizer, loader = start(checks=0)
    truth, found = copy.deepcopy(model), []
    for x, y, _ in loader:
        seen = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(seen), y), seen)
        with engine.pause():
            seen = x.clone().requires_grad_()
            (expected,) = torch.autograd.grad(F.cross_entropy(model(seen), y), seen)
        assert torch.equal(grad, expected)
        assert bool(grad.flatten(1).any(1).all())  # also of padding
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(grad)
    by_hand(truth, plan())
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)


MISTAKES = {
    "a mean over the rows of a user": (
        lambda m, x, y: F.cross_entropy(m(x).view(-1, K, 3).mean(1), y[::K]),
        "other rows",
    ),
    "a part of the batch": (lambda m, x, y: F.cross_entropy(m(x[:K]), y[:K]), "called on 3 rows"),
    "a sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), "sum"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_losses_that_are_no_mean_of_rows_are_refused(name):
    loss, match = MISTAKES[name]
    engine, model, optimizer, loader = start()

    def train():
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()

    with pytest.raises((ValueError, RuntimeError), match=match):
        train()
    assert len(engine.ledger) == 0


def refused(match, error=ValueError, **options):
    given = parts()
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = given
    options = {"plan": plan(), "users": OWNERS} | options
    before = end_of(model)
    with pytest.raises(error, match=match):
        engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
    with pytest.raises(error, match=match):
        engine.make_loader(data_loader=loader, **options)
    assert torch.equal(before, end_of(model))
    start(given, plan=plan(seed=2))[0].detach()


WRONG = {
    "no users": ({"users": None}, ValueError, "unit='user', but users is missing"),
    "examples": ({"plan": loop.plan()}, ValueError, "users came for a plan with unit='example'"),
    "too short": ({"users": OWNERS[1:]}, ValueError, "59 ids but the data has 60 rows"),
    "text": ({"users": [f"user {i}" for i in OWNERS]}, TypeError, "Expected a one-dimensional"),
    "floats": ({"users": OWNERS / 2}, TypeError, "Expected a one-dimensional array of integers"),
    "columns": ({"users": OWNERS.reshape(30, 2)}, ValueError, r"shape \(30, 2\)"),
    "unknown": ({"users": OWNERS - 1}, ValueError, "is negative, which often means an unknown"),
    "number": ({"plan": plan(num_examples=26)}, ValueError, "25 users but the plan has num_ex"),
    "other data": (
        {"users": units.user_rows(OWNERS[1:])},
        ValueError,
        "59 ids but the data has 60",
    ),
    "twice a row": (
        {"users": units.UserRows(np.zeros(60, np.int64), units.user_rows(OWNERS).starts)},
        ValueError,
        r"users\[1\]=-1 is negative",
    ),
    "views": (
        {"views": 2, "augment": lambda example, generator: example},
        ValueError,
        "users and views= or augment= came together",
    ),
}


def test_a_batch_of_more_users_than_there_are_is_refused():
    """The loader's batch size counts users, and one that counted rows may be larger than all."""
    model, optimizer, _ = parts()
    loader = DataLoader(TensorDataset(data(60, 6)), batch_size=50)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "epochs": 1, "target_delta": 1e-5}
    with pytest.raises(ValueError, match="Expected a finite number > 0, at most num_examples=25"):
        dpt.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, users=OWNERS, unit="user",
            rows_per_unit=K, **options,
        )  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_users_are_refused_before_anything_changes(name):
    options, error, match = WRONG[name]
    refused(match, error, **options)


@pytest.mark.parametrize(
    "given", [{"users": OWNERS}, {"views": 2}, {"plan": plan()}, {"unit": "user"}]
)
def test_trainers_of_other_packages_take_no_units(given):
    with pytest.raises(ValueError, match="came to a trainer of another package"):
        HostedRun(**given)


def test_a_plan_is_made_of_the_number_of_users():
    model, optimizer, data_loader = parts(drop_last=True)
    engine = dpt.PrivacyEngine(accountant="rdp")
    *_, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        target_epsilon=8.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=C,
        unit="user",
        rows_per_unit=K,
        users=torch.as_tensor(OWNERS),
    )
    run = engine.plan
    assert (run.num_examples, run.expected_batch_size_at(0), run.num_steps) == (USERS, 8, 6)
    assert len(loader) == 3
    loop.train(model, optimizer, loader.remaining())
    assert engine.get_epsilon() <= 8.0


def test_a_ledger_says_whom_it_protects():
    engine, model, optimizer, loader = start()
    loop.train(model, optimizer, loader)
    text = engine.ledger.to_json()
    engine.detach()
    told = {finding.name: finding for finding in verify(text, allow_seed=True).findings}
    assert any("of one user" in finding.detail for finding in told.values())
    assert str(OWNERS.tolist()) not in text

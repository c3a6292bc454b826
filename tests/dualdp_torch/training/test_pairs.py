# SPDX-License-Identifier: Apache-2.0
"""Preference pairs in the loop: an item of two rows is one example, which its loss may join."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError
from dualdp_torch.training.loader import ItemCollate
from tests import tiers
from tests.dualdp_torch import loop
from tests.dualdp_torch.checks import data, randomise
from tests.dualdp_torch.training.test_loader import forks
from tests.dualdp_torch.training.test_users import MODES, Parts, end_of

N, C = 40, 0.5


def pairs(k=2):
    """(N, k, 6) rows, and (N, k) numbers of them."""
    return TensorDataset(data(N * k, 6).double().view(N, k, 6), torch.arange(N * k).view(N, k))


def parts(items=None, model=None, **options):
    model = randomise(model or Parts()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, DataLoader(items or pairs(), batch_size=8, **options)


def plan(**changes):
    return loop.plan(**{"num_examples": N, "num_steps": 3, "rows_per_unit": 2} | changes)


def start(given=None, **options):
    return loop.start(given or parts(), **{"plan": plan(), "checks": 1.0} | options)


def score(out):
    return (out * torch.tensor([1.0, -2.0, 0.5])).sum(1).tanh()


def preference(out):
    """(2 u, 3) -> (u,) losses that join the rows of a pair, in no symmetric way."""
    chosen, rejected = score(out[::2]), score(out[1::2])
    return F.softplus(0.3 - chosen * rejected.exp())


def train(model, optimizer, loader, loss=preference, reduction="mean"):
    rows = []
    for x, row in loader:
        optimizer.zero_grad()
        getattr(loss(model(x)), reduction)().backward()
        optimizer.step()
        rows.append(row.tolist())
    return rows


def by_hand(model, run, items=None, loss=preference):
    """Train by plain autograd of each pair alone, clipped once."""
    x = (items or pairs()).tensors[0]
    loop.train_units(model, run, lambda step, index: loss(model(x[index])).mean())


def assert_same_end(found, expected):
    torch.testing.assert_close(end_of(found), end_of(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", tiers.first(1, MODES))
def test_training_is_plain_autograd_of_each_pair(mode, reduction):
    engine, model, optimizer, loader = start(grad_sample_mode=mode, loss_reduction=reduction)
    truth = copy.deepcopy(model)
    rows = train(model, optimizer, loader, reduction=reduction)
    assert engine.ledger.last_check == 2
    assert engine.get_epsilon() == plan(rows_per_unit=None).epsilon()
    assert engine.stages().unprotected_norms.shape == (len(rows[-1]) // 2,)
    assert [some[::2] for some in rows] == [
        (2 * plan().batch_indices(i)).tolist() for i in range(3)
    ]
    assert [some[1::2] for some in rows] == [[row + 1 for row in some[::2]] for some in rows]
    engine.detach()
    by_hand(truth, plan())
    assert_same_end(model, truth)


LOSSES = {
    "halves of a view": lambda out: preference(out.view(-1, 2, 3).flatten(0, 1)),
    "mean of rows": lambda out: score(out),
    "rows of a count": lambda out: score(out) * len(out) * (1 / len(out)),
    "a softmax in each pair": lambda out: -score(out).view(-1, 2).log_softmax(1)[:, 0],
    "weights by position": lambda out: score(out) * torch.tensor([1.0, 3.0]).repeat(len(out) // 2),
}


@pytest.mark.parametrize("name", tiers.first(2, LOSSES))
def test_right_losses_of_pairs_pass_every_check(name):
    loss, run = LOSSES[name], plan(num_steps=2)
    engine, model, optimizer, loader = start(plan=run)
    truth = copy.deepcopy(model)
    train(model, optimizer, loader, loss)
    assert engine.ledger.last_check == 1
    engine.detach()
    by_hand(truth, run, loss=loss)
    assert_same_end(model, truth)


def noisy(out):
    return preference(out + 0.1 * torch.randn_like(out)) * torch.rand(len(out) // 2)


@pytest.mark.slow
def test_a_size_of_the_loss_may_be_the_number_of_pairs():
    """Rows are counted before pairs: 20 rows are a count, and the 10 features are none."""

    def loss(out):
        hidden = out @ torch.linspace(-1, 1, 30).view(3, 10).double()
        for _ in range(4):
            hidden = hidden.view(len(out), 10).tanh() + hidden.roll(1, 1)
        return preference(hidden[:, :3])

    run = plan(sampler="shuffle", num_steps=2)
    assert {len(run.batch_indices(step)) for step in range(2)} == {10}
    engine, model, optimizer, loader = start(plan=run)
    train(model, optimizer, loader, loss)
    assert engine.ledger.last_check == 1


@pytest.mark.slow
def test_a_loss_may_draw_for_rows_and_pairs():
    engine, model, optimizer, loader = start()
    train(model, optimizer, loader, noisy)
    assert engine.ledger.last_check == 2


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_items_have_any_number_of_rows(k):
    def loss(out):  # the first row against the best of the others
        own = score(out).view(-1, k)
        return F.softplus(own[:, 1:].amax(1) - own[:, 0]) if k > 1 else own[:, 0]

    run = plan(rows_per_unit=k)
    engine, model, optimizer, loader = start(parts(pairs(k)), plan=run)
    truth = copy.deepcopy(model)
    train(model, optimizer, loader, loss)
    engine.detach()
    by_hand(truth, run, pairs(k), loss)
    assert_same_end(model, truth)


def turned(out):
    """The rejected row of a pair with the chosen one of the next."""
    return preference(out.roll(-1, 0))


MIXING = {
    "the next pair": turned,
    "chosen first, then rejected": lambda out: F.softplus(
        score(out[len(out) // 2 :]) - score(out[: len(out) // 2])
    ),
    "centred": lambda out: F.softplus(score(out[::2]) - score(out[1::2]) + score(out).mean()),
    "whitened": lambda out: preference((out - out.mean(0)) / out.std(0)),
    "best of the batch": lambda out: F.softplus(score(out[1::2]) - score(out[::2]).max()),
    "all against all": lambda out: F.softplus(score(out[1::2])[:, None] - score(out[::2])).mean(1),
    "normalised": lambda out: preference(out) / preference(out).detach().sum(),
}


@pytest.mark.parametrize("name", tiers.first(3, MIXING))
def test_a_loss_that_mixes_pairs_is_refused(name):
    engine, model, optimizer, loader = start()
    before = end_of(model)
    with pytest.raises(ValueError, match="mixes the examples|depends? on|weighs in the loss"):
        train(model, optimizer, loader, MIXING[name])
    assert len(engine.ledger) == 0
    assert torch.equal(end_of(model), before)


@pytest.mark.parametrize("size", tiers.first(1, [3, 1]))
def test_physical_batches_count_pairs_and_split_none(size):
    run = plan(physical_batch_size=size)
    _, model, optimizer, loader = start(plan=run)
    truth, rows = copy.deepcopy(model), train(model, optimizer, loader)
    assert max(map(len, rows)) == 2 * size
    assert all(some[1::2] == [row + 1 for row in some[::2]] for some in rows)
    by_hand(truth, run)
    assert_same_end(model, truth)


@pytest.mark.slow
@forks
def test_workers_and_empty_draws_give_whole_pairs():
    run = plan(expected_batch_size=1, num_steps=8)
    assert {len(run.batch_indices(step)) for step in range(8)} >= {0, 1}
    _, model, optimizer, loader = start(parts(num_workers=2), plan=run)
    truth = copy.deepcopy(model)
    train(model, optimizer, loader)
    by_hand(truth, run)
    assert_same_end(model, truth)


def sum_of_pairs(x):
    run = plan(expected_batch_size=N, num_steps=1, noise_multiplier=0.0)
    engine, model, optimizer, loader = start(parts(TensorDataset(x, x[..., 0])), plan=run)
    train(model, optimizer, loader)
    found = engine.stages().unprotected_sum
    engine.detach()
    return torch.cat([part.flatten() for part in found.values()])


def farthest():
    """Largest distance of two sums whose data differ in one pair."""
    x, apart = pairs().tensors[0], [0.0]
    before = sum_of_pairs(x)
    for value in (300.0, -30.0, float("nan"), data(2, 6, seed=9).double(), x[7].flip(0)):
        other = x.clone()
        other[7] = value
        apart.append(float((sum_of_pairs(other) - before).norm()))
    return max(apart)


def test_a_pair_that_is_replaced_moves_the_sum_by_at_most_twice_the_bound():
    assert C / 2 < farthest() <= 2 * C


def test_two_forwards_of_the_chosen_and_the_rejected_rows_need_no_rows_per_unit():
    run = plan(rows_per_unit=None)
    engine, model, optimizer, loader = start(plan=run)
    truth = copy.deepcopy(model)
    for x, _ in loader:
        optimizer.zero_grad()
        chosen, rejected = score(model(x[:, 0])), score(model(x[:, 1]))
        F.softplus(0.3 - chosen * rejected.exp()).mean().backward()
        optimizer.step()
    assert engine.ledger.last_check == 2
    engine.detach()
    by_hand(truth, run)
    assert_same_end(model, truth)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    _, whole, optimizer, loader = start()
    train(whole, optimizer, loader)
    engine, model, optimizer, loader = start()
    for x, _ in loader:
        optimizer.zero_grad()
        preference(model(x)).mean().backward()
        optimizer.step()
        break
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model, optimizer, data_loader = parts()
    engine = dpt.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    *_, loader = engine.resume(data_loader=data_loader)
    train(model, optimizer, loader.remaining())
    assert torch.equal(end_of(model), end_of(whole))


def test_the_loader_of_a_loop_of_ones_own_gives_rows_in_turn():
    engine, (model, _, data_loader) = dpt.PrivacyEngine(), parts()
    chunk = next(iter(engine.make_loader(data_loader=data_loader, plan=plan()))).chunks[0]
    x, rows = chunk.args
    assert len(x) == 2 * len(chunk.mask)
    assert rows[1::2].tolist() == [row + 1 for row in rows[::2].tolist()]
    with pytest.raises(ValueError, match="The loader gave 2 rows for each unit, but the call has"):
        dpt.clipped_grad_sum(lambda m, x: score(m(x)), model, x, max_grad_norm=C)
    found = dpt.clipped_grad_sum(
        lambda m, x: preference(m(x)), model, x, max_grad_norm=C, rows_per_unit=2
    )
    assert found.norms.shape == chunk.mask.shape


class Odd(dict):
    pass


REFUSED = {
    "three rows": (
        pairs(3),
        None,
        r"shape \(\d+, 3, 6\). Expected \(\d+, 2\) in front with rows",
    ),
    "a label for the pair": (
        TensorDataset(pairs().tensors[0], torch.zeros(N)),
        None,
        r"shape \(\d+,\). Expected \(\d+, 2\) in front with rows_per_unit=2",
    ),
    "rows already": (
        pairs(),
        lambda items: torch.cat([x for x, _ in items]),
        r"shape \(\d+, 6\). Expected \(\d+, 2\)",
    ),
    "no tensor": (pairs(), lambda items: Odd(x=items), "an Odd, holds no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_items_of_other_rows_are_refused(name):
    items, collate, match = REFUSED[name]
    engine, model, optimizer, loader = start(parts(items, collate_fn=collate), checks=0)
    with pytest.raises(ValueError, match=match):
        train(model, optimizer, loader)
    assert len(engine.ledger) == 0


def rows_first(items):
    """(K, n, ...) tensors."""
    return [torch.stack(parts, 1) for parts in zip(*items, strict=True)]


def items_first(items):
    torch.rand(1)  # as a collate function that draws
    return [torch.stack(parts) for parts in zip(*items, strict=True)]


def test_rows_before_items_are_refused_where_both_are_as_many():
    run = plan(sampler="shuffle", expected_batch_size=2, num_steps=2)
    engine, *given = start(parts(collate_fn=rows_first), plan=run, checks=0)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 6\). Expected \(3, 2\) in front"):
        train(*given)
    assert len(engine.ledger) == 0


def test_trying_another_number_of_items_draws_nothing():
    run = plan(sampler="shuffle", expected_batch_size=2, num_steps=2)
    collate, items = ItemCollate(items_first, 2), [pairs()[0], pairs()[1]]
    torch.manual_seed(0)
    collate(items)
    found = torch.rand(1)
    torch.manual_seed(0)
    items_first(items)
    assert torch.equal(found, torch.rand(1))
    train(*start(parts(collate_fn=items_first), plan=run)[1:])


def test_a_constant_that_is_the_number_of_rows_once_is_no_mean():
    """The first batch has as many pairs as the constant, the second as many rows."""
    plans = (plan(expected_batch_size=4, num_steps=2, seed=seed) for seed in range(1000))
    run = next(p for p in plans if [len(p.batch_indices(i)) for i in range(2)] == [4, 2])
    engine, model, optimizer, loader = start(plan=run)
    with pytest.raises(ExactnessError, match="the loss is a sum"):
        train(model, optimizer, loader, lambda out: preference(out) / 4, "sum")
    assert len(engine.ledger) == 1


def on_rows(model, optimizer, loader, rows):
    for x, _ in loader:
        score(model(rows(x))).mean().backward()
        optimizer.step()


def test_pairs_that_are_taken_for_rows_are_refused():
    _, *given = start(plan=plan(rows_per_unit=None))
    with pytest.raises(
        RuntimeError, match=r"gave \d+. Expected the whole .*rows_per_unit=2 in make_p"
    ):
        on_rows(*given, lambda x: x.flatten(0, 1))


def test_parts_of_the_rows_are_refused():
    _, *given = start(plan=plan(sampler="shuffle"))
    with pytest.raises(RuntimeError, match="The model saw 5 examples but the loader gave 10"):
        on_rows(*given, lambda x: x[::2])


def test_views_of_pairs_are_refused():
    with pytest.raises(ValueError, match="augment= came with rows_per_unit=2, whose items hold"):
        start(views=2, augment=lambda item, generator: item)


@pytest.mark.slow
def test_frameworks_arrays_and_names_pass_through():
    """A collate function may return NumPy arrays and lists of names beside tensors."""

    def collate(items):
        x = torch.stack([x for x, _ in items])
        return {"x": x, "rows": np.stack([r.numpy() for _, r in items]), "names": ["a"] * len(x)}

    _, _, _, loader = start(parts(collate_fn=collate))
    batch = next(iter(loader))
    assert len(batch["x"]) == len(batch["rows"]) == 2 * len(batch["names"])


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize("is_split", [False, True])
def test_lightning_takes_pairs(is_split, tmp_path):
    """In one module, and in several, of which each pair is checked in a step of its own."""
    lightning = pytest.importorskip("lightning")
    from dualdp_torch.lightning import PrivacyCallback

    class Step(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.net, self.last = model, nn.Linear(3, 3).double() if is_split else nn.Identity()

        def training_step(self, batch, index):
            return preference(self.last(self.net(batch[0]))).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    torch.manual_seed(5)
    model, *_, data_loader = parts()
    step, callback = Step(model), PrivacyCallback(plan=plan(), checks=1.0)
    truth = copy.deepcopy(nn.Sequential(step.net, step.last))
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(step, data_loader)
    assert callback.engine.ledger.last_check == 2
    by_hand(truth, plan())
    assert_same_end(step, truth)


class Attending(nn.Module):
    """The rows of a pair see each other inside the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.first(x).tanh().view(-1, 2, 8)
        return self.last(torch.cat([hidden, hidden.flip(1)], 2).flatten(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_model_may_join_the_rows_of_a_pair(mode):
    engine, model, optimizer, loader = start(parts(model=Attending()), grad_sample_mode=mode)
    truth = copy.deepcopy(model)
    train(model, optimizer, loader)
    assert engine.ledger.last_check == 2
    engine.detach()
    by_hand(truth, plan())
    assert_same_end(model, truth)

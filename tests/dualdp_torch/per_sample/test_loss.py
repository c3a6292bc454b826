# SPDX-License-Identifier: Apache-2.0
"""The loss that backward is called on: a mean or a sum of one loss per example, as declared."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.loop import build, by_hand, dataset, first_batch, plan, start

MODES = ["auto", "functorch", "ghost"]


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("declared", "used"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_is_not_what_was_declared_is_refused(declared, used, mode, call):
    _, model, optimizer, loader = start(plan=plan(), loss_reduction=declared, grad_sample_mode=mode)
    _batches, x, y = first_batch(loader)
    call(F.cross_entropy(model(x), y, reduction=used))
    with pytest.raises(ValueError, match=f"'{declared}', but the loss is a {used}"):
        optimizer.step()


def released(loss_fn, reduction="mean", **options):
    """One step of an engine with this loss."""
    _, model, optimizer, loader = start(plan=plan(), loss_reduction=reduction, **options)
    _batches, x, y = first_batch(loader)
    loss_fn(model(x), y).backward()
    optimizer.step()


def recorded(loss_fn, reduction="mean"):
    """Norms of the same batch, recorded, and the record."""
    model, (x, y, _) = build()[0], dataset().tensors
    with dpt.record_per_sample(model, loss_reduction=reduction) as record:
        loss_fn(model(x[:9]), y[:9]).backward()
    return model, x[:9], y[:9], record


def of_each(out, y):
    """(n,) losses."""
    return F.cross_entropy(out, y, reduction="none")


def masked_mean(out, y):
    """A mean over some of the batch."""
    return of_each(out, y)[y != 1].mean()


def correlation(out, y):
    """One minus the correlation of two outputs over the batch."""
    a, b = out[:, 0] - out[:, 0].mean(), out[:, 1] - out[:, 1].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm())


#: Criteria that pair, reorder or mix the examples (n, 3).
MIXING = {
    "batch norm": lambda z: F.batch_norm(z, None, None, training=True).square() * z,
    "condensed distances": lambda z: F.pdist(z),
    "pairs by broadcasting": lambda z: (z[:, :1] - z[:, 0]).square().mean(1),
    "products": lambda z: torch.bmm(z[None], z.T[None]),
    "batched, wrong axis": lambda z: torch.bmm(z.t()[:, :, None], z.t()[:, None]),
    "flipped": lambda z: z * z.flip(0),
    "rolled as one": lambda z: z * z.roll(3),
    "maximum": lambda z: z - z.max(0).values,
    "cumulated": lambda z: z.cumsum(-2),
    "scattered": lambda z: (
        torch.zeros_like(z).scatter_add(0, torch.zeros(len(z), 3).long(), z).square()
    ),
    "looked up": lambda z: F.embedding(torch.arange(len(z)).flip(0), z) * z,
    "neighbours": lambda z: z[1:] - z[:-1],
    "split": lambda z: z.split(1)[0] - z,
    "viewed": lambda z: z.view(3, -1).log_softmax(1),
    "strided": lambda z: z.as_strided((len(z), 3), (0, 1)).square(),
    "as a kernel": lambda z: F.conv1d(z[:, :, None].expand(-1, 3, 4), z.view(-1, 3, 1)),
    "by place": lambda z: z * torch.linspace(0, 1, len(z))[:, None],
    "shuffled": lambda z: z * z[torch.randperm(len(z))],
    "centred, without a gradient": lambda z: (z - z.detach().mean(0)).square(),
    "ranked": lambda z: z * z[:, 0].detach().argsort().argsort()[:, None],
    "normalised gains": lambda z: z * ((z.detach() - z.detach().mean()) / z.detach().std()),
}
REFUSED = (
    "The loss mixes the examples|What one example weighs|but the loss is a|can't be computed for "
    "one example alone|can't be computed with other rows|Data were read into Python numbers"
)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mix", [pytest.param(f, id=name) for name, f in MIXING.items()])
@pytest.mark.parametrize("run", [released, recorded])
def test_a_criterion_that_joins_or_moves_examples_is_refused(mix, reduction, run):
    with pytest.raises(ValueError, match=REFUSED):
        run(lambda z, y: getattr(mix(z), reduction)(), reduction)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_a_mean_over_tokens_is_seen_where_a_row_is_not_full(dtype):
    mask = torch.ones(9, 3, dtype=dtype)
    mask[4, 1:] = 0
    recorded(lambda z, y: ((z.square() * mask).sum(1) / mask.sum(1)).mean())
    with pytest.raises(ValueError, match=REFUSED):
        recorded(lambda z, y: (z.square() * mask).sum() / mask.sum())


#: Losses whose gradient for one example depends on the others, and what is said of them.
WRONG = {
    "class weights": lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1.0, 4.0)),
    "ignored by choice": lambda out, y: F.cross_entropy(out, y, ignore_index=1),
    "some of the batch": masked_mean,
    "a token mean": lambda out, y: (of_each(out, y) * (y != 1)).sum() / (y != 1).sum(),
    "a count of some": lambda out, y: of_each(out, y).sum() / len(y[y != 1]),
    "like smoothing": lambda out, y: (
        F.nll_loss(lp := out.log_softmax(1), y) + (lp * 2).sum() / (y != 1).sum()
    ),
    "root": lambda out, y: F.mse_loss(out, torch.zeros_like(out)).sqrt(),
    "softplus of all": lambda out, y: F.softplus(F.cross_entropy(out, y)),
    "largest": lambda out, y: of_each(out, y).max(),
    "hardest": lambda out, y: of_each(out, y).topk(4).values.mean(),
    "correlation": correlation,
    "centred": lambda out, y: (out - out.mean(0)).square().mean(),
    "spread": lambda out, y: out.std(0).mean(),
    "spread of all": lambda out, y: (out - out.std()).square().mean(),
    "over the batch": lambda out, y: -out.log_softmax(0)[:, 0].mean(),
    "contrastive": lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(y))),
    "mixed by a constant": lambda out, y: (torch.ones(len(y), len(y)) @ out).square().mean(),
    "weights from counts": lambda out, y: (of_each(out, y) / torch.bincount(y)[y]).mean(),
    "a number that was read": lambda out, y: F.cross_entropy(out, y) * out.square().mean().item(),
    "broadcast": lambda out, y: ((out[:, :1] - y.float()) ** 2).mean(),
    "mixed up": lambda out, y: F.cross_entropy(0.7 * out + 0.3 * out[torch.randperm(len(y))], y),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_fn", [pytest.param(f, id=name) for name, f in WRONG.items()])
def test_a_loss_that_mixes_examples_is_refused(loss_fn, mode):
    with pytest.raises(ValueError, match=REFUSED + "|decides by the data"):
        released(loss_fn, grad_sample_mode=mode)


@pytest.mark.parametrize("loss_fn", [pytest.param(f, id=name) for name, f in WRONG.items()])
def test_a_recorded_loss_that_mixes_examples_is_refused(loss_fn):
    with pytest.raises(ValueError, match=REFUSED + "|decides by the data"):
        recorded(loss_fn)


def in_a_mapping(rows):
    """A batch as tokenizers make it: a mapping that is no dict."""
    return UserDict(x=torch.stack([r[0] for r in rows]), y=[(torch.stack([r[1] for r in rows]),)])


@pytest.mark.parametrize("collate", [None, in_a_mapping])
def test_ignored_targets_are_found_in_the_batch(collate):
    model, optimizer, _ = build()
    x, y, _ = dataset().tensors
    y = y.clone()
    y[7] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=12, collate_fn=collate)
    _, model, optimizer, loader = start((model, optimizer, loader), plan=plan(), checks=1.0)
    held = [7 in plan().batch_indices(step) for step in range(6)]
    assert 0 < sum(held) < 6
    batches = iter(loader)
    for step in range(held.index(True) + 1):
        batch = next(batches)
        x, y = batch if collate is None else (batch["x"], batch["y"][0][0])
        F.cross_entropy(model(x), y).backward()
        if not held[step]:
            optimizer.step()
    with pytest.raises((ValueError, ExactnessError), match="ignored targets"):
        optimizer.step()


@pytest.mark.parametrize("mixes", [False, True])
def test_only_what_comes_after_the_model_is_the_criterion(mixes):
    """Attention moves axes and multiplies outputs; its criterion may do neither."""
    model = randomise(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data(20, 3, 4)), batch_size=5)
    run = plan(num_examples=20, expected_batch_size=5, num_steps=1)
    _, model, optimizer, loader = start((model, optimizer, loader), plan=run)
    for (x,) in loader:
        out = model(x)
        (out - out.mean(0) if mixes else out).square().mean().backward()
        if not mixes:
            optimizer.step()
            continue
        with pytest.raises(ValueError, match="The loss mixes the examples"):
            optimizer.step()
        break


def test_targets_of_a_recorded_loss_are_looked_at():
    model, x, y = build()[0], data(5, 6), ids(3, 5)

    def norms(ignored):
        with dpt.record_per_sample(model, loss_reduction="mean") as record:
            F.cross_entropy(model(x), y, ignore_index=ignored).backward()
        return record.norms()

    with pytest.raises(ValueError, match=REFUSED):
        norms(int(y[0]))
    assert len(norms(next(c for c in (0, 1, 2, -5) if c not in y))) == 5


@pytest.mark.parametrize("position", [0, 1])
def test_every_loss_of_one_backward_is_looked_at(position):
    _, model, optimizer, loader = start(plan=plan())
    _batches, x, y = first_batch(loader)
    out = model(x)
    losses = [F.cross_entropy(out, y), F.cross_entropy(out, y)]
    losses[position] = out.std(0).mean()
    torch.autograd.backward(losses)
    with pytest.raises(ValueError, match="The loss mixes the examples"):
        optimizer.step()


def test_two_losses_of_one_backward_are_their_sum():
    _, model, optimizer, loader = start(plan=plan())
    for x, y, _ in loader:
        out = model(x)
        torch.autograd.backward([F.cross_entropy(out, y), out.square().mean()])
        optimizer.step()


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_gradient_that_backward_is_given_belongs_to_the_loss(weight):
    model, x, y, record = recorded(lambda out, y: of_each(out, y).mean())
    with dpt.record_per_sample(model, loss_reduction="mean") as weighted:
        F.cross_entropy(model(x), y).backward(torch.tensor(weight))
    torch.testing.assert_close(weighted.norms(), weight * record.norms())


def test_a_gradient_for_the_input_is_not_that_of_the_parameters():
    _, model, optimizer, loader = start(plan=plan())
    _batches, x, y = first_batch(loader)
    x.requires_grad_()
    torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    with pytest.raises(RuntimeError, match="No backward was recorded"):
        optimizer.step()


def test_after_a_refused_loss_the_step_begins_again_from_its_forward():
    engine, model, optimizer, loader = start(plan=plan(), checks=1.0)
    for step, (x, y, _) in enumerate(loader):
        if step == 2:
            F.mse_loss(model(x), torch.zeros(len(x), 3)).sqrt().backward()
            with pytest.raises(ExactnessError, match="The loss mixes the examples"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="No forward was recorded"):
                optimizer.step()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.ledger) == 6
    expected = build()[0]
    by_hand(expected, plan(), 6)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

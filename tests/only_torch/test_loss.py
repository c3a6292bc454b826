# SPDX-License-Identifier: Apache-2.0
"""The loss that backward is called on: a mean or a sum of one loss per example, as declared."""

import threading
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp_torch.reduction import current_loss
from tests.only_torch.checks import data, ids, randomise
from tests.only_torch.loop import build, dataset, first_batch, plan, start

MODES = ["auto", "functorch", "ghost"]


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("declared", "used"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_is_not_what_was_declared_is_refused(declared, used, mode, call):
    _, model, _, loader = start(plan=plan(), loss_reduction=declared, grad_sample_mode=mode)
    _, x, y = first_batch(loader)
    loss = F.cross_entropy(model(x), y, reduction=used)
    with pytest.raises(ValueError, match=f"'{declared}', but the loss is a {used}"):
        call(loss)


def of_each(out, y):
    """(n,) losses."""
    return F.cross_entropy(out, y, reduction="none")


#: Losses that are what they say, by the usual ways to write them.
RIGHT = {
    "mean": {
        "cross entropy": F.cross_entropy,
        "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
        "by hand": lambda out, y: of_each(out, y).mean(),
        "along an axis": lambda out, y: of_each(out, y).mean(0),
        "scaled": lambda out, y: 0.5 * F.cross_entropy(out, y),
        "accumulated": lambda out, y: F.cross_entropy(out, y) / 4,
        "two terms": lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean(),
        "own mean first": lambda out, y: out.square().mean(1).mean(),
        "of two views": lambda out, y: torch.stack([of_each(out, y), out.sum(1)]).mean(0).mean(),
        "examples first": lambda out, y: out.square().mean(0).sum(),
        "binary, with weights": lambda out, y: F.binary_cross_entropy_with_logits(
            out, torch.ones_like(out), weight=torch.arange(3.0)
        ),
    },
    "sum": {
        "cross entropy": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
        "by hand": lambda out, y: of_each(out, y).sum(),
        "weights": lambda out, y: F.cross_entropy(
            out, y, weight=torch.arange(3.0), reduction="sum"
        ),
        "variational": lambda out, y: (
            F.mse_loss(out, torch.zeros_like(out), reduction="sum")
            - 0.5 * torch.sum(1 + out - out.exp())
        ),
        "chosen": lambda out, y: of_each(out, y)[y != 1].sum(),
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("declared", "loss_fn"),
    [pytest.param(r, f, id=f"{r}: {name}") for r, fs in RIGHT.items() for name, f in fs.items()],
)
def test_the_usual_losses_pass(declared, loss_fn, mode):
    _, model, optimizer, loader = start(plan=plan(), loss_reduction=declared, grad_sample_mode=mode)
    for x, y, _ in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()


def masked_mean(out, y):
    """A mean over some of the batch."""
    return of_each(out, y)[y != 1].mean()


def correlation(out, y):
    """One minus the correlation of two outputs over the batch."""
    a, b = out[:, 0] - out[:, 0].mean(), out[:, 1] - out[:, 1].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm())


#: Losses whose gradient for one example depends on the others, and what is said of them.
WRONG = {
    "class weights": (
        lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1.0, 4.0)),
        "a weighted mean",
    ),
    "ignored by choice": (lambda out, y: F.cross_entropy(out, y, ignore_index=1), "a weighted"),
    "some of the batch": (masked_mean, r"a mean over \d+ numbers of 9 examples"),
    "a sum, divided": (lambda out, y: of_each(out, y).sum() / len(y), "a sum divided by"),
    "a token mean": (
        lambda out, y: (of_each(out, y) * (y != 1)).sum() / (y != 1).sum(),
        "a sum divided by",
    ),
    "root": (lambda out, y: F.mse_loss(out, torch.zeros_like(out)).sqrt(), "The loss is sqrt of"),
    "largest": (lambda out, y: of_each(out, y).max(), "The loss is max of"),
    "correlation": (correlation, "The loss is div of"),
    "centred": (lambda out, y: (out - out.mean(0)).square().mean(), "MeanBackward1 below the mean"),
    "spread": (lambda out, y: out.std(0).mean(), r"a mean over 3 numbers"),
    "spread of all": (lambda out, y: (out - out.std()).square().mean(), "StdBackward0 below"),
    "smoothed, weights": (
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1, weight=torch.ones(3)),
        "a weighted mean",
    ),
    "over the batch": (lambda out, y: -out.log_softmax(0)[:, 0].mean(), "LogSoftmaxBackward0"),
    "contrastive": (
        lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(y))),
        "MmBackward0 below the mean",
    ),
    "mixed by a constant": (
        lambda out, y: (torch.ones(len(y), len(y)) @ out).square().mean(),
        "MmBackward0 below the mean",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("loss_fn", "match"), [pytest.param(*case, id=name) for name, case in WRONG.items()]
)
def test_a_loss_that_mixes_examples_is_refused(loss_fn, match, mode):
    _, model, _, loader = start(plan=plan(), grad_sample_mode=mode)
    _, x, y = first_batch(loader)
    with pytest.raises(ValueError, match=match):
        loss_fn(model(x), y).backward()


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
    _, model, optimizer, loader = start((model, optimizer, loader), plan=plan())
    held = [7 in plan().batch_indices(step) for step in range(6)]
    assert 0 < sum(held) < 6
    for step, batch in enumerate(loader):
        x, y = batch if collate is None else (batch["x"], batch["y"][0][0])
        loss = F.cross_entropy(model(x), y)
        if held[step]:
            break
        loss.backward()
        optimizer.step()
    with pytest.raises(ValueError, match="ignored targets"):
        loss.backward()


@pytest.mark.parametrize("mixes", [False, True])
def test_only_the_graph_above_the_models_outputs_is_looked_at(mixes):
    """Attention moves axes and multiplies outputs; its criterion may do neither."""
    model = randomise(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data(20, 3, 4)), batch_size=5)
    run = plan(num_examples=20, expected_batch_size=5, num_steps=1)
    _, model, optimizer, loader = start((model, optimizer, loader), plan=run)
    for (x,) in loader:
        out = model(x)
        out = out - out.mean(0) if mixes else out
        if mixes:
            with pytest.raises(ValueError, match="MeanBackward1 below the mean"):
                out.square().mean().backward()
            break
        out.square().mean().backward()
        optimizer.step()


def test_the_loss_is_found_from_another_thread():
    """On a GPU hooks run in a thread of autograd's own."""
    main, seen = threading.get_ident(), []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def look(_):
        other = threading.Thread(target=lambda: seen.append(current_loss(main)))
        other.start()
        other.join()

    y.register_hook(look)
    loss = y.sum()
    loss.backward()
    assert seen[0] is loss
    assert current_loss() is None


def test_targets_of_a_recorded_loss_are_looked_at():
    model, x = build()[0], data(4, 6)
    y = ids(3, 4)
    for loss_fn in (
        lambda out: F.cross_entropy(out, y, ignore_index=int(y[0])),
        lambda out: F.cross_entropy(out, y, weight=torch.ones(3)),
    ):
        with dpt.record_per_sample(model, loss_reduction="mean") as record:
            with pytest.raises(ValueError, match="a weighted mean"):
                loss_fn(model(x)).backward()
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        F.cross_entropy(model(x), y, ignore_index=2 if 2 not in y else -5).backward()
    assert len(record.norms()) == 4

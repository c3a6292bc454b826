# SPDX-License-Identifier: Apache-2.0
"""Items of two rows, whose loss may join them but no others; training: test_units.py."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError
from dualdp_torch.training.loader import ItemCollate
from tests.dualdp_torch.training.kinds import KINDS, PAIRS, C, OfPairs, items, preference, score
from tests.dualdp_torch.training.runs import end_of

OF = KINDS["pairs"]


def assert_by_hand(losses=None, model=None, of=OF, **options):
    """A run with this loss passes every check, and ends where plain autograd of each item does."""
    run = of.plan(num_steps=2)
    engine, model, optimizer, loader = of.start(of.parts(model=model), plan=run, **options)
    truth = copy.deepcopy(model)
    of.train(model, optimizer, loader, losses=losses)
    assert engine.ledger.last_check == 1
    engine.detach()
    of.by_hand(truth, run, losses)
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)


LOSSES = {
    "halves of a view": lambda out, _: preference(out.view(-1, 2, 3).flatten(0, 1)),
    "mean of rows": lambda out, _: score(out),
    "rows of a count": lambda out, _: score(out) * len(out) * (1 / len(out)),
    "a softmax in each pair": lambda out, _: -score(out).view(-1, 2).log_softmax(1)[:, 0],
    "weights by place": lambda out, _: score(out) * torch.tensor([1.0, 3.0]).repeat(len(out) // 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_right_losses_of_pairs_pass_every_check(name):
    assert_by_hand(LOSSES[name])


class Attending(nn.Module):
    """The rows of a pair see each other inside the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.first(x).tanh().view(-1, 2, 8)
        return self.last(torch.cat([hidden, hidden.flip(1)], 2).flatten(0, 1))


@pytest.mark.parametrize("mode", ["auto", "two_pass", "materialize", "vmap", "loop"])
def test_a_model_may_join_the_rows_of_a_pair(mode):
    assert_by_hand(model=Attending(), grad_sample_mode=mode)


def drawing(out, _):
    return preference(out + 0.1 * torch.randn_like(out)) * torch.rand(len(out) // 2)


def sized(out, _):
    """Rows are counted before pairs: 20 rows are a count, and the 10 features are none."""
    hidden = out @ torch.linspace(-1, 1, 30).view(3, 10).double()
    for _ in range(4):
        hidden = hidden.view(len(out), 10).tanh() + hidden.roll(1, 1)
    return preference(hidden[:, :3])


@pytest.mark.parametrize("losses", [drawing, sized])
def test_a_loss_may_draw_and_have_sizes_that_are_counts(losses):
    run = OF.plan(sampler="shuffle", expected_batch_size=10, num_steps=2)
    engine, *parts = OF.start(plan=run)
    OF.train(*parts, losses=losses)
    assert engine.ledger.last_check == 1


def test_items_have_any_number_of_rows():
    def first_against_best(out, _):
        own = score(out).view(-1, 3)
        return F.softplus(own[:, 1:].amax(1) - own[:, 0])

    assert_by_hand(first_against_best, of=OfPairs(3))


MIXING = {
    "the next pair": lambda out, _: preference(out.roll(-1, 0)),
    "chosen first, then rejected": lambda out, _: F.softplus(
        score(out[len(out) // 2 :]) - score(out[: len(out) // 2])
    ),
    "centred": lambda out, _: preference(out - out.mean(0)),
    "all against all": lambda out, _: (score(out[1::2])[:, None] - score(out[::2])).exp().mean(1),
    "normalised": lambda out, _: preference(out) / preference(out).detach().sum(),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_pairs_is_refused(name):
    engine, model, *parts = OF.start()
    before = end_of(model)
    with pytest.raises(ValueError, match="mixes the examples|depends? on|weighs in the loss"):
        OF.train(model, *parts, losses=MIXING[name])
    assert len(engine.ledger) == 0
    assert torch.equal(end_of(model), before)


def test_rows_of_a_loop_of_ones_own_need_rows_per_unit():
    engine, (model, _, data_loader) = dpt.PrivacyEngine(), OF.parts()
    chunk = next(iter(engine.make_loader(data_loader=data_loader, plan=OF.plan()))).chunks[0]
    with pytest.raises(ValueError, match="The loader gave 2 rows for each unit, but the call has"):
        dpt.clipped_grad_sum(lambda m, x: score(m(x)), model, chunk.args[0], max_grad_norm=C)


# ---------------------------------------------------------------------- items of another form


class Odd(dict):
    """A container that no pytree opens."""


def rows_first(rows):
    """(K, n, ...) tensors."""
    return [torch.stack(parts, 1) for parts in zip(*rows, strict=True)]


THREE = {"sampler": "shuffle", "expected_batch_size": 2}
LABELS = TensorDataset(OF.data.tensors[0], torch.zeros(PAIRS))


@pytest.mark.parametrize(
    ("rows", "collate", "changes", "match"),
    [
        (items(3), None, {}, r"shape \(\d+, 3, 6\). Expected \(\d+, 2\) in front with rows"),
        (LABELS, None, {}, r"shape \(\d+,\). Expected \(\d+, 2\) in front with rows_per_unit=2"),
        (
            None,
            lambda rows: torch.cat([x for x, *_ in rows]),
            {},
            r"shape \(\d+, 6\). Expected \(\d+, 2\)",
        ),
        (None, lambda rows: Odd(x=rows), {}, "an Odd, holds no tensor"),
        (None, rows_first, THREE, r"shape \(2, 3, 6\). Expected \(3, 2\) in front"),
    ],
    ids=["three rows", "a label for the pair", "rows already", "no tensor", "rows before items"],
)
def test_items_of_other_rows_are_refused(rows, collate, changes, match):
    parts = OF.parts(rows, collate_fn=collate)
    engine, *given = OF.start(parts, plan=OF.plan(**changes), checks=0)
    with pytest.raises(ValueError, match=match):
        OF.train(*given)
    assert len(engine.ledger) == 0


def test_trying_another_number_of_items_draws_nothing():
    def drawn(rows):
        return [torch.rand(len(rows), 2), *(torch.stack(p) for p in zip(*rows, strict=True))]

    collate, rows = ItemCollate(drawn, 2), [OF.data[0], OF.data[1]]
    torch.manual_seed(0)
    found = collate(rows)[0]
    torch.manual_seed(0)
    assert torch.equal(found, drawn(rows)[0].flatten())


def test_arrays_and_names_pass_through():
    """A collate function may return NumPy arrays and lists of names beside tensors."""

    def collate(rows):
        x = torch.stack([x for x, *_ in rows])
        return {"x": x, "rows": np.stack([r.numpy() for *_, r in rows]), "names": ["a"] * len(x)}

    batch = next(iter(OF.start(OF.parts(collate_fn=collate))[3]))
    assert len(batch["x"]) == len(batch["rows"]) == 2 * len(batch["names"])


def test_a_constant_that_is_the_number_of_rows_once_is_no_mean():
    """The first batch has as many pairs as the constant, the second as many rows."""
    plans = (OF.plan(expected_batch_size=4, num_steps=2, seed=seed) for seed in range(1000))
    run = next(p for p in plans if [len(p.batch_indices(i)) for i in range(2)] == [4, 2])
    engine, *parts = OF.start(plan=run)
    with pytest.raises(ExactnessError, match="the loss is a sum"):
        OF.train(*parts, "sum", lambda out, _: preference(out) / 4)
    assert len(engine.ledger) == 1


def test_other_numbers_of_rows_are_refused():
    ten = {"sampler": "shuffle", "expected_batch_size": 10}
    whole = r"gave \d+. Expected the whole .*rows_per_unit=2 in make_p"
    for changes, rows, match in (
        ({"rows_per_unit": None}, lambda x: x.flatten(0, 1), whole),
        (ten, lambda x: x[::2], "The model saw 5 examples but the loader gave 10"),
    ):
        _, model, optimizer, loader = OF.start(plan=OF.plan(**changes))
        x, *_ = next(batches := iter(loader))
        score(model(rows(x))).mean().backward()
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        batches.close()


def test_views_of_pairs_are_refused():
    with pytest.raises(ValueError, match="augment= came with rows_per_unit=2, whose items hold"):
        OF.start(views=2, augment=lambda item, generator: item)


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
    model, *_, data_loader = OF.parts()
    step, callback = Step(model), PrivacyCallback(plan=OF.plan(), checks=1.0)
    truth = copy.deepcopy(nn.Sequential(step.net, step.last))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_steps": 3, "accelerator": "cpu", "default_root_dir": str(tmp_path)}
    trainer = lightning.Trainer(**dict.fromkeys(quiet, False), **options, callbacks=[callback])
    trainer.fit(step, data_loader)
    assert callback.engine.ledger.last_check == 2
    OF.by_hand(truth, OF.plan())
    torch.testing.assert_close(end_of(step), end_of(truth), rtol=1e-10, atol=1e-10)

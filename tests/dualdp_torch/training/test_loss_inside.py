# SPDX-License-Identifier: Apache-2.0
"""Models that compute their loss in forward, such as those of Hugging Face with labels."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids, randomise, truth_of
from tests.dualdp_torch.loop import plan, start

V, T, ROWS = 7, 5, 24


class WithLoss(nn.Module):
    """Returns logits, and with labels the loss that its kind names."""

    def __init__(self, kind="mean"):
        super().__init__()
        self.table, self.head, self.kind = nn.Embedding(V, 6), nn.Linear(6, V), kind

    def forward(self, words, labels=None):
        hidden = torch.tanh(self.table(words))
        logits = self.head(hidden)
        found = {"logits": logits}
        if labels is not None and self.kind != "none":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            if self.kind == "penalised":
                loss = loss + 0.01 * self.head.weight.square().sum()
            if self.kind == "hidden":
                loss = loss + 0.01 * hidden.square().mean()
            if self.kind == "mixes":
                loss = loss + logits.mean(0).square().sum()
            found["loss"] = loss
        return found


def private(model, labels, mode="auto", checks=1.0, **changes):
    items = TensorDataset(ids(V, ROWS, T), labels)
    changes = {"num_examples": ROWS, "expected_batch_size": 6, "num_steps": 2, **changes}
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(items, batch_size=6)
    return start(parts, plan=plan(**changes), grad_sample_mode=mode, checks=checks)


@pytest.mark.parametrize("checks", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["auto", "two_pass", "materialize"])
def test_a_mean_over_examples_is_that_of_the_loop(mode, checks):
    engine, model, optimizer, loader = private(
        randomise(WithLoss()), ids(V, ROWS, T, seed=2), mode, checks
    )
    for words, labels in loader:
        before = copy.deepcopy(model)
        out = model(words=words, labels=labels)
        out["loss"].backward()
        optimizer.step()
        torch.testing.assert_close(out["loss"], before(words=words, labels=labels)["loss"])

        def losses(model, words, labels):
            logits = model(words)["logits"]
            return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

        found = dpt.clipped_grad_sum(losses, before, words, labels, max_grad_norm=0.5)
        truth = truth_of(before, losses, words, labels)
        norms = sum(torch.from_numpy(g).flatten(1).square().sum(1) for g in truth.values()).sqrt()
        torch.testing.assert_close(
            engine.stages().unprotected_norms.double(), norms, rtol=1e-4, atol=1e-6
        )
        for name, total in engine.stages().unprotected_sum.items():
            torch.testing.assert_close(total, found.grads[name])


@pytest.mark.parametrize("kind", ["ragged", "mixes"])
def test_a_mean_over_all_tokens_is_refused(kind):
    labels = ids(V, ROWS, T, seed=2)
    if kind == "ragged":
        labels[::3, 2:] = -100
    engine, model, optimizer, loader = private(randomise(WithLoss(kind)), labels)

    def train():
        for words, labels in loader:
            model(words, labels=labels)["loss"].backward()
            optimizer.step()

    with pytest.raises(ValueError, match="each example's own mean first"):
        train()
    assert not len(engine.ledger)


def test_labels_that_become_ragged_later_are_refused_there():
    labels = ids(V, ROWS, T, seed=2)
    engine, model, optimizer, loader = private(
        randomise(WithLoss()), labels, checks=1.0, sampler="shuffle", num_steps=4
    )

    def train():
        for step, (words, targets) in enumerate(loader):
            model(words, labels=targets)["loss"].backward()
            optimizer.step()
            if step == 1:
                labels[::2, 1:] = -100  # of the data set

    with pytest.raises(ExactnessError, match="own mean"):
        train()
    assert len(engine.ledger) == 2


@pytest.mark.parametrize("checks", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["penalised", "hidden"])
def test_a_loss_of_more_than_the_outputs_is_refused(kind, checks):
    _, model, _, loader = private(randomise(WithLoss(kind)), ids(V, ROWS, T, seed=2), checks=checks)
    for words, labels in loader:
        out = model(words, labels=labels)
        assert out["loss"].item() > 0
        with pytest.raises(UnsupportedLayerError, match="number that the model computed inside"):
            out["loss"].backward()
        return


def test_a_loss_of_a_model_that_goes_through_vmap_is_refused():
    _, model, _, loader = private(randomise(WithLoss()), ids(V, ROWS, T, seed=2), "vmap")
    for words, labels in loader:
        with pytest.raises(UnsupportedLayerError, match=r"more than the outputs.*per_example_loss"):
            model(words, labels=labels)["loss"].backward()
        return


def test_a_loss_of_each_example_alone_is_refused():
    _, model, _, loader = private(randomise(WithLoss()), ids(V, ROWS, T, seed=2), "loop")
    for words, labels in loader:
        with pytest.raises(
            UnsupportedLayerError, match=r"number for one example.*per_example_loss"
        ):
            model(words, labels=labels)
        model(words)
        return


@pytest.mark.parametrize("kind", ["mean", "penalised", "hidden"])
def test_a_number_that_the_loss_does_not_use_costs_nothing(kind):
    ends = []
    for used in (kind, "none"):
        engine, model, optimizer, loader = private(
            randomise(WithLoss(used)), ids(V, ROWS, T, seed=2)
        )
        for words, labels in loader:
            logits = model(words, labels=labels)["logits"]
            F.cross_entropy(logits.transpose(1, 2), labels).backward()
            optimizer.step()
        assert engine.ledger.last_check == 1
        ends.append(model.head.weight)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("kind", ["mean", "hidden"])
def test_a_number_that_weighs_the_loss_is_refused(kind):
    engine, model, optimizer, loader = private(randomise(WithLoss(kind)), ids(V, ROWS, T, seed=2))
    for words, labels in loader:
        out = model(words, labels=labels)
        (out["logits"].square().mean() * out["loss"].detach()).backward()
        with pytest.raises(ValueError, match="example"):
            optimizer.step()
        return
    assert not len(engine.ledger)


def test_a_record_of_a_loss_inside():
    model, words, labels = randomise(WithLoss()), ids(V, 4, T), ids(V, 4, T, seed=2)
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        model(words, labels=labels)["loss"].backward()

    def losses(model, words, labels):
        logits = model(words)["logits"]
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    expected = dpt.per_sample_grads(losses, model, words, labels, method="loop")
    for name, grad in record.grads().items():
        torch.testing.assert_close(grad, expected[name])


def test_a_model_that_returns_nothing_but_its_loss_is_refused():
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x).square().mean()

    model = Only()
    with (
        dpt.record_per_sample(model, loss_reduction="mean"),
        pytest.raises(UnsupportedLayerError, match="the examples on axis 0 of every output"),
    ):
        model(data(4, 6))


# ---------------------------------------------------------------------- Hugging Face

KINDS = {
    "causal": ("GPT2Config", "GPT2LMHeadModel"),
    "masked": ("BertConfig", "BertForMaskedLM"),
    "classes": ("BertConfig", "BertForSequenceClassification"),
    "tokens": ("BertConfig", "BertForTokenClassification"),
}


def hugging_face(kind):
    """A tiny model of a kind."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2Config": {"n_positions": T, "n_embd": 8, "n_layer": 1, "n_head": 2},
        "BertConfig": {
            **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 16, "max_position_embeddings": T, "num_labels": 3},
        },
    }
    config, model = KINDS[kind]
    torch.manual_seed(0)
    return getattr(transformers, model)(
        getattr(transformers, config)(vocab_size=V, **sizes[config])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_hugging_face(kind):
    """`loss = model(**batch).loss`, as its documentation writes the loop."""
    labels = {"classes": ids(3, ROWS, seed=2), "tokens": ids(3, ROWS, T, seed=2)}
    engine, model, optimizer, loader = private(
        hugging_face(kind), labels.get(kind, ids(V, ROWS, T, seed=2)), num_steps=1
    )
    model.eval()  # without dropout, so that plain autograd is the truth
    for words, labels in loader:
        batch = {"input_ids": words, "labels": labels}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        before = copy.deepcopy(model)
        optimizer.step()
        optimizer.zero_grad()
        truth = truth_of(before, lambda m, i, y: m(input_ids=i, labels=y).loss[None], words, labels)
        norms = sum(torch.from_numpy(g).flatten(1).square().sum(1) for g in truth.values()).sqrt()
        torch.testing.assert_close(
            engine.stages().unprotected_norms.double(), norms, rtol=1e-4, atol=1e-6
        )
        factors = (0.5 / 1.0001 / norms).clamp(max=1)
        for name, total in engine.stages().unprotected_sum.items():
            expected = torch.tensordot(factors, torch.from_numpy(truth[name]), 1)
            torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_ragged_labels_of_hugging_face_are_refused(kind):
    labels = ids(V, ROWS, T, seed=2)
    labels[::2, 3:] = -100
    _, model, optimizer, loader = private(hugging_face(kind), labels)
    for words, labels in loader:
        model(input_ids=words, labels=labels).loss.backward()
        with pytest.raises(ValueError, match="per_example_loss"):
            optimizer.step()
        return


class Chained(nn.Module):
    """Returns a loss, and outputs that are made from each other."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 6), nn.Linear(6, V)

    def forward(self, words, labels):
        hidden = torch.tanh(self.table(words))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.transpose(1, 2), labels) + 0.1 * hidden.square().mean()
        return {"loss": loss, "hidden": hidden, "logits": logits}


def test_a_loss_of_outputs_made_from_each_other_counts_each_once():
    engine, model, optimizer, loader = private(randomise(Chained()), ids(V, ROWS, T, seed=2))
    for words, labels in loader:
        before = copy.deepcopy(model)
        model(words, labels)["loss"].backward()
        optimizer.step()

        def losses(model, words, labels):
            found = model(words, labels)
            each = F.cross_entropy(found["logits"].transpose(1, 2), labels, reduction="none")
            return each.mean(1) + 0.1 * found["hidden"].square().mean((1, 2))

        found = dpt.clipped_grad_sum(
            losses, before, words, labels, max_grad_norm=0.5, method="loop"
        )
        for name, total in engine.stages().unprotected_sum.items():
            torch.testing.assert_close(total, found.grads[name], rtol=1e-4, atol=1e-5)

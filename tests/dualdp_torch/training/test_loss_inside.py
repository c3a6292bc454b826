# SPDX-License-Identifier: Apache-2.0
"""Models that compute their loss in forward, such as those of Hugging Face with labels."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests.closeness import factors_of, whole_norms
from tests.dualdp_torch.checks import data, ids, randomise, truth_of
from tests.dualdp_torch.loop import plan
from tests.dualdp_torch.training.runs import Open, end_of, fit, sgd

V, T, ROWS, C = 7, 5, 24, 0.5


class WithLoss(nn.Module):
    """Returns logits, and with labels the loss that its kind names."""

    def __init__(self, kind="mean"):
        super().__init__()
        self.table, self.head, self.kind = nn.Embedding(V, 6), nn.Linear(6, V), kind

    def forward(self, words, labels=None):
        hidden = torch.tanh(self.table(words))
        logits = self.head(hidden)
        if labels is None or self.kind == "none":
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        found = {"logits": logits}
        if self.kind == "penalised":
            loss = loss + 0.01 * self.head.weight.square().sum()
        if self.kind == "hidden":
            loss = loss + 0.01 * hidden.square().mean()
        if self.kind == "weighs":
            loss = logits.square().mean() * loss.detach()
        if self.kind == "mixes":
            loss = loss + logits.mean(0).square().sum()
        if self.kind == "outputs made from each other":
            loss, found = loss + 0.1 * hidden.square().mean(), {"hidden": hidden, **found}
        return {"loss": loss, **found}


def opened(model, labels=None, mode="auto", checks=1.0, **changes):
    """A run that stands at its first batch of words and labels."""
    labels = ids(V, ROWS, T, seed=2) if labels is None else labels
    loader = DataLoader(TensorDataset(ids(V, ROWS, T), labels), batch_size=6)
    changes = {"num_examples": ROWS, "expected_batch_size": 6, "num_steps": 2, **changes}
    options = {"plan": plan(**changes), "grad_sample_mode": mode, "checks": checks}
    return Open(sgd(model, loader), **options)


def own(kind="mean", *arguments, **options):
    return opened(randomise(WithLoss(kind)), *arguments, **options)


def loss_of(model, words, labels):
    return model(words, labels=labels)["loss"]


def each(model, words, labels):
    """(n,) losses of the examples."""
    return torch.stack(
        [loss_of(model, *pair) for pair in zip(words.split(1), labels.split(1), strict=True)]
    )


def assert_released(run, model):
    """The clipped sum is that of each example's own loss, in float64."""
    truth, stages = truth_of(model, each, run.x, run.y), run.engine.stages()
    norms = whole_norms(truth)
    torch.testing.assert_close(
        stages.unprotected_norms.double(), torch.from_numpy(norms), rtol=1e-4, atol=1e-6
    )
    factors = torch.from_numpy(factors_of(norms, C))
    for name, total in stages.unprotected_sum.items():
        expected = torch.tensordot(factors, torch.from_numpy(truth[name]), 1)
        torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=1e-5)


def stepped(run):
    before = copy.deepcopy(run.model)
    loss = loss_of(run.model, run.x, run.y)
    loss.backward()
    run.optimizer.step()
    torch.testing.assert_close(loss, loss_of(before, run.x, run.y))
    assert_released(run, before)


@pytest.mark.parametrize(
    ("kind", "mode", "checks"),
    [
        ("mean", "auto", 1.0),
        ("mean", "auto", 0.0),
        ("mean", "two_pass", 1.0),
        ("mean", "materialize", 0.0),
        ("outputs made from each other", "auto", 1.0),  # known_failures 89
    ],
)
def test_a_mean_over_examples_is_that_of_the_loop(kind, mode, checks):
    stepped(own(kind, mode=mode, checks=checks))


def test_labels_that_become_ragged_later_are_refused_there():
    labels = ids(V, ROWS, T, seed=2)
    run = own("mean", labels, sampler="shuffle", num_steps=4)
    parts = run.model, run.optimizer
    fit(*parts, [(run.x, run.y)], loss_of)
    fit(*parts, itertools.islice(run.batches, 1), loss_of)
    labels[::2, 1:] = -100  # of the data set
    with pytest.raises(ExactnessError, match="own mean"):
        fit(*parts, run.batches, loss_of)
    assert len(run.engine.ledger) == 2


@pytest.mark.parametrize("kind", ["mean", "penalised", "hidden"])
def test_a_number_that_the_loss_does_not_use_costs_nothing(kind):
    """known_failures 87."""
    ends = []
    for used in (kind, "none"):
        run = own(used)
        logits = run.model(run.x, labels=run.y)["logits"]
        F.cross_entropy(logits.transpose(1, 2), run.y).backward()
        run.optimizer.step()
        assert run.engine.ledger.last_check == 0
        ends.append(end_of(run.model))
    torch.testing.assert_close(*ends)


REFUSED = [  # kind of loss, ragged labels, options
    ("mean", True, {}, "each example's own mean first"),
    ("mixes", False, {}, "each example's own mean first"),
    ("weighs", False, {}, "example"),
    ("penalised", False, {}, "number that the model computed inside"),
    ("hidden", False, {"checks": 0.0}, "number that the model computed inside"),
    ("mean", False, {"mode": "vmap"}, r"more than the outputs.*per_example_loss"),
    ("mean", False, {"mode": "loop"}, r"number for one example.*per_example_loss"),
]


@pytest.mark.parametrize(("kind", "is_ragged", "options", "match"), REFUSED)
def test_a_loss_of_more_than_an_examples_outputs_is_refused(kind, is_ragged, options, match):
    labels = ids(V, ROWS, T, seed=2)
    labels[::3, 2:] = -100 if is_ragged else 0
    run = own(kind, labels, **options)
    with pytest.raises((ValueError, UnsupportedLayerError), match=match):
        fit(run.model, run.optimizer, [(run.x, run.y)], loss_of)
    assert not len(run.engine.ledger)


class Only(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_model_that_returns_nothing_but_its_loss_is_refused():
    model = Only(6, 3)
    with (
        dpt.record_per_sample(model, loss_reduction="mean"),
        pytest.raises(UnsupportedLayerError, match="the examples on axis 0 of every output"),
    ):
        model(data(4, 6))


# ---------------------------------------------------------------------- Hugging Face

KINDS = {
    "GPT2LMHeadModel": {"n_positions": T, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "BertForSequenceClassification": {
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3},
        **{"intermediate_size": 16, "max_position_embeddings": T},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_hugging_face(kind):
    """`model(**batch).loss`; without dropout, so that plain autograd is the truth."""
    transformers = pytest.importorskip("transformers")
    is_gpt = kind.startswith("GPT")
    config = transformers.GPT2Config if is_gpt else transformers.BertConfig
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config(vocab_size=V, **KINDS[kind]))
    run = opened(model, None if is_gpt else ids(3, ROWS, seed=2))
    model.eval()
    stepped(run)

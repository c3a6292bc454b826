# SPDX-License-Identifier: Apache-2.0
"""Activation checkpoints in the engine's forward: exact, and what they save is saved."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.per_sample.capture import Capture
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.per_sample.test_usual_models import held_to_plain_autograd
from tests.dualdp_torch.per_sample.test_vmap_and_loop import loss, trained

N, T, WIDTH = 24, 5, 8


class Checkpointed(nn.Module):
    """Words through blocks, each checkpointed by a function."""

    def __init__(self, kind, dropout=0.0, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3)
        self.kind, self.options = kind, {"use_reentrant": False, **options}
        self.blocks = nn.ModuleList([BLOCKS[kind](dropout) for _ in range(2)])
        if kind == "shared":
            self.blocks[1] = self.blocks[0]

    def twice(self, block, x):
        """A checkpoint in a checkpoint, beside uses of the same weights."""
        inner = checkpoint(block, torch.sin(block(x)), **self.options)
        return inner + checkpoint(block, x, **self.options)

    def forward(self, words):
        x = checkpoint(self.table, words, **self.options)
        for block in self.blocks:
            if self.kind == "nested":
                x = x + checkpoint(self.twice, block, x, **self.options)
            else:
                x = x + checkpoint(block, x, **self.options)
        return self.head(torch.tanh(x)).mean(1)


def feed_forward(dropout):
    layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH)
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))


def attention(dropout):
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True)


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Scaled(nn.Module):
    """Parameters of its own, and a weight computed in the checkpoint."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layer(torch.tanh(x * self.scale)) + self.shift


BLOCKS = {
    "plain": feed_forward,
    "shared": feed_forward,
    "nested": feed_forward,
    "attention": attention,
    "recurrent": lambda dropout: Recurrent(WIDTH, WIDTH, batch_first=True),
    "scaled": lambda dropout: Scaled(),
}


def items():
    return TensorDataset(ids(9, N, T), ids(3, N))


@pytest.mark.parametrize("mode", ["auto", "two_pass", "loop"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_checkpointed_models_are_plain_autograd(kind, mode):
    held_to_plain_autograd(randomise(Checkpointed(kind)), items(), loss("mean"), mode=mode)


@pytest.mark.parametrize("kind", ["plain", "nested", "scaled"])
@pytest.mark.parametrize("method", ["auto", "two_pass", "materialize", "loop"])
def test_two_forwards_before_one_backward(method, kind):
    """Each is captured again by its own capture."""
    model, words, others = (
        randomise(Checkpointed(kind)).double(),
        ids(9, 5, T),
        ids(9, 5, T, seed=2),
    )

    def losses(model, words, others):
        return (model(words) - 2 * model(others)).square().sum(1)

    with dpt.record_per_sample(model, loss_reduction="sum", method=method) as record:
        model(others).sum().backward()
        model.zero_grad()
        losses(model, words, others).sum().backward()
    expected = dpt.per_sample_grads(losses, model, words, others, method="loop")
    for name, grad in record.grads().items():
        torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_dropout_in_a_checkpoint_is_that_of_the_forward(kind, clipping):
    model = randomise(Checkpointed(kind, dropout=0.3))
    torch.manual_seed(1)
    *_, (_, _, _, engine) = trained(model, items(), loss("mean"), mode="auto", clipping=clipping)
    assert engine.ledger.last_check == 1
    x, y = ids(9, 6, T), ids(3, 6)
    torch.manual_seed(2)
    with dpt.record_per_sample(model, loss_reduction="sum", check="off") as record:
        F.cross_entropy(model(x), y, reduction="sum").backward()
    model.zero_grad()
    torch.manual_seed(2)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(record.grads()[name].sum(0), p.grad, rtol=1e-4, atol=1e-6)


def test_functional_calls_check_dropout_in_a_checkpoint():
    model = randomise(Checkpointed("plain", dropout=0.3))
    for method in ("auto", "two_pass", "materialize", "loop"):
        found = dpt.clipped_grad_sum(
            lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
            model,
            *(ids(9, 6, T), ids(3, 6)),
            max_grad_norm=0.1,
            method=method,
            check="always",
        )
        assert bool(found.norms.isfinite().all())


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("mode", ["auto", "loop"])
def test_reentrant_checkpoints_are_refused_with_their_mending(mode):
    model = Checkpointed("plain", use_reentrant=True)
    model.forward = lambda words: model.head(  # an input in the graph, as torch asks for it
        torch.tanh(checkpoint(model.blocks[0], model.table(words), use_reentrant=True)).mean(1)
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedLayerError, match="use_reentrant=False"):
        list(trained(model, items(), loss("mean"), mode=mode))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_checkpoint_around_the_whole_model_is_refused():
    model, x = nn.Linear(6, 3), data(4, 6)
    with (
        dpt.record_per_sample(model, loss_reduction="sum"),
        pytest.raises(UnsupportedLayerError, match="inside of its forward, around its parts"),
    ):
        checkpoint(model, x, use_reentrant=False)


def test_a_part_that_runs_otherwise_the_second_time_is_refused():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
            self.runs = 0

        def part(self, x):
            self.runs += 1
            return self.layers[self.runs % 2](x)

        def forward(self, x):
            return checkpoint(self.part, self.layers[2](x), use_reentrant=False)

    model, x = Changing(), data(1, 6)  # one example: nothing is examined before
    with (
        pytest.raises(UnsupportedLayerError, match="called other layers when it ran again"),
        dpt.record_per_sample(model, loss_reduction="sum"),
    ):
        model(x).sum().backward()


def test_inputs_inside_a_checkpoint_are_not_held_before_the_backward():
    model, held = Checkpointed("plain"), []
    with dpt.record_per_sample(model, loss_reduction="sum", check="off") as record:
        out = model(ids(9, 6, T))
        uses = list(record._recorder.forwards[-1].uses)
        held = [use.acts is None for use in uses if use.held.keys() - use.rule.light]
        out.sum().backward()
        assert all(use.acts is not None for use in uses if use.held.keys() - use.rule.light)
    assert held == [False, *[True] * 6, False]  # table, two blocks of three layers, head


def test_a_checkpointed_forward_leaves_nothing_in_memory():
    model = Checkpointed("nested")
    names = {id(p): name for name, p in model.named_parameters()}
    with Capture(names) as capture:
        total = model(ids(9, 6, T)).sum()
    capture.backward(total, dict(model.named_parameters()))
    graph, use = weakref.ref(total), weakref.ref(capture.uses[1])
    del total, capture
    gc.collect()
    assert graph() is None
    assert use() is None


def test_checkpointing_of_hugging_face_is_exact():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": T, "n_embd": 8, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=9, **sizes, **tokens, **no_dropout)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    def loop(model, batch):
        return F.cross_entropy(model(input_ids=batch[0]).logits.transpose(1, 2), batch[0])

    held_to_plain_autograd(model, items(), loop)

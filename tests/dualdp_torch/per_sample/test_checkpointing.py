# SPDX-License-Identifier: Apache-2.0
"""Activation checkpoints in the engine's forward: exact, and what they save is saved."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.per_sample.loops import (
    classified,
    held_to_plain_autograd,
    loss,
    recorded,
    slow,
    trained,
    words,
)

T, WIDTH = 5, 8


class Checkpointed(nn.Module):
    """Words through blocks, each checkpointed by a function."""

    def __init__(self, kind, dropout=0.0, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3)
        self.kind, self.options = kind, {"use_reentrant": False, **options}
        self.blocks = nn.ModuleList([BLOCKS[kind](dropout) for _ in range(2)])
        if kind == "shared":
            self.blocks[1] = self.blocks[0]
        randomise(self)

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

    def __init__(self, dropout):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layer(torch.tanh(x * self.scale)) + self.shift


BLOCKS = {
    **dict.fromkeys(("plain", "shared", "nested"), feed_forward),
    "attention": attention,
    "recurrent": lambda dropout: Recurrent(WIDTH, WIDTH, batch_first=True),
    "scaled": Scaled,
}


@pytest.mark.parametrize("mode", ["auto", *slow("two_pass", "loop")])
@pytest.mark.parametrize(
    "kind", ["plain", "nested", *slow("shared", "attention", "recurrent", "scaled")]
)
def test_checkpointed_models_are_plain_autograd(kind, mode):
    held_to_plain_autograd(Checkpointed(kind), words(), loss(), mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_dropout_in_a_checkpoint_is_that_of_the_forward(kind, clipping):
    model, x, y = Checkpointed(kind, dropout=0.3), ids(9, 6, T), ids(3, 6)
    torch.manual_seed(1)
    list(trained(model, words(), loss(), mode="auto", clipping=clipping))
    for method in ("auto", "two_pass", "materialize", "loop"):
        options = {"clipping": clipping, "method": method, "check": "always"}
        if (method, clipping) != ("two_pass", "per_layer"):  # refused
            dpt.clipped_grad_sum(classified, model, x, y, max_grad_norm=0.1, **options)
    torch.manual_seed(2)
    found = recorded(model, x, y, loss=classified, check="off").grads()
    model.zero_grad()
    torch.manual_seed(2)
    classified(model, x, y).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].sum(0), p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("mode", ["auto", "loop"])
def test_reentrant_checkpoints_are_refused_with_their_mending(mode):
    model = Checkpointed("plain", use_reentrant=True)
    model.forward = lambda words: model.head(  # an input in the graph, as torch asks for it
        torch.tanh(checkpoint(model.blocks[0], model.table(words), use_reentrant=True)).mean(1)
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedLayerError, match="use_reentrant=False"):
        list(trained(model, words(), loss(), mode=mode))
    assert all(map(torch.equal, model.parameters(), before))


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

    with pytest.raises(UnsupportedLayerError, match="called other layers when it ran again"):
        recorded(Changing(), data(1, 6))  # one example: nothing is examined before


def test_inputs_inside_a_checkpoint_are_not_held():
    model = Checkpointed("plain")
    with dpt.record_per_sample(model, loss_reduction="sum", check="off") as record:
        out = model(ids(9, 6, T))
        uses = list(record._recorder.forwards[-1].uses)
        held = [use.acts is None for use in uses if use.held.keys() - use.rule.light]
        out.sum().backward()
        assert all(use.acts is not None for use in uses if use.held.keys() - use.rule.light)
    assert held == [False, *[True] * 6, False]  # table, two blocks of three layers, head

# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers, and the gates of an LSTM from oneDNN's workspace."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dualdp_torch.rules import rnn_backward
from tests.dualdp_torch.checks import assert_exact, data, randomise

FAST = ("auto", "book_keeping", "materialize")


class Outputs(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("steps", [1, 1 << 19])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(monkeypatch, kind, steps):
    monkeypatch.setattr(rnn_backward, "_CHUNK", steps)  # one step at a time, or all of them
    layer = getattr(nn, kind)(4, 3, 2, bidirectional=True, batch_first=True)
    assert_exact(randomise(Outputs(layer)), data(3, 5, 4), methods=FAST)


@pytest.mark.parametrize(("steps", "n", "inputs", "width"), [(5, 3, 4, 3), (4, 2, 6, 64)])
def test_the_workspace_begins_with_the_gates(steps, n, inputs, width):
    """Rows of several paddings; the input in another order than oneDNN takes for granted."""
    x, h, c = data(n, steps, inputs).transpose(0, 1), data(n, width), data(n, width, seed=2)
    shapes = ((4 * width, inputs), (4 * width, width), (4 * width,), (4 * width,))
    weights = tuple(data(*shape, seed=k) * 0.2 for k, shape in enumerate(shapes))
    found = rnn_backward.lstm_with_gates(x, h, c, weights)
    if found is None:
        assert not rnn_backward.by_onednn(x)
        pytest.skip("this build of torch has no oneDNN")
    out, last_h, last_c, gates = found
    cell = rnn_backward.Cell("lstm", *weights, None, None)
    assert_close((out, last_h, last_c), tuple(cell.fused(x, h, c, weights)))
    sums = cell.gate_sums(x, torch.cat([h[None], out[:-1]]))
    assert_close(gates, rnn_backward.lstm_gates(sums.clone(), None))
    assert rnn_backward.are_gates(gates, rnn_backward.lstm_cells(gates, c), last_c, sums[-1])


@pytest.mark.parametrize("row", [lambda n: n, lambda n: n + 16, lambda n: 1 << 40])
def test_a_workspace_of_another_layout_is_not_used(monkeypatch, row):
    monkeypatch.setattr(rnn_backward, "row_stride", row)
    model = randomise(Outputs(nn.LSTM(4, 33, batch_first=True)))
    assert_exact(model, data(3, 5, 4), methods=("auto", "book_keeping"))

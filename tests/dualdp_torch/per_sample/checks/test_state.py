# SPDX-License-Identifier: Apache-2.0
"""What a forward leaves behind: nothing that depends on the examples, whatever it is kept in."""

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data


def squares(model, x):
    return model(x).square().sum(1)


class Writes(nn.Module):
    """Writes something in forward, from the moment that `what` is set."""

    def __init__(self):
        super().__init__()
        self.layer, self.what = nn.Linear(5, 2), "nothing"
        self.register_buffer("buffer", torch.zeros(5))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            if self.what == "average":
                self.buffer.mul_(0.9).add_(x.mean(0))
            if self.what == "frozen parameter":
                self.frozen.copy_(x[0])
            if self.what == "average by data":
                self.buffer.data.mul_(0.9).add_(x.mean(0))
            if self.what == "average in numpy":
                self.buffer.numpy()[:] = x.mean(0).numpy()
            if self.what == "new data":
                self.buffer.data = x[0].clone()
            if self.what == "rows normalised":
                self.layer.weight[:, 0] = x[0, :2]
            if self.what == "counter by data":
                self.buffer.data += 1
            if self.what == "another tensor":
                self.buffer = x[0].clone()
            if self.what == "size":
                self.buffer += len(x)
            if self.what == "counter":
                self.buffer += 1
            if self.what == "another counter":
                self.buffer = self.buffer + 1
            if self.what == "new buffer" and not hasattr(self, "added"):
                self.register_buffer("added", torch.arange(3.0))
        return self.layer(x)


LEAKS = (
    *("average", "frozen parameter", "another tensor"),
    *("average by data", "average in numpy", "new data"),
)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("begins", ["at once", "later"])
@pytest.mark.parametrize("what", LEAKS)
def test_what_depends_on_the_examples_is_refused(what, begins, n):
    """With one example too, and in any forward: a raw row would lie in the state_dict."""
    model, x = Writes(), data(n, 5)
    if begins == "later":
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0)
    model.what = what
    found = "'buffer' changes in forward, by what the"
    if what == "frozen parameter":
        found = "'frozen' is written in forward"
    with pytest.raises(UnsupportedLayerError, match=found):
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_a_buffer_that_keeps_an_average_is_refused_by_every_method(method):
    model = Writes()
    model.what = "average"
    found = "vmap can't run" if method == "vmap" else "buffer 'buffer' changes in forward"
    with pytest.raises(UnsupportedLayerError, match=found):
        dpt.per_sample_grads(squares, model, data(4, 5), method=method)


def test_the_number_of_examples_is_refused():
    model = Writes()
    model.what = "size"
    with pytest.raises(UnsupportedLayerError, match="'buffer' changes in forward"):
        dpt.per_sample_norms(squares, model, data(4, 5))


def test_a_trained_parameter_that_forward_writes_is_refused():
    """Which numbers change tells of the examples, also with a learning rate of 0."""
    model = Writes()
    model.what = "rows normalised"
    with pytest.raises(UnsupportedLayerError, match="'layer.weight' is written in forward"):
        dpt.clipped_grad_sum(squares, model, data(4, 5), max_grad_norm=1.0)


def test_a_counter_counts_the_loops_forwards_only():
    """Forwards of ours write copies, by value: `.data` moves no version."""
    model, x = Writes(), data(4, 5)
    model.what = "counter by data"
    for _ in range(3):
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0, check="always")
    assert model.buffer[0] == 3


@pytest.mark.parametrize("what", ["counter", "another counter", "counter by data", "new buffer"])
@pytest.mark.parametrize("method", ["auto", "two_pass", "materialize"])
def test_what_is_the_same_on_every_batch_passes(what, method):
    model, x = Writes(), data(4, 5)
    model.what = what
    for calls in range(1, 4):
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0, method=method)
        if what != "new buffer":
            forwards = calls * (2 if method == "two_pass" else 1)
            assert model.buffer[0] in (calls, forwards)
    assert len(dict(model.named_buffers())) == 1 + (what == "new buffer")


def test_one_example_that_can_not_be_told_from_others_is_refused():
    """Of one number there is no other batch to compare with."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 2)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, tokens):
            self.seen[tokens] += 1
            return self.table(tokens)

    with pytest.raises(UnsupportedLayerError, match="'seen' changes in forward"):
        dpt.per_sample_norms(squares, Counts(), torch.tensor([2]))

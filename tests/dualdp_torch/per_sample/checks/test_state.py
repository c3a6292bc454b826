# SPDX-License-Identifier: Apache-2.0
"""What a forward leaves behind depends on no example, whatever it is kept in (62, 91, 92)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.per_sample.loops import engine_loop, squares

#: What depends on the examples, and how it is written.
LEAKS = {
    "average": lambda m, x: m.buffer.mul_(0.9).add_(x.mean(0)),
    "frozen parameter": lambda m, x: m.frozen.copy_(x[0]),
    "another tensor": lambda m, x: setattr(m, "buffer", x[0].clone()),
    "average by data": lambda m, x: m.buffer.data.mul_(0.9).add_(x.mean(0)),
    "average in numpy": lambda m, x: m.buffer.numpy().__setitem__(..., x.mean(0).numpy()),
    "new data": lambda m, x: setattr(m.buffer, "data", x[0].clone()),
    "trained parameter": lambda m, x: m.layer.weight[:, 0].copy_(x[0, :3]),
    "size": lambda m, x: m.buffer.add_(len(x)),
}
COUNTS = {
    "counter": lambda m, x: m.buffer.add_(1),
    "another counter": lambda m, x: setattr(m, "buffer", m.buffer + 1),
    "counter by data": lambda m, x: m.buffer.data.add_(1),
    "new buffer": lambda m, x: hasattr(m, "added") or m.register_buffer("added", torch.arange(3.0)),
}


class Writes(nn.Module):
    """Writes something in forward, from the moment that `what` is set."""

    def __init__(self, what=None):
        super().__init__()
        self.layer, self.what = nn.Linear(6, 3), what
        self.register_buffer("buffer", torch.zeros(6))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        if self.what is not None:
            with torch.no_grad():
                {**LEAKS, **COUNTS}[self.what](self, x)
        return self.layer(x)


def refused(what):
    name = {"frozen parameter": "frozen", "trained parameter": "layer.weight"}.get(what, "buffer")
    verb = "changes" if name == "buffer" else "is written"
    errors = UnsupportedLayerError, ExactnessError  # on a first batch, or later
    return pytest.raises(errors, match=f"'{name}' {verb} in forward")


def clipped(model, x, **options):
    return dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0, **options)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("what", [leak for leak in LEAKS if leak != "size"])
def test_what_depends_on_the_examples_is_refused(what, n):
    """With one example too, and in any forward: a raw row would lie in the state_dict."""
    for begins_later in (False, True):
        model, x = Writes(), data(n, 6)
        if begins_later:
            clipped(model, x)
        model.what = what
        with refused(what):
            clipped(model, x)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_a_buffer_of_averages_is_refused_by_every_method(method):
    found = "vmap can't run" if method == "vmap" else "buffer 'buffer' changes in forward"
    with pytest.raises(UnsupportedLayerError, match=found):
        dpt.per_sample_grads(squares, Writes("average"), data(4, 6), method=method)


def test_the_number_of_examples_is_refused():
    with refused("size"):
        clipped(Writes("size"), data(4, 6))


@pytest.mark.parametrize("what", COUNTS)
@pytest.mark.parametrize("method", ["auto", "two_pass", "materialize"])
def test_what_is_the_same_on_every_batch_passes(what, method):
    """Forwards of ours write copies, by value: `.data` moves no version."""
    model, x = Writes(what), data(4, 6)
    for calls in range(1, 4):
        clipped(model, x, method=method, check="always")
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


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("begins", [0, 12])
@pytest.mark.parametrize("what", ["average", "another tensor", "frozen parameter"])
def test_what_a_forward_of_a_loop_writes_is_refused(what, begins, size):
    def loop(model, x, y, step):
        model.what = what if step >= begins else None
        F.cross_entropy(model(x), y).backward()

    with refused(what):
        engine_loop(loop, Writes(), 20, physical_batch_size=size, checks=1.0 if begins else None)


def test_a_counter_of_a_loop_passes():
    def loop(model, x, y, step):
        F.cross_entropy(model(x), y).backward()

    engine_loop(loop, Writes("counter"), 3, checks=1.0)


@pytest.mark.parametrize("n", [1, 4])
def test_a_recorded_block_looks_at_buffers_too(n):
    model = Writes("average")
    with refused("average"), dpt.record_per_sample(model, loss_reduction="mean"):
        F.cross_entropy(model(data(n, 6)), ids(3, n)).backward()

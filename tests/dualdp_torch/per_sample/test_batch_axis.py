# SPDX-License-Identifier: Apache-2.0
"""The batch axis is proved, never guessed; a model that mixes examples is refused."""

import contextlib
import functools
import random
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from dualdp_torch.per_sample import call
from tests import reference
from tests.dualdp_torch.checks import METHODS, Ways, assert_exact, data, ids, randomise
from tests.dualdp_torch.per_sample.loops import Model, linear, recorded, slow

N = 4
loss_fn = reference.loss_fn
norms_of = functools.partial(dpt.per_sample_norms, loss_fn)
recorded_of = functools.partial(recorded, loss=loss_fn)
ANOTHER = "The loss of an example is another one"


def around(before=lambda x: x, after=lambda y, x: y):
    """A linear layer between two functions."""
    return Model(lambda m, x: after(m.layer(before(x)).tanh(), x), layer=linear(6))


def assert_right(model, x, methods=METHODS):
    """By every method, and recorded."""
    assert_exact(model, x, methods=methods)
    torch.testing.assert_close(recorded_of(model, x).norms(), norms_of(model, x, method="loop"))


def by_length(x):
    order = x[:, 0, 0].argsort(descending=True)
    return order, order.argsort()


APART = {
    "time first": (lambda x: x.transpose(0, 1), lambda y, x: y.transpose(0, 1)),
    "examples outside": (lambda x: x.flatten(0, 1), lambda y, x: y.view(len(x), -1, 6)),
    "examples inside": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y, x: y.view(-1, len(x), 6).transpose(0, 1),
    ),
    "windows": (lambda x: x.unfold(1, 2, 1).transpose(2, 3), lambda y, x: y.mean(2)),
    "last step only": (lambda x: x.transpose(0, 1), lambda y, x: y[-1]),
    "permuted": (lambda x: x[by_length(x)[0]], lambda y, x: y[by_length(x)[1]]),
    "middle axis": (lambda x: x.permute(1, 0, 2).unsqueeze(0), lambda y, x: y[0].transpose(0, 1)),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("t", [N, *slow(3)])
def test_examples_are_found_wherever_they_lie(name, t, monkeypatch):
    model = around(*APART[name])
    assert_exact(model, data(N, t, 6))
    ways = Ways(monkeypatch)
    norms_of(model, data(N, t, 6))
    assert ways.taken == (["by_vmap"] if name == "permuted" else ["Captured"])


# ---------------------------------------------------------------------- models that mix


def attention_over_examples(x):
    return F.scaled_dot_product_attention(*(x.transpose(0, 1),) * 3).transpose(0, 1)


MIXED = {
    "mean subtracted": lambda x: x - x.mean(0),
    "first example added": lambda x: x + x[0],
    "neighbours added": lambda x: x + x.roll(1, 0),
    "attention over examples": attention_over_examples,
    "divided by n": lambda x: x / len(x),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("method", ["auto", *slow(*METHODS[1:])])
def test_mixed_examples_are_refused(name, method):
    mix = MIXED[name]
    for model in (around(mix), around(after=lambda y, x: mix(y))):
        with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
            norms_of(model, data(N, 5, 6), method=method)
        with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
            recorded_of(model, data(N, 5, 6))


class OwnBatchNorm(nn.BatchNorm1d):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return super().forward(x * 2)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6, track_running_stats=False).eval(),
        OwnBatchNorm(6),
        nn.SyncBatchNorm(6),
        nn.BatchNorm1d(6).requires_grad_(False),
    ],
    ids=["plain", "no_affine", "no_statistics_in_eval", "subclass", "sync", "frozen"],
)
def test_batch_norm_is_refused_by_name(layer):
    model = nn.Sequential(nn.Linear(6, 6), layer)
    for method in ("auto", "vmap", "loop"):
        with pytest.raises(UnsupportedLayerError, match=r"BatchNorm.* \(layer '1'\).*GroupNorm"):
            norms_of(model, data(N, 6), method=method)
    assert [finding.path for finding in dpt.validate(model)] == ["1"]


def test_batch_norm_in_eval_is_a_fixed_map():
    norm = nn.BatchNorm1d(6)
    norm.running_mean.copy_(data(6))
    assert_exact(randomise(nn.Sequential(nn.Linear(6, 6), norm)).eval(), data(N, 6))


TABLE = Model(
    lambda m, x: F.embedding(x, m.table, scale_grad_by_freq=True), table=nn.Parameter(data(5, 3))
)


@pytest.mark.parametrize(
    ("model", "x", "match"),
    [
        (
            around(after=lambda y, x: F.batch_norm(y, None, None, training=True)),
            data(N, 6),
            "batch_norm was called with batch statistics",
        ),
        (nn.InstanceNorm1d(3, track_running_stats=True), data(N, 3, 5), "running statistics"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), ids(5, N, 7), "scale_grad_by_freq"),
        (nn.Embedding(5, 3, max_norm=1.0), ids(5, N, 7), "max_norm renormalises"),
        (TABLE, ids(5, N, 7), "'table'.*scale_grad_by_freq"),
    ],
)
def test_batch_statistics_in_options_are_refused(model, x, match):
    for method in METHODS if isinstance(model, nn.Embedding) else ("auto",):
        with pytest.raises(UnsupportedLayerError, match=match):
            norms_of(model, x, method=method)


def mixstyle(h):
    mean = h.mean(1, keepdim=True).detach()
    share = torch.distributions.Beta(0.1, 0.1).sample((len(h), 1))
    return h - mean + share * mean + (1 - share) * mean[torch.randperm(len(h))]


def mixup(draw):
    return lambda h: 0.5 * (h + h.flip(0)) if draw() < 0.5 else h


MIXES = {
    "mean of many": lambda h: h - h.mean(0) if len(h) > 4 else h,
    "detached mean": lambda h: h - h.detach().mean(0),
    "mixup by torch": mixup(lambda: torch.rand(1)),
    "mixup by numpy": mixup(lambda: np.random.rand()),  # noqa: NPY002
    "mixup by random": mixup(random.random),
    "mixstyle": mixstyle,
}


def mixes(how, on=True):
    """Joins examples in some way, from the moment that `on` says so."""

    def run(self, x):
        h = self.first(x)
        return self.second((MIXES[how](h) if self.on else h).tanh())

    return Model(run, first=linear(6), second=linear(), on=on)


@pytest.mark.parametrize("method", ["auto", *slow("two_pass", "loop")])
@pytest.mark.parametrize("how", MIXES)
def test_mixing_by_size_and_by_chance_is_refused(how, method):
    """Also mixing that a few examples do not show; by chance, on a step where it happens."""
    torch.manual_seed(0)
    model, x = mixes(how), data(8, 6)

    def often():
        for _ in range(20 if how.startswith("mixup") else 1):
            norms_of(model, x, method=method, check="always")

    with pytest.raises((ExactnessError, UnsupportedLayerError)):
        often()


@pytest.mark.parametrize("method", METHODS)
def test_mixing_that_is_switched_on_later_is_refused(method):
    """By an attribute, by a keyword default of the same code, and by what a closure holds."""
    model, x = mixes("detached mean", on=False), data(8, 6)
    norms_of(model, x, method=method)
    model.on = True
    with pytest.raises(UnsupportedLayerError, match=ANOTHER):
        norms_of(model, x, method=method)

    def loss_of(mixes):
        def loss(model, x, *, mixes=mixes):
            h = model(x)
            return (h - h.mean(0) if mixes else h).square().sum(1)

        return loss

    plain = linear()
    dpt.per_sample_norms(loss_of(False), plain, x, method=method)
    with pytest.raises(UnsupportedLayerError, match=ANOTHER):
        dpt.per_sample_norms(loss_of(True), plain, x, method=method)


def test_a_refusal_shows_no_number_of_the_data():
    with pytest.raises(UnsupportedLayerError, match="relative difference 1e[+-]0") as caught:
        norms_of(mixes("detached mean"), data(8, 6))
    assert not re.search(r"\d\.\d", str(caught.value))


# ---------------------------------------------------------------------- what a model is given later


def centred(h):
    return h - h.mean(0)


class Centred(nn.Module):
    def forward(self, h):
        return centred(h)


class CentredLoss:
    def __call__(self, model, x):
        return centred(model(x)).square().sum(1)


def changeable():
    """Two layers with a module, a function and an optional object between them."""

    def run(self, x):
        h = self.function(self.between(self.first(x)))
        h = h - self.share * h.mean(0)
        return self.second(h if self.more is None else self.more(h))

    options = {"function": torch.tanh, "more": None, "share": 0.0}
    return Model(run, first=linear(6), second=linear(), between=nn.Tanh(), **options)


LATER = {
    "forward hook": lambda m: m.first.register_forward_hook(lambda *a: centred(a[-1])),
    "forward pre-hook": lambda m: m.second.register_forward_pre_hook(lambda m, a: centred(a[0])),
    "module": lambda m: setattr(m, "between", Centred()),
    "forward": lambda m: setattr(m.between, "forward", centred),
    "function": lambda m: setattr(m, "function", centred),
    "object": lambda m: setattr(m, "more", Centred().forward),
    "number": lambda m: setattr(m, "share", 0.5),
}


@pytest.mark.parametrize("what", LATER)
def test_what_a_model_is_given_later_is_examined(what):
    """Hooks, modules and functions of a model that was examined without them."""
    model, x = changeable(), data(8, 6)
    norms_of(model, x), recorded_of(model, x)
    LATER[what](model)
    for call_again in (norms_of, recorded_of):
        with pytest.raises(UnsupportedLayerError, match=ANOTHER):
            call_again(model, x)


def test_a_later_hook_that_knows_its_layer_is_caught():
    """It does nothing on the copies that are examined, so that only the numbers tell."""
    model, x = changeable(), data(8, 6)
    norms_of(model, x), recorded_of(model, x)
    layer = weakref.ref(model.first)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: centred(out) if module is layer() else None
    )
    try:
        with pytest.raises(ExactnessError, match="differs from plain autodiff"):
            norms_of(model, x)
        with pytest.raises(UnsupportedLayerError, match="computes changed between its forward"):
            recorded_of(model, x).norms()
    finally:
        handle.remove()


def test_backward_hooks_of_later_are_examined():
    """A hook that joins the examples' gradients, on a model that was examined without it."""
    model, x = changeable(), data(8, 6)
    recorded_of(model, x)
    model.between.register_full_backward_hook(lambda m, grads, *_: (grads[0] / grads[0].norm(),))
    found = recorded_of(model, x).norms()
    torch.testing.assert_close(found, norms_of(model, x, method="loop"))


def test_functions_made_anew_at_every_step_are_examined_once(monkeypatch):
    """Hooks, functions of the model and losses, which close over other numbers each time."""
    examined, seen, examine = [], [], call.examine
    monkeypatch.setattr(call, "examine", lambda *a: examined.append(1) or examine(*a))
    model, of = changeable(), (lambda scale, m, x: seen.append(scale) or loss_fn(m, x) * scale)
    for number in torch.arange(1.0, 5.0):
        with model.first.register_forward_hook(lambda *a: seen.append(a[-1] + number)):  # noqa: B023
            model.function = lambda h: seen.append(h + number) or number * torch.tanh(h)  # noqa: B023
            for loss in (functools.partial(of, 2.0), lambda m, x: of(number, m, x)):  # noqa: B023
                dpt.per_sample_norms(loss, model, data(8, 6))
    assert len(examined) == 2
    assert seen


# ---------------------------------------------------------------------- rare and closed layers


def test_a_path_that_only_some_batches_take_is_examined_too():
    def branches(self, x):
        return self.first(x) if float(x.detach().sum()) > 0 else self.second(x).tanh()

    model, x = Model(branches, first=linear(6), second=linear(6)), data(N, 6).abs()
    methods = tuple(method for method in METHODS if method != "vmap")  # which can't branch
    assert_exact(model, x, methods=methods)
    assert_exact(model, -x, methods=methods)


def test_gradients_that_vanish_at_first_prove_nothing():
    """A gate of zero hides the layer from the examination; opened, it is examined."""

    def gated(self, x):
        return self.head(x) + self.gate * self.layer(x.transpose(0, 1)).transpose(0, 1)

    gate = nn.Parameter(torch.zeros(1), requires_grad=False)
    model = Model(gated, layer=linear(6), head=linear(6), gate=gate)
    for value in (0.0, 1.5):
        with torch.no_grad():
            model.gate.fill_(value)
        assert_right(model, data(N, N, 6))


def less_mean(layer, x):
    h, gate = layer(x), (x[:, :1] > 2).float()
    return h - (h * gate).sum(0) / gate.sum().clamp(min=1)


def sorted_inside(layer, x):
    order = x[:, 1].argsort()
    return layer(x[order])[order.argsort()]


def few(call=lambda layer, x: layer(x), sorts=False):
    """A layer of which few examples take the output."""

    def run(self, x):
        rows = x[order := x[:, 1].argsort()] if sorts else x
        chosen = torch.where(rows[:, :1] > 2, call(self.rare, rows), self.usual(rows))
        return chosen[order.argsort()] if sorts else chosen

    return Model(run, rare=linear(), usual=linear())


def rows_of(*rare):
    x = data(12, 6).clamp(max=1)
    x[[*rare], 0] = 3
    return x


FEW = {
    "in place": ({}, "Captured"),
    "sorted": ({"sorts": True}, "by_vmap"),
    "sorted inside": ({"call": sorted_inside}, "by_vmap"),
}


@pytest.mark.parametrize("count", [1, *slow(3)])
@pytest.mark.parametrize("name", FEW)
def test_a_layer_that_few_examples_reach_is_examined_on_those(name, count, monkeypatch):
    """Four examples of a batch are examined; a gate may leave a layer to the others."""
    options, way = FEW[name]
    x, is_fast = rows_of(*range(5, 5 + count)), way == "Captured"
    methods = tuple(m for m in METHODS if is_fast or m != "two_pass")
    assert_exact(few(**options), x, methods=methods)
    ways = Ways(monkeypatch)
    norms_of(few(**options), x)
    assert ways.taken[-1] == way
    with contextlib.suppress(*([] if is_fast else [UnsupportedLayerError])):
        expected = norms_of(few(**options), x, method="loop")
        torch.testing.assert_close(recorded_of(few(**options), x).norms(), expected)


def test_rows_that_a_model_sorts_are_seen_in_any_order():
    """The examined examples stand in the order of the sort; they are looked at backwards too."""
    x = rows_of(3, 4, 5, 8, 9)
    x[:, 1] = torch.arange(12) / 12
    x[[8, 9], 1] = x[[9, 8], 1]
    assert_right(few(sorted_inside), x, [m for m in METHODS if m != "two_pass"])


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_mixing_of_the_few_examples_that_reach_a_layer_is_named(method):
    with pytest.raises((ExactnessError, UnsupportedLayerError), match="A spot check failed"):
        norms_of(few(less_mean), rows_of(4, 5, 8), method=method)


@pytest.mark.parametrize("row", [0, 5])
def test_a_rare_layer_reached_by_an_example_of_nan(row):
    model, x = few(), rows_of(row, 6, 7)
    x[row, 2] = float("nan")
    expected = norms_of(model, x, method="loop")
    for norms in (norms_of(model, x), recorded_of(model, x).norms()):
        torch.testing.assert_close(norms, expected, equal_nan=True)


@pytest.mark.parametrize("d", [3, 4])  # also as many features as examples are examined
def test_an_axis_of_the_batchs_size_is_right_for_that_size_alone(d):
    """Examples lie on axis 1 where there are as many as features."""

    def scattered(self, x):
        n = len(x)
        return self.layer(x.t().reshape(n, d, 1)).reshape(d, n, 2).transpose(0, 1)

    model = Model(scattered, layer=nn.Linear(1, 2))
    for n in (d, 12, d, 7):
        assert_right(model, data(n, d), [m for m in METHODS if m != "two_pass"])


def test_too_few_finite_examples_are_taken_one_at_a_time(monkeypatch):
    first, second = (
        Model(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(6, 6, batch_first=True)) for _ in range(2)
    )
    x = data(N, 5, 6)
    expected = norms_of(first, x, method="loop")
    x[1:] = float("nan")
    ways = Ways(monkeypatch)
    norms = norms_of(second, x)
    assert ways.taken == ["by_loop"]
    torch.testing.assert_close(norms[:1], expected[:1])
    assert not norms[1:].isfinite().any()

# SPDX-License-Identifier: Apache-2.0
"""The batch axis is proved, never guessed; a model that mixes examples is refused."""

import contextlib
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
from dualdp_torch.per_sample import analysis_cache, call
from dualdp_torch.per_sample.analysis_cache import cached_analyses
from dualdp_torch.per_sample.batch import Batch
from tests import reference
from tests.closeness import assert_grads_close
from tests.dualdp_torch.checks import METHODS, Ways, assert_exact, data, ids, randomise, truth_of

N = 4


class Apply(nn.Module):
    """A linear layer between two functions."""

    def __init__(self, before, after, d_in=6, d_out=6):
        super().__init__()
        self.layer = nn.Linear(d_in, d_out)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.layer(self.before(x)).tanh(), x)


def _sorted_by_length(x):
    order = x[:, 0, 0].argsort(descending=True)
    return order, order.argsort()


APART = {
    "time_first": (lambda x: x.transpose(0, 1), lambda y, x: y.transpose(0, 1)),
    "examples_outside": (lambda x: x.flatten(0, 1), lambda y, x: y.view(len(x), -1, 6)),
    "examples_inside": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y, x: y.view(-1, len(x), 6).transpose(0, 1),
    ),
    "windows": (lambda x: x.unfold(1, 2, 1).transpose(2, 3), lambda y, x: y.mean(2)),
    "last_step_only": (lambda x: x.transpose(0, 1), lambda y, x: y[-1]),
    "permuted": (lambda x: x[_sorted_by_length(x)[0]], lambda y, x: y[_sorted_by_length(x)[1]]),
    "middle_axis": (lambda x: x.permute(1, 0, 2).unsqueeze(0), lambda y, x: y[0].transpose(0, 1)),
}
FAST = set(APART) - {"permuted"}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("t", [N, 3, 8])
def test_examples_are_found_wherever_they_lie(name, t, monkeypatch):
    model = randomise(Apply(*APART[name]))
    assert_exact(model, data(N, t, 6))
    ways = Ways(monkeypatch)
    dpt.per_sample_norms(reference.loss_fn, model, data(N, t, 6))
    assert ways.taken == (["Captured"] if name in FAST else ["by_vmap"])


def test_rows_picked_by_a_mask_are_right_or_refused():
    def pick(x):
        return x[x[..., 0] > 0]

    def place(y, x):
        out = x.new_zeros(x.shape)
        out[x[..., 0] > 0] = y
        return out

    model = randomise(Apply(pick, place))
    assert_exact(model, data(N, 5, 6), methods=("auto", "loop"))
    for method in ("materialize", "book_keeping", "vmap"):
        with pytest.raises(UnsupportedLayerError, match='can\'t run this model .* method="loop"'):
            dpt.per_sample_grads(reference.loss_fn, model, data(N, 5, 6), method=method)


MIXED = {
    "mean_subtracted": lambda x: x - x.mean(0),
    "first_example_added": lambda x: x + x[0],
    "neighbours_added": lambda x: x + x.roll(1, 0),
    "attention_over_examples": lambda x: F.scaled_dot_product_attention(
        *(x.transpose(0, 1),) * 3
    ).transpose(0, 1),
    "divided_by_n": lambda x: x / len(x),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["before", "after"])
def test_mixed_examples_are_refused(name, method, where):
    mix, keep = MIXED[name], lambda x: x
    before, after = (mix, keep) if where == "before" else (keep, mix)
    model = randomise(Apply(before, lambda y, x: after(y)))
    for function in (dpt.per_sample_grads, dpt.per_sample_norms):
        with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
            function(reference.loss_fn, model, data(N, 5, 6), method=method)


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
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_batch_norm_is_refused_by_name(layer, method):
    model = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(UnsupportedLayerError, match=r"BatchNorm.* \(layer '1'\).*GroupNorm"):
        dpt.per_sample_grads(reference.loss_fn, model, data(N, 6), method=method)
    assert [finding.path for finding in dpt.validate(model)] == ["1"]


def test_batch_norm_in_eval_is_a_fixed_map():
    norm = nn.BatchNorm1d(6)
    norm.running_mean.copy_(data(6))
    model = randomise(nn.Sequential(nn.Linear(6, 6), norm)).eval()
    assert_exact(model, data(N, 6))


def test_functional_batch_norm_is_refused():
    model = randomise(Apply(lambda x: x, lambda y, x: F.batch_norm(y, None, None, training=True)))
    with pytest.raises(UnsupportedLayerError, match="batch_norm was called with batch statistics"):
        dpt.per_sample_grads(reference.loss_fn, model, data(N, 6))


@pytest.mark.parametrize(
    ("layer", "shape", "match"),
    [
        (nn.InstanceNorm1d(3, track_running_stats=True), (3, 5), "running statistics"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), None, "scale_grad_by_freq"),
        (nn.Embedding(5, 3, max_norm=1.0), None, "max_norm renormalises"),
    ],
)
def test_batch_statistics_in_options_are_refused(layer, shape, match):
    model = nn.Sequential(layer)
    x = ids(5, N, 7) if shape is None else data(N, *shape)
    for method in METHODS:
        with pytest.raises(UnsupportedLayerError, match=match):
            dpt.per_sample_grads(reference.loss_fn, model, x, method=method)


def test_the_same_options_in_functions_are_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(data(5, 3))

        def forward(self, x):
            return F.embedding(x, self.table, scale_grad_by_freq=True)

    with pytest.raises(UnsupportedLayerError, match="'table'.*scale_grad_by_freq"):
        dpt.per_sample_grads(reference.loss_fn, Own(), ids(5, N, 7))


def test_a_path_that_only_some_batches_take_is_examined_too():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.first(x) if float(x.detach().sum()) > 0 else self.second(x).tanh()

    model = randomise(Branches())
    x = data(N, 6).abs()
    methods = tuple(method for method in METHODS if method != "vmap")  # which can't branch
    assert_exact(model, x, methods=methods)
    assert_exact(model, -x, methods=methods)


def _same_rows(h, x):
    return h


def assert_recorded_norms(model, x):
    """Norms of a recorded forward are the loop's."""
    with dpt.record_per_sample(model, loss_reduction="sum") as record:
        reference.loss_fn(model, x).sum().backward()
    expected = dpt.per_sample_norms(reference.loss_fn, model, x, method="loop")
    torch.testing.assert_close(record.norms(), expected)


def test_gradients_that_vanish_at_first_prove_nothing():
    """A gate of zero hides the layer from the examination; opened, it is examined."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.head = nn.Linear(6, 6)
            self.gate = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x):
            hidden = self.layer(x.transpose(0, 1)).transpose(0, 1)
            return self.head(x) + self.gate * hidden

    model = randomise(Gated())
    with torch.no_grad():
        model.gate.zero_()
    x = data(N, N, 6)
    assert_exact(model, x)
    assert_recorded_norms(model, x)
    with torch.no_grad():
        model.gate.fill_(1.5)
    assert_exact(model, x)
    assert_recorded_norms(model, x)


class Few(nn.Module):
    """A layer of which few examples take the output, between two functions of the rows."""

    def __init__(self, before=_same_rows, after=_same_rows, call=lambda layer, x: layer(x)):
        super().__init__()
        self.rare, self.usual = nn.Linear(6, 3), nn.Linear(6, 3)
        self.before, self.after, self.call = before, after, call

    def forward(self, x):
        rows = self.before(x, x)
        chosen = torch.where(rows[:, :1] > 2, self.call(self.rare, rows), self.usual(rows))
        return self.after(chosen, x)


class Normalised(torch.autograd.Function):
    """A backward that is no linear function of the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-3)


FEW = {
    "in place": ({}, "Captured"),
    "sorted": (
        {
            "before": lambda h, x: h[x[:, 1].argsort()],
            "after": lambda h, x: h[x[:, 1].argsort().argsort()],
        },
        "by_vmap",
    ),
    "not linear": ({"call": lambda layer, x: Normalised.apply(layer(x))}, "by_vmap"),
    "sorted inside": ({"call": lambda layer, x: sorted_inside(layer, x)}, "by_vmap"),
}


def sorted_inside(layer, x):
    order = x[:, 1].argsort()
    return layer(x[order])[order.argsort()]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_layer_that_few_examples_reach_is_examined_on_those(name, count, monkeypatch):
    """Four examples of a batch are examined; a gate may leave a layer to the others."""
    options, way = FEW[name]
    x = data(12, 6).clamp(max=1)
    x[5 : 5 + count, 0] = 3
    model = randomise(Few(**options))
    methods = METHODS if way == "Captured" else tuple(m for m in METHODS if m != "two_pass")
    assert_exact(model, x, methods=methods)
    ways = Ways(monkeypatch)
    dpt.per_sample_norms(reference.loss_fn, randomise(Few(**options)), x)
    assert ways.taken[-1] == way  # a backward that is not linear is found by trial
    with contextlib.suppress(*([] if way == "Captured" else [UnsupportedLayerError])):
        assert_recorded_norms(model, x)


def test_rows_that_a_model_sorts_are_seen_in_any_order():
    """The examined examples stand in the order of the sort; they are looked at backwards too."""
    x = data(12, 6).clamp(max=1)
    x[:, 1] = torch.arange(12) / 12
    x[[8, 9], 1] = x[[9, 8], 1]
    x[[4, 5, 8, 9], 0] = 3
    methods = tuple(m for m in METHODS if m != "two_pass")
    assert_exact(randomise(Few(call=sorted_inside)), x, methods=methods)
    assert_recorded_norms(randomise(Few(call=sorted_inside)), x)


class Scattered(nn.Module):
    """A layer whose input has the examples on axis 1 where there are as many as features."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x):
        n, d = x.shape
        return self.layer(x.t().reshape(n, d, 1)).reshape(d, n, 2).transpose(0, 1)


@pytest.mark.parametrize("d", [3, 4])  # also as many features as examples are examined
def test_an_axis_of_the_batchs_size_is_right_for_that_size_alone(d):
    model = randomise(Scattered())
    methods = tuple(m for m in METHODS if m != "two_pass")
    for n in (d, 12, d, 7):
        assert_exact(model, data(n, d), methods=methods)
    recorded = randomise(Scattered())
    for n in (d, 12, d, 7):
        assert_recorded_norms(recorded, data(n, d))


def test_mixing_of_the_few_examples_that_reach_a_layer_is_named():
    def less_mean(layer, x):
        h, gate = layer(x), (x[:, :1] > 2).float()
        return h - (h * gate).sum(0) / gate.sum().clamp(min=1)

    x = data(12, 6).clamp(max=1)
    x[[4, 5, 8], 0] = 3
    with pytest.raises((ExactnessError, UnsupportedLayerError), match="A spot check failed"):
        assert_recorded_norms(randomise(Few(call=less_mean)), x)


@pytest.mark.parametrize("row", [0, 5, 11])
def test_a_rare_layer_reached_by_an_example_without_a_finite_loss(row):
    x = data(12, 6).clamp(max=1)
    x[[row, 6, 7], 0] = 3
    x[row, 2] = float("nan")
    model = randomise(Few())
    norms = dpt.per_sample_norms(reference.loss_fn, model, x)
    expected = dpt.per_sample_norms(reference.loss_fn, model, x, method="loop")
    torch.testing.assert_close(norms, expected, equal_nan=True)
    with dpt.record_per_sample(model, loss_reduction="sum") as record:
        reference.loss_fn(model, x).sum().backward()
    torch.testing.assert_close(record.norms(), expected, equal_nan=True)


def test_heads_without_a_way_to_the_loss_are_examined_once():
    """And again when the loss begins to use them, though neither model nor loss are new."""
    seen = []

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            seen.append(len(x))
            return self.one(x), self.other(x)

    model, x, both, runs = randomise(Heads()), data(N, 6), [False], []

    def loss(model, x):
        one, other = model(x)
        return (one + other if both[0] else one).square().sum(1)

    for both[0] in (False, False, True, True, True):
        seen.clear()
        found = dpt.per_sample_grads(loss, model, x)
        runs.append(list(seen))
        truth = truth_of(model, loss, x)
        assert_grads_close({name: g.numpy() for name, g in found.items()}, truth, "float32")
    assert runs[1] == runs[4] == [N]


def test_too_few_finite_examples_are_taken_one_at_a_time(monkeypatch):
    def build():
        outputs = Apply(lambda y: y[0], _same)
        return randomise(nn.Sequential(nn.GRU(6, 6, batch_first=True), outputs))

    x = data(N, 5, 6)
    expected = dpt.per_sample_norms(reference.loss_fn, build(), x, method="loop")
    model = build()
    x[1:] = float("nan")
    ways = Ways(monkeypatch)
    norms = dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ways.taken == ["by_loop"]
    torch.testing.assert_close(norms[:1], expected[:1])
    assert not norms[1:].isfinite().any()


def _same(y, x):
    return y


class Mixes(nn.Module):
    """Joins examples in some way, from the moment that `on` says so."""

    def __init__(self, how, on=True):
        super().__init__()
        self.first, self.second, self.how, self.on = nn.Linear(6, 6), nn.Linear(6, 3), how, on

    def forward(self, x):
        h = self.first(x)
        if self.on:
            h = MIXES[self.how](h)
        return self.second(h.tanh())


def _mixstyle(h):
    mean = h.mean(1, keepdim=True).detach()
    share = torch.distributions.Beta(0.1, 0.1).sample((len(h), 1))
    return h - mean + share * mean + (1 - share) * mean[torch.randperm(len(h))]


MIXES = {
    "mean of many": lambda h: h - h.mean(0) if len(h) > 4 else h,
    "detached mean": lambda h: h - h.detach().mean(0),
    "mixup by torch": lambda h: 0.5 * (h + h.flip(0)) if torch.rand(1) < 0.5 else h,
    "mixup by numpy": lambda h: 0.5 * (h + h.flip(0)) if np.random.rand() < 0.5 else h,  # noqa: NPY002
    "mixup by random": lambda h: 0.5 * (h + h.flip(0)) if random.random() < 0.5 else h,
    "mixstyle": _mixstyle,
}


@pytest.mark.parametrize("method", dpt.METHODS)
@pytest.mark.parametrize("how", MIXES)
def test_mixing_by_size_and_by_chance_is_refused(how, method):
    """Also mixing that a few examples do not show; by chance, on a step where it happens."""
    torch.manual_seed(0)
    model, x = Mixes(how), data(8, 6)

    def often():
        for _ in range(20 if how.startswith("mixup") else 1):
            dpt.per_sample_norms(reference.loss_fn, model, x, method=method, check="always")

    with pytest.raises((ExactnessError, UnsupportedLayerError)):
        often()


@pytest.mark.parametrize("method", dpt.METHODS)
def test_mixing_that_is_switched_on_later_is_refused(method):
    """By an attribute, by a keyword default of the same code, and by what a closure holds."""
    model, x = Mixes("detached mean", on=False), data(8, 6)
    dpt.per_sample_norms(reference.loss_fn, model, x, method=method)
    model.on = True
    with pytest.raises(UnsupportedLayerError, match="The loss of an example is another one"):
        dpt.per_sample_norms(reference.loss_fn, model, x, method=method)

    def loss_of(mixes):
        def loss(model, x, *, mixes=mixes):
            h = model(x)
            return (h - h.mean(0) if mixes else h).square().sum(1)

        return loss

    plain = nn.Linear(6, 3)
    dpt.per_sample_norms(loss_of(False), plain, x, method=method)
    with pytest.raises(UnsupportedLayerError, match="The loss of an example is another one"):
        dpt.per_sample_norms(loss_of(True), plain, x, method=method)


def centred(h):
    return h - h.mean(0)


class Centred(nn.Module):
    def forward(self, h):
        return centred(h)


class CentredObject:
    def __call__(self, h):
        return centred(h)


class Changeable(nn.Module):
    """Two layers with a module, a function and an optional object between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 6), nn.Linear(6, 3), nn.Tanh()
        self.function, self.more, self.share = torch.tanh, None, 0.0

    def forward(self, x):
        h = self.function(self.between(self.first(x)))
        h = h - self.share * h.mean(0)
        return self.second(h if self.more is None else self.more(h))


LATER = {
    "forward hook": lambda m: m.first.register_forward_hook(lambda *a: centred(a[-1])),
    "forward pre-hook": lambda m: m.second.register_forward_pre_hook(lambda m, a: centred(a[0])),
    "module": lambda m: setattr(m, "between", Centred()),
    "forward": lambda m: setattr(m.between, "forward", centred),
    "function": lambda m: setattr(m, "function", centred),
    "object": lambda m: setattr(m, "more", CentredObject()),
    "number": lambda m: setattr(m, "share", 0.5),
}


def centre_all(model):
    """Add a hook of every module that centres what one layer returns, until the model is gone."""
    layer = weakref.ref(model.first)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: centred(out) if module is layer() else None
    )
    weakref.finalize(model, handle.remove)


@pytest.mark.parametrize("what", LATER)
def test_what_a_model_is_given_later_is_examined(what):
    """Hooks, modules and functions of a model that was examined without them."""
    model, x = randomise(Changeable()), data(8, 6)
    dpt.per_sample_norms(reference.loss_fn, model, x)
    assert_recorded_norms(model, x)
    LATER[what](model)
    with pytest.raises(UnsupportedLayerError, match="The loss of an example is another one"):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    with pytest.raises(UnsupportedLayerError, match="The loss of an example is another one"):
        assert_recorded_norms(model, x)


def test_a_later_hook_that_knows_its_layer_is_caught_by_the_check():
    """It does nothing on the copies that are examined, so that only the numbers tell."""
    model, x = randomise(Changeable()), data(8, 6)
    dpt.per_sample_norms(reference.loss_fn, model, x)
    assert_recorded_norms(model, x)
    centre_all(model)
    with pytest.raises(ExactnessError, match="differs from plain autodiff"):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    with pytest.raises(UnsupportedLayerError, match="computes changed between its forward"):
        assert_recorded_norms(model, x)


def test_an_object_at_the_address_of_one_that_is_gone_is_another(monkeypatch):
    """The numbers of objects stand for them in a key only as long as these objects live."""
    monkeypatch.setattr(analysis_cache, "id", lambda value: 7, raising=False)
    model, x, batch = nn.Linear(6, 3), data(8, 6), lambda x: Batch((x,))
    loss = CentredObject()
    first = cached_analyses(model, loss, batch(x))
    assert cached_analyses(model, loss, batch(x)) is first
    del loss
    assert cached_analyses(model, CentredObject(), batch(x)) is not first


@pytest.mark.parametrize("what", ["hook", "function", "loss"])
def test_functions_made_anew_at_every_step_are_examined_once(what, monkeypatch):
    """They close over other numbers, lists and tensors each time."""
    seen, examine = [], call.examine
    monkeypatch.setattr(call, "examine", lambda *a: seen.append(what) or examine(*a))
    model, x = randomise(Changeable()), data(8, 6)
    for step in range(4):
        assert model_step(what, model, x, [], 1.0 + step, torch.tensor(float(step)))
    assert seen == [what]


def model_step(what, model, x, features, scale, shift):
    """Return what a hook, a function of the model or the loss saw in one call."""
    loss = reference.loss_fn
    if what == "hook":
        handle = model.first.register_forward_hook(lambda *a: features.append(a[-1] + shift))
    elif what == "function":
        model.function = lambda h: features.append(h + shift) or scale * torch.tanh(h)
    else:
        loss = lambda m, x: features.append(x + shift) or scale * reference.loss_fn(m, x)  # noqa: E731
    dpt.per_sample_norms(loss, model, x)
    if what == "hook":
        handle.remove()
    return features


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_later_are_examined(kind):
    """A hook that joins the examples' gradients, on a model that was examined without it."""
    model, x = randomise(Changeable()), data(8, 6)
    assert_recorded_norms(model, x)
    getattr(model.between, kind)(lambda module, grads, *_: (grads[0] / grads[0].norm(),))
    assert_recorded_norms(model, x)


def test_a_refusal_shows_no_number_of_the_data():
    x = data(8, 6)
    with pytest.raises(UnsupportedLayerError, match="relative difference 1e[+-]0") as caught:
        dpt.per_sample_norms(reference.loss_fn, Mixes("detached mean"), x)
    assert not re.search(r"\d\.\d", str(caught.value))

# SPDX-License-Identifier: Apache-2.0
"""The three public calls: what they accept, hand on, and refuse by one sentence."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.rules.base import Rule
from tests import reference
from tests.dualdp_torch.checks import assert_exact, data, randomise
from tests.dualdp_torch.per_sample.loops import Model, linear, size_of, squares

N = 4
loss_fn = reference.loss_fn
model = randomise(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
X = data(N, 6)
JAGGED = torch.nested.nested_tensor([data(2, 6), data(3, 6)], layout=torch.jagged)


def call_all(loss, what, *batch, **options):
    """Each public call, as a function of nothing."""
    return (
        lambda: dpt.per_sample_grads(loss, what, *batch, **options),
        lambda: dpt.per_sample_norms(loss, what, *batch, **options),
        lambda: dpt.clipped_grad_sum(loss, what, *batch, **{"max_grad_norm": 1.0, **options}),
    )


#: Losses, the error and its words.
LOSSES = {
    "column": (lambda m, x: m(x).sum(1, keepdim=True), ValueError, r"\(4, 1\). Expected \(4,\)"),
    "scalar": (lambda m, x: m(x).sum(), ValueError, r"shape \(\). Expected \(4,\)"),
    "broadcast": (lambda m, x: m(x).sum(1)[:, None] - x[:, 0], ValueError, r"shape \(4, 4\)"),
    "list": (lambda m, x: m(x).sum(1).tolist(), TypeError, "returned a list. Expected a float"),
    "integers": (lambda m, x: m(x).argmax(1), TypeError, "returned torch.int64"),
}


@pytest.mark.parametrize("method", dpt.METHODS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_another_shape_are_refused(name, method):
    loss, error, match = LOSSES[name]
    for call in call_all(loss, model, X, method=method):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((X, data(3)), ValueError, r"\[3, 4\] examples. Expected the same number"),
        ((np.zeros((N, 6), np.float32),), TypeError, r"NumPy array of shape \(4, 6\)"),
        ((X, torch.tensor(1.0)), ValueError, "tensor without axes"),
        (("text",), ValueError, "hold no tensor"),
        ((X.to("meta"),), ValueError, "tensor on the meta device"),
        ((torch.eye(N, 6).to_sparse(),), TypeError, r"a sparse tensor.*x.to_dense\(\)"),
        ((JAGGED,), TypeError, r"a nested tensor.*to_padded_tensor\(x, 0.0\)"),
        ({"what": dict(model.named_parameters())}, TypeError, "The model is a dict. Expected a to"),
        ({"loss": "loss"}, TypeError, "loss_fn is a str. Expected a function"),
        ({"method": "fast"}, ValueError, "method='fast' is unknown. Expected one of auto, book"),
        ({"physical_batch_size": 0}, ValueError, "physical_batch_size=0 is out of range"),
        ({"max_memory": -1}, ValueError, "max_memory=-1 is out of range"),
        ({"check": "sometimes"}, ValueError, "check='sometimes' is unknown. Expected one of alway"),
        ({"has_aux": True}, TypeError, "has_aux=True, but loss_fn returned"),
    ],
)
def test_wrong_batches_and_options_are_refused(given, error, match):
    batch = given if isinstance(given, tuple) else (X,)
    options = {} if isinstance(given, tuple) else dict(given)
    loss, what = options.pop("loss", lambda m, x, *_: m(x).sum(1)), options.pop("what", model)
    for call in call_all(loss, what, *batch, **options):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm=-1.0 is out of range"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm=nan is not a number"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1' is a str"),
        ({"max_grad_norm": torch.ones(2)}, ValueError, r"max_grad_norm has shape \(2,\)"),
        ({"max_grad_norm": {"0": 1.0}}, TypeError, "is a mapping, but clipping='flat'"),
        (
            {"max_grad_norm": {"0": 1.0}, "clipping": "per_layer"},
            ValueError,
            r"max_grad_norm lacks \['2'\]",
        ),
        ({"clipping": "adaptive"}, ValueError, "clipping='adaptive' is unknown"),
        ({"mask": torch.ones(N)}, ValueError, r"Expected a bool tensor of shape \(4,\)"),
        ({"mask": [True] * N}, ValueError, r"Expected a bool tensor of shape \(4,\)"),
        ({"clipping": "per_layer", "method": "two_pass"}, ValueError, "can't clip per_layer"),
    ],
)
def test_wrong_clipping_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        call_all(loss_fn, model, X, **options)[2]()


Pair = namedtuple("Pair", ["left", "right"])


def test_nested_batches_reach_the_loss_as_they_are():
    """And a loss may empty the dict that it gets."""
    seen = []

    def loss(model, batch, scale, note, *, extra=None):
        assert isinstance(pair := batch.pop("pair"), Pair)
        assert (note, scale) == ("note", 2.0)
        seen.append(len(batch.pop("mask")))
        return (model(pair.left) * pair.right).sum(1) * scale

    batch = {"pair": Pair(X, data(N, 3)), "mask": torch.ones(N, dtype=torch.bool)}
    assert_exact(model, batch, 2.0, "note", loss_fn=loss)
    assert batch.keys() == {"pair", "mask"}
    assert set(seen) == {1, 2, N}  # two of them show how much memory an example takes


# ---------------------------------------------------------------------- auxiliary outputs


@pytest.mark.parametrize("method", dpt.METHODS)
@pytest.mark.parametrize("size", [None, 3])
def test_auxiliary_outputs_come_back_in_order(method, size):
    def loss(model, x):
        return (out := model(x)).sum(1), {"out": out, "name": "aux"}

    options = {"has_aux": True, "method": method, "physical_batch_size": size}
    (_, of_grads), (norms, of_norms), clipped = (c() for c in call_all(loss, model, X, **options))
    for aux in (of_grads, of_norms, clipped.aux):
        assert aux["name"] == "aux"
        torch.testing.assert_close(aux["out"], model(X))
    torch.testing.assert_close(clipped.losses, model(X).sum(1))
    torch.testing.assert_close(norms, clipped.norms)


def test_aux_must_be_that_of_the_whole_batch():
    """known_failures 72: the first chunk's was returned."""

    def call(aux, **options):
        loss = lambda model, x: (loss_fn(model, x), aux(x))  # noqa: E731
        return dpt.per_sample_norms(loss, model, data(5, 6), has_aux=True, **options)[1]

    assert call(lambda x: "same", physical_batch_size=2) == "same"
    assert call(len) == 5
    for aux, match in (
        (lambda x: float(x.mean()), "aux holds a float that differs between the chunks"),
        (len, "aux holds a int that differs between the chunks"),
        (lambda x: x.mean(), r"aux holds a tensor of shape \(\) for \d examples"),
    ):
        with pytest.raises(ValueError, match=match):
            call(aux, physical_batch_size=2)


# ---------------------------------------------------------------------- nothing, nan, minute


def test_no_examples_call_nothing():
    def loss(model, x):
        raise AssertionError("called")

    grads, norms, clipped = (call() for call in call_all(loss, model, data(0, 6)))
    assert {name: g.shape for name, g in grads.items()} == {
        name: (0, *p.shape) for name, p in model.named_parameters()
    }
    assert norms.shape == clipped.norms.shape == clipped.losses.shape == (0,)
    assert all(not g.any() and g.shape == grads[n].shape[1:] for n, g in clipped.grads.items())


@pytest.mark.parametrize("method", dpt.METHODS)
def test_no_parameters_in_the_loss_or_the_model(method):
    grads = dpt.per_sample_grads(lambda m, x: x.sum(1), model, X, method=method)
    assert all(g.shape[0] == N and not g.any() for g in grads.values())
    frozen = nn.Linear(6, 3).requires_grad_(False)
    found = dpt.clipped_grad_sum(loss_fn, frozen, X, max_grad_norm=1.0, method=method)
    assert found.grads == {}
    assert not found.norms.any()
    assert found.losses.shape == (N,)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_masked_and_nan_examples_contribute_nothing(method):
    x, options = data(6, 6), {"max_grad_norm": 0.5, "method": method}
    mask = torch.tensor([True, False, True, True, True, False])
    whole = dpt.clipped_grad_sum(loss_fn, model, x[[0, 3]], **options)
    x[1], x[2], x[4] = float("nan"), float("inf"), float("nan")
    for size in (None, 2):
        found = dpt.clipped_grad_sum(
            loss_fn, model, x, mask=mask, physical_batch_size=size, **options
        )
        torch.testing.assert_close(found.grads, whole.grads)
        assert found.norms[1] == found.losses[1] == found.norms[5] == found.losses[5] == 0
        assert not found.norms[[2, 4]].isfinite().any()


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("method", dpt.METHODS)
def test_contributions_are_bounded_where_squares_underflow(method, clipping):
    """known_failures 1: any bound, any input; 1e-24 squared is 0 in float32."""
    if (method, clipping) == ("two_pass", "per_layer"):
        return  # refused
    long = randomise(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30)))
    # The norms of products lose more: squares of 1e-28 under inputs of 1e4.
    for scale, size in ((1e-24, 1.0), (1e-28, 1e4)):
        for bound in (1e-27, 1e-24, 1e-22, 1e-20):
            found = dpt.clipped_grad_sum(
                lambda m, x: loss_fn(m, x) * scale,  # noqa: B023
                long,
                data(1, 5, 6) * size,
                max_grad_norm=bound,
                clipping=clipping,
                method=method,
            )
            assert size_of(found.grads) <= bound * (1 + 1e-4)


# ---------------------------------------------------------------------- memory


def test_max_memory_cuts_the_batch_into_pieces():
    sizes = []

    def loss(model, x):
        sizes.append(len(x))
        return loss_fn(model, x)

    wide = randomise(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    call = lambda **o: dpt.clipped_grad_sum(loss, wide, data(64, 64), max_grad_norm=1.0, **o)  # noqa: E731
    whole = call()
    sizes.clear()
    pieces = call(max_memory=16_000)
    assert max(sizes) < 32
    call(max_memory=10**9)
    assert sizes[-1] == 64
    torch.testing.assert_close(pieces.grads, whole.grads)


# ---------------------------------------------------------------------- rules, hooks, contexts


def test_a_rule_of_ones_own():
    @torch.overrides.wrap_torch_function(lambda x, w: (x, w))
    def scaled(x, w):
        return x * w.exp()

    calls = []

    def grads(acts, grads_out, **_):
        calls.append(1)
        return (acts * grads_out).flatten(1, -2).sum(1) * own.w.detach().exp()

    own = Model(lambda self, x: scaled(x, self.w), w=nn.Parameter(torch.zeros(6)))
    rule = Rule(arguments=("x", "w"), acts="x", grads={"w": grads})
    dpt.register_rule(scaled, rule)
    try:
        with pytest.raises(ValueError, match="scaled has a rule already. Pass overwrite=True"):
            dpt.register_rule(scaled, rule)
        dpt.register_rule(scaled, rule, overwrite=True)
        assert_exact(own, data(N, 3, 6), methods=("auto", "book_keeping", "materialize"))
        assert calls
    finally:
        del dpt.RULES[scaled]
    with pytest.raises(TypeError, match="rule='r' is a str"):
        dpt.register_rule(scaled, "r")
    with pytest.raises(TypeError, match="target=3 is not callable"):
        dpt.register_rule(3, rule)


@pytest.mark.parametrize("method", dpt.METHODS)
@pytest.mark.parametrize("n", [1, 4])
def test_gradients_are_on_inside_a_call(n, method):
    """Whatever the caller's context: under no_grad, the loop had found zeros."""
    expected = dpt.clipped_grad_sum(loss_fn, model, data(n, 6), max_grad_norm=0.1)
    with torch.no_grad():
        found = dpt.clipped_grad_sum(loss_fn, model, data(n, 6), max_grad_norm=0.1, method=method)
    torch.testing.assert_close(found.grads, expected.grads)
    match = "inside torch.inference_mode.* the call outside of it"
    with torch.inference_mode(), pytest.raises(RuntimeError, match=match):
        dpt.per_sample_norms(loss_fn, model, data(n, 6), method=method)


def accumulated(layer):
    return layer.weight.register_post_accumulate_grad_hook(lambda p: None)


def plain(layer):
    return layer.weight.register_hook(lambda grad: grad * 0.5)


@pytest.mark.parametrize("hook", [accumulated, plain])
def test_gradient_hooks_are_refused_by_name(hook):
    layer = linear(2)
    handle = hook(layer)
    with pytest.raises(UnsupportedLayerError, match="'weight' has a gradient hook"):
        dpt.per_sample_norms(squares, layer, X)
    handle.remove()
    dpt.per_sample_norms(squares, layer, X)
    if hook is plain:  # also one made in the loss
        with pytest.raises(UnsupportedLayerError, match="'weight' has a gradient hook"):
            dpt.per_sample_norms(lambda m, x: hook(m) and squares(m, x), layer, X)


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("method", dpt.METHODS)
def test_a_parameter_of_the_loss_is_a_constant(method, trains):
    """Plain autograd of an example would leave its gradient there, neither clipped nor noised."""
    scale = nn.Parameter(torch.tensor(0.5))
    scale.grad = torch.tensor(7.0)
    layer = randomise(nn.Linear(6, 2)).requires_grad_(trains)

    def loss(by):
        return lambda m, x: m(x).square().sum(1) * torch.exp(-by) + by

    options = {"method": method, "check": "always"}
    grads, norms, clipped = (call() for call in call_all(loss(scale), layer, X, **options))
    expected = [call() for call in call_all(loss(scale.detach()), layer, X, **options)]
    assert float(scale.grad) == 7.0
    assert len(grads) == len(clipped.grads) == (2 if trains else 0)
    found = [grads, norms, (clipped.grads, clipped.norms, clipped.losses)]
    torch.testing.assert_close(found, [*expected[:2], tuple(expected[2][:3])])
    for tensor in (norms, clipped.losses, *grads.values(), *clipped.grads.values()):
        assert not tensor.requires_grad

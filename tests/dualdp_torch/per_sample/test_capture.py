# SPDX-License-Identifier: Apache-2.0
"""What the capture sees, keeps and leaves alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dualdp_torch as dpt
from tests import reference
from tests.dualdp_torch.checks import Ways, assert_exact, data, ids, randomise
from tests.dualdp_torch.per_sample.loops import CAPTURED, Model, linear, recorded, size_of

N = 4
loss_fn = reference.loss_fn
NORMS = ("auto", "book_keeping", "two_pass")


@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_in_place_changes_of_outputs_are_right(shape, monkeypatch):
    """Also of an output with positions, which is a view. Module hooks refuse them."""

    def run(self, x):
        out = self.second(self.norm(F.relu(self.first(x), inplace=True)))
        out += x
        return out

    model = Model(run, first=linear(6), norm=nn.LayerNorm(6), second=linear(6))
    x = data(N, *shape)
    assert_exact(model, x)
    ways = Ways(monkeypatch)
    norms = dpt.per_sample_norms(loss_fn, model, x)
    assert ways.taken == ["Captured"]
    torch.testing.assert_close(recorded(model, x, loss=loss_fn).norms(), norms)


def test_a_saved_input_that_was_overwritten_is_never_used():
    """Plain autograd refuses this model; ours must not be wrong about it."""

    def run(self, x):
        hidden = self.first(x) * 1
        out = self.second(hidden)
        hidden.mul_(3)
        return out + hidden

    model, x = Model(run, first=linear(6), second=linear(6)), data(N, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_fn(model, x).sum().backward()
    for method in ("auto", "materialize", "book_keeping", "vmap"):
        with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation"):
            dpt.per_sample_grads(loss_fn, model, x, method=method)


# ---------------------------------------------------------------------- what is formed


class Shapes(TorchDispatchMode):
    """Shapes of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(tensor) and not func.is_view:
                self.seen.add(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("t", [(), (3,)], ids=["one_position", "three_positions"])
def test_book_keeping_forms_no_parameter_gradient(t):
    model = randomise(nn.Sequential(nn.Linear(61, 67), nn.Tanh(), nn.Linear(67, 71)))
    x, options = data(N, *t, 61), {"method": "book_keeping"}
    dpt.per_sample_norms(loss_fn, model, x, **options)
    with Shapes() as shapes:
        dpt.per_sample_norms(loss_fn, model, x, **options)
    weights = {(67, 61), (61, 67), (71, 67), (67, 71)}
    assert not (weights | {(N, *shape) for shape in weights}) & shapes.seen
    with Shapes() as shapes:
        dpt.clipped_grad_sum(loss_fn, model, x, max_grad_norm=1.0, **options)
    assert not {(N, *shape) for shape in weights} & shapes.seen


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_form_no_table_per_example(is_tied):
    def run(self, x):
        h = self.body(self.words(x))
        return F.linear(h.tanh(), self.words.weight) if is_tied else h

    model, x = Model(run, words=nn.Embedding(97, 5), body=nn.Linear(5, 5)), ids(97, N, 8)
    assert_exact(model, x)
    with Shapes() as shapes:
        dpt.clipped_grad_sum(loss_fn, model, x, max_grad_norm=1.0)
    assert (97, 5) in shapes.seen
    formed = {(N, 97, 5), (N * 97, 5)} | (set() if is_tied else {(N, 97), (N, 8, 97)})
    assert not formed & shapes.seen


# ---------------------------------------------------------------------- dropout (35)


@pytest.mark.parametrize("method", ["auto", *CAPTURED, "loop"])
def test_dropout_masks_are_those_of_the_plain_forward(method):
    """With a huge bound the clipped sum is the plain gradient under the same random numbers."""
    model = randomise(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)))
    x = data(8, 6)
    torch.manual_seed(5)
    loss_fn(model, x).sum().backward()
    plain = {name: p.grad for name, p in model.named_parameters()}

    def in_a_call():
        return dpt.clipped_grad_sum(loss_fn, model, x, max_grad_norm=1e9, method=method).grads

    def in_a_record():
        record = recorded(model, x, loss=loss_fn, method=method)
        torch.testing.assert_close({k: g.sum(0) for k, g in record.grads().items()}, plain)
        return record.clipped_sum(max_grad_norm=1e9)

    # the first call examines the model, without using up random numbers
    for found in (in_a_record,) * 2 if method == "loop" else (in_a_call, in_a_record) * 2:
        torch.manual_seed(5)
        torch.testing.assert_close(found(), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_dropout_differs_between_examples(method):
    model, x = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5)), data(1, 6).expand(6, 6)
    grads = dpt.per_sample_grads(lambda m, x: m(x).sum(1), model, x, method=method)["0.bias"]
    assert len({tuple(row.tolist()) for row in grads}) == 6


# ---------------------------------------------------------------------- precision (18, 51, 68)


def signs(*shape):
    """1000 and -1000 by turns: output gradients that sum to nearly nothing."""
    return 1e3 * torch.tensor([1.0, -1.0]).repeat(8)[: torch.Size(shape).numel()].view(shape)


#: Layer, shape of an input without and with its positions, weights of the output.
CANCELLING = {
    "linear": (lambda: nn.Linear(64, 64), (1, 64), (8, 64), signs(8, 1)),
    "convolution": (lambda: nn.Conv2d(64, 64, 3), (64, 1, 1), (64, 6, 6), signs(4, 4)),
}


@pytest.mark.parametrize("method", dpt.METHODS)
@pytest.mark.parametrize("name", CANCELLING)
def test_gram_norms_do_not_cancel(name, method):
    """Equal activations at all positions."""
    layer, one, many, weights = CANCELLING[name]
    x = data(N, *one).expand(N, *many) + 1e-4 * data(N, *many, seed=2)
    loss = lambda m, x: (m(x) * weights.to(x.dtype)).flatten(1).sum(1)  # noqa: E731
    model, exact = randomise(layer()), randomise(layer()).double()
    truth = dpt.per_sample_norms(loss, exact, x.double(), method="loop")
    norms = dpt.per_sample_norms(loss, model, x, method=method)
    torch.testing.assert_close(norms.double(), truth, rtol=2e-3, atol=0)
    for k in range(N):
        options = {"max_grad_norm": 1.0, "mask": torch.arange(N) == k, "method": method}
        assert 0 < size_of(dpt.clipped_grad_sum(loss, model, x, **options).grads) <= 1 + 1e-4


@pytest.mark.parametrize("autocast", [False, True])
def test_a_second_pass_forms_no_sum_in_low_precision(autocast):
    """Its rounding would depend on the other examples, and move a sum by more than C."""
    model = randomise(nn.Linear(16, 4)).to(torch.float32 if autocast else torch.bfloat16)
    x = 3 * data(64, 16).to(model.weight.dtype)

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().sum(1)

    def narrow(model, x):
        return model(x.to(model.weight.dtype)).square().sum(1).bfloat16()

    sums = [
        dpt.clipped_grad_sum(loss, model, x, max_grad_norm=1.0, method=method).grads
        for method in ("two_pass", "book_keeping")
    ]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)
    options = {"max_grad_norm": 0.3, "method": "two_pass"}
    alone = dpt.clipped_grad_sum(narrow, model.float(), x[:1].float(), **options)
    assert size_of(alone.grads) <= 0.3 * (1 + 1e-4)

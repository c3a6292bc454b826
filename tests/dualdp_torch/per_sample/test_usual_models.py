# SPDX-License-Identifier: Apache-2.0
"""Idioms of models and loops that people have: each is exact, or refused by what mends it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.per_sample.loops import (
    Model,
    held_to_plain_autograd,
    linear,
    loss,
    rows,
    slow,
    trained,
    words,
)

# ---------------------------------------------------------------------- shared arguments


def positioned(self, words, position_ids, scale=None):
    x = self.table(words) + self.positions(position_ids)
    return self.head(torch.tanh(x if scale is None else x * scale).mean(1))


def with_positions():
    tables = {"table": nn.Embedding(9, 6), "positions": nn.Embedding(5, 6)}
    return Model(positioned, **tables, head=linear())


@pytest.mark.parametrize("mode", ["auto", "two_pass", "vmap", "loop"])
def test_position_ids_of_one_row_are_shared(mode):
    def loop(model, batch):
        return F.cross_entropy(model(batch[0], position_ids=torch.arange(5)[None]), batch[1])

    held_to_plain_autograd(with_positions(), words(), loop, mode=mode)


def of_the_batch(model, batch):
    """A mean over the batch, handed to the model as if all examples shared it."""
    scale = torch.tanh(model.table(batch[0]).detach().mean((0, 1), keepdim=True))
    return F.cross_entropy(model(batch[0], torch.arange(5)[None], scale), batch[1])


SHARED = {
    "of the batch": (of_the_batch, "other rows"),
    "a row": (lambda m, b: F.cross_entropy(m(b[0], b[0][:1] % 5), b[1]), "other rows"),
    "a vector": (
        lambda m, b: m(b[0], torch.arange(5)).sum(),
        r"\[5, \d\] examples.*unsqueeze\(0\)",
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_examples_share_may_not_be_made_of_examples(name):
    loop, message = SHARED[name]
    with pytest.raises((ValueError, ExactnessError), match=message):
        list(trained(with_positions(), words(), loop, steps=4))


# ---------------------------------------------------------------------- outputs

OUTPUTS = {
    "time first": (lambda out: out.transpose(0, 1), r"\(5, 8, 3\) for 8 examples.*transpose"),
    "squeezed": (lambda out: out.mean(1).squeeze(), r"\(3,\) for one example.*axis to squeeze"),
    "flat": (lambda out: out.flatten(0, 1), r"\(40, 3\) for 8 examples.*rows of unequal lengths"),
    "mean": (lambda out: out.mean(), r"\(\) for 8 examples.*means in the loop"),
}


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_without_examples_in_front_are_refused(kind, mode):
    change, message = OUTPUTS[kind]
    model = Model(lambda self, x: change(self.table(x)), table=nn.Embedding(9, 3))

    def recorded():
        with dpt.record_per_sample(model, loss_reduction="mean", method=mode) as record:
            model(ids(9, 8, 5)).mean().backward()
            return record.norms()

    with pytest.raises(UnsupportedLayerError, match=message) as error:
        recorded()
    assert "loss_fn" not in str(error.value)


# ---------------------------------------------------------------------- chance


def diffusion(self, x):
    """Timesteps and noise drawn in the forward; the loss needs them, too."""
    steps, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
    share = (steps.float() / 10)[:, None]
    hidden = self.first(x * (1 - share) + noise * share) + self.times(steps)
    return self.second(torch.tanh(hidden)), noise


def sampled(self, x):
    logits = self.first(x)
    drawn = torch.distributions.Categorical(logits=logits).sample()
    return self.second(F.one_hot(drawn, 6) * logits)


def gamma(self, x):
    """Drawn by rejection: how often depends on the data."""
    return self.second(torch.distributions.Gamma(F.softplus(self.first(x)) + 0.3, 1.0).rsample())


def guided(self, x):
    """A learned condition in place of the example's own, as classifier-free guidance drops it."""
    hidden = torch.where(torch.rand(len(x), 1) < 0.3, self.null, self.first(x))
    return self.second(torch.tanh(hidden))


def masked(self, x):
    """A learned token that is written over features, as wav2vec 2.0 hides them."""
    hidden = self.first(x)
    hidden[torch.rand(len(x)) < 0.3] = self.null
    return self.second(torch.tanh(hidden))


#: known_failures 87: forwards that draw, and the layers that they need beside two.
CHANCE = {
    "diffusion": (diffusion, lambda: {"times": nn.Embedding(10, 6)}),
    "gumbel": (lambda self, x: self.second(F.gumbel_softmax(self.first(x), hard=True)), dict),
    "rrelu": (lambda self, x: self.second(F.rrelu(self.first(x), training=self.training)), dict),
    "categorical": (sampled, dict),
    "gamma": (gamma, dict),
    "guidance": (guided, lambda: {"null": nn.Parameter(torch.ones(6))}),
    "masks": (masked, lambda: {"null": nn.Parameter(torch.ones(6))}),
}


def squared(model, batch):
    out = model(batch[0])
    out, target = out if isinstance(out, tuple) else (out, batch[0])
    return F.mse_loss(out, target)


@pytest.mark.parametrize("kind", ["diffusion", "masks", *slow(*list(CHANCE)[1:-1])])
def test_gradients_are_those_of_the_numbers_that_a_forward_draws(kind):
    """In every mode they pass the checks; recorded they are those of the plain forward."""
    forward, more = CHANCE[kind]
    for mode in ("auto", "two_pass", "loop"):
        torch.manual_seed(1)
        model = Model(forward, first=linear(6), second=linear(6), **more())
        list(trained(model, rows(), squared, mode=mode, steps=4))
    x = data(8, 6)
    torch.manual_seed(5)
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        squared(model, (x,)).backward()
    whole = {name: g.mean(0) for name, g in record.grads().items()}
    torch.manual_seed(5)
    model.zero_grad()
    squared(model, (x,)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


def dropped(self, x):
    for layer in self.stack:
        x = torch.tanh(layer(x)) if torch.rand(()) > 0.4 else x
    return self.second(x)


def test_layers_that_chance_drops_are_refused_but_in_a_loop():
    def steps(mode, count):
        torch.manual_seed(0)
        model = Model(dropped, stack=nn.ModuleList(linear(6) for _ in range(3)), second=linear())
        return list(trained(model, rows(), loss(), mode=mode, steps=count))

    steps("loop", 4)
    with pytest.raises(UnsupportedLayerError, match='layerdrop.*grad_sample_mode="loop"'):
        steps("auto", 20)


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norms_pass_every_check(norm, mode):
    torch.manual_seed(2)
    model = nn.Sequential(linear(6), nn.Tanh(), norm(linear()))
    list(trained(model, rows(), loss(), mode=mode, steps=3))


@pytest.mark.parametrize("mode", ["auto", "two_pass", "materialize", "vmap", "loop"])
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_tables_have_dense_gradients(table, mode):
    def run(self, x):
        return self.head(torch.tanh(self.table(x)).reshape(len(x), -1, 6).mean(1))

    model = Model(run, table=table(9, 6, sparse=True), head=linear())
    if mode == "vmap":
        with pytest.raises(UnsupportedLayerError, match='grad_sample_mode="loop"'):
            list(trained(model, words(), loss(), mode=mode))
    else:
        held_to_plain_autograd(model, words(), loss(), mode=mode)

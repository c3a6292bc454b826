# SPDX-License-Identifier: Apache-2.0
"""Idioms of models and loops that people have: each is exact, or refused by what mends it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.per_sample.test_vmap_and_loop import (
    C,
    Model,
    by_hand,
    linear,
    loss,
    trained,
)

N = 24


def held_to_plain_autograd(model, items, loop, **options):
    """Run two checked steps; their sums are those of each example's own loss in float64."""
    exact = copy.deepcopy(model).double()
    for before, batch, stages, engine in trained(model, items, loop, **options):  # noqa: B007
        exact.load_state_dict(before)
        wide = [t.double() if t.is_floating_point() else t for t in batch]
        for name, total in by_hand(exact, wide, loop)[1].items():
            assert (stages.unprotected_sum[name] - total).norm() <= 1e-5 * C * len(wide[0]), name
    assert engine.ledger.last_check == 1


# ---------------------------------------------------------------------- shared arguments


def positioned(self, words, position_ids, scale=None):
    x = self.table(words) + self.positions(position_ids)
    return self.head(torch.tanh(x if scale is None else x * scale).mean(1))


def words():
    tables = {"table": nn.Embedding(9, 6), "positions": nn.Embedding(5, 6)}
    return Model(positioned, **tables, head=linear()), TensorDataset(ids(9, N, 5), ids(3, N))


@pytest.mark.parametrize("mode", ["auto", "two_pass", "vmap", "loop"])
def test_position_ids_of_one_row_are_shared(mode):
    def loop(model, batch):
        position_ids = torch.arange(5)[None]
        return F.cross_entropy(model(batch[0], position_ids=position_ids), batch[1])

    held_to_plain_autograd(*words(), loop, mode=mode)


def of_the_batch(model, batch):
    """A mean over the batch, handed to the model as if all examples shared it."""
    scale = torch.tanh(model.table(batch[0]).detach().mean((0, 1), keepdim=True))
    return model(batch[0], torch.arange(5)[None], scale)


def a_row_of_the_batch(model, batch):
    return model(batch[0], batch[0][:1] % 5)


@pytest.mark.parametrize("run", [of_the_batch, a_row_of_the_batch])
def test_what_examples_share_may_not_be_made_of_examples(run):
    model, items = words()
    with pytest.raises((ValueError, ExactnessError), match="other rows"):
        list(trained(model, items, lambda m, b: F.cross_entropy(run(m, b), b[1]), steps=4))


def test_a_vector_that_examples_share_is_refused_with_its_mending():
    model, items = words()
    with pytest.raises(ValueError, match=r"\[5, \d\] examples.*unsqueeze\(0\)"):
        list(trained(model, items, lambda m, b: m(b[0], torch.arange(5)).sum()))


# ---------------------------------------------------------------------- outputs

OUTPUTS = {
    "time first": (lambda out: out.transpose(0, 1), r"\(5, 8, 3\) for 8 examples.*transpose"),
    "squeezed": (lambda out: out.mean(1).squeeze(), r"\(3,\) for one example.*axis to squeeze"),
    "flat": (lambda out: out.flatten(0, 1), r"\(40, 3\) for 8 examples.*rows of unequal lengths"),
    "mean": (lambda out: out.mean(), r"\(\) for 8 examples.*means in the loop"),
}


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_without_examples_in_front_are_refused_in_the_users_words(kind, mode):
    change, message = OUTPUTS[kind]
    model = Model(
        lambda self, x: change(self.head(self.table(x))), table=nn.Embedding(9, 6), head=linear()
    )

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


def gumbel(self, x):
    return self.second(F.gumbel_softmax(self.first(x), hard=True))


def leaky(self, x):
    return self.second(F.rrelu(self.first(x), training=self.training))


def sampled(self, x):
    logits = self.first(x)
    return self.second(
        F.one_hot(torch.distributions.Categorical(logits=logits).sample(), 6) * logits
    )


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


def layers(**more):
    return {"first": linear(6), "second": linear(6), **more}


CHANCE = {
    "diffusion": lambda: Model(diffusion, **layers(times=nn.Embedding(10, 6))),
    "gumbel": lambda: Model(gumbel, **layers()),
    "rrelu": lambda: Model(leaky, **layers()),
    "categorical": lambda: Model(sampled, **layers()),
    "gamma": lambda: Model(gamma, **layers()),
    "guidance": lambda: Model(guided, **layers(null=nn.Parameter(torch.ones(6)))),
    "masks": lambda: Model(masked, **layers(null=nn.Parameter(torch.ones(6)))),
}


def squared(model, batch):
    out = model(batch[0])
    out, target = out if isinstance(out, tuple) else (out, batch[0])
    return F.mse_loss(out, target)


@pytest.mark.parametrize("mode", ["auto", "two_pass", "loop"])
@pytest.mark.parametrize("kind", CHANCE)
def test_numbers_drawn_in_forward_are_checked_and_pass(kind, mode):
    torch.manual_seed(1)
    *_, (_, _, _, engine) = trained(
        CHANCE[kind](), TensorDataset(data(N, 6), ids(3, N)), squared, mode=mode, steps=4
    )
    assert engine.ledger.last_check == 3


@pytest.mark.parametrize("kind", CHANCE)
def test_gradients_are_those_of_the_plain_forward_on_the_same_numbers(kind):
    model, x = CHANCE[kind](), data(8, 6)
    torch.manual_seed(5)
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        squared(model, (x,)).backward()
    whole = {name: g.mean(0) for name, g in record.grads().items()}
    torch.manual_seed(5)
    squared(model, (x,)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


def dropped(self, x):
    for layer in self.stack:
        x = torch.tanh(layer(x)) if torch.rand(()) > 0.4 else x
    return self.second(x)


def test_layers_that_chance_drops_are_exact_by_the_loop_or_refused():
    def build():
        torch.manual_seed(0)
        stack = nn.ModuleList([linear(6) for _ in range(3)])
        return Model(dropped, stack=stack, second=linear(3))

    items = TensorDataset(data(N, 6), ids(3, N))
    *_, (_, _, _, engine) = trained(build(), items, loss("mean"), mode="loop", steps=4)
    assert engine.ledger.last_check == 3
    with pytest.raises(UnsupportedLayerError, match='layerdrop.*grad_sample_mode="loop"'):
        list(trained(build(), items, loss("mean"), mode="auto", steps=20))


# ---------------------------------------------------------------------- parameters


def old_spectral_norm():
    return nn.utils.spectral_norm(linear())


def new_spectral_norm():
    return nn.utils.parametrizations.spectral_norm(linear())


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize("layer", [old_spectral_norm, new_spectral_norm])
def test_spectral_norms_pass_every_check(layer, mode):
    torch.manual_seed(2)
    items = TensorDataset(data(N, 6), ids(3, N))
    model = nn.Sequential(linear(6), nn.Tanh(), layer())
    *_, (_, _, _, engine) = trained(model, items, loss("mean"), mode=mode, steps=3)
    assert engine.ledger.last_check == 2


@pytest.mark.parametrize("mode", ["auto", "two_pass", "materialize", "vmap", "loop"])
@pytest.mark.parametrize("kind", ["table", "bag"])
def test_sparse_tables_have_dense_gradients(kind, mode):
    table = (nn.Embedding if kind == "table" else nn.EmbeddingBag)(9, 6, sparse=True)
    model = Model(
        lambda self, x: self.head(torch.tanh(self.table(x)).reshape(len(x), -1, 6).mean(1)),
        table=table,
        head=linear(),
    )
    if mode == "vmap":
        with pytest.raises(UnsupportedLayerError, match='grad_sample_mode="loop"'):
            list(trained(model, TensorDataset(ids(9, N, 5), ids(3, N)), loss("mean"), mode=mode))
    else:
        held_to_plain_autograd(
            model, TensorDataset(ids(9, N, 5), ids(3, N)), loss("mean"), mode=mode
        )


def test_a_divergence_over_the_batch_is_a_mean():
    items = TensorDataset(data(N, 6), data(N, 3).softmax(1))
    model = nn.Sequential(linear(4), nn.Tanh(), nn.Linear(4, 3))

    def loop(model, batch):
        return F.kl_div(model(batch[0]).log_softmax(1), batch[1], reduction="batchmean")

    held_to_plain_autograd(randomise(model), items, loop)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_outputs_with_positions_may_be_changed_in_place(shape):
    """The output of a linear layer is a view where the input has positions."""
    model = randomise(nn.Sequential(linear(6), nn.ReLU(inplace=True), nn.LayerNorm(6), linear()))
    x = data(5, *shape)

    def losses(model, x):
        return model(x).square().flatten(1).sum(1)

    for method in ("auto", "materialize", "two_pass"):
        found = dpt.per_sample_grads(losses, model, x, method=method, check="off")
        with dpt.record_per_sample(model, loss_reduction="sum", method=method, check="off") as of:
            losses(model, x).sum().backward()
        for row in range(len(x)):
            model.zero_grad()
            losses(model, x[row : row + 1]).sum().backward()
            for name, p in model.named_parameters():
                torch.testing.assert_close(found[name][row], p.grad, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(of.grads()[name][row], p.grad, rtol=1e-4, atol=1e-5)
        model.zero_grad()

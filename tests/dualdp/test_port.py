# SPDX-License-Identifier: Apache-2.0
"""Weights from one stack to the other: same outputs, bitwise back again, nothing left over."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import dualdp.torch as dpt
from dualdp import port
from tests.mistakes import refused


class TorchTower(nn.Module):
    """A list, a sequence, a tied head and a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class LinenTower(linen.Module):
    def setup(self):
        self.embed = linen.Embed(7, 4)
        self.blocks = [linen.Sequential([linen.Dense(4), jnp.tanh]) for _ in range(2)]
        self.scale = self.param("scale", jax.nn.initializers.ones, (4,))
        self.head = OnlyBias()

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.embed.attend(x * self.scale))


class OnlyBias(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + self.param("bias", jax.nn.initializers.zeros, (7,))


IDS = np.random.default_rng(0).integers(0, 7, (3, 5))


@pytest.fixture
def tower():
    torch.manual_seed(0)
    net = TorchTower()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


def linen_like():
    return LinenTower().init(jax.random.key(0), IDS)


def test_a_tied_weight_may_be_the_heads_in_jax(tower):
    """Tied under either name: here the JAX model holds it as the head's kernel."""
    params = jax.tree.map(jnp.asarray, linen_like()["params"])
    params["head"]["kernel"] = params.pop("embed")["embedding"].T
    ported = port.to_jax(tower, like=params)
    np.testing.assert_array_equal(ported["head"]["kernel"], tower.head.weight.detach().numpy().T)
    assert torch.equal(port.to_torch(ported, like=tower)["embed.weight"], tower.embed.weight)


def test_tied_in_one_stack_only_is_refused(tower):
    params = linen_like()["params"]
    params = {**params, "head": {**params["head"], "kernel": jnp.zeros((4, 7))}}
    words = r"Two JAX leaves share .*'embed/embedding', 'head/kernel'"
    refused(lambda: port.to_jax(tower, like=params), ValueError, words)


def test_names_that_differ_are_mapped_and_not_guessed(tower):
    params = dict(linen_like()["params"])
    params["Embed_0"] = params.pop("embed")
    params["tower"] = {"first": params.pop("blocks_0"), "second": params.pop("blocks_1")}
    words = r"embed.weight \(7, 4\).*Embed_0/embedding \(7, 4\)"
    refused(lambda: port.to_jax(tower, like=params), ValueError, words)
    mapping = {"blocks.0": "tower/first", "blocks.1.0": "tower/second/layers_0"}
    mapping |= {"embed": "Embed_0"}
    ported = port.to_jax(tower, like=params, mapping=mapping)
    kernel = ported["tower"]["second"]["layers_0"]["kernel"]
    np.testing.assert_array_equal(kernel, tower.blocks[1][0].weight.detach().numpy().T)
    back = port.to_torch(ported, like=tower, mapping=mapping)
    assert torch.equal(back["blocks.0.0.bias"], tower.blocks[0][0].bias)


def test_a_table_with_layouts():
    """A nested dict of the user's own words, which no line of the table knows."""
    net = nn.Linear(3, 3)
    params = {"w": jnp.zeros((3, 3)), "b": jnp.zeros(3)}
    bare = {"weight": "w", "bias": "b"}
    words = r"'weight': 'w', for which there is no layout .* \(3, 3\)"
    refused(lambda: port.to_jax(net, like=params, mapping=bare), ValueError, words)
    mapping = {"weight": ("w", "o i -> i o"), "bias": ("b", "o -> o")}
    ported = port.to_jax(net, like=params, mapping=mapping)
    np.testing.assert_array_equal(ported["w"], net.weight.detach().numpy().T)
    assert torch.equal(port.to_torch(ported, like=net, mapping=mapping)["weight"], net.weight)


def test_what_has_no_one_place_is_refused():
    net, kernel = nn.Sequential(nn.Linear(2, 2, bias=False)), {"kernel": jnp.zeros((2, 2))}
    params = {"layers_0": kernel, "layers": {"0": kernel}}
    words = r"0.weight could be any of the JAX leaves \['layers/0/ker"
    refused(lambda: port.to_jax(net, like=params), ValueError, words)
    norm, like = nn.Sequential(nn.BatchNorm1d(3)), {"scale": jnp.ones(3), "bias": jnp.zeros(3)}
    words = r"\['0.running_mean \(3,\)', '0.running_var \(3,\)'\]"
    refused(lambda: port.to_jax(norm, like={"layers_0": like}), ValueError, words)


def test_lists_tied_weights_and_raw_parameters(tower):
    params = port.to_jax(tower, like=linen_like())
    expected = tower(torch.as_tensor(IDS)).detach().numpy()
    np.testing.assert_allclose(LinenTower().apply(params, IDS), expected, rtol=1e-5, atol=1e-5)
    back = port.to_torch(params, like=tower)
    assert list(back) == list(tower.state_dict())
    for name, tensor in tower.state_dict().items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN, nn.GRU])
def test_fold_biases_keeps_the_outputs(kind):
    x, net = torch.randn(2, 5, 3), kind(3, 4, num_layers=2, bidirectional=True)
    before = net(x)[0]
    torch.testing.assert_close(before, dpt.weights.fold_biases(net)(x)[0])
    frozen = [p for p in net.parameters() if not p.requires_grad]
    assert len(frozen) == (0 if kind is nn.GRU else 4)
    assert not any(p.any() for p in frozen)

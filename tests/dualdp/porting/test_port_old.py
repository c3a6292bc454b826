# SPDX-License-Identifier: Apache-2.0
"""Weights from one stack to the other: same outputs, bitwise back again, nothing left over."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from dualdp import port


class TorchNet(nn.Module):
    """Every layer that is ported: ids and an image in, logits out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv1 = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.conv2 = nn.Conv2d(2, 4, (3, 2), groups=2, bias=False)
        self.head = nn.Linear(12, 5)

    def forward(self, ids, image):
        words = self.conv1(self.embed(ids).transpose(1, 2)).transpose(1, 2)  # (n, t, 8)
        words = self.norm(torch.tanh(words)).mean(1)
        pixels = torch.tanh(self.conv2(image)).mean((2, 3))  # (n, 4)
        return self.head(torch.cat([words, pixels], 1))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, ids, image):
        words = linen.Embed(11, 6, name="embed")(ids)
        words = linen.Conv(8, (3,), padding=1, name="conv1")(words)
        words = linen.LayerNorm(epsilon=1e-5, name="norm")(jnp.tanh(words)).mean(1)
        pixels = linen.Conv(
            4, (3, 2), padding="VALID", feature_group_count=2, use_bias=False, name="conv2"
        )(image.transpose(0, 2, 3, 1))
        return linen.Dense(5, name="head")(
            jnp.concatenate([words, jnp.tanh(pixels).mean((1, 2))], 1)
        )


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.conv1 = nnx.Conv(6, 8, (3,), padding=1, rngs=rngs)
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs)
        self.conv2 = nnx.Conv(
            2, 4, (3, 2), padding="VALID", feature_group_count=2, use_bias=False, rngs=rngs
        )
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, ids, image):
        words = self.norm(jnp.tanh(self.conv1(self.embed(ids)))).mean(1)
        pixels = jnp.tanh(self.conv2(image.transpose(0, 2, 3, 1))).mean((1, 2))
        return self.head(jnp.concatenate([words, pixels], 1))


RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 11, (3, 7))
IMAGE = RNG.normal(size=(3, 2, 6, 5)).astype(np.float32)


@pytest.fixture
def torch_net():
    torch.manual_seed(0)
    net = TorchNet()
    for parameter in net.parameters():  # ones and zeros would hide a swap
        nn.init.normal_(parameter, std=0.5)
    return net


def linen_params():
    return LinenNet().init(jax.random.key(0), IDS, IMAGE)


def torch_output(net):
    with torch.no_grad():
        return net(torch.as_tensor(IDS), torch.as_tensor(IMAGE)).numpy()


def test_linen_gives_the_same_outputs(torch_net):
    params = port.to_jax(torch_net, like=linen_params())
    assert jax.tree.structure(params) == jax.tree.structure(linen_params())
    ours = LinenNet().apply(params, IDS, IMAGE)
    np.testing.assert_allclose(ours, torch_output(torch_net), rtol=1e-5, atol=1e-5)


def test_nnx_gives_the_same_outputs(torch_net):
    net = NnxNet(nnx.Rngs(0))
    ported = port.to_jax(torch_net, like=net)
    graph, _ = nnx.split(net)
    state = ported if isinstance(ported, nnx.State) else nnx.state(ported)
    ours = nnx.merge(graph, state)(IDS, IMAGE)
    np.testing.assert_allclose(ours, torch_output(torch_net), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make_like", [linen_params, lambda: linen_params()["params"]])
def test_there_and_back_is_bitwise(torch_net, make_like):
    back = port.to_torch(port.to_jax(torch_net, like=make_like()), like=torch_net)
    assert list(back) == list(torch_net.state_dict())
    for name, tensor in torch_net.state_dict().items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype
        assert back[name].data_ptr() != tensor.data_ptr()
    other = TorchNet()
    other.load_state_dict(back)
    np.testing.assert_array_equal(torch_output(other), torch_output(torch_net))


def test_names_that_differ_are_mapped_and_not_guessed(torch_net):
    params = dict(linen_params()["params"])
    params["classifier"] = params.pop("head")
    with pytest.raises(ValueError, match=r"head.weight \(5, 12\).*classifier/kernel \(12, 5\)"):
        port.to_jax(torch_net, like=params)
    mapping = {"head.weight": "classifier/kernel", "head.bias": "classifier/bias"}
    ported = port.to_jax(torch_net, like=params, mapping=mapping)
    np.testing.assert_array_equal(
        ported["classifier"]["kernel"], torch_net.head.weight.detach().numpy().T
    )
    back = port.to_torch(ported, like=torch_net, mapping=mapping)
    assert torch.equal(back["head.weight"], torch_net.head.weight)


def test_a_leaf_too_many_is_named(torch_net):
    params = {**linen_params()["params"], "extra": {"bias": jnp.zeros(3)}}
    with pytest.raises(ValueError, match=r"the JAX leaves \['extra/bias \(3,\)'\]"):
        port.to_jax(torch_net, like=params)


def test_sizes_that_differ_are_named(torch_net):
    params = dict(linen_params()["params"])
    params["head"] = {"kernel": jnp.zeros((12, 6)), "bias": jnp.zeros(5)}
    with pytest.raises(ValueError, match=r"head.weight \(5, 12\) in torch would be \(12, 5\)"):
        port.to_jax(torch_net, like=params)

# SPDX-License-Identifier: Apache-2.0
"""Which leaf has which noise, and maps as plain data."""

import json

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import port
from dualdp.porting import parameter_map
from dualdp.porting.matching import Matcher
from tests.dualdp.porting.test_convert_checkpoint import Torch, jax_state, plan

PLAN = plan(noise="portable", seed=3)


def test_a_tensor_that_is_three_leaves_has_their_noise():
    """Attention: torch's one in_proj_weight draws what JAX draws for query, key and value."""

    net = nn.Module()
    net.layer = nn.MultiheadAttention(6, 3)
    layer = linen.MultiHeadDotProductAttention(3)
    like = {"layer": layer.init(jax.random.key(0), jnp.zeros((1, 2, 6)))["params"]}
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    ours = dpt.noisy_mean(zeros, PLAN, 4, layout=port.match(net, like))
    net.load_state_dict(ours)
    theirs = dpj.noisy_mean(jax.tree.map(jnp.zeros_like, like), PLAN, 4)
    for a, b in zip(
        jax.tree.leaves(port.to_jax(net, like=like)), jax.tree.leaves(theirs), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def lstm_leaves(net):
    cells = linen.LSTMCell(4)
    carry = (jnp.zeros(4), jnp.zeros(4))
    like = {"l0": cells.init(jax.random.key(0), carry, jnp.zeros(3))["params"]}
    return port.match(net, like)


def test_folded_biases_have_noise_of_their_own():
    """Both biases are trained: JAX's one normal must not be added twice."""
    net = nn.LSTM(3, 4)
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    noise = dpt.noisy_mean(zeros, PLAN, 4, layout=lstm_leaves(net))
    drawn = torch.cat([value.flatten() for value in noise.values()])
    assert len(torch.unique(drawn)) == len(drawn)
    assert set(noise) == set(zeros)


def test_one_trained_bias_has_jaxs_noise():
    """After fold_biases the frozen bias has none, and the keys are still JAX's."""
    both, one = nn.LSTM(3, 4), dpt.weights.fold_biases(nn.LSTM(3, 4))
    trained = {n: torch.zeros_like(p) for n, p in one.named_parameters() if p.requires_grad}
    assert "bias_hh_l0" not in trained
    ours = dpt.noisy_mean(trained, PLAN, 4, layout=lstm_leaves(one))
    theirs = dpt.noisy_mean(
        {n: torch.zeros_like(p) for n, p in both.named_parameters()}, PLAN, 4,
        layout=lstm_leaves(both),
    )  # fmt: skip
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_frozen_leaves_draw_no_noise():
    """JAX numbers its keys over the trained leaves; so does the pairing."""
    shapes, kinds = {"a": (2,), "b": (2,)}, {"a": "raw", "b": "raw"}
    leaves = {"a": (2,), "b": (2,)}
    first, second = Matcher(shapes, kinds, leaves, frozen=["a"]).parameter_maps()
    assert [s.noise_index for s in second.slices] == [0]
    assert second.slices[0].path == "b"
    assert first.slices[0].noise_index == -1


def test_leaves_are_plain_data():
    pairs = port.match(Torch(), jax_state().params)
    assert parameter_map.from_json(json.loads(json.dumps(parameter_map.to_json(pairs)))) == pairs

# SPDX-License-Identifier: Apache-2.0
"""Every layer that is ported: the same outputs on both stacks, bitwise back again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from dualdp import port
from dualdp.porting import layouts
from tests.cases import pairs

#: Those of linen are fast; nnx traces and compiles its modules for seconds.
CASES = [
    pytest.param(pair, kind, "float64", id=f"{pair.name}-{kind}", marks=marks)
    for kind, marks in (("linen", ()), ("nnx", pytest.mark.slow))
    for pair in pairs.PAIRS
    if getattr(pair, kind) is not None
] + [pytest.param(pairs.PAIRS[0], "linen", "float32", id="float32")]
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}


def random_torch(pair, kind, dtype):
    """Torch's net, all its numbers random: ones and zeros would hide a swap."""
    torch.manual_seed(0)
    net = pairs.TorchNet(pair).to(getattr(torch, dtype))
    for value in (*net.parameters(), *net.buffers()):
        if value.is_floating_point():
            value.data = torch.rand_like(value) + 0.1
    if pair.name == "fused_gru":
        pairs.zero_hidden_bias_of_n(net.layer)
    return net


def jax_net(pair, kind, x):
    """(parameters, all zero, and call(parameters, x)) of the JAX net."""
    if kind == "linen":
        net = pairs.LinenNet(pair)
        return zeros(jax.eval_shape(net.init, jax.random.key(0), x)), jax.jit(net.apply)
    graph, params, rest = nnx.split(
        pairs.NnxNet(pair, nnx.Rngs(0)), nnx.Any(nnx.Param, nnx.BatchStat), ...
    )
    call = jax.jit(lambda params, rest, x: nnx.merge(graph, params, rest)(x))
    return zeros(params), lambda params, x: call(params, rest, x)


def zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, float), tree)


@pytest.mark.parametrize(("pair", "kind", "dtype"), CASES)
def test_outputs_agree_and_the_way_back_is_bitwise(pair, kind, dtype):
    net = random_torch(pair, kind, dtype)
    x = pair.inputs(dtype)
    with jax.enable_x64(dtype == "float64"):
        like, call = jax_net(pair, kind, jnp.asarray(x))
        params = port.to_jax(net, like=like)
        assert jax.tree.structure(params) == jax.tree.structure(like)
        for training in (True, False):
            net.train(training and "running" not in pair.name)
            with torch.no_grad():
                theirs = net(torch.as_tensor(x)).numpy()
            ours = np.asarray(call(params, jnp.asarray(x)))
            assert ours.dtype == theirs.dtype == np.dtype(dtype)
            tolerance = TOLERANCE[dtype]
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        assert_bitwise(net, params, like)


def assert_bitwise(net, params, like):
    """Back: every parameter bit for bit; of two folded biases their sum, and zero."""
    back = port.to_torch(params, like=net)
    assert list(back) == list(net.state_dict())
    for name, tensor in net.state_dict().items():
        first, second = name.replace("bias_hh", "bias_ih"), name.replace("bias_ih", "bias_hh")
        if first != second and isinstance(net.layer, nn.RNNBase | nn.RNNCellBase):
            tensor = tensor + 0
            total = net.get_parameter(first) + net.get_parameter(second)
            rows = slice(0, 2 * len(tensor) // 3 if isinstance(net.layer, nn.GRU) else None)
            tensor[rows] = total[rows] if name == first else 0
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype
    other = pairs.TorchNet(net.pair).to(next(net.parameters()).dtype)
    other.load_state_dict(back)
    again = port.to_jax(other, like=like)
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)


def test_bfloat16_crosses_bit_for_bit():
    net = nn.Linear(3, 2).bfloat16()
    like = {"kernel": jnp.zeros((3, 2), jnp.bfloat16), "bias": jnp.zeros(2, jnp.bfloat16)}
    params = port.to_jax(net, like=like)
    assert params["kernel"].dtype == jnp.bfloat16
    back = port.to_torch(params, like=net)
    assert torch.equal(back["weight"], net.weight)
    assert torch.equal(back["bias"], net.bias)


def test_a_bias_without_a_place_is_refused():
    pair = next(pair for pair in pairs.PAIRS if pair.name == "fused_gru")
    net = pairs.TorchNet(pair)
    like, _ = jax_net(pair, "nnx", jnp.zeros(pair.x))
    with pytest.raises(
        ValueError, match=r"layer.bias_hh_l0 \(12,\) is not zero in the rows \(8, 12"
    ):
        port.to_jax(net, like=like)


@pytest.mark.parametrize(
    ("options", "heads", "message"),
    [
        ({}, 2, r"in_proj_weight \(18, 6\) \(part 0 of 3\) in torch would be \(6, 3, 2\) in JAX"),
        ({"add_bias_kv": True}, 3, r"layer.bias_k \(1, 1, 6\)"),
    ],
)
def test_attention_that_differs_is_refused(options, heads, message):
    net = nn.Module()
    net.layer = nn.MultiheadAttention(6, 3, **options)
    layer = linen.MultiHeadDotProductAttention(heads)
    params = {"layer": layer.init(jax.random.key(0), jnp.zeros((1, 2, 6)))["params"]}
    with pytest.raises(ValueError, match=message):
        port.to_jax(net, like=params)


def test_a_mapping_of_a_part_of_attention_is_refused():
    net = nn.Module()
    net.layer = nn.MultiheadAttention(6, 3)
    layer = linen.MultiHeadDotProductAttention(3)
    params = {"layer": layer.init(jax.random.key(0), jnp.zeros((1, 2, 6)))["params"]}
    with pytest.raises(ValueError, match=r"mapping names \['layer.out_proj'\], which neither"):
        port.match(net, params, {"layer.out_proj": "layer/value"})  # it would be ignored


@pytest.mark.parametrize(
    "paths",
    [
        "blocks/0/1/w params/blocks_0/layers_1/w blocks/layers/0/layers/1/w blocks_0/layers/1/w",
        "layers/0/w layers_0/w layers/layers_0/w params/0/w",
        "rnn/l0/w rnn_l0/cell/w rnn/cell/w rnn/w rnn/l0/forward_rnn/cell/w rnn/forward_rnn/cell/w",
        "rnn/l0_reverse/w rnn_l0_reverse/cell/w rnn/backward_rnn/cell/w rnn_l0/backward_rnn/cell/w",
        "rnn/l1_reverse/w rnn_l1_reverse/w rnn_l1/backward_rnn/cell/w rnn/l1/backward_rnn/cell/w",
        "blocks/0/1/w blocks_0_1/w blocks/0_1/w blocks/layers_0_1/w",
        "rnn/0/l0/w rnn_0_l0/cell/w rnn/layers_0/w rnn_0/forward_rnn/cell/w",
        "rnn/2/l1_reverse/w rnn_2_l1/backward_rnn/cell/w rnn_2_l1_reverse/w",
    ],
)
def test_paths_of_one_module_have_one_form(paths):
    kind = "lstm" if "rnn" in paths else "linear"
    assert len({layouts.canonical(path, kind) for path in paths.split()}) == 1


def test_layers_of_an_rnn_are_its_own():
    assert layouts.canonical("a_0/b_l0/w", "linear") != layouts.canonical("a_0/b/w", "linear")
    assert layouts.canonical("a_0/cell/w", "linear") != layouts.canonical("a_0/w", "linear")

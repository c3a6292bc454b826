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
from tests.mistakes import refused

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
        assert_bitwise(net, params)


def assert_bitwise(net, params):
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


def test_bfloat16_crosses_bit_for_bit():
    net = nn.Linear(3, 2).bfloat16()
    like = {"kernel": jnp.zeros((3, 2), jnp.bfloat16), "bias": jnp.zeros(2, jnp.bfloat16)}
    params = port.to_jax(net, like=like)
    assert params["kernel"].dtype == jnp.bfloat16
    back = port.to_torch(params, like=net)
    assert torch.equal(back["weight"], net.weight)
    assert torch.equal(back["bias"], net.bias)


def attention(heads=3, **options):
    """Torch's attention of 3 heads, and the parameters of a layer of JAX."""
    net = nn.Module()
    net.layer = nn.MultiheadAttention(6, 3, **options)
    layer = linen.MultiHeadDotProductAttention(heads)
    return net, {"layer": layer.init(jax.random.key(0), jnp.zeros((1, 2, 6)))["params"]}


def test_what_differs_is_refused():
    pair = next(pair for pair in pairs.PAIRS if pair.name == "fused_gru")
    gru, (like, _) = pairs.TorchNet(pair), jax_net(pair, "nnx", jnp.zeros(pair.x))
    words = r"layer.bias_hh_l0 \(12,\) is not zero in the rows \(8, 12"
    refused(lambda: port.to_jax(gru, like=like), ValueError, words)
    net, params = attention(heads=2)
    words = r"in_proj_weight \(18, 6\) \(part 0 of 3\) in torch would be \(6, 3, 2\) in JAX"
    refused(lambda: port.to_jax(net, like=params), ValueError, words)
    biased, params = attention(add_bias_kv=True)
    words = r"layer.bias_k \(1, 1, 6\)"
    refused(lambda: port.to_jax(biased, like=params), ValueError, words)
    mapping = {"layer.out_proj": "layer/value"}  # it would be ignored
    words = r"mapping names \['layer.out_proj'\], which neither"
    refused(lambda: port.match(net, params, mapping), ValueError, words)


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

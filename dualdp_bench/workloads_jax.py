# SPDX-License-Identifier: Apache-2.0
"""A workload as plain JAX functions over nested dicts of arrays; images are NHWC."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dualdp_bench import specs
from dualdp_bench.workloads import Workload

EPSILON = 1e-5  # of the normalisations, PyTorch's default


@singledispatch
def forward(layer: specs.Layer, params: Any, x: jax.Array) -> jax.Array:
    """The layer's outputs for a batch, (n, ...)."""
    raise TypeError(f"{type(layer).__name__} has no JAX function. Register one with `forward`.")


@forward.register
def _(layer: specs.Op, params: Any, x: jax.Array) -> jax.Array:
    match layer.kind:
        case "relu":
            return jax.nn.relu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "flatten":
            return x.reshape(x.shape[0], -1)
        case "tokens":
            return x.reshape(x.shape[0], -1, x.shape[-1])  # (n, h, w, c) -> (n, t, c)
        case "mean":
            return x.mean(1)
        case "pixel_mean":
            return x.mean((1, 2))
        case _:
            return x[:, 0]


@forward.register
def _(layer: specs.Pool, params: Any, x: jax.Array) -> jax.Array:
    window, strides = (1, layer.size, layer.size, 1), (1, layer.stride, layer.stride, 1)
    padding = ((0, 0), (layer.padding,) * 2, (layer.padding,) * 2, (0, 0))
    if layer.kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
    return lax.reduce_window(x, 0.0, lax.add, window, strides, padding) / layer.size**2


def _means(size: int, outputs: int) -> np.ndarray:
    """(outputs, size): row i averages the window that adaptive pooling gives output i."""
    weights = np.zeros((outputs, size), np.float32)
    for i in range(outputs):
        first, last = i * size // outputs, -(-(i + 1) * size // outputs)
        weights[i, first:last] = 1 / (last - first)
    return weights


@forward.register
def _(layer: specs.AdaptivePool, params: Any, x: jax.Array) -> jax.Array:
    if x.shape[1:3] == (layer.size, layer.size):
        return x
    rows = jnp.einsum("ph,nhwc->npwc", _means(x.shape[1], layer.size), x)
    return jnp.einsum("qw,npwc->npqc", _means(x.shape[2], layer.size), rows)


@forward.register
def _(layer: specs.Linear, params: Any, x: jax.Array) -> jax.Array:
    y = x @ params["weight"]
    return y + params["bias"] if layer.bias else y


@forward.register
def _(layer: specs.Conv, params: Any, x: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(
        x,
        params["weight"],
        (layer.stride, layer.stride),
        ((layer.padding,) * 2,) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + params["bias"] if layer.bias else y


@forward.register
def _(layer: specs.Embedding, params: Any, x: jax.Array) -> jax.Array:
    return params["weight"][x]


@forward.register
def _(layer: specs.Positions, params: Any, x: jax.Array) -> jax.Array:
    return x + params["weight"][: x.shape[1]]


@forward.register
def _(layer: specs.Token, params: Any, x: jax.Array) -> jax.Array:
    token = jnp.broadcast_to(params["vector"], (x.shape[0], 1, layer.width))
    return jnp.concatenate([token, x], 1)


def _normalise(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + EPSILON)


@forward.register
def _(layer: specs.LayerNorm, params: Any, x: jax.Array) -> jax.Array:
    return _normalise(x, (-1,)) * params["weight"] + params["bias"]


@forward.register
def _(layer: specs.GroupNorm, params: Any, x: jax.Array) -> jax.Array:
    groups = x.reshape(x.shape[0], -1, layer.groups, layer.width // layer.groups)  # (n, t, g, c)
    return _normalise(groups, (1, 3)).reshape(x.shape) * params["weight"] + params["bias"]


@forward.register
def _(layer: specs.InstanceNorm, params: Any, x: jax.Array) -> jax.Array:
    return _normalise(x, (1, 2)) * params["weight"] + params["bias"]


def _lstm(gates: jax.Array, weight: jax.Array, state: Any) -> Any:
    hidden, cell = state
    i, f, g, o = jnp.split(gates + hidden @ weight, 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def _gru(gates: jax.Array, weight: jax.Array, state: Any) -> Any:
    (hidden,) = state
    parts = zip(jnp.split(gates, 3, -1), jnp.split(hidden @ weight, 3, -1), strict=True)
    (r, r_hidden), (z, z_hidden), (new, new_hidden) = parts
    z = jax.nn.sigmoid(z + z_hidden)
    new = jnp.tanh(new + jax.nn.sigmoid(r + r_hidden) * new_hidden)
    return ((1 - z) * new + z * hidden,)


def _rnn(gates: jax.Array, weight: jax.Array, state: Any) -> Any:
    return (jnp.tanh(gates + state[0] @ weight),)


#: Kind -> ((n, gates) of the inputs, hidden weight, state) -> state; outputs come first in it.
_STEPS = {"lstm": _lstm, "gru": _gru, "rnn": _rnn}


@forward.register
def _(layer: specs.Recurrent, params: Any, x: jax.Array) -> jax.Array:
    inputs = (x @ params["weight_ih"] + params["bias"]).swapaxes(0, 1)  # (t, n, gates)

    def step(state: Any, gates: jax.Array) -> Any:
        state = _STEPS[layer.kind](gates, params["weight_hh"], state)
        return state, state[0]

    zeros = jnp.zeros((x.shape[0], layer.width), x.dtype)
    start = (zeros, zeros) if layer.kind == "lstm" else (zeros,)
    return lax.scan(step, start, inputs)[1].swapaxes(0, 1)


@forward.register
def _(layer: specs.Attention, params: Any, x: jax.Array) -> jax.Array:
    n, t, d = x.shape
    parts = layer.parts()
    qkv = forward(parts["qkv"], params["qkv"], x).reshape(n, t, 3, layer.heads, d // layer.heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # each (n, h, t, d / h)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(d // layer.heads)
    if layer.causal:
        scores = jnp.where(np.tril(np.ones((t, t), bool)), scores, -jnp.inf)
    y = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(n, t, d)
    return forward(parts["out"], params["out"], y)


@forward.register
def _(layer: specs.Chain, params: Any, x: jax.Array) -> jax.Array:
    for name, part in layer.parts().items():
        x = forward(part, params.get(name), x)
    return x


@forward.register
def _(layer: specs.Residual, params: Any, x: jax.Array) -> jax.Array:
    skipped = forward(layer.shortcut, params["shortcut"], x) if layer.shortcut else x
    return forward(layer.body, params["body"], x) + skipped


def _to_jax(layer: specs.Layer, array: np.ndarray) -> np.ndarray:
    """One weight from PyTorch's layout to ours: outputs last, pixels before channels."""
    if isinstance(layer, specs.Linear | specs.Recurrent) and array.ndim == 2:
        if isinstance(layer, specs.Linear) and layer.image is not None:
            rows = array.reshape(-1, *layer.image).transpose(0, 2, 3, 1)  # (o, h, w, c)
            array = rows.reshape(array.shape)
        return array.T
    return (
        array.transpose(2, 3, 1, 0) if isinstance(layer, specs.Conv) and array.ndim == 4 else array
    )


def params(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """`workload.weights(seed)` as a nested dict."""
    weights = workload.weights(seed)

    def convert(layer: specs.Layer, path: str) -> dict[str, Any]:
        own = {name: jnp.asarray(_to_jax(layer, weights[path + name])) for name in layer.shapes()}
        inner = {name: convert(part, f"{path}{name}.") for name, part in layer.parts().items()}
        return own | {name: part for name, part in inner.items() if part}

    return convert(workload.model, "")


def load(workload: Workload, x: np.ndarray, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """One NumPy batch on the device, images as NHWC."""
    if x.ndim == 4:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    return jnp.asarray(x, jnp.int32 if x.dtype == np.int64 else None), jnp.asarray(y)


def losses(workload: Workload, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """One loss per example, (n,)."""
    outputs = forward(workload.model, params, x)
    if workload.loss == "squares":
        return jnp.square(outputs).reshape(x.shape[0], -1).sum(1) / 2
    if workload.loss == "binary":
        score = outputs[:, 0]
        return jax.nn.softplus(score) - y * score
    scores = jax.nn.log_softmax(outputs, -1)
    each = -jnp.take_along_axis(scores, y[..., None], -1)[..., 0]
    return each.mean(-1) if workload.loss == "token" else each


def loss(workload: Workload, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of ONE example."""
    return losses(workload, params, x[None], y[None])[0]

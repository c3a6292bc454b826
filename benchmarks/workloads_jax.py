# SPDX-License-Identifier: Apache-2.0
"""Workloads as plain JAX functions over nested dicts of arrays; images are NHWC."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import specs
from benchmarks.workloads import Workload

EPSILON = 1e-5  # PyTorch's default for normalisations


def forward(layer: specs.Layer, params: Any, x: jax.Array) -> jax.Array:
    """Return the layer's outputs for a batch, (n, ...)."""
    match layer:
        case specs.Op("relu"):
            return jax.nn.relu(x)
        case specs.Op("gelu"):
            return jax.nn.gelu(x, approximate=False)
        case specs.Op("flatten"):
            return x.reshape(x.shape[0], -1)
        case specs.Op("tokens"):
            return x.reshape(x.shape[0], -1, x.shape[-1])  # (n, h, w, c) -> (n, t, c)
        case specs.Op("mean"):
            return x.mean(1)
        case specs.Op("pixel_mean"):
            return x.mean((1, 2))
        case specs.Op():
            return x[:, 0]
        case specs.Pool(kind, size, stride, padding):
            window, strides = (1, size, size, 1), (1, stride, stride, 1)
            pads = ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0))
            if kind == "max":
                return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads)
            return lax.reduce_window(x, 0.0, lax.add, window, strides, pads) / size**2
        case specs.Linear():
            y = x @ params["weight"]
            return y + params["bias"] if layer.bias else y
        case specs.Conv():
            y = lax.conv_general_dilated(
                x,
                params["weight"],
                (layer.stride, layer.stride),
                ((layer.padding,) * 2,) * 2,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            return y + params["bias"] if layer.bias else y
        case specs.Positions():
            return x + params["weight"][: x.shape[1]]
        case specs.Embedding():
            return params["weight"][x]
        case specs.Token(width):
            token = jnp.broadcast_to(params["vector"], (x.shape[0], 1, width))
            return jnp.concatenate([token, x], 1)
        case specs.Norm("layernorm"):
            return _normalise(x, (-1,)) * params["weight"] + params["bias"]
        case specs.Norm("groupnorm", width, groups):
            grouped = x.reshape(x.shape[0], -1, groups, width // groups)  # (n, t, g, c)
            return _normalise(grouped, (1, 3)).reshape(x.shape) * params["weight"] + params["bias"]
        case specs.Lstm():
            return _lstm(layer, params, x)
        case specs.Attention():
            return _attention(layer, params, x)
        case specs.Chain():
            for name, inner in specs.children(layer).items():
                x = forward(inner, params.get(name), x)
            return x
        case specs.Residual(body, shortcut):
            skipped = forward(shortcut, params["shortcut"], x) if shortcut else x
            return forward(body, params["body"], x) + skipped
    raise TypeError(f"{type(layer).__name__} has no JAX function. Add a case to `forward`.")


def _normalise(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + EPSILON)


def _lstm(layer: specs.Lstm, params: Any, x: jax.Array) -> jax.Array:
    """(n, t, inputs) -> (n, t, width)."""
    inputs = (x @ params["weight_ih"] + params["bias"]).swapaxes(0, 1)  # (t, n, gates)

    def step(state: Any, gates: jax.Array) -> Any:
        hidden, cell = state
        i, f, g, o = jnp.split(gates + hidden @ params["weight_hh"], 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((x.shape[0], layer.width), x.dtype)
    return lax.scan(step, (zeros, zeros), inputs)[1].swapaxes(0, 1)


def _attention(layer: specs.Attention, params: Any, x: jax.Array) -> jax.Array:
    """(n, t, d) -> (n, t, d)."""
    n, t, d = x.shape
    linear = specs.children(layer)
    qkv = forward(linear["qkv"], params["qkv"], x).reshape(n, t, 3, layer.heads, d // layer.heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # each (n, h, t, d / h)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(d // layer.heads)
    if layer.causal:
        scores = jnp.where(np.tril(np.ones((t, t), bool)), scores, -jnp.inf)
    y = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(n, t, d)
    return forward(linear["out"], params["out"], y)


def _to_jax(layer: specs.Layer, array: np.ndarray) -> np.ndarray:
    """Weight converted from PyTorch's layout: outputs last, pixels before channels."""
    if isinstance(layer, specs.Linear | specs.Lstm) and array.ndim == 2:
        if isinstance(layer, specs.Linear) and layer.image is not None:
            rows = array.reshape(-1, *layer.image).transpose(0, 2, 3, 1)  # (o, h, w, c)
            array = rows.reshape(array.shape)
        return array.T
    return (
        array.transpose(2, 3, 1, 0) if isinstance(layer, specs.Conv) and array.ndim == 4 else array
    )


def params(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Return a copy of `workload.weights(seed)` as a nested dict."""
    weights = workload.weights(seed)

    def convert(layer: specs.Layer, path: str) -> dict[str, Any]:
        names = specs.shapes(layer)
        own = {name: jnp.array(_to_jax(layer, weights[path + name])) for name in names}
        children = specs.children(layer).items()
        inner = {name: convert(child, f"{path}{name}.") for name, child in children}
        return own | {name: found for name, found in inner.items() if found}

    return convert(workload.model, "")


def load(x: np.ndarray, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return a NumPy batch on the device, images as NHWC."""
    if x.ndim == 4:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    return jnp.asarray(x, jnp.int32 if x.dtype == np.int64 else None), jnp.asarray(y)


def losses(workload: Workload, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return one loss per example, (n,)."""
    outputs = forward(workload.model, params, x)
    scores = jax.nn.log_softmax(outputs, -1)
    each = -jnp.take_along_axis(scores, y[..., None], -1)[..., 0]
    return each.mean(-1) if workload.loss == "token" else each


def loss(workload: Workload, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the loss of ONE example."""
    return losses(workload, params, x[None], y[None])[0]

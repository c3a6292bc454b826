# SPDX-License-Identifier: Apache-2.0
"""Models of the shared grid on JAX: torch's names and shapes, plain `lax` arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import layers
from tests.cases.layers import Case

jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here

Params = dict[str, Any]
Options = dict[str, Any]


class Model(NamedTuple):
    """One case, ready to call: `loss_fn(params, x[k])` is the loss of example k."""

    params: Params
    loss_fn: Callable[[Params, Any], Any]
    x: Any
    trainable: dict[str, bool]


def build(case: Case) -> Model:
    """Parameters, per-example loss and inputs of a case."""
    params = {name: jnp.asarray(array) for name, array in layers.parameters(case).items()}
    forward = SPECIALS[case.special] if case.special else lambda p, x: _sequence(case, p, x)

    def loss_fn(p: Params, x: Any) -> Any:
        y = forward(p, x).reshape(-1)
        index = jnp.arange(y.size, dtype=y.dtype)
        return jnp.sum(y**2 / 2 + y * jnp.cos(index))

    trainable = {name: name not in case.frozen for name in params}
    return Model(params, loss_fn, jnp.asarray(layers.inputs(case)), trainable)


# ---------------------------------------------------------------------- layers of ONE example


def _linear(p: Params, x: Any, name: str) -> Any:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _sequence(case: Case, p: Params, x: Any) -> Any:
    for position, (kind, options) in enumerate(case.layers):
        x = LAYERS[kind](p, x, str(position), options)
    return x


def _tuple(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


_PAD_MODES = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}


def _conv(p: Params, x: Any, name: str, options: Options) -> Any:
    weight = p[f"{name}.weight"]
    axes = weight.ndim - 2
    stride = _tuple(options.get("stride", 1), axes)
    dilation = _tuple(options.get("dilation", 1), axes)
    pads = _padding(options.get("padding", 0), weight.shape[2:], dilation)
    mode = options.get("padding_mode", "zeros")
    if mode != "zeros":
        x, pads = jnp.pad(x, [(0, 0), *pads], mode=_PAD_MODES[mode]), [(0, 0)] * axes
    y = jax.lax.conv_general_dilated(
        x[None],
        weight,
        stride,
        pads,
        rhs_dilation=dilation,
        feature_group_count=options.get("groups", 1),
    )[0]
    bias = p.get(f"{name}.bias")
    return y if bias is None else y + bias.reshape(-1, *(1,) * axes)


def _padding(padding: Any, kernel: Any, dilation: Any) -> list[tuple[int, int]]:
    """Zeros before and after each axis; torch's "same" puts the odd one behind."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(size, size) for size in _tuple(padding, len(kernel))]


def _embedding(p: Params, x: Any, name: str, options: Options) -> Any:
    weight = p[f"{name}.weight"]
    rows = weight[x]
    padding_idx = options.get("padding_idx")
    if padding_idx is None:
        return rows
    return jnp.where((x == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def _layernorm(p: Params, x: Any, name: str, options: Options) -> Any:
    axes = tuple(range(-len(options["shape"]), 0))
    centred = x - x.mean(axes, keepdims=True)
    y = centred * jax.lax.rsqrt((centred**2).mean(axes, keepdims=True) + 1e-5)
    y = y * p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _groupnorm(p: Params, x: Any, name: str, options: Options) -> Any:
    rows = x.reshape(options["groups"], -1)
    centred = rows - rows.mean(1, keepdims=True)
    y = (centred * jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-5)).reshape(x.shape)
    beside = lambda v: v.reshape(-1, *(1,) * (x.ndim - 1))  # noqa: E731
    return y * beside(p[f"{name}.weight"]) + beside(p[f"{name}.bias"])


def _avgpool2d(p: Params, x: Any, name: str, options: Options) -> Any:
    kernel = _tuple(options["kernel"], 2)
    window = (1, *kernel)
    sums = jax.lax.reduce_window(x, np.zeros((), x.dtype), jax.lax.add, window, window, "VALID")
    return sums / math.prod(kernel)


LAYERS: dict[str, Callable[[Params, Any, str, Options], Any]] = {
    "linear": lambda p, x, name, options: _linear(p, x, name),
    "conv1d": _conv,
    "conv2d": _conv,
    "embedding": _embedding,
    "layernorm": _layernorm,
    "groupnorm": _groupnorm,
    "tanh": lambda p, x, name, options: jnp.tanh(x),
    "gelu": lambda p, x, name, options: jax.nn.gelu(x, approximate=False),
    "relu": lambda p, x, name, options: jax.nn.relu(x),
    "flatten": lambda p, x, name, options: x.reshape(-1),
    "mean": lambda p, x, name, options: x.mean(options["axis"]),
    "avgpool2d": _avgpool2d,
}

# ---------------------------------------------------------------------- models that are no sequence


def _tied(p: Params, ids: Any) -> Any:
    table = p["embedding.weight"]
    return jnp.tanh(_linear(p, table[ids], "body")) @ table.T


def _tanh(p: Params, x: Any, name: str) -> Any:
    return jnp.tanh(_linear(p, x, name))


def _class_token(p: Params, x: Any) -> Any:
    return _linear(p, _tanh(p, jnp.concatenate([p["token"], x]), "first"), "head")


SPECIALS: dict[str, Callable[[Params, Any], Any]] = {
    "tied": _tied,
    "reuse": lambda p, x: _linear(p, _tanh(p, x, "layer"), "layer"),
    "reuse_ranks": lambda p, x: _linear(p, _tanh(p, x, "layer").mean(0), "layer"),
    "functional": lambda p, x: _tanh(p, x, "first") @ p["first.weight"].T,
    "raw": lambda p, x: _linear(p, (x + p["pos"]) * p["scale"], "head"),
    "class_token": _class_token,
    "unused": lambda p, x: _linear(p, x, "first"),
    "shared": lambda p, x: _tanh(p, x, "first") @ p["first.weight"].T + p["second.bias"],
    "two_branches": lambda p, x: _linear(p, x, "first") * _tanh(p, x, "second"),
}

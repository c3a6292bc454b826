# SPDX-License-Identifier: Apache-2.0
"""The same layer in torch, Flax linen and Flax nnx: what porting is tested on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as linen
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn


@dataclass(frozen=True)
class Pair:
    """One layer on both stacks, under the name `layer`.

    Args:
        name: of the case.
        torch: makes torch's layer.
        torch_call: (layer, x) to its output; None for layer(x).
        linen: makes linen's, given `name=` and `param_dtype=`; None where it has none.
        nnx: makes nnx's, given `rngs=`, `param_dtype=` and `dtype=`; None where it has none.
        jax_call: (layer, x) to the output in torch's order of axes.
        x: shape of the input, or integers.
    """

    name: str
    torch: Callable[[], nn.Module]
    x: Any
    linen: Callable[..., Any] | None = None
    nnx: Callable[..., Any] | None = None
    torch_call: Callable[..., Any] | None = None
    jax_call: Callable[..., Any] = lambda layer, x: layer(x)

    def inputs(self, dtype: Any) -> np.ndarray:
        """Random numbers, or the integers as they are."""
        if isinstance(self.x, np.ndarray):
            return self.x
        return np.random.default_rng(1).normal(size=self.x).astype(dtype)


def _wide() -> Any:
    """float64 where JAX has it."""
    return jnp.result_type(float)


class TorchNet(nn.Module):
    """A layer with a name."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.layer = pair.torch()
        self.pair = pair

    def forward(self, x: torch.Tensor) -> Any:
        call = self.pair.torch_call
        return self.layer(x) if call is None else call(self.layer, x)


class LinenNet(linen.Module):
    """The same in linen."""

    pair: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return self.pair.jax_call(self.pair.linen(name="layer", param_dtype=_wide()), x)


class NnxNet(nnx.Module):
    """The same in nnx."""

    def __init__(self, pair: Pair, rngs: nnx.Rngs) -> None:
        self.layer = pair.nnx(rngs=rngs, param_dtype=_wide(), dtype=_wide())
        self.pair = nnx.static(pair)

    def __call__(self, x: Any) -> Any:
        return self.pair.jax_call(self.layer, x)


def _last(call: Callable[..., Any]) -> Callable[..., Any]:
    """A layer with channels last, on arrays with channels first."""
    return lambda layer, x: jnp.moveaxis(call(layer, jnp.moveaxis(x, 1, -1)), -1, 1)


CHANNELS = _last(lambda layer, x: layer(x))


def _conv(dims: int) -> Pair:
    sizes, kernel = (7, 6, 5)[:dims], (3, 2, 4)[:dims]
    options = {"strides": 2, "padding": 1, "feature_group_count": 2, "kernel_size": kernel}
    return Pair(
        f"conv{dims}d",
        lambda: getattr(nn, f"Conv{dims}d")(4, 6, kernel, stride=2, padding=1, groups=2),
        (3, 4, *sizes),
        lambda **k: linen.Conv(6, **options, **k),
        lambda **k: nnx.Conv(4, 6, **options, **k),
        jax_call=CHANNELS,
    )


def _transposed(dims: int) -> Pair:
    sizes, kernel = (4, 3, 3)[:dims], (3, 2, 4)[:dims]
    # torch's padding p is k - 1 - p of Flax
    options = {"strides": (2,) * dims, "padding": [(k - 1, k - 1) for k in kernel]}
    options |= {"transpose_kernel": True, "kernel_size": kernel}
    return Pair(
        f"transposed_conv{dims}d",
        lambda: getattr(nn, f"ConvTranspose{dims}d")(4, 6, kernel, stride=2),
        (3, 4, *sizes),
        lambda **k: linen.ConvTranspose(6, **options, **k),
        lambda **k: nnx.ConvTranspose(4, 6, **options, **k),
        jax_call=CHANNELS,
    )


def _norms() -> list[Pair]:
    return [
        Pair(
            "layer_norm",
            lambda: nn.LayerNorm(5),
            (3, 4, 5),
            lambda **k: linen.LayerNorm(epsilon=1e-5, **k),
            lambda **k: nnx.LayerNorm(5, epsilon=1e-5, **k),
        ),
        Pair(
            "group_norm",
            lambda: nn.GroupNorm(2, 6),
            (3, 6, 4, 5),
            lambda **k: linen.GroupNorm(2, epsilon=1e-5, **k),
            lambda **k: nnx.GroupNorm(6, 2, epsilon=1e-5, **k),
            jax_call=CHANNELS,
        ),
        Pair(
            "rms_norm",
            lambda: nn.RMSNorm(5, eps=1e-6),
            (3, 4, 5),
            lambda **k: linen.RMSNorm(**k),
            lambda **k: nnx.RMSNorm(5, **k),
        ),
        Pair(
            "batch_norm_running",
            lambda: nn.BatchNorm2d(6).eval(),
            (3, 6, 4, 5),
            lambda **k: linen.BatchNorm(use_running_average=True, **k),
            lambda **k: nnx.BatchNorm(6, use_running_average=True, **k),
            jax_call=CHANNELS,
        ),
    ]


def plain_attention(query: Any, key: Any, value: Any, **others: Any) -> Any:
    """Attention in the arrays' precision; nnx's own computes its softmax in float32 always."""
    return linen.dot_product_attention(query, key, value, mask=others.get("mask"))


def _attention(bias: bool) -> Pair:
    return Pair(
        f"attention_{'bias' if bias else 'plain'}",
        lambda: nn.MultiheadAttention(6, 3, bias=bias, batch_first=True),
        (2, 5, 6),
        lambda **k: linen.MultiHeadDotProductAttention(3, use_bias=bias, **k),
        lambda **k: nnx.MultiHeadAttention(
            3, 6, use_bias=bias, decode=False, attention_fn=plain_attention, **k
        ),
        lambda layer, x: layer(x, x, x)[0],
    )


def _attention_of_three() -> Pair:
    """Keys and values of other widths, which torch keeps in tensors of their own."""
    return Pair(
        "attention_kdim_vdim",
        lambda: nn.MultiheadAttention(6, 3, kdim=4, vdim=2, batch_first=True),
        (2, 5, 6),
        lambda **k: linen.MultiHeadDotProductAttention(3, qkv_features=6, out_features=6, **k),
        None,
        lambda layer, x: layer(x, x[..., :4], x[..., :2])[0],
        lambda layer, x: layer(x, x[..., :4], x[..., :2]),
    )


def _cell() -> Pair:
    """One step of a cell, without a layer around it."""
    return Pair(
        "lstm_cell",
        lambda: nn.LSTMCell(5, 4),
        (2, 5),
        lambda **k: linen.LSTMCell(4, **k),
        None,
        lambda layer, x: layer(x)[0],
        lambda layer, x: layer((jnp.zeros((2, 4), x.dtype),) * 2, x)[1],
    )


RECURRENT = {
    "lstm": (nn.LSTM, linen.LSTMCell, nnx.LSTMCell),
    "optimized_lstm": (nn.LSTM, linen.OptimizedLSTMCell, nnx.OptimizedLSTMCell),
    "gru": (nn.GRU, linen.GRUCell, None),
    "fused_gru": (nn.GRU, None, nnx.GRUCell),
    "rnn": (nn.RNN, linen.SimpleCell, nnx.SimpleCell),
}


def zero_hidden_bias_of_n(layer: nn.GRU) -> nn.GRU:
    """What nnx's GRUCell has no place for."""
    for name, p in layer.named_parameters():
        if "bias_hh" in name:
            p.data[2 * len(p) // 3 :] = 0
    return layer


def _recurrent(name: str) -> Pair:
    torch_cls, linen_cell, nnx_cell = RECURRENT[name]
    return Pair(
        name,
        lambda: torch_cls(5, 4, batch_first=True),
        (2, 6, 5),
        None if linen_cell is None else lambda **k: linen.RNN(linen_cell(4, **k)),
        None if nnx_cell is None else lambda **k: nnx.RNN(nnx_cell(5, 4, **k), rngs=k["rngs"]),
        lambda layer, x: layer(x)[0],
    )


def _bidirectional() -> Pair:
    def both(rngs: nnx.Rngs, **options: Any) -> nnx.Bidirectional:
        cells = [nnx.LSTMCell(5, 4, rngs=rngs, **options) for _ in range(2)]
        return nnx.Bidirectional(*(nnx.RNN(cell, rngs=rngs) for cell in cells), rngs=rngs)

    return Pair(
        "bidirectional_lstm",
        lambda: nn.LSTM(5, 4, batch_first=True, bidirectional=True),
        (2, 6, 5),
        lambda name, **k: linen.Bidirectional(
            linen.RNN(linen.LSTMCell(4, name=f"{name}_l0", **k)),
            linen.RNN(linen.LSTMCell(4, name=f"{name}_l0_reverse", **k)),
        ),
        both,
        lambda layer, x: layer(x)[0],
    )


def _deep() -> Pair:
    def call(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return Pair(
        "two_layer_gru",
        lambda: nn.GRU(5, 4, num_layers=2, batch_first=True),
        (2, 6, 5),
        lambda name, **o: [linen.RNN(linen.GRUCell(4, name=f"{name}_l{k}", **o)) for k in (0, 1)],
        None,
        lambda layer, x: layer(x)[0],
        call,
    )


PAIRS = [
    Pair(
        "linear",
        lambda: nn.Linear(5, 5),
        (3, 5),
        lambda **k: linen.Dense(5, **k),
        lambda **k: nnx.Linear(5, 5, **k),
    ),
    *(_conv(dims) for dims in (1, 2, 3)),
    *(_transposed(dims) for dims in (1, 2, 3)),
    Pair(
        "embedding",
        lambda: nn.Embedding(7, 7),
        np.random.default_rng(2).integers(0, 7, (3, 4)),
        lambda **k: linen.Embed(7, 7, **k),
        lambda **k: nnx.Embed(7, 7, **k),
    ),
    *_norms(),
    _attention(bias=True),
    _attention(bias=False),
    _attention_of_three(),
    _cell(),
    *map(_recurrent, RECURRENT),
    _bidirectional(),
    _deep(),
]

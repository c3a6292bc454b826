# SPDX-License-Identifier: Apache-2.0
"""Small models on both stacks under the same names, all smooth: what a run that switches trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import dualdp.torch as dpt

N, CLASSES, TOKENS = 24, 5, 7


@dataclass(frozen=True)
class Twin:
    """One model on both stacks.

    Args:
        name: of the case.
        torch: makes torch's, which takes a batch.
        flax: makes Flax's, which takes one example.
        x: (n, ...) inputs.
        y: (n,) or (n, t) labels.
    """

    name: str
    torch: Callable[[], nn.Module]
    flax: Callable[[], linen.Module]
    x: np.ndarray
    y: np.ndarray


class TorchMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Any) -> Any:
        return self.body(x)


class FlaxMLP(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(linen.Dense(8, name="body_0")(x))
        return linen.Dense(CLASSES, name="body_2")(x)


class TorchCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(nn.functional.gelu(self.norm(self.conv(x))).mean((2, 3)))


class FlaxCNN(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(4, (3, 3), strides=2, padding=1, name="conv")(x.transpose(1, 2, 0))
        x = linen.GroupNorm(2, epsilon=1e-5, reduction_axes=(0, 1, 2), name="norm")(x)
        return linen.Dense(CLASSES, name="head")(jax.nn.gelu(x, approximate=False).mean((0, 1)))


class TorchLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = dpt.weights.fold_biases(nn.LSTM(3, 6, batch_first=True))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0].mean(1))


class FlaxLSTM(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.RNN(linen.OptimizedLSTMCell(6, param_dtype=x.dtype, name="lstm"))(x)
        return linen.Dense(CLASSES, name="head")(x.mean(0))


class TorchGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, 8), nn.Embedding(5, 8)
        self.ln = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Any) -> Any:
        t = ids.shape[1]
        x = self.wte(ids) + self.wpe(torch.arange(t))
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = self.ln(x)
        x = x + self.attn(y, y, y, attn_mask=future, need_weights=False)[0]
        return self.head(x + self.mlp(x))


class FlaxGPT(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        t = len(ids)
        tokens = linen.Embed(TOKENS, 8, name="wte")
        x = tokens(ids) + linen.Embed(5, 8, name="wpe")(jnp.arange(t))
        past = jnp.tril(jnp.ones((1, t, t), bool))
        y = linen.LayerNorm(epsilon=1e-5, name="ln")(x)
        x = x + linen.MultiHeadDotProductAttention(2, name="attn")(y, mask=past)
        y = linen.Dense(16, name="mlp_1")(linen.LayerNorm(epsilon=1e-5, name="mlp_0")(x))
        y = linen.Dense(8, name="mlp_3")(jax.nn.gelu(y, approximate=False))
        return tokens.attend(x + y)


_RNG = np.random.default_rng(0)
_LABELS = _RNG.integers(0, CLASSES, N)
_IDS = _RNG.integers(0, TOKENS, (N, 6))

TWINS = [
    Twin("mlp", TorchMLP, FlaxMLP, _RNG.normal(size=(N, 6)), _LABELS),
    Twin("cnn", TorchCNN, FlaxCNN, _RNG.normal(size=(N, 2, 6, 6)), _LABELS),
    Twin("lstm", TorchLSTM, FlaxLSTM, _RNG.normal(size=(N, 4, 3)), _LABELS),
    Twin("gpt", TorchGPT, FlaxGPT, _IDS[:, :-1], _IDS[:, 1:]),
]

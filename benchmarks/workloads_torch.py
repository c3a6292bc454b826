# SPDX-License-Identifier: Apache-2.0
"""Workloads as PyTorch modules, written as by a user."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from benchmarks import specs
from benchmarks.workloads import Workload

# Weight names that differ between a layer description and its PyTorch module.
_NAMES = {
    specs.Lstm: {
        "weight_ih": "cell.weight_ih_l0",
        "weight_hh": "cell.weight_hh_l0",
        "bias": "cell.bias_ih_l0",
    },
    specs.Positions: {"weight": "table.weight"},
}


class Reshape(nn.Module):
    """Layers without weights that `torch.nn` lacks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the operation `kind`."""
        match self.kind:
            case "tokens":
                return x.flatten(2).transpose(1, 2)  # (n, c, h, w) -> (n, t, c)
            case "mean":
                return x.mean(1)
            case "pixel_mean":
                return x.mean((2, 3))
            case _:
                return x[:, 0]


class Positions(nn.Module):
    """Addition of learned positions.

    Each example looks up its own positions, without broadcasting and with separate memory for its
    ids: hook-based libraries require the former, Opacus' ghost mode the latter.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, d) -> (n, t, d)."""
        ids = torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)
        return x + self.table(ids)


class Token(nn.Module):
    """Concatenation of a learned vector before the first position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, d) -> (n, 1 + t, d)."""
        return torch.cat([self.vector.expand(x.shape[0], 1, -1), x], 1)


class Lstm(nn.Module):
    """LSTM with its second bias frozen at zero, and only the outputs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(inputs, width, batch_first=True)
        nn.init.zeros_(self.cell.bias_hh_l0.requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, inputs) -> (n, t, width)."""
        return self.cell(x)[0]


class Attention(nn.Module):
    """Self-attention through `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, d) -> (n, t, d)."""
        n, t, d = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*qkv, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, t, d))  # (n, h, t, d / h) -> (n, t, d)


class Residual(nn.Module):
    """Sum body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        if shortcut is not None:
            self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both branches to x."""
        return self.body(x) + (self.shortcut(x) if hasattr(self, "shortcut") else x)


def module(layer: specs.Layer) -> nn.Module:
    """Return the PyTorch module of a layer."""
    match layer:
        case specs.Op(kind):
            plain = {"relu": nn.ReLU, "gelu": nn.GELU, "flatten": nn.Flatten}
            return plain[kind]() if kind in plain else Reshape(kind)
        case specs.Pool(kind, size, stride, padding):
            return (nn.MaxPool2d if kind == "max" else nn.AvgPool2d)(size, stride, padding)
        case specs.Linear(inputs, outputs, bias):
            return nn.Linear(inputs, outputs, bias)
        case specs.Conv(inputs, outputs, kernel, stride, padding, bias):
            return nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=bias)
        case specs.Positions(length, width):
            return Positions(length, width)
        case specs.Embedding(num_embeddings, width):
            return nn.Embedding(num_embeddings, width)
        case specs.Token(width):
            return Token(width)
        case specs.Norm("layernorm", width):
            return nn.LayerNorm(width)
        case specs.Norm("groupnorm", width, groups):
            return nn.GroupNorm(groups, width)
        case specs.Lstm(inputs, width):
            return Lstm(inputs, width)
        case specs.Attention(width, heads, causal):
            return Attention(width, heads, causal)
        case specs.Residual(body, shortcut):
            return Residual(module(body), module(shortcut) if shortcut else None)
        case specs.Chain():
            inner = specs.children(layer).items()
            return nn.Sequential(OrderedDict((name, module(one)) for name, one in inner))
    raise TypeError(f"{type(layer).__name__} has no PyTorch module. Add a case to `module`.")


def model(workload: Workload, seed: int = 0) -> nn.Module:
    """Return the whole model with a copy of the weights `workload.weights(seed)`."""
    built = module(workload.model)
    weights = workload.weights(seed)
    state = built.state_dict()
    for path, layer in specs.walk(workload.model):
        for name in specs.shapes(layer):
            prefix = f"{path}." if path else ""
            ours = prefix + _NAMES.get(type(layer), {}).get(name, name)
            state[ours] = torch.tensor(weights[prefix + name])
    built.load_state_dict(state)
    return built


def losses(workload: Workload, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return one loss per example, (n,)."""
    match workload.loss:
        case "token":
            each = functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
            return each.view(y.shape).mean(1)
        case _:
            return functional.cross_entropy(outputs, y, reduction="none")

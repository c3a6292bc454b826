# SPDX-License-Identifier: Apache-2.0
"""A workload as a PyTorch module, the way a user would write it."""

from __future__ import annotations

from collections import OrderedDict
from functools import singledispatch

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dualdp_bench import specs
from dualdp_bench.workloads import Workload

# Weight names of a description whose PyTorch module calls them otherwise.
_NAMES = {
    specs.Recurrent: {
        "weight_ih": "cell.weight_ih_l0",
        "weight_hh": "cell.weight_hh_l0",
        "bias": "cell.bias_ih_l0",
    },
    specs.Positions: {"weight": "table.weight"},
}


class Reshape(nn.Module):
    """The layers without weights that `torch.nn` does not have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Whatever the kind says."""
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
    """Adds learned positions.

    Each example looks its own up, without broadcasting and in ids of their own memory: hook-based
    libraries require the one, Opacus' ghost mode the other.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, d) -> (n, t, d)."""
        ids = torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)
        return x + self.table(ids)


class Token(nn.Module):
    """Puts a learned vector before the first position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, d) -> (n, 1 + t, d)."""
        return torch.cat([self.vector.expand(x.shape[0], 1, -1), x], 1)


#: Kind of recurrent layer -> PyTorch's own.
CELLS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Recurrent(nn.Module):
    """PyTorch's layer with its second bias frozen at zero, returning the outputs alone."""

    def __init__(self, kind: str, inputs: int, width: int) -> None:
        super().__init__()
        self.cell = CELLS[kind](inputs, width, batch_first=True)
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
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        if shortcut is not None:
            self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both branches see x."""
        return self.body(x) + (self.shortcut(x) if hasattr(self, "shortcut") else x)


@singledispatch
def module(layer: specs.Layer) -> nn.Module:
    """The module of a layer."""
    raise TypeError(f"{type(layer).__name__} has no PyTorch module. Register one with `module`.")


@module.register
def _(layer: specs.Op) -> nn.Module:
    plain = {"relu": nn.ReLU, "gelu": nn.GELU, "flatten": nn.Flatten}
    return plain[layer.kind]() if layer.kind in plain else Reshape(layer.kind)


@module.register
def _(layer: specs.Pool) -> nn.Module:
    kind = nn.MaxPool2d if layer.kind == "max" else nn.AvgPool2d
    return kind(layer.size, layer.stride, layer.padding)


@module.register
def _(layer: specs.Conv) -> nn.Module:
    return nn.Conv2d(
        layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding, bias=layer.bias
    )


@module.register
def _(layer: specs.Chain) -> nn.Module:
    return nn.Sequential(OrderedDict((name, module(part)) for name, part in layer.parts().items()))


@module.register
def _(layer: specs.Residual) -> nn.Module:
    return Residual(module(layer.body), module(layer.shortcut) if layer.shortcut else None)


module.register(specs.AdaptivePool, lambda layer: nn.AdaptiveAvgPool2d(layer.size))
module.register(specs.Linear, lambda layer: nn.Linear(layer.inputs, layer.outputs, layer.bias))
module.register(specs.Embedding, lambda layer: nn.Embedding(layer.rows, layer.width))
module.register(specs.Positions, lambda layer: Positions(layer.rows, layer.width))
module.register(specs.Token, lambda layer: Token(layer.width))
module.register(specs.LayerNorm, lambda layer: nn.LayerNorm(layer.width))
module.register(specs.GroupNorm, lambda layer: nn.GroupNorm(layer.groups, layer.width))
module.register(specs.InstanceNorm, lambda layer: nn.InstanceNorm2d(layer.width, affine=True))
module.register(specs.Recurrent, lambda layer: Recurrent(layer.kind, layer.inputs, layer.width))
module.register(specs.Attention, lambda layer: Attention(layer.width, layer.heads, layer.causal))


def model(workload: Workload, seed: int = 0) -> nn.Module:
    """The whole model, holding `workload.weights(seed)`."""
    built = module(workload.model)
    weights = workload.weights(seed)
    state = built.state_dict()
    for path, layer in specs.walk(workload.model):
        for name in layer.shapes():
            prefix = f"{path}." if path else ""
            ours = prefix + _NAMES.get(type(layer), {}).get(name, name)
            state[ours] = torch.from_numpy(weights[prefix + name])
    built.load_state_dict(state)
    return built


def batch(workload: Workload, n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """`workload.batch` as tensors."""
    return load(workload, *workload.batch(n, seed))


def load(
    workload: Workload, x: np.ndarray, y: np.ndarray, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """One NumPy batch on the device."""
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


def losses(workload: Workload, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One loss per example, (n,)."""
    match workload.loss:
        case "squares":
            return outputs.flatten(1).square().sum(1) / 2
        case "binary":
            return functional.binary_cross_entropy_with_logits(
                outputs.squeeze(-1), y, reduction="none"
            )
        case "token":
            each = functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
            return each.view(y.shape).mean(1)
        case _:
            return functional.cross_entropy(outputs, y, reduction="none")

# SPDX-License-Identifier: Apache-2.0
"""Models of the shared grid on PyTorch, and their loss. Calls nothing of the library."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.cases import layers

with warnings.catch_warnings():  # torch warns once that even kernels with "same" padding copy
    warnings.simplefilter("ignore", UserWarning)
    F.conv1d(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), padding="same")


class _Mean(nn.Module):
    """Mean over an axis of one example."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axis + 1)


def _conv(kind: str) -> Any:
    def build(o: dict[str, Any]) -> nn.Module:
        rest = {k: v for k, v in o.items() if k not in ("in", "out", "kernel")}
        return getattr(nn, f"Conv{kind}")(o["in"], o["out"], o["kernel"], **rest)

    return build


LAYERS: dict[str, Any] = {
    "linear": lambda o: nn.Linear(o["in"], o["out"], bias=o.get("bias", True)),
    "conv1d": _conv("1d"),
    "conv2d": _conv("2d"),
    "embedding": lambda o: nn.Embedding(o["num"], o["dim"], padding_idx=o.get("padding_idx")),
    "layernorm": lambda o: nn.LayerNorm(o["shape"], bias=o.get("bias", True)),
    "groupnorm": lambda o: nn.GroupNorm(o["groups"], o["channels"]),
    "tanh": lambda o: nn.Tanh(),
    "gelu": lambda o: nn.GELU(),
    "relu": lambda o: nn.ReLU(),
    "flatten": lambda o: nn.Flatten(),
    "mean": lambda o: _Mean(o["axis"]),
    "avgpool2d": lambda o: nn.AvgPool2d(o["kernel"]),
}


class Special(nn.Module):
    """One of `layers.SPECIALS`: parameters by dotted name, and the formula given there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        for path, shape in layers.SPECIALS[name].items():
            owner: nn.Module = self
            *modules, attribute = path.split(".")
            for module in modules:
                if not hasattr(owner, module):
                    owner.add_module(module, nn.Module())
                owner = getattr(owner, module)
            owner.register_parameter(attribute, nn.Parameter(torch.zeros(shape)))
        self._formula = getattr(self, f"_{name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._formula(x)

    def _tied(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.embedding.weight
        return F.linear(_linear(self.body, F.embedding(ids, table)).tanh(), table)

    def _reuse(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.layer, _linear(self.layer, x).tanh())

    def _reuse_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.layer, _linear(self.layer, x).tanh().mean(1))

    def _functional(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_linear(self.first, x).tanh(), self.first.weight)

    def _raw(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.head, (x + self.pos) * self.scale)

    def _class_token(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        return _linear(self.head, _linear(self.first, x).tanh())

    def _unused(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.first, x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_linear(self.first, x).tanh(), self.first.weight, self.second.bias)

    def _two_branches(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.first, x) * _linear(self.second, x).tanh()


def _linear(owner: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, owner.weight, owner.bias)


def model_of(case: layers.Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The case's model with its parameters."""
    if case.special is not None:
        model: nn.Module = Special(case.special)
    else:
        model = nn.Sequential(*(LAYERS[kind](options) for kind, options in case.layers))
    model = model.to(dtype)
    values = layers.parameters(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values[name]))
            parameter.requires_grad_(name not in case.frozen)
    return model


def batch_of(case: layers.Case, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(n, *x) inputs."""
    x = torch.from_numpy(layers.inputs(case))
    return x.to(dtype) if x.is_floating_point() else x


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """(n,): sum over each example's outputs of y^2 / 2 + y cos(index)."""
    y = model(x).flatten(1)
    index = torch.arange(y.shape[1], dtype=y.dtype, device=y.device)
    return (y.square() / 2 + y * index.cos()).sum(1)

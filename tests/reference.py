# SPDX-License-Identifier: Apache-2.0
"""The truth: float64, one example at a time, plain autograd. Calls nothing of the library."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.cases import layers
from tests.closeness import factors_of

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
        hidden = F.linear(F.embedding(ids, table), self.body.weight, self.body.bias).tanh()
        return F.linear(hidden, table)

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.first.weight, self.first.bias)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.head.weight, self.head.bias)

    def _reuse(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(self._layer(x).tanh())

    def _reuse_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(self._layer(x).tanh().mean(1))

    def _functional(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._first(x).tanh(), self.first.weight)

    def _raw(self, x: torch.Tensor) -> torch.Tensor:
        return self._head((x + self.pos) * self.scale)

    def _class_token(self, x: torch.Tensor) -> torch.Tensor:
        token = self.token.expand(len(x), 1, -1)
        return self._head(self._first(torch.cat([token, x], 1)).tanh())

    def _unused(self, x: torch.Tensor) -> torch.Tensor:
        return self._first(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._first(x).tanh(), self.first.weight, self.second.bias)

    def _two_branches(self, x: torch.Tensor) -> torch.Tensor:
        return self._first(x) * F.linear(x, self.second.weight, self.second.bias).tanh()


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


def losses(case: layers.Case) -> np.ndarray:
    """(n,) losses of a case."""
    model, x = model_of(case), batch_of(case)
    parts = [loss_fn(model, x[k : k + 1]).detach().numpy() for k in range(len(x))]
    return np.concatenate(parts) if parts else np.zeros(0)


def per_sample_grads(case: layers.Case) -> dict[str, np.ndarray]:
    """Name -> (n, *shape) of a case."""
    return loop(model_of(case), loss_fn, batch_of(case))


def loop(model: nn.Module, loss: Any, x: torch.Tensor) -> dict[str, np.ndarray]:
    """Name -> (n, *shape): one backward per example."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {name: np.zeros((len(x), *p.shape)) for name, p in named.items()}
    for k in range(len(x)):
        total = loss(model, x[k : k + 1]).sum()
        parts = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        for name, part in zip(named, parts, strict=True):
            if part is not None:
                found[name][k] = part.double().numpy()
    return found


def norms_of(found: dict[str, np.ndarray]) -> np.ndarray:
    """(n,) norms of whole gradients."""
    squares = [np.square(g).sum(tuple(range(1, g.ndim))) for g in found.values()]
    return np.sqrt(np.sum(squares, axis=0))


def clipped_sum(
    found: dict[str, np.ndarray], max_grad_norm: float, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Name -> shape: gradients scaled to norm at most C, summed in `dtype`."""
    factors = factors_of(norms_of(found), max_grad_norm, dtype)
    return {name: np.einsum("n,n...->...", factors, g) for name, g in found.items()}

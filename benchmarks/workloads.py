# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103  (the builders' names say what they build)
"""Models of the literature, described once for both stacks, with weights and synthetic data.

The first five are the models of Subramani, Vadivelu and Kamath 2020 (fast-dpsgd), which the Opacus
paper uses too. Weights and data come from
NumPy and a seed, in PyTorch's layout, so that every stack and system uses the same numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.specs import (
    Attention,
    Conv,
    Embedding,
    Layer,
    Linear,
    Lstm,
    Norm,
    Op,
    Pool,
    Positions,
    Residual,
    Token,
    chain,
    count,
    shapes,
    walk,
)

RELU, GELU, FLATTEN, MEAN = Op("relu"), Op("gelu"), Op("flatten"), Op("mean")


@dataclass(frozen=True)
class Workload:
    """Model with its data and loss."""

    name: str  # key of `WORKLOADS`, or the name of a single layer
    model: Layer
    shape: tuple[int, ...]  # of ONE example's input; images are (c, h, w)
    loss: str = "class"  # or "token"
    vocabulary: int | None = None  # number of input ids; None: inputs uniform in [0, 1)
    classes: int = 10
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the builder

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return count(self.model)

    def weights(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return float32 weights by dotted name, read-only: He scaling, none of them constant."""
        return dict(_weights(self.model, seed))

    def batch(self, n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs (n, *shape) and targets (n,), or (n, t) for `token`."""
        rng = np.random.default_rng(seed)
        if self.vocabulary is None:
            x = rng.random((n, *self.shape), dtype=np.float32)
        else:
            x = rng.integers(0, self.vocabulary, (n, *self.shape))
        targets = (n, *self.shape) if self.loss == "token" else (n,)
        return x, rng.integers(0, self.classes, targets)


@functools.lru_cache(maxsize=1)  # every system of a point asks for the same
def _weights(model: Layer, seed: int) -> dict[str, np.ndarray]:
    """Weights of a model by dotted name, which nobody can change."""
    rng = np.random.default_rng(seed)
    drawn = {
        f"{path}.{name}" if path else name: _draw(rng, layer, name, shape)
        for path, layer in walk(model)
        for name, shape in shapes(layer).items()
    }
    for array in drawn.values():
        array.setflags(write=False)
    return drawn


def _draw(rng: np.random.Generator, layer: Layer, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random weight, scaled to keep the size of signals through the layers."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if isinstance(layer, Norm) and name == "weight":
        return 1 + np.float32(0.1) * noise
    if len(shape) == 1 or isinstance(layer, Positions):
        return np.float32(0.05) * noise
    if isinstance(layer, Embedding):
        return noise
    return np.float32(np.sqrt(2 / np.prod(shape[1:]))) * noise


def mlp(width: int = 512, depth: int = 2) -> Workload:
    """Return the network 784-512-512-10, or one with another width and depth."""
    sizes = (784, *(width,) * depth)
    hidden = [layer for i, o in itertools.pairwise(sizes) for layer in (Linear(i, o), RELU)]
    return Workload("mlp", chain(*hidden, Linear(sizes[-1], 10)), (784,))


def mnist() -> Workload:
    layers = chain(
        *(Conv(1, 16, 8, stride=2, padding=3), RELU, Pool("max", 2, 1)),  # 28 -> 14 -> 13
        *(Conv(16, 32, 4, stride=2), RELU, Pool("max", 2, 1)),  # -> 5 -> 4
        *(FLATTEN, Linear(512, 32, image=(32, 4, 4)), RELU, Linear(32, 10)),
    )
    return Workload("mnist", layers, (1, 28, 28))


def cifar10() -> Workload:
    """Return eight 3 x 3 convolutions with three average pools and a mean over the pixels."""
    layers: list[Layer] = []
    channels = (3, 32, 32, 64, 64, 128, 128, 256)
    for i, (inputs, outputs) in enumerate(itertools.pairwise(channels)):
        layers += [Conv(inputs, outputs, 3, padding=1), RELU]
        layers += [Pool("avg", 2, 2)] if i in (1, 3, 5) else []
    layers += [Conv(256, 10, 3, padding=1), Op("pixel_mean")]
    return Workload("cifar10", chain(*layers), (3, 32, 32))


def embed(length: int = 256, vocabulary: int = 10_000) -> Workload:
    layers = chain(Embedding(vocabulary + 4, 16), MEAN, Linear(16, 2))
    return Workload("embed", layers, (length,), vocabulary=vocabulary, classes=2)


def lstm(length: int = 256) -> Workload:
    layers = chain(Embedding(10_004, 100), Lstm(100, 100), MEAN, Linear(100, 2))
    return Workload("lstm", layers, (length,), vocabulary=10_000, classes=2)


def block(width: int, heads: int, *, causal: bool) -> tuple[Layer, Layer]:
    """Return a pre-norm transformer block: attention, and a GELU network of four times width."""
    attention = chain(Norm("layernorm", width), Attention(width, heads, causal))
    feed = chain(Norm("layernorm", width), Linear(width, 4 * width), GELU, Linear(4 * width, width))
    return Residual(attention), Residual(feed)


def gpt(
    layers: int = 4, width: int = 256, heads: int = 4, length: int = 128, vocabulary: int = 2_000
) -> Workload:
    """Return a decoder with learned positions and an untied head."""
    blocks = block(width, heads, causal=True) * layers
    model = chain(
        Embedding(vocabulary, width),
        Positions(length, width),
        *blocks,
        Norm("layernorm", width),
        Linear(width, vocabulary, bias=False),
    )
    return Workload("gpt", model, (length,), "token", vocabulary, vocabulary)


def vit_tiny(
    layers: int = 12, width: int = 192, heads: int = 3, image: int = 224, patch: int = 16
) -> Workload:
    blocks = block(width, heads, causal=False) * layers
    model = chain(
        Conv(3, width, patch, stride=patch),
        Op("tokens"),
        Token(width),
        Positions((image // patch) ** 2 + 1, width),
        *blocks,
        Norm("layernorm", width),
        Op("first"),
        Linear(width, 10),
    )
    return Workload("vit_tiny", model, (3, image, image))


def vit_base(
    layers: int = 12, width: int = 768, heads: int = 12, image: int = 224, patch: int = 16
) -> Workload:
    return replace(vit_tiny(layers, width, heads, image, patch), name="vit_base", options={})


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Layer:
    return Conv(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _resnet(
    repeats: tuple[int, ...], image: int, groups: int, *, bottleneck: bool
) -> tuple[Layer, tuple[int, ...]]:
    """Model and input shape of a residual network with GroupNorm instead of BatchNorm."""

    def normed(*sizes: int) -> tuple[Layer, Layer]:
        return _convolution(*sizes), Norm("groupnorm", sizes[1], groups)

    layers = [*normed(3, 64, 7, 2), RELU, Pool("max", 3, 2, 1)]
    inputs = 64
    for width, repeat in zip((64, 128, 256, 512), repeats, strict=True):
        outputs = 4 * width if bottleneck else width
        for index in range(repeat):
            stride = 2 if index == 0 and width > 64 else 1
            body = [*normed(inputs, width, 3, stride), RELU, *normed(width, width, 3)]
            if bottleneck:
                body = [*normed(inputs, width, 1), RELU, *normed(width, width, 3, stride), RELU]
                body += normed(width, outputs, 1)
            project = chain(*normed(inputs, outputs, 1, stride)) if outputs != inputs else None
            layers += [Residual(chain(*body), project), RELU]
            inputs = outputs
    return chain(*layers, Op("pixel_mean"), Linear(inputs, 10)), (3, image, image)


def resnet18_gn(image: int = 64, groups: int = 32) -> Workload:
    """Return ResNet-18 with GroupNorm instead of BatchNorm."""
    return Workload("resnet18_gn", *_resnet((2, 2, 2, 2), image, groups, bottleneck=False))


def resnet50_gn(image: int = 224, groups: int = 32) -> Workload:
    """Return ResNet-50 with GroupNorm instead of BatchNorm."""
    return Workload("resnet50_gn", *_resnet((3, 4, 6, 3), image, groups, bottleneck=True))


def wrn16_4(image: int = 32, groups: int = 16) -> Workload:
    """Return the WRN-16-4 with GroupNorm of De et al. 2022, without weight standardisation."""

    def activated(width: int) -> tuple[Layer, Layer]:
        return Norm("groupnorm", width, groups), RELU

    layers: list[Layer] = [_convolution(3, 16, 3)]
    inputs = 16
    for outputs in (64, 128, 256):
        stride = 1 if outputs == 64 else 2
        first = (_convolution(inputs, outputs, 3, stride), *activated(outputs))
        second = _convolution(outputs, outputs, 3)
        project = chain(_convolution(inputs, outputs, 1, stride))
        again = (*activated(outputs), second, *activated(outputs), second)
        layers += [*activated(inputs), Residual(chain(*first, second), project)]
        layers += [Residual(chain(*again))]
        inputs = outputs
    model = chain(*layers, *activated(inputs), Op("pixel_mean"), Linear(inputs, 10))
    return Workload("wrn16_4", model, (3, image, image))


WORKLOADS: dict[str, Callable[..., Workload]] = {
    builder.__name__: builder
    for builder in (
        *(mlp, mnist, cifar10, embed, lstm, gpt),
        *(resnet18_gn, resnet50_gn, wrn16_4, vit_tiny, vit_base),
    )
}  # fmt: skip


def check(name: str) -> None:
    """Raise if there is no workload of that name."""
    if name not in WORKLOADS:
        raise ValueError(f"workload={name!r} is not known. Expected one of {sorted(WORKLOADS)}.")


def create(name: str, **options: Any) -> Workload:
    """Return the workload of that name; options are arguments of its builder."""
    check(name)
    workload = WORKLOADS[name](**options)
    workload.options.update(options)
    return workload

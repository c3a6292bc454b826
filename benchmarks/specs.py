# SPDX-License-Identifier: Apache-2.0
"""Layers of the benchmark models as data, independent of any framework.

`shapes` names the weights of a layer, in PyTorch's layout, and `children` the layers inside it.
`workloads_torch` turns a layer into a module, `workloads_jax` into a function of nested dicts; both
read the same description, so the two stacks cannot diverge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Layer of a model."""


@dataclass(frozen=True)
class Op(Layer):
    """Layer without weights."""

    # "relu", "gelu", "flatten" (pixels to features), "tokens" (pixels to positions), "mean" (over
    # positions), "pixel_mean" or "first" (position).
    kind: str


@dataclass(frozen=True)
class Pool(Layer):
    """`max` or `avg` pooling over square windows."""

    kind: str
    size: int
    stride: int
    padding: int = 0


@dataclass(frozen=True)
class Linear(Layer):
    """Linear layer, (..., inputs) -> (..., outputs)."""

    inputs: int
    outputs: int
    bias: bool = True
    image: tuple[int, int, int] | None = None  # (c, h, w) of the image flattened into `inputs`


@dataclass(frozen=True)
class Conv(Layer):
    """Two-dimensional convolution with a square kernel."""

    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True


@dataclass(frozen=True)
class Embedding(Layer):
    """Embedding of ids (n, t) as vectors (n, t, width)."""

    num_embeddings: int
    width: int


@dataclass(frozen=True)
class Positions(Embedding):
    """Addition of a learned vector to each position of (n, t, width)."""


@dataclass(frozen=True)
class Token(Layer):
    """Concatenation of a learned vector before the first position (class token of a ViT)."""

    width: int


@dataclass(frozen=True)
class Norm(Layer):
    """`layernorm` over the last axis; `groupnorm` of an image."""

    kind: str
    width: int
    groups: int = 1


@dataclass(frozen=True)
class Lstm(Layer):
    """LSTM with all outputs: (n, t, inputs) -> (n, t, width).

    One bias is trained, as in Keras and Haiku; PyTorch's second bias is frozen at zero.
    """

    inputs: int
    width: int


@dataclass(frozen=True)
class Attention(Layer):
    """Multi-head self-attention; `causal` masks later positions."""

    width: int
    heads: int
    causal: bool


@dataclass(frozen=True)
class Chain(Layer):
    """Sequence of layers, named by kind and number: conv1, relu1, conv2, ..."""

    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Residual(Layer):
    """Sum body(x) + shortcut(x), or body(x) + x without a shortcut."""

    body: Chain
    shortcut: Chain | None = None


def chain(*layers: Layer) -> Chain:
    """Return the sequence of the layers."""
    return Chain(layers)


def shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Return weight name -> shape of a layer's own weights, in PyTorch's layout."""
    found: dict[str, tuple[int, ...]] = {}
    match layer:
        case Linear(inputs, outputs):
            found = {"weight": (outputs, inputs)}
        case Conv(inputs, outputs, kernel):
            found = {"weight": (outputs, inputs, kernel, kernel)}
        case Embedding(num_embeddings, width):
            found = {"weight": (num_embeddings, width)}
        case Token(width):
            found = {"vector": (width,)}
        case Norm(_, width):
            found = {"weight": (width,), "bias": (width,)}
        case Lstm(inputs, width):
            gates = 4 * width
            found = {"weight_ih": (gates, inputs), "weight_hh": (gates, width), "bias": (gates,)}
    if isinstance(layer, Linear | Conv) and layer.bias:
        found["bias"] = (layer.outputs,)
    return found


def children(layer: Layer) -> dict[str, Layer]:
    """Return name -> layer of the layers inside a layer."""
    match layer:
        case Attention(width):
            return {"qkv": Linear(width, 3 * width), "out": Linear(width, width)}
        case Residual(body, shortcut):
            return {"body": body} | ({"shortcut": shortcut} if shortcut else {})
        case Chain(layers):
            seen: Counter[str] = Counter()
            named = {}
            for inner in layers:
                is_kind = isinstance(inner, Op | Norm)
                kind = inner.kind if is_kind else type(inner).__name__.lower()
                seen[kind] += 1
                named[f"{kind}{seen[kind]}"] = inner
            return named
    return {}


def walk(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield (dotted path, layer) of the layer itself and all inner layers, outermost first."""
    yield path, layer
    for name, inner in children(layer).items():
        yield from walk(inner, f"{path}.{name}" if path else name)


def count(layer: Layer) -> int:
    """Return the number of trained parameters."""
    return sum(math.prod(shape) for _, inner in walk(layer) for shape in shapes(inner).values())

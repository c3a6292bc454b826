# SPDX-License-Identifier: Apache-2.0
"""Layers as data: what a benchmark model is made of, before any framework.

A layer says which weights it holds (`shapes`, in PyTorch's layout) and which layers it is made of
(`parts`). `workloads_torch` turns a layer into a module, `workloads_jax` into a function of nested
dicts; both read the same description, so the two stacks cannot drift apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layer:
    """One layer; without weights and parts unless a subclass says so."""

    def shapes(self) -> Shapes:
        """Weight name -> shape, in PyTorch's layout."""
        return {}

    def parts(self) -> dict[str, Layer]:
        """Name -> layer inside this one."""
        return {}


@dataclass(frozen=True)
class Op(Layer):
    """A layer without weights.

    Attributes:
        kind: `relu`, `gelu`, `flatten` (pixels to features), `tokens` (pixels to positions),
            `mean` (over positions), `pixel_mean` or `first` (position).
    """

    kind: str


@dataclass(frozen=True)
class Pool(Layer):
    """`max` or `avg` pooling over square windows."""

    kind: str
    size: int
    stride: int
    padding: int = 0


@dataclass(frozen=True)
class AdaptivePool(Layer):
    """Average pooling to a size x size image, whatever comes in."""

    size: int


@dataclass(frozen=True)
class Linear(Layer):
    """(..., inputs) -> (..., outputs).

    Attributes:
        inputs: features of an example or position.
        outputs: features that come out.
        bias: whether there is one.
        image: the (c, h, w) that was flattened into `inputs`, or None.
    """

    inputs: int
    outputs: int
    bias: bool = True
    image: tuple[int, int, int] | None = None

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        bias: Shapes = {"bias": (self.outputs,)} if self.bias else {}
        return {"weight": (self.outputs, self.inputs)} | bias


@dataclass(frozen=True)
class Conv(Layer):
    """Two-dimensional convolution with a square kernel."""

    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        bias: Shapes = {"bias": (self.outputs,)} if self.bias else {}
        return {"weight": (self.outputs, self.inputs, self.kernel, self.kernel)} | bias


@dataclass(frozen=True)
class Embedding(Layer):
    """Ids (n, t) -> vectors (n, t, width)."""

    rows: int
    width: int

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        return {"weight": (self.rows, self.width)}


@dataclass(frozen=True)
class Positions(Embedding):
    """Adds a learned vector to each position: (n, t, width) -> the same."""


@dataclass(frozen=True)
class Token(Layer):
    """Puts one learned vector before the first position (the class token of a ViT)."""

    width: int

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        return {"vector": (self.width,)}


@dataclass(frozen=True)
class LayerNorm(Layer):
    """Layer normalisation over the last axis."""

    width: int

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        return {"weight": (self.width,), "bias": (self.width,)}


@dataclass(frozen=True)
class GroupNorm(Layer):
    """Group normalisation of an image."""

    width: int
    groups: int

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        return {"weight": (self.width,), "bias": (self.width,)}


@dataclass(frozen=True)
class InstanceNorm(Layer):
    """Instance normalisation of an image: every channel by itself."""

    width: int

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        return {"weight": (self.width,), "bias": (self.width,)}


#: Kind of recurrent layer -> products of its width that one step makes.
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


@dataclass(frozen=True)
class Recurrent(Layer):
    """One recurrent layer of a kind in `GATES`, all outputs: (n, t, inputs) -> (n, t, width).

    One bias is trained, as in Keras and Haiku; PyTorch's second bias stays zero and frozen.
    """

    kind: str
    inputs: int
    width: int

    def shapes(self) -> Shapes:
        """Weight name -> shape."""
        rows = GATES[self.kind] * self.width
        return {
            "weight_ih": (rows, self.inputs),
            "weight_hh": (rows, self.width),
            "bias": (rows,),
        }


@dataclass(frozen=True)
class Attention(Layer):
    """Multi-head self-attention; `causal` hides later positions."""

    width: int
    heads: int
    causal: bool

    def parts(self) -> dict[str, Layer]:
        """Name -> layer inside this one."""
        return {
            "qkv": Linear(self.width, 3 * self.width),
            "out": Linear(self.width, self.width),
        }


@dataclass(frozen=True)
class Chain(Layer):
    """Layers one after the other, named by kind and number: conv1, relu1, conv2, ..."""

    layers: tuple[Layer, ...]

    def parts(self) -> dict[str, Layer]:
        """Name -> layer inside this one."""
        seen: Counter[str] = Counter()
        named = {}
        for layer in self.layers:
            named_by_kind = isinstance(layer, Op | Recurrent)
            kind = layer.kind if named_by_kind else type(layer).__name__.lower()
            seen[kind] += 1
            named[f"{kind}{seen[kind]}"] = layer
        return named


@dataclass(frozen=True)
class Residual(Layer):
    """x -> body(x) + shortcut(x); without a shortcut x itself is added."""

    body: Chain
    shortcut: Chain | None = None

    def parts(self) -> dict[str, Layer]:
        """Name -> layer inside this one."""
        return {"body": self.body} | ({"shortcut": self.shortcut} if self.shortcut else {})


def chain(*layers: Layer) -> Chain:
    """The layers in order."""
    return Chain(layers)


def walk(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Every layer inside with its dotted path, itself included, outermost first."""
    yield path, layer
    for name, part in layer.parts().items():
        yield from walk(part, f"{path}.{name}" if path else name)


def weight_shapes(layer: Layer) -> Shapes:
    """Dotted weight name -> shape, of every weight inside."""
    return {
        f"{path}.{name}" if path else name: shape
        for path, inner in walk(layer)
        for name, shape in inner.shapes().items()
    }


def count(layer: Layer) -> int:
    """Number of trained parameters."""
    return sum(math.prod(shape) for shape in weight_shapes(layer).values())

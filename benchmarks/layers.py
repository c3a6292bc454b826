# SPDX-License-Identifier: Apache-2.0
"""Single layers and toy networks: the micro-benchmarks of the two papers that compared methods.

`LAYERS` holds the layers of the Opacus paper (Yousefpour et al. 2021, Fig. 3 and 5) in its sizes;
`toy_cnn` is the network of Rochette et al. 2019 (Fig. 1 to 3), whose sweeps `SWEEPS` lists at sizes
for a processor and for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.specs import (
    LSTM,
    Attention,
    Conv,
    Embedding,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    Op,
    Pool,
    chain,
)
from benchmarks.workloads import Workload


def _layer(name: str, layer: Layer, shape: tuple[int, ...], **options: Any) -> Workload:
    vocabulary = layer.rows if isinstance(layer, Embedding) else None
    return Workload(name, chain(layer), shape, "squares", vocabulary, options=options)


def linear(width: int = 512) -> Workload:
    return _layer("linear", Linear(width, width), (width,), width=width)


def conv(channels: int = 64, kernel: int = 8, height: int = 50, width: int = 100) -> Workload:
    sizes = {"channels": channels, "kernel": kernel, "height": height, "width": width}
    return _layer("conv", Conv(channels, channels, kernel), (channels, height, width), **sizes)


def embedding(rows: int = 20_000, width: int = 100, length: int = 1) -> Workload:
    sizes = {"rows": rows, "width": width, "length": length}
    return _layer("embedding", Embedding(rows, width), (length,), **sizes)


def layernorm(width: int = 64, length: int = 16) -> Workload:
    return _layer("layernorm", LayerNorm(width), (length, width), width=width, length=length)


def groupnorm(channels: int = 256, groups: int = 16, image: int = 8) -> Workload:
    sizes = {"channels": channels, "groups": groups, "image": image}
    return _layer("groupnorm", GroupNorm(channels, groups), (channels, image, image), **sizes)


def attention(width: int = 100, heads: int = 4, length: int = 128) -> Workload:
    sizes = {"width": width, "heads": heads, "length": length}
    return _layer("attention", Attention(width, heads, causal=False), (length, width), **sizes)


def lstm_layer(width: int = 100, length: int = 128) -> Workload:
    return _layer("lstm_layer", LSTM(width, width), (length, width), width=width, length=length)


LAYERS: dict[str, Callable[..., Workload]] = {
    builder.__name__: builder
    for builder in (linear, conv, embedding, layernorm, groupnorm, attention, lstm_layer)
}
# Smaller layers where the paper's would take a processor minutes.
QUICK_SIZES: dict[str, dict[str, int]] = {
    "conv": {"channels": 8, "kernel": 3, "height": 12, "width": 24},
    "embedding": {"rows": 1_000},
    "attention": {"length": 32},
    "lstm_layer": {"length": 16},
}


def toy_cnn(
    depth: int = 3, rate: float = 1.0, first: int = 25, kernel: int = 3, image: int = 64
) -> Workload:
    """Convolutions whose channels grow by `rate`, a max pool after every second, a linear head."""
    options = {"depth": depth, "rate": rate, "first": first, "kernel": kernel, "image": image}
    layers: list[Layer] = []
    inputs = 3
    for index in range(depth):
        outputs = round(first * rate**index)
        layers += [Conv(inputs, outputs, kernel), Op("relu")]
        layers += [Pool("max", 2, 2)] if index % 2 else []
        inputs = outputs
    model = chain(*layers, Op("pixel_mean"), Linear(inputs, 10))
    return Workload("toy_cnn", model, (3, image, image), options=options)


# Points of each figure: (axis, sizes, examples). Their 256 pixels and channels on a GPU only.
Sweep = list[tuple[str, dict[str, Any], int]]


def _rates(rates: tuple[float, ...], batch: int, **sizes: Any) -> Sweep:
    return [("rate", {"rate": rate, **sizes}, batch) for rate in rates]


def _batches(batches: tuple[int, ...], **sizes: Any) -> Sweep:
    return [("batch", sizes, n) for n in batches]


SWEEPS: dict[str, Sweep] = {
    "quick": _rates((2.0,), 4, depth=2, first=8, image=16),
    "cpu": _rates((1.0, 1.3, 1.6), 8, kernel=3)
    + _rates((1.0, 1.3, 1.6), 8, kernel=5)
    + _batches((2, 4, 8, 16), kernel=5, first=64),
    "cuda": [
        point
        for kernel in (3, 5)
        for depth in (2, 3, 4)
        for point in _rates((1.0, 1.25, 1.5, 1.75, 2.0), 8, kernel=kernel, depth=depth, image=256)
    ]
    + _batches((2, 4, 8, 16, 32), kernel=5, first=256, image=256),
}

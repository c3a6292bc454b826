# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103  (the builders' names say what they build)
"""Single layers and toy networks: micro-benchmarks of two papers that compare methods.

`LAYERS` holds the layers of the Opacus paper (Yousefpour et al. 2021, Fig. 3 and 5) in its sizes;
`toy_cnn` is the network of Rochette et al. 2019 (Fig. 1 to 3), whose sweeps `SWEEPS` lists, with
the two networks of their Table 1, at sizes for a processor and for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dualdp_tools.bench import workloads
from dualdp_tools.bench.specs import (
    Attention,
    Conv,
    Embedding,
    Layer,
    Linear,
    Norm,
    Op,
    Pool,
    Recurrent,
    chain,
)
from dualdp_tools.bench.workloads import Workload


def _layer(name: str, layer: Layer, shape: tuple[int, ...], **options: Any) -> Workload:
    vocabulary = layer.num_embeddings if isinstance(layer, Embedding) else None
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
    return _layer(
        "layernorm", Norm("layernorm", width), (length, width), width=width, length=length
    )


def groupnorm(channels: int = 256, groups: int = 16, image: int = 8) -> Workload:
    sizes = {"channels": channels, "groups": groups, "image": image}
    return _layer(
        "groupnorm", Norm("groupnorm", channels, groups), (channels, image, image), **sizes
    )


def instancenorm(channels: int = 256, image: int = 8) -> Workload:
    sizes = {"channels": channels, "image": image}
    return _layer("instancenorm", Norm("instancenorm", channels), (channels, image, image), **sizes)


def attention(width: int = 100, heads: int = 4, length: int = 128) -> Workload:
    sizes = {"width": width, "heads": heads, "length": length}
    return _layer("attention", Attention(width, heads, causal=False), (length, width), **sizes)


def recurrent(kind: str, width: int = 100, length: int = 128) -> Workload:
    layer = Recurrent(kind, width, width)
    return _layer(f"{kind}_layer", layer, (length, width), width=width, length=length)


LAYERS: dict[str, Callable[..., Workload]] = {
    builder.__name__: builder
    for builder in (linear, conv, embedding, layernorm, groupnorm, instancenorm, attention)
} | {f"{kind}_layer": partial(recurrent, kind) for kind in ("rnn", "gru", "lstm")}

# Sizes by layer, for "quick", "cpu" and "cuda"; smaller than the papers' if those take too long.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "quick": {
        "linear": {"width": 64},
        "conv": {"channels": 8, "kernel": 3, "height": 12, "width": 24},
        "embedding": {"rows": 1_000},
        "attention": {"length": 16},
        "rnn_layer": {"length": 8},
        "gru_layer": {"length": 8},
        "lstm_layer": {"length": 8},
    },
    "cpu": {
        "conv": {"channels": 32, "kernel": 3, "height": 16, "width": 32},
        "embedding": {"rows": 2_000},
    },
    "cuda": {},
}
BATCHES: dict[str, tuple[int, ...]] = {"quick": (8,), "cpu": (16, 128), "cuda": (16, 128, 512)}


def layers(size_key: str) -> list[Workload]:
    """Return every layer, in the sizes of "quick", "cpu" or "cuda"."""
    return [builder(**SIZES[size_key].get(name, {})) for name, builder in LAYERS.items()]


def toy_cnn(
    depth: int = 3, rate: float = 1.0, first: int = 25, kernel: int = 3, image: int = 64
) -> Workload:
    """Return convolutions with channels growing by `rate`, max pools and a linear head."""
    options = {"depth": depth, "rate": rate, "first": first, "kernel": kernel, "image": image}
    inner: list[Layer] = []
    inputs = 3
    for index in range(depth):
        outputs = round(first * rate**index)
        inner += [Conv(inputs, outputs, kernel), Op("relu")]
        inner += [Pool("max", 2, 2)] if index % 2 else []
        inputs = outputs
    model = chain(*inner, Op("pixel_mean"), Linear(inputs, 10))
    return Workload("toy_cnn", model, (3, image, image), options=options)


# A point of a figure: (axis or None, workload, sizes, examples).
Point = tuple[str | None, str, dict[str, Any], int]


def _rates(depth: int, rates: tuple[float, ...], batch: int = 8, **sizes: Any) -> list[Point]:
    """Points of Fig. 1 and 3: channels that grow by a rate, at one depth and kernel size."""
    return [("rate", "toy_cnn", {"depth": depth, "rate": rate, **sizes}, batch) for rate in rates]


def _batches(batches: tuple[int, ...], **sizes: Any) -> list[Point]:
    """Points of Fig. 2: batch sizes of a wide network without growth."""
    return [
        ("batch", "toy_cnn", {"depth": 3, "rate": 1.0, "kernel": 5, **sizes}, n) for n in batches
    ]


def _table1(alexnet: int, vgg16: int, **sizes: Any) -> list[Point]:
    """Points of Table 1: two networks with their batch sizes."""
    return [(None, "alexnet", sizes, alexnet), (None, "vgg16", sizes, vgg16)]


# On a CPU 64 x 64 images, at most 64 channels, and small heads of the two networks.
_CPU_RATES = {2: (1.0, 1.75, 2.5), 3: (1.0, 1.3, 1.6), 4: (1.0, 1.36)}
_CUDA_RATES = (1.0, 1.25, 1.5, 1.75, 2.0)
SWEEPS: dict[str, list[Point]] = {
    "quick": [
        *_rates(2, (2.0,), 4, kernel=3, first=8, image=16),
        (None, "alexnet", {"image": 64, "hidden": 16}, 2),
    ],
    "cpu": [
        *(point for depth, rates in _CPU_RATES.items() for point in _rates(depth, rates, kernel=3)),
        *_rates(3, _CPU_RATES[3][::2], kernel=5),
        *_batches((4, 16), first=32),
        *_table1(16, 4, image=64, hidden=512),
    ],
    "cuda": [
        *(
            point
            for kernel in (3, 5)
            for depth in (2, 3, 4)
            for point in _rates(depth, _CUDA_RATES, kernel=kernel, image=256)
        ),
        *_batches((2, 4, 8, 16, 32), first=256, image=256),
        *_table1(16, 8, image=256),
    ],
}


def check(name: str) -> None:
    """Raise unless the name is a layer, the toy network or a workload."""
    if name not in (*LAYERS, "toy_cnn"):
        workloads.check(name)


def create(name: str, size_key: str) -> Workload:
    """Return the layer, toy network or workload of that name; layers in the sizes of `size_key`."""
    if name in LAYERS:
        return LAYERS[name](**SIZES[size_key].get(name, {}))
    return toy_cnn() if name == "toy_cnn" else workloads.create(name)


def network(name: str, sizes: dict[str, Any]) -> Workload:
    """Return the network of a point of `SWEEPS`."""
    return toy_cnn(**sizes) if name == "toy_cnn" else workloads.create(name, **sizes)

# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103  (a builder of that name is all that its reader needs to know)
"""Single layers and toy networks: the micro-benchmarks of the two papers that compared methods.

`LAYERS` holds the layers of the Opacus paper (Yousefpour et al. 2021, Fig. 3 and 5) in its sizes;
`toy_cnn` is the network of Rochette et al. 2019 (Fig. 1 to 3), whose sweeps `SWEEPS` lists, with
the two networks of their Table 1, at sizes for a processor and for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dualdp_bench import workloads
from dualdp_bench.specs import (
    Attention,
    Conv,
    Embedding,
    GroupNorm,
    InstanceNorm,
    Layer,
    LayerNorm,
    Linear,
    Op,
    Pool,
    Recurrent,
    chain,
)
from dualdp_bench.workloads import Workload


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


def instancenorm(channels: int = 256, image: int = 8) -> Workload:
    sizes = {"channels": channels, "image": image}
    return _layer("instancenorm", InstanceNorm(channels), (channels, image, image), **sizes)


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

# Smaller layers where the papers' would take too long: sizes by layer, for each place.
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


def layers(place: str) -> list[Workload]:
    """Every layer, in the sizes of "quick", "cpu" or "cuda"."""
    return [builder(**SIZES[place].get(name, {})) for name, builder in LAYERS.items()]


def toy_cnn(
    depth: int = 3, rate: float = 1.0, first: int = 25, kernel: int = 3, image: int = 64
) -> Workload:
    """Convolutions whose channels grow by `rate`, a max pool after every second, a linear head."""
    options = {"depth": depth, "rate": rate, "first": first, "kernel": kernel, "image": image}
    parts: list[Layer] = []
    inputs = 3
    for index in range(depth):
        outputs = round(first * rate**index)
        parts += [Conv(inputs, outputs, kernel), Op("relu")]
        parts += [Pool("max", 2, 2)] if index % 2 else []
        inputs = outputs
    model = chain(*parts, Op("pixel_mean"), Linear(inputs, 10))
    return Workload("toy_cnn", model, (3, image, image), options=options)


# A point of a figure: (axis or None, workload, sizes, examples).
Point = tuple[str | None, str, dict[str, Any], int]


def _rates(depth: int, rates: tuple[float, ...], batch: int = 8, **sizes: Any) -> list[Point]:
    """Fig. 1 and 3: channels that grow by a rate, in networks of one depth and kernel."""
    return [("rate", "toy_cnn", {"depth": depth, "rate": rate, **sizes}, batch) for rate in rates]


def _batches(batches: tuple[int, ...], **sizes: Any) -> list[Point]:
    """Fig. 2: batches of a wide network without growth."""
    return [
        ("batch", "toy_cnn", {"depth": 3, "rate": 1.0, "kernel": 5, **sizes}, n) for n in batches
    ]


def _table1(alexnet: int, vgg16: int, **sizes: Any) -> list[Point]:
    """Table 1: the two networks, with the batches that they get."""
    return [(None, "alexnet", sizes, alexnet), (None, "vgg16", sizes, vgg16)]


# On a processor 64 pixels and at most 64 channels, and small heads of the two networks.
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
    """Raise when that is neither a layer, nor the toy network, nor a workload."""
    if name not in (*LAYERS, "toy_cnn"):
        workloads.check(name)


def create(name: str, place: str) -> Workload:
    """The layer, toy network or workload of that name, in the sizes of a place where it has any."""
    if name in LAYERS:
        return LAYERS[name](**SIZES[place].get(name, {}))
    return toy_cnn() if name == "toy_cnn" else workloads.create(name)


def network(name: str, sizes: dict[str, Any]) -> Workload:
    """The network of a point of `SWEEPS`."""
    return toy_cnn(**sizes) if name == "toy_cnn" else workloads.create(name, **sizes)

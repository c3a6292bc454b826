# SPDX-License-Identifier: Apache-2.0
"""The shared grid of layer cases: plain data and NumPy, read by both adapters and the reference.

A case is a small model, written down. Its mathematics, the same on every stack:

* `layers` is a sequence applied in order; a parameter is called `"<position>.weight"` and so on,
  with the shapes and the arithmetic of the `torch.nn` layer of that name (`SHAPES` lists them).
* The loss of ONE example is `sum(y ** 2 / 2 + y * cos(index))` over the flattened output `y`, where
  `index` counts its elements from 0: smooth, asymmetric, and without targets.
* `special` replaces the sequence by one of the models of `SPECIALS`, where the formula stands.

`parameters(case)` and `inputs(case)` draw everything; adapters only cast and compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One model, one batch.

    Attributes:
        name: unique in the grid.
        layers: (kind, options) in order; options as in `SHAPES` and `torch.nn`.
        x: shape of ONE example.
        kind: `"float"` (standard normal inputs) or `"ids"` (integers below `vocabulary`).
        n: examples in the batch.
        seed: of parameters and inputs.
        dtype: `"float32"` or `"float64"`.
        special: key of `SPECIALS`, or None for a sequence.
        frozen: parameter names that are not trained.
        vocabulary: ids are drawn from range(vocabulary).
    """

    name: str
    layers: tuple[tuple[str, dict[str, Any]], ...] = ()
    x: tuple[int, ...] = ()
    kind: str = "float"
    n: int = 3
    seed: int = 0
    dtype: str = "float32"
    special: str | None = None
    frozen: tuple[str, ...] = ()
    vocabulary: int = 11

    def but(self, **changes: Any) -> Case:
        """The same case with other sizes; `name` says which."""
        tag = ",".join(f"{key}={value}" for key, value in changes.items())
        return replace(self, name=f"{self.name}[{tag}]", **changes)


def _linear(options: dict[str, Any]) -> Shapes:
    shapes: Shapes = {"weight": (options["out"], options["in"])}
    return shapes | ({"bias": (options["out"],)} if options.get("bias", True) else {})


def _conv(axes: int) -> Callable[[dict[str, Any]], Shapes]:
    def shapes(options: dict[str, Any]) -> Shapes:
        kernel = options["kernel"]
        kernel = (kernel,) * axes if isinstance(kernel, int) else tuple(kernel)
        found: Shapes = {
            "weight": (options["out"], options["in"] // options.get("groups", 1), *kernel)
        }
        return found | ({"bias": (options["out"],)} if options.get("bias", True) else {})

    return shapes


def _embedding(options: dict[str, Any]) -> Shapes:
    return {"weight": (options["num"], options["dim"])}


def _layernorm(options: dict[str, Any]) -> Shapes:
    shape = tuple(options["shape"])
    return {"weight": shape} | ({"bias": shape} if options.get("bias", True) else {})


def _groupnorm(options: dict[str, Any]) -> Shapes:
    return {"weight": (options["channels"],), "bias": (options["channels"],)}


#: kind -> options -> {parameter: shape}. Options and their defaults are torch.nn's:
#: linear(in, out, bias)   conv1d/conv2d(in, out, kernel, stride, padding, dilation, groups, bias,
#: padding_mode)   embedding(num, dim, padding_idx)   layernorm(shape, bias)
#: groupnorm(groups, channels)   tanh, gelu (exact), relu   flatten (everything but the batch)
#: mean(axis): mean over that axis of ONE example   avgpool2d(kernel)
SHAPES: dict[str, Callable[[dict[str, Any]], Shapes]] = {
    "linear": _linear,
    "conv1d": _conv(1),
    "conv2d": _conv(2),
    "embedding": _embedding,
    "layernorm": _layernorm,
    "groupnorm": _groupnorm,
}

#: Models that are no sequence: the shapes of their parameters, in torch's order. For ONE example x,
#: with linear(x, W, b) = x @ W.T + b and `first` = linear(., first.weight, first.bias):
#: tied          ids (t,): h = tanh(linear(E[x], body)); y = h @ E.T            E = embedding.weight
#: reuse         x (6,):   y = layer(tanh(layer(x)))
#: reuse_ranks   x (5, 6): y = layer(mean over axis 0 of tanh(layer(x)))
#: functional    x (6,):   y = linear(tanh(first(x)), first.weight, no bias)
#: raw           x (5, 6): y = head((x + pos) * scale)
#: class_token   x (4, 6): z = concatenate([token, x]); y = head(tanh(first(z)))  (token first)
#: unused        x (6,):   y = first(x); `spare` is never called
#: shared        x (6,):   y = linear(tanh(first(x)), first.weight, second.bias)
#: two_branches  x (6,):   y = first(x) * tanh(second(x))
SPECIALS: dict[str, Shapes] = {
    "tied": {"embedding.weight": (11, 6), "body.weight": (6, 6), "body.bias": (6,)},
    "reuse": {"layer.weight": (6, 6), "layer.bias": (6,)},
    "reuse_ranks": {"layer.weight": (6, 6), "layer.bias": (6,)},
    "functional": {"first.weight": (6, 6), "first.bias": (6,)},
    "raw": {"pos": (5, 6), "scale": (6,), "head.weight": (4, 6), "head.bias": (4,)},
    "class_token": {
        "token": (1, 6),
        "first.weight": (6, 6),
        "first.bias": (6,),
        "head.weight": (4, 6),
        "head.bias": (4,),
    },
    "unused": {
        "first.weight": (4, 6),
        "first.bias": (4,),
        "spare.weight": (3, 6),
        "spare.bias": (3,),
    },
    "shared": {"first.weight": (6, 6), "first.bias": (6,), "second.bias": (6,)},
    "two_branches": {
        "first.weight": (4, 6),
        "first.bias": (4,),
        "second.weight": (4, 6),
        "second.bias": (4,),
    },
}


def shapes(case: Case) -> Shapes:
    """{parameter name: shape}, in torch's order; kinds that `SHAPES` has not have none."""
    if case.special is not None:
        return SPECIALS[case.special]
    return {
        f"{position}.{name}": shape
        for position, (kind, options) in enumerate(case.layers)
        if kind in SHAPES
        for name, shape in SHAPES[kind](options).items()
    }


def parameters(case: Case) -> dict[str, np.ndarray]:
    """{parameter name: array}, frozen ones too; every entry random, none of them symmetric."""
    rng = np.random.default_rng([case.seed, 1])
    return {
        name: (rng.normal(size=shape) * 0.5 + 0.05).astype(case.dtype)
        for name, shape in shapes(case).items()
    }


def inputs(case: Case) -> np.ndarray:
    """(n, *x): standard normals, or int64 ids."""
    rng = np.random.default_rng([case.seed, 2])
    if case.kind == "ids":
        return rng.integers(0, case.vocabulary, size=(case.n, *case.x), dtype=np.int64)
    return rng.normal(size=(case.n, *case.x)).astype(case.dtype)


def _layer(kind: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return kind, options


def _linear_layer(d_in: int, d_out: int, **options: Any) -> tuple[str, dict[str, Any]]:
    return _layer("linear", **{"in": d_in, "out": d_out}, **options)


def _conv_layer(
    axes: int, d_in: int, d_out: int, kernel: Any, **options: Any
) -> tuple[str, dict[str, Any]]:
    return _layer(f"conv{axes}d", **{"in": d_in, "out": d_out, "kernel": kernel}, **options)


_TANH = _layer("tanh")
_LINEAR = (
    Case("linear_2d", (_linear_layer(6, 4),), (6,)),
    Case("linear_3d", (_linear_layer(6, 4),), (5, 6)),
    Case("linear_3d_long", (_linear_layer(3, 2),), (29, 3)),
    Case("linear_4d", (_linear_layer(6, 4), _TANH, _linear_layer(4, 3)), (2, 3, 6)),
    Case("linear_nobias", (_linear_layer(6, 4, bias=False),), (5, 6)),
    Case(
        "mlp",
        (_linear_layer(7, 9), _TANH, _linear_layer(9, 8), _layer("gelu"), _linear_layer(8, 3)),
        (7,),
    ),
    Case("mlp_relu", (_linear_layer(7, 9), _layer("relu"), _linear_layer(9, 3)), (7,)),
)
_CONV = (
    Case("conv1d", (_conv_layer(1, 3, 4, 3), _TANH, _conv_layer(1, 4, 2, 2)), (3, 9)),
    Case("conv1d_stride_pad", (_conv_layer(1, 3, 4, 3, stride=2, padding=1),), (3, 10)),
    Case("conv1d_dilation", (_conv_layer(1, 3, 4, 3, dilation=2),), (3, 10)),
    Case("conv1d_groups", (_conv_layer(1, 4, 6, 3, groups=2),), (4, 9)),
    Case("conv1d_depthwise", (_conv_layer(1, 4, 8, 3, groups=4),), (4, 9)),
    Case("conv1d_same_even", (_conv_layer(1, 3, 4, 4, padding="same"),), (3, 9)),
    Case("conv1d_circular", (_conv_layer(1, 3, 4, 3, padding=2, padding_mode="circular"),), (3, 9)),
    Case("conv2d", (_conv_layer(2, 3, 4, 3), _TANH, _conv_layer(2, 4, 2, 2)), (3, 7, 6)),
    Case("conv2d_nobias", (_conv_layer(2, 3, 4, 3, bias=False),), (3, 7, 6)),
    Case(
        "conv2d_stride_pad",
        (_conv_layer(2, 3, 4, (3, 2), stride=(2, 1), padding=(1, 0)),),
        (3, 8, 7),
    ),
    Case("conv2d_dilation", (_conv_layer(2, 3, 4, 3, dilation=(2, 1), stride=2),), (3, 9, 8)),
    Case("conv2d_groups", (_conv_layer(2, 4, 6, 3, groups=2),), (4, 7, 6)),
    Case("conv2d_depthwise", (_conv_layer(2, 4, 4, 3, groups=4, padding=1),), (4, 7, 6)),
    Case("conv2d_same", (_conv_layer(2, 3, 4, 3, padding="same"),), (3, 7, 6)),
    Case("conv2d_same_even", (_conv_layer(2, 3, 4, (4, 2), padding="same"),), (3, 7, 6)),
    Case("conv2d_valid", (_conv_layer(2, 3, 4, 3, padding="valid"),), (3, 7, 6)),
    Case(
        "conv2d_circular",
        (_conv_layer(2, 3, 4, 3, padding=(2, 1), padding_mode="circular"),),
        (3, 7, 6),
    ),
    Case(
        "conv2d_reflect", (_conv_layer(2, 3, 4, 3, padding=1, padding_mode="reflect"),), (3, 7, 6)
    ),
    Case(
        "conv2d_replicate",
        (_conv_layer(2, 3, 4, 3, padding=1, padding_mode="replicate"),),
        (3, 7, 6),
    ),
    Case(
        "conv2d_all",
        (_conv_layer(2, 4, 6, 3, stride=2, padding=2, dilation=2, groups=2),),
        (4, 9, 8),
    ),
    Case("conv2d_pointwise", (_conv_layer(2, 4, 5, 1),), (4, 5, 4)),
    Case(
        "cnn",
        (
            _conv_layer(2, 1, 4, 3, padding=1),
            _TANH,
            _layer("avgpool2d", kernel=2),
            _conv_layer(2, 4, 5, 3),
            _layer("gelu"),
            _layer("flatten"),
            _linear_layer(20, 3),
        ),
        (1, 8, 8),
    ),
)
_EMBEDDING = (
    Case("embedding", (_layer("embedding", num=11, dim=4),), (7,), "ids"),
    Case("embedding_one_id", (_layer("embedding", num=11, dim=4),), (), "ids"),
    Case("embedding_2d_ids", (_layer("embedding", num=11, dim=4),), (3, 4), "ids"),
    Case(
        "embedding_padding_idx",
        (_layer("embedding", num=5, dim=4, padding_idx=2),),
        (9,),
        "ids",
        vocabulary=5,
    ),
    Case(
        "token_net",
        (
            _layer("embedding", num=11, dim=6),
            _layer("layernorm", shape=(6,)),
            _linear_layer(6, 5),
            _TANH,
            _layer("mean", axis=0),
            _linear_layer(5, 2),
        ),
        (8,),
        "ids",
    ),
)
_NORM = (
    Case("layernorm", (_linear_layer(6, 5), _layer("layernorm", shape=(5,))), (4, 6)),
    Case("layernorm_2d", (_layer("layernorm", shape=(6,)), _linear_layer(6, 3)), (6,)),
    Case("layernorm_multidim", (_layer("layernorm", shape=(3, 6)), _linear_layer(6, 2)), (4, 3, 6)),
    Case("layernorm_nobias", (_layer("layernorm", shape=(6,), bias=False), _TANH), (4, 6)),
    Case(
        "groupnorm", (_conv_layer(2, 3, 4, 3), _layer("groupnorm", groups=2, channels=4)), (3, 6, 5)
    ),
    Case("groupnorm_one", (_layer("groupnorm", groups=1, channels=4), _TANH), (4, 6)),
)
_SPECIAL = (
    Case("tied", x=(7,), kind="ids", special="tied"),
    Case("reuse", x=(6,), special="reuse"),
    Case("reuse_ranks", x=(5, 6), special="reuse_ranks"),
    Case("functional", x=(6,), special="functional"),
    Case("raw", x=(5, 6), special="raw"),
    Case("class_token", x=(4, 6), special="class_token"),
    Case("unused", x=(6,), special="unused"),
    Case("shared", x=(6,), special="shared"),
    Case("two_branches", x=(6,), special="two_branches"),
)
_MLP, _CNN, _TOKENS = _LINEAR[5], _CONV[-1], _EMBEDDING[-1]
_VARIANTS = (
    _MLP.but(frozen=("2.weight",)),
    _MLP.but(frozen=("2.bias",)),
    _MLP.but(frozen=("0.weight", "0.bias")),
    _CNN.but(frozen=("0.weight",)),
    _TOKENS.but(frozen=("0.weight",)),
)

#: Every case of the shared grid; names are unique.
ALL = (*_LINEAR, *_CONV, *_EMBEDDING, *_NORM, *_SPECIAL, *_VARIANTS)

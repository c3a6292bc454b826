# SPDX-License-Identifier: Apache-2.0
"""Conversion of a checkpoint to the format of the other backend, without either framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp.checkpoint import RUN
from dualdp.porting import optimizer_state, parameter_map
from dualdp.porting.matching import Mapped, Matcher
from dualdp.porting.parameter_map import ParameterMap

Arrays = Mapping[str, NDArray[Any]]
Wanted = Mapping[str, tuple[tuple[int, ...], str]]
Checkpoint = tuple[dict[str, NDArray[Any]], dict[str, Any]]


def to_jax(
    arrays: Arrays, document: Mapping[str, Any], wanted: Wanted, mapping: Mapped | None = None
) -> Checkpoint:
    """Convert arrays and document of the torch backend's checkpoint to the JAX backend's format.

    `wanted` has the (shape, dtype) of every leaf of the state to fill: "params/<path>" and
    "optimizer/<path>", keys joined by ".", in the order of its leaves; `mapping` see `port.match`.
    """
    values = _wide(arrays, document, wanted)
    shapes = {path: shape for path, (shape, _) in _below(wanted, "params/", "/").items()}
    maps = Matcher(**document["layout"], jax_shapes=shapes, mapping=mapping).parameter_maps()
    named = _below(values, "params/") | _below(values, "buffers/")
    state = optimizer_state.TorchState.of(
        _below(values, "optimizer/"), document["optimizer"], document["trained"]
    )
    slots = {path: shape for path, (shape, _) in _below(wanted, "optimizer/", "/").items()}
    ported = {
        "params": parameter_map.to_jax(maps, named),
        "optimizer": optimizer_state.to_jax(state, maps, slots, int(document["position"])),
    }
    found = {
        f"{part}/{path.replace('/', '.')}": array
        for part, several in ported.items()
        for path, array in several.items()
    }
    described = {
        "stack": "jax",
        "settings": {"views": 1, "checks": document["settings"]["checks"]},
        "trained": sorted(_leaves(maps, document["trained"])),
        "parameters": [name.removeprefix("params/") for name in found if "params/" in name],
    }
    return _pack(found, wanted, document, described)


def to_torch(
    arrays: Arrays,
    document: Mapping[str, Any],
    wanted: Wanted,
    like: Mapping[str, Any],
    mapping: Mapped | None = None,
) -> Checkpoint:
    """Convert arrays and document of the JAX backend's checkpoint to the torch backend's format.

    Buffers that JAX does not have are left out. "noise_layout" of the document describes the
    portable noise that JAX would draw. `wanted` has the (shape, dtype) of "params/<name>" or
    "buffers/<name>", to be filled; `like` is the document of a checkpoint of the torch model, of
    which "layout", "trained" and "optimizer" are read; `mapping` see `port.match`.
    """
    values = _wide(arrays, document, wanted)
    shapes = {
        name.replace(".", "/"): values[f"params/{name}"].shape for name in document["parameters"]
    }
    maps = Matcher(**like["layout"], jax_shapes=shapes, mapping=mapping).parameter_maps()
    named = parameter_map.to_torch(maps, _below(values, "params/", "/"))
    found = {
        f"params/{name}" if f"params/{name}" in wanted else f"buffers/{name}": array
        for name, array in named.items()
    }
    state = optimizer_state.TorchState.of({}, like["optimizer"], like["trained"])
    slots = optimizer_state.to_torch(_below(values, "optimizer/", "/"), maps, state)
    apart = _leaves(maps, like["trained"]) ^ {*document["trained"]}
    if apart:
        raise ValueError(
            f"The leaves {sorted(apart)} are trained either by the checkpoint's run or by this "
            "model. Expected requires_grad as trainable= of its make_private."
        )
    found |= {f"optimizer/{path}": array for path, array in slots.items()}
    dtypes = {  # torch keeps a slot in its parameter's dtype, and counts in float32
        f"optimizer/{slot}/{name}": ((), "float32") if slot == "step" else wanted[f"params/{name}"]
        for slot, name in (path.split("/", 1) for path in slots)
    }
    described = {
        "stack": "torch",
        **{key: like[key] for key in ("layout", "trained", "parameters")},
        "optimizer": {**like["optimizer"], "plain": {}},
        "noise_layout": parameter_map.to_json(maps),
    }
    return _pack(found, {**wanted, **dtypes}, document, described)


def _leaves(maps: Iterable[ParameterMap], names: Collection[str]) -> set[str]:
    """Paths of the JAX leaves of torch's parameters of these names."""
    return {piece.path for m in maps if m.torch_name in names for piece in m.slices}


def _below(named: Mapping[str, Any], prefix: str, joint: str = ".") -> dict[str, Any]:
    """Entries under a prefix, with the prefix removed; "/" joins their paths as `match` does."""
    below = {name: value for name, value in named.items() if name.startswith(prefix)}
    return {n.removeprefix(prefix).replace(".", joint): value for n, value in below.items()}


def _wide(arrays: Arrays, document: Mapping[str, Any], wanted: Wanted) -> dict[str, NDArray[Any]]:
    """Arrays with bfloat16 ones converted to float32.

    Raises a ValueError if the run averages views, or if the model has another precision.
    """
    views = document["settings"].get("views", 1)
    if views > 1:
        raise ValueError(
            f"The run averages views={views} of each example, drawn by {document['stack']}. "
            "Expected to go on with it there; the other stack would draw others."
        )
    low = set(document["bfloat16"])
    parameters = _below(arrays, "params/")
    theirs = {
        "bfloat16" if f"params/{name}" in low else str(array.dtype)
        for name, array in parameters.items()
    }
    ours = {dtype for _, dtype in _below(wanted, "params/").values()}
    if theirs != ours:
        raise ValueError(
            f"The checkpoint's parameters are {sorted(theirs)}, but the model's {sorted(ours)}. "
            "Expected the same precision on both stacks."
        )
    return {
        # A bfloat16, stored as uint16, is the upper half of a float32.
        name: (array.astype(np.uint32) << 16).view(np.float32) if name in low else array
        for name, array in arrays.items()
    }


def _pack(
    found: Arrays, wanted: Wanted, document: Mapping[str, Any], described: Mapping[str, Any]
) -> Checkpoint:
    """Arrays in the requested dtypes, and the document with plan and ledger."""
    packed, low = {}, []
    for name, array in found.items():
        dtype = wanted[name][1]
        if dtype == "bfloat16":
            low.append(name)
            bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
            rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)  # to the nearest, ties to even
            packed[name] = (rounded >> 16).astype(np.uint16)
        else:
            packed[name] = np.ascontiguousarray(array, dtype).reshape(np.shape(array))
    run = {key: document[key] for key in RUN}
    return packed, {"bfloat16": low, **described, **run}

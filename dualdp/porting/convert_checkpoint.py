# SPDX-License-Identifier: Apache-2.0
"""Conversion of a checkpoint to the format of the other backend, without either framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp.porting import optimizer_state, parameter_map
from dualdp.porting.matching import Mapped, match
from dualdp.porting.parameter_map import ParameterMap

Arrays = Mapping[str, NDArray[Any]]
Wanted = Mapping[str, tuple[tuple[int, ...], str]]
Checkpoint = tuple[dict[str, NDArray[Any]], dict[str, Any]]


def to_jax(
    arrays: Arrays, document: Mapping[str, Any], wanted: Wanted, mapping: Mapped | None = None
) -> Checkpoint:
    """Convert a checkpoint of the torch backend to the JAX backend's format.

    Args:
        arrays: mapping from name to array, of the file.
        document: mapping, document of the file.
        wanted: mapping from name to (shape, dtype) of every leaf of the state to fill:
            "params/<path>" and "optimizer/<path>", keys joined by ".", in the order of its leaves.
        mapping: mapping for names that differ, see `dualdp.port.match`.

    Returns:
        `(arrays, document)`.

    Raises:
        ValueError: parameters or optimizers do not fit, or their dtypes differ.
    """
    _same_dtypes(arrays, document, wanted)
    values = _wide(arrays, document["bfloat16"])
    shapes = {name: array.shape for name, array in values.items()}
    maps = _match(document, shapes, _below(wanted, "params/"), mapping)
    named = _below(values, "params/") | _below(values, "buffers/")
    found = {f"params/{_dots(p)}": a for p, a in parameter_map.to_jax(maps, named).items()}
    state = optimizer_state.TorchState.of(
        _below(values, "optimizer/"), document["optimizer"], document["trained"]
    )
    slots = {_slashes(path): shape for path, (shape, _) in _below(wanted, "optimizer/").items()}
    steps = int(document["position"])
    converted = optimizer_state.to_jax(state, maps, slots, steps)
    found |= {f"optimizer/{_dots(path)}": array for path, array in converted.items()}
    return _pack(found, wanted, document, {"stack": "jax", "step": steps})


def to_torch(
    arrays: Arrays,
    document: Mapping[str, Any],
    wanted: Wanted,
    like: Mapping[str, Any],
    mapping: Mapped | None = None,
) -> Checkpoint:
    """Convert a checkpoint of the JAX backend to the torch backend's format.

    Args:
        arrays: mapping from name to array, of the file.
        document: mapping, document of the file.
        wanted: mapping from "params/<name>" or "buffers/<name>" to (shape, dtype), to be filled.
        like: mapping with "layout", "trained" and "optimizer" of a checkpoint of the torch model.
        mapping: mapping for names that differ, see `dualdp.port.match`.

    Returns:
        `(arrays, document)`, without buffers that JAX does not have. "noise_layout" of the document
        describes the portable noise that JAX would draw.

    Raises:
        ValueError: parameters or optimizers do not fit, or their dtypes differ.
    """
    _same_dtypes(arrays, document, wanted)
    values = _wide(arrays, document["bfloat16"])
    leaves = {name: (values[f"params/{name}"].shape, "") for name in document["leaves"]}
    shapes = {name: shape for name, (shape, _) in wanted.items()}
    maps = _match(like, shapes, leaves, mapping)
    held = {_slashes(name): array for name, array in _below(values, "params/").items()}
    named = parameter_map.to_torch(maps, held)
    found = {_stored(name, wanted): array for name, array in named.items()}
    state = optimizer_state.TorchState.of({}, like["optimizer"], like["trained"])
    theirs = {_slashes(path): array for path, array in _below(values, "optimizer/").items()}
    slots = optimizer_state.to_torch(theirs, maps, state, int(document["step"]))
    found |= {f"optimizer/{path}": array for path, array in slots.items()}
    dtypes = {
        # torch keeps a slot in its parameter's dtype, and counts in float32
        f"optimizer/{path}": (
            (),
            "float32" if path.startswith("step/") else wanted[f"params/{path.split('/', 1)[1]}"][1],
        )
        for path in slots
    }
    described = {
        **{key: like[key] for key in ("layout", "trained")},
        "optimizer": {**like["optimizer"], "plain": {}},
        "noise_layout": parameter_map.to_json(maps),
    }
    return _pack(
        found,
        {**wanted, **dtypes},
        document,
        {"stack": "torch", "position": int(document["step"]), **described},
    )


def _match(
    torch: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    leaves: Wanted,
    mapping: Mapped | None,
) -> tuple[ParameterMap, ...]:
    """Parameter maps, from the description of the model in a torch checkpoint."""
    kinds, tied = torch["layout"]["kinds"], torch["layout"]["tied"]
    later = {alias for aliases in tied.values() for alias in aliases[1:]}
    names = [name for name in kinds if name not in later]
    return match(
        {name: tuple(shapes[_stored(name, shapes)]) for name in names},
        kinds,
        [(tuple(path.split(".")), tuple(shape)) for path, (shape, _) in leaves.items()],
        mapping,
        tied=tied,
        frozen=frozenset(names) - frozenset(torch["trained"]),
    )


def _stored(name: str, names: Iterable[str]) -> str:
    """Name of a parameter or buffer in a checkpoint."""
    return f"params/{name}" if f"params/{name}" in names else f"buffers/{name}"


def _below(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Entries under a prefix, with the prefix removed."""
    return {n.removeprefix(prefix): v for n, v in named.items() if n.startswith(prefix)}


def _dots(path: str) -> str:
    """Path joined by ".", as in a checkpoint."""
    return path.replace("/", ".")


def _slashes(path: str) -> str:
    """Path joined by "/", as in `match`."""
    return path.replace(".", "/")


def _wide(arrays: Arrays, low: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Arrays with bfloat16 ones converted to float32."""
    low = set(low)
    return {
        name: (array.astype(np.uint32) << 16).view(np.float32) if name in low else array
        for name, array in arrays.items()
    }


def _same_dtypes(arrays: Arrays, document: Mapping[str, Any], wanted: Wanted) -> None:
    """Raise if the parameters have another precision."""
    low = set(document["bfloat16"])
    theirs = {
        "bfloat16" if name in low else str(array.dtype)
        for name, array in arrays.items()
        if name.startswith("params/")
    }
    ours = {dtype for name, (_, dtype) in wanted.items() if name.startswith("params/")}
    if theirs != ours:
        raise ValueError(
            f"The checkpoint's parameters are {sorted(theirs)}, but the model's {sorted(ours)}. "
            "Expected the same precision on both stacks."
        )


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
    run = {key: document[key] for key in ("plan", "ledger", "ledger_file")}
    return packed, {"bfloat16": low, **described, **run}

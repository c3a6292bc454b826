# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one stack as the other would have written it, without either framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp import leaves as _leaves
from dualdp import optimizers
from dualdp.leaves import Leaf
from dualdp.matching import Mapped, match

Arrays = Mapping[str, NDArray[Any]]
Wanted = Mapping[str, tuple[tuple[int, ...], str]]
Checkpoint = tuple[dict[str, NDArray[Any]], dict[str, Any]]


def to_jax(
    arrays: Arrays, document: Mapping[str, Any], wanted: Wanted, mapping: Mapped | None = None
) -> Checkpoint:
    """A checkpoint of the torch stack in the words of JAX's.

    Args:
        arrays: of the file.
        document: of the file.
        wanted: name -> (shape, dtype) of every leaf of the state that is to be filled:
            "params/<path>" and "optimizer/<path>", keys joined by ".", in the order of its leaves.
        mapping: as in `dualdp.port.match`.

    Returns:
        `(arrays, document)`.

    Raises:
        ValueError: parameters or optimizers do not fit, or their dtypes differ.
    """
    _same_dtypes(arrays, document, wanted)
    values = _wide(arrays, document["bfloat16"])
    shapes = {name: array.shape for name, array in values.items()}
    pairs = _pairs(document, shapes, _below(wanted, "params/"), mapping)
    named = _below(values, "params/") | _below(values, "buffers/")
    found = {f"params/{_dots(p)}": a for p, a in _leaves.to_jax(pairs, named).items()}
    state = optimizers.TorchState.of(
        _below(values, "optimizer/"), document["optimizer"], document["trained"]
    )
    slots = {_slashes(path): shape for path, (shape, _) in _below(wanted, "optimizer/").items()}
    steps = int(document["position"])
    moved = optimizers.to_jax(state, pairs, slots, steps)
    found |= {f"optimizer/{_dots(path)}": array for path, array in moved.items()}
    return _pack(found, wanted, document, {"stack": "jax", "step": steps})


def to_torch(
    arrays: Arrays,
    document: Mapping[str, Any],
    wanted: Wanted,
    like: Mapping[str, Any],
    mapping: Mapped | None = None,
) -> Checkpoint:
    """A checkpoint of the JAX stack in the words of torch's.

    Args:
        arrays: of the file.
        document: of the file.
        wanted: name -> (shape, dtype) of what is to be filled: "params/<name>", "buffers/<name>".
        like: "layout", "trained" and "optimizer" of a checkpoint of the torch model.
        mapping: as in `dualdp.port.match`.

    Returns:
        `(arrays, document)`; buffers that JAX does not have are not among the arrays. The document
        says in "noise_layout" which portable noise JAX would draw.

    Raises:
        ValueError: parameters or optimizers do not fit, or their dtypes differ.
    """
    _same_dtypes(arrays, document, wanted)
    values = _wide(arrays, document["bfloat16"])
    leaves = {name: (values[f"params/{name}"].shape, "") for name in document["leaves"]}
    shapes = {name: shape for name, (shape, _) in wanted.items()}
    pairs = _pairs(like, shapes, leaves, mapping)
    held = {_slashes(name): array for name, array in _below(values, "params/").items()}
    named = _leaves.to_torch(pairs, held)
    found = {_stored(name, wanted): array for name, array in named.items()}
    state = optimizers.TorchState.of({}, like["optimizer"], like["trained"])
    moved = {_slashes(path): array for path, array in _below(values, "optimizer/").items()}
    steps = int(document["step"])
    slots = optimizers.to_torch(moved, pairs, state, steps)
    found |= {f"optimizer/{path}": array for path, array in slots.items()}
    dtypes = {
        f"optimizer/{path}": ((), _slot_dtype(path, wanted)) for path in slots
    }  # torch keeps a slot in its parameter's dtype, and counts in float32
    described = {
        **{key: like[key] for key in ("layout", "trained")},
        "optimizer": {**like["optimizer"], "plain": {}},
        "noise_layout": _leaves.to_json(pairs),
    }
    return _pack(
        found, {**wanted, **dtypes}, document, {"stack": "torch", "position": steps, **described}
    )


# ---------------------------------------------------------------------- names


def _pairs(
    torch: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    leaves: Wanted,
    mapping: Mapped | None,
) -> tuple[Leaf, ...]:
    """Partners, from what a torch checkpoint says of its model."""
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
    """The name of a parameter or buffer in a checkpoint."""
    return f"params/{name}" if f"params/{name}" in names else f"buffers/{name}"


def _below(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What is under a prefix, without it."""
    return {n.removeprefix(prefix): v for n, v in named.items() if n.startswith(prefix)}


def _dots(path: str) -> str:
    """The words of a path as a checkpoint joins them."""
    return path.replace("/", ".")


def _slashes(path: str) -> str:
    """The words of a path as `match` joins them."""
    return path.replace(".", "/")


# ---------------------------------------------------------------------- numbers


def _wide(arrays: Arrays, low: Iterable[str]) -> dict[str, NDArray[Any]]:
    """The arrays, those that are bfloat16 as the float32 that they are."""
    names = set(low)
    return {
        name: (array.astype(np.uint32) << 16).view(np.float32) if name in names else array
        for name, array in arrays.items()
    }


def _slot_dtype(path: str, wanted: Wanted) -> str:
    """In which dtype torch keeps "slot/parameter"."""
    slot, name = path.split("/", 1)
    return "float32" if slot == "step" else wanted[f"params/{name}"][1]


def _same_dtypes(arrays: Arrays, document: Mapping[str, Any], wanted: Wanted) -> None:
    """Refuse parameters of another precision."""
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
    found: Arrays, wanted: Wanted, document: Mapping[str, Any], said: Mapping[str, Any]
) -> Checkpoint:
    """The arrays in the dtypes that are wanted, and the document with plan and ledger."""
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
    return packed, {"bfloat16": low, **said, **run}

# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in both backends, and its conversion.

Torch counts steps in one float per parameter and has no momentum before the first step; optax
counts in one integer and starts from zeros. docs/resuming.md lists the settings that agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp.porting import parameter_map
from dualdp.porting.parameter_map import ParameterMap

Array = NDArray[Any]
Named = Mapping[str, Array]

# Class of torch.optim, or the torch backend's AdamBC -> its state entry (slot) -> optax's field.
SLOTS: Mapping[str, Mapping[str, str]] = {
    "SGD": {"momentum_buffer": "trace"},
    "Adam": {"exp_avg": "mu", "exp_avg_sq": "nu"},
    "AdamW": {"exp_avg": "mu", "exp_avg_sq": "nu"},
    "AdamBC": {"exp_avg": "mu", "exp_avg_sq_corrected": "nu_corrected"},
}
COUNTERS = ("count", "step")  # optax's fields with the number of updates
_MODULES = ("torch.optim", "dualdp_torch.")  # of the classes


@dataclass(frozen=True)
class TorchState:
    """State of one torch optimizer."""

    kind: str  # name of its class, a key of `SLOTS`
    slots: Mapping[str, Named]  # slot -> parameter -> array; missing slots are left out
    options: Mapping[str, Mapping[str, Any]]  # parameter -> settings of its group

    @classmethod
    def of(cls, arrays: Named, described: Mapping[str, Any], trained: Iterable[str]) -> TorchState:
        """Return the state from a checkpoint's arrays, by "slot/parameter", and description."""
        names = set(trained)
        slots: dict[str, dict[str, Array]] = {}
        for path, array in arrays.items():
            slot, name = path.split("/", 1)
            slots.setdefault(slot, {})[name] = array
        options = {
            name: group["options"]
            for group in described["groups"]
            for name in group["parameters"]
            if name in names
        }
        path = described["class"]  # a class of another package keeps its whole path
        kind = path.rpartition(".")[2] if path.startswith(_MODULES) else path
        return cls(kind, slots, options)

    @property
    def fields(self) -> Mapping[str, str]:
        """Slot -> optax's field, of all that torch keeps with these settings."""
        has_momentum = any(group.get("momentum") for group in self.options.values())
        return SLOTS[self.kind] if has_momentum or self.kind != "SGD" else {}


def check(state: TorchState) -> None:
    """Raise if the optimizer's class or one of its settings can't be converted."""
    if state.kind not in SLOTS:
        raise ValueError(
            f"The optimizer is a {state.kind}, whose state can't be carried over. Expected one of "
            f"{', '.join(SLOTS)}."
        )
    for name, options in state.options.items():
        for option in ("amsgrad", "maximize"):
            if options.get(option):
                raise ValueError(
                    f"The optimizer has {option}=True for {name!r}, which optax keeps otherwise or "
                    f"not at all. Expected {option}=False."
                )


def to_jax(
    state: TorchState,
    maps: Sequence[ParameterMap],
    wanted: Mapping[str, tuple[int, ...]],
    position: int,
) -> dict[str, Array]:
    """Return the arrays of an optax state, for every path of `wanted`.

    `wanted` maps the path of every leaf of optax's state, joined by "/", to its shape. `position`
    is the number of updates for optax's counters where torch keeps none.
    """
    fields, counters = _fields(state, wanted, maps)
    counts = {int(count) for count in state.slots.get("step", {}).values()} or {position}
    if len(counts) > 1:
        raise ValueError(
            f"The optimizer's parameters have seen {sorted(counts)} updates. Expected one number."
        )
    found: dict[str, Array] = dict.fromkeys(counters, np.asarray(counts.pop()))
    for field, named in _filled(state, maps).items():
        arrays = parameter_map.to_jax([p for p in maps if p.torch_name in named], named)
        _same_trained(arrays.keys(), fields[field].keys())
        found |= {path: arrays[leaf] for leaf, path in fields[field].items()}
    return found


def to_torch(arrays: Named, maps: Sequence[ParameterMap], like: TorchState) -> dict[str, Array]:
    """Return the arrays of a torch optimizer's state, by "slot/parameter".

    `arrays` are those of optax's state, by path joined by "/"; `like` has kind and settings of the
    torch optimizer.
    """
    fields, counters = _fields(like, {path: array.shape for path, array in arrays.items()}, maps)
    counts = {int(arrays[path]) for path in counters}
    if len(counts) > 1 or (like.kind != "SGD" and not counts):
        raise ValueError(
            f"optax's state counts {sorted(counts)} updates in different places. Expected one "
            "number."
        )
    trained = [parameter for parameter in maps if parameter.torch_name in like.options]
    leaves = {s.path for parameter in trained for s in parameter.slices}
    found: dict[str, Array] = {}
    for slot, field in like.fields.items():
        _same_trained(leaves, fields[field].keys())
        held = {leaf: arrays[path] for leaf, path in fields[field].items()}
        named = parameter_map.to_torch(trained, held)
        found |= {f"{slot}/{name}": array for name, array in named.items()}
    if like.kind != "SGD":
        count = np.asarray(counts.pop(), np.float32)
        found |= {f"step/{name}": count for name in like.options}
    return found


def _fields(
    state: TorchState, wanted: Mapping[str, tuple[int, ...]], maps: Sequence[ParameterMap]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Optax's field -> JAX leaf -> whole path, and the paths of the counters.

    Raises unless both optimizers keep the same slots, by settings that both have, and no two
    trained biases would share one momentum in JAX.
    """
    check(state)
    expected = sorted(state.fields.values())
    for parameter in maps if expected else ():
        if parameter.torch_name in state.options and any(s.is_added for s in parameter.slices):
            raise ValueError(
                f"{parameter.torch_name} {parameter.torch_shape} is trained and has state of its "
                f"own, but JAX holds it folded into {parameter.jax_path}. Expected one trained "
                "bias: call dualdp.torch.weights.fold_biases(model) before the run of an LSTM or "
                "RNN; a GRU's weights cross, and its state with plain SGD only."
            )
    leaves = {s.path for parameter in maps for s in parameter.slices}
    found: dict[str, dict[str, str]] = {}
    counters = []
    for path, shape in wanted.items():
        names = path.split("/")  # "0/trace/fc/kernel" is the field "0/trace" of "fc/kernel"
        ends = ("/".join(names[k:]) for k in range(1, len(names)))
        leaf = next((end for end in ends if end in leaves), None)
        if leaf is not None:
            found.setdefault(path.removesuffix(f"/{leaf}"), {})[leaf] = path
        elif names[-1] in COUNTERS and shape == ():
            counters.append(path)
        else:
            raise ValueError(
                f"optax's state has {path} {shape}, which torch.optim does not keep. Expected "
                f"{expected} for each parameter, and counters."
            )
    by_field = {prefix.rpartition("/")[2]: paths for prefix, paths in found.items()}
    kept = sorted(prefix.rpartition("/")[2] for prefix in found)
    if kept != expected:
        raise ValueError(
            f"torch's {state.kind} keeps {expected} (in optax's words), but optax's state has "
            f"{kept}. Expected the same optimizer with the same settings on both sides."
        )
    return by_field, counters


def _filled(state: TorchState, maps: Sequence[ParameterMap]) -> dict[str, Named]:
    """Optax's field -> parameter -> array; zeros before the first step."""
    shapes = {parameter.torch_name: parameter.torch_shape for parameter in maps}
    dampened = any(group.get("dampening") for group in state.options.values())
    found = {}
    for slot, field in state.fields.items():
        named = state.slots.get(slot, {})
        missing = sorted(set(state.options) - set(named))
        if missing and (named or dampened):
            raise ValueError(
                f"torch's state lacks {slot!r} for {missing}. Expected it for every trained "
                "parameter: take a step first."
            )
        found[field] = named or {name: np.zeros(shapes[name]) for name in missing}
    return found


def _same_trained(torch: Set[str], jax: Set[str]) -> None:
    """Raise unless both optimizers train the same parameters."""
    if torch != jax:
        raise ValueError(
            f"Only one of the two optimizers trains {sorted(torch ^ jax)} (JAX's names). Expected "
            "the same parameters frozen on both sides."
        )

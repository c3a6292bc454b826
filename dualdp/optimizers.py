# SPDX-License-Identifier: Apache-2.0
"""How the two stacks keep the state of the same optimizer, as data, and its way across.

Torch counts steps in one float per parameter and has no momentum before the first step; optax
counts in one integer and starts from zeros. docs/porting.md tells which settings agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp import leaves as _leaves
from dualdp.leaves import Leaf

Array = NDArray[Any]
Named = Mapping[str, Array]

# Class of torch.optim -> its slot -> the field of optax's state.
SLOTS: Mapping[str, Mapping[str, str]] = {
    "SGD": {"momentum_buffer": "trace"},
    "Adam": {"exp_avg": "mu", "exp_avg_sq": "nu"},
    "AdamW": {"exp_avg": "mu", "exp_avg_sq": "nu"},
    "RMSprop": {"square_avg": "nu", "grad_avg": "mu", "momentum_buffer": "trace"},
}
COUNTERS = ("count", "step")  # optax: updates done
HAS_STEP = ("Adam", "AdamW", "RMSprop")


@dataclass(frozen=True)
class TorchState:
    """The state of one torch optimizer.

    Args:
        kind: its class, a key of `SLOTS`.
        slots: slot -> parameter name -> array; a slot that does not exist yet is left out.
        options: parameter name -> the settings of its group.
    """

    kind: str
    slots: Mapping[str, Named]
    options: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, arrays: Named, described: Mapping[str, Any], trained: Iterable[str]) -> TorchState:
        """The state as checkpoints have it.

        Args:
            arrays: "slot/parameter" -> array.
            described: "class", and "groups" of "parameters" and "options".
            trained: names of the parameters that are trained.
        """
        module, _, kind = described["class"].rpartition(".")
        names = set(trained)
        slots: dict[str, dict[str, Array]] = {}
        for path, array in arrays.items():
            slot, name = path.split("/", 1)
            slots.setdefault(slot, {})[name] = array
        options = {
            name: {key: _number(value) for key, value in group["options"].items()}
            for group in described["groups"]
            for name in group["parameters"]
            if name in names
        }
        return cls(kind if module.startswith("torch.optim") else described["class"], slots, options)

    @property
    def steps(self) -> int | None:
        """Updates done, where the state tells.

        Raises:
            ValueError: the parameters have seen different numbers of updates.
        """
        counts = sorted({int(count) for count in self.slots.get("step", {}).values()})
        if len(counts) > 1:
            raise ValueError(
                f"The optimizer's parameters have seen {counts} updates. Expected one number."
            )
        return counts[0] if counts else None if any(self.slots.values()) else 0


def _number(value: Any) -> Any:
    """A setting, also one that was a tensor of one number."""
    return value.get("tensor", value) if isinstance(value, dict) else value


def check(state: TorchState) -> None:
    """Refuse an optimizer whose state the other stack does not have.

    Raises:
        ValueError: its class, or one of its settings.
    """
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
    pairs: Sequence[Leaf],
    wanted: Mapping[str, tuple[int, ...]],
    steps: int | None,
) -> dict[str, Array]:
    """The arrays of an optax state.

    Args:
        state: torch's.
        pairs: parameters, from `dualdp.matching.match`.
        wanted: path of every leaf of optax's state, joined by "/" -> shape.
        steps: updates done so far, where optax counts them.

    Returns:
        Path -> array, for every path of `wanted`.

    Raises:
        ValueError: the two optimizers do not have the same slots.
    """
    check(state)
    _refuse_folded(state, pairs)
    fields = _fields(wanted, pairs)
    theirs = _filled(state, pairs)
    _compare(state, fields)
    found: dict[str, Array] = {}
    for (prefix, field), paths in fields.items():
        if field in COUNTERS:
            found[prefix] = np.asarray(_known(steps, f"optax's {prefix}"))
            continue
        scale = _trace_scale(prefix, fields, state)
        named = {name: scale(name, array) for name, array in theirs[field].items()}
        trained = [leaf for leaf in pairs if leaf.torch_name in named]
        arrays = _leaves.to_jax(trained, named)
        _same_trained(set(arrays), set(paths))
        found |= {path: arrays[leaf] for leaf, path in paths.items()}
    return found


def to_torch(
    arrays: Named,
    pairs: Sequence[Leaf],
    like: TorchState,
    steps: int | None = None,
) -> dict[str, Array]:
    """The arrays of a torch optimizer's state.

    Args:
        arrays: path of every leaf of optax's state, joined by "/" -> array.
        pairs: parameters, from `dualdp.matching.match`.
        like: kind and settings of the torch optimizer.
        steps: updates done so far, where torch counts them and optax does not.

    Returns:
        "slot/parameter" -> array.

    Raises:
        ValueError: the two optimizers do not have the same slots.
    """
    check(like)
    _refuse_folded(like, pairs)
    fields = _fields({path: array.shape for path, array in arrays.items()}, pairs)
    _compare(like, fields)
    found: dict[str, Array] = {}
    counts = {int(arrays[prefix]) for prefix, field in fields if field in COUNTERS}
    if len(counts) > 1:
        raise ValueError(
            f"optax's state counts {sorted(counts)} updates in different places. Expected one "
            "number."
        )
    names = {field: slot for slot, field in SLOTS[like.kind].items()}
    for (prefix, field), paths in fields.items():
        if field in COUNTERS:
            continue
        trained = [leaf for leaf in pairs if leaf.torch_name in like.options]
        held = {leaf: arrays[path] for leaf, path in paths.items()}
        _same_trained({place.path for leaf in trained for place in leaf.places}, set(held))
        named = _leaves.to_torch(trained, held)
        scale = _trace_scale(prefix, fields, like, inverse=True)
        found |= {f"{names[field]}/{name}": scale(name, a) for name, a in named.items()}
    if like.kind in HAS_STEP:
        count = np.float32(_known(next(iter(counts), steps), f"torch's {like.kind}"))
        found |= {f"step/{name}": np.asarray(count) for name in like.options}
    return found


def _known(steps: int | None, where: str) -> int:
    """The number of updates.

    Raises:
        ValueError: nobody knows it.
    """
    if steps is None:
        raise ValueError(
            f"{where} counts updates, which the other stack's state does not. Expected steps=."
        )
    return steps


# ---------------------------------------------------------------------- optax's paths


Fields = dict[tuple[str, str], dict[str, str]]


def _fields(wanted: Mapping[str, tuple[int, ...]], pairs: Sequence[Leaf]) -> Fields:
    """(path of a field, its name) -> JAX leaf -> whole path; a counter has no leaves.

    Raises:
        ValueError: a leaf that is neither a counter nor as long as a parameter.
    """
    shapes = {place.path: place.axes.jax_shape for leaf in pairs for place in leaf.places}
    found: Fields = {}
    for path, shape in wanted.items():
        prefix, parameter = _cut(path, shapes)
        field = prefix.rpartition("/")[2]
        if parameter is None and not (field in COUNTERS and shape == ()):
            raise ValueError(
                f"optax's state has {path} {shape}, which torch.optim does not keep. Expected "
                f"{sorted({f for slots in SLOTS.values() for f in slots.values()})} for each "
                "parameter, and counters."
            )
        paths = found.setdefault((prefix, field), {})
        if parameter is not None:
            paths[parameter] = path
    return found


def _cut(path: str, parameters: Mapping[str, tuple[int, ...]]) -> tuple[str, str | None]:
    """Field and parameter: "0/trace/fc/kernel" to ("0/trace", "fc/kernel")."""
    words = path.split("/")
    for k in range(1, len(words)):
        if "/".join(words[k:]) in parameters:
            return "/".join(words[:k]), "/".join(words[k:])
    return path, None


def _trace_scale(prefix: str, fields: Fields, state: TorchState, inverse: bool = False) -> Any:
    """What a slot is multiplied with, a function of (name, array).

    optax.rmsprop accumulates what is already multiplied by -learning rate, two places behind the
    second moment in its chain; a trace right behind it accumulates the updates, as torch does.

    Raises:
        ValueError: the trace is somewhere else.
    """
    if state.kind != "RMSprop" or not prefix.endswith("trace"):
        return lambda name, array: array
    second = next(path for path, field in fields if field == "nu")
    chain, place = second.split("/")[:-2], second.split("/")[-2]
    ways = {"/".join([*chain, str(int(place) + k), "trace"]): k for k in (1, 2) if place.isdigit()}
    if prefix not in ways:
        raise ValueError(
            f"optax's state has {prefix} beside {second}. Expected the chain of optax.rmsprop, or "
            "the trace right behind the second moment."
        )
    if ways[prefix] == 1:
        return lambda name, array: array
    sign = -1 if inverse else 1
    return lambda name, array: array * np.asarray(-state.options[name]["lr"], array.dtype) ** sign


# ---------------------------------------------------------------------- checks


def _compare(state: TorchState, fields: Fields) -> None:
    """Both optimizers must keep the same slots."""
    kept = [field for _, field in fields if field not in COUNTERS]
    if len(set(kept)) < len(kept):
        raise ValueError(
            f"optax's state has {kept}, one of them twice. Expected each once: which is torch's "
            "can't be told."
        )
    expected = _expected(state)
    if set(kept) != expected:
        raise ValueError(
            f"torch's {state.kind} keeps {sorted(expected)} (in optax's words), but optax's state "
            f"has {sorted(kept)}. Expected the same optimizer with the same settings on both sides."
        )


def _expected(state: TorchState) -> set[str]:
    """The slots that these settings make torch keep, in optax's words."""
    needed = {"momentum_buffer": "momentum", "grad_avg": "centered"}
    options = list(state.options.values())
    return {
        field
        for slot, field in SLOTS[state.kind].items()
        if slot not in needed or any(group.get(needed[slot]) for group in options)
    }


def _filled(state: TorchState, pairs: Sequence[Leaf]) -> dict[str, Named]:
    """Slot in optax's words -> name -> array; zeros before the first step.

    Raises:
        ValueError: a slot is there for some parameters only, or its first value can't be zero.
    """
    shapes = {leaf.torch_name: leaf.torch_shape for leaf in pairs}
    dampened = any(group.get("dampening") for group in state.options.values())
    found = {}
    for slot, field in SLOTS[state.kind].items():
        named = state.slots.get(slot, {})
        missing = sorted(set(state.options) - set(named))
        if field not in _expected(state):
            continue
        if missing and (named or dampened):
            raise ValueError(
                f"torch's state lacks {slot!r} for {missing}. Expected it for every trained "
                "parameter: take a step first."
            )
        found[field] = named or {name: np.zeros(shapes[name]) for name in missing}
    return found


def _same_trained(torch: set[str], jax: set[str]) -> None:
    """Both optimizers must train the same parameters."""
    if torch != jax:
        raise ValueError(
            f"torch's optimizer trains {sorted(torch - jax)} (JAX's names), which optax's state "
            f"lacks, and not {sorted(jax - torch)}, which it has. Expected the same parameters "
            "frozen on both sides."
        )


def _refuse_folded(state: TorchState, pairs: Sequence[Leaf]) -> None:
    """Two trained biases can't share JAX's one momentum."""
    for leaf in pairs if _expected(state) else ():
        if leaf.torch_name in state.options and any(place.is_added for place in leaf.places):
            raise ValueError(
                f"{leaf.torch_name} {leaf.torch_shape} is trained and has state of its own, but "
                f"JAX holds it folded into {leaf.jax_path}. Expected one trained bias: call "
                "dualdp.torch.weights.fold_biases(model) before the run of an LSTM or RNN; a GRU's "
                "weights cross, and its state with plain SGD only."
            )

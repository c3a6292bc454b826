# SPDX-License-Identifier: Apache-2.0
"""A run on disk: parameters, optimizer, generators, plan and ledger, in one file without code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from dualdp import checkpoint, leaves, translate
from dualdp.randomness import RootKey

from . import weights
from .agreement import resumed_by_first
from .arguments import Settings
from .distributed import group_of, on_all, unwrapped
from .engine import PrivacyEngine
from .optimizer_state import named_state, restorer
from .rules.base import Tensor
from .sharded import refuse_pieces

Path = str | os.PathLike[str]
Arrays = dict[str, Any]


def save_checkpoint(
    path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, engine: PrivacyEngine
) -> None:
    """Write the whole run into one file; between two steps.

    Beside it, `<path>.key` holds the secret key (mode 0600), and `<path>.ledger` the record of what
    is released from now on, unless the engine was given a `ledger`. The state of torch's generator,
    from which dropout comes, is part of the file; a learning rate scheduler's own state is not.
    Of several processes that train together, all call this, and rank 0 writes one file.

    Args:
        path: an existing file is replaced, in one go.
        model: the one the engine trains.
        optimizer: the one the engine uses.
        engine: attached.

    Raises:
        RuntimeError: a logical batch is half done, see `engine.is_between_steps`.
        TypeError: the optimizer keeps something else than tensors and plain values.
        ValueError: another model or optimizer.
    """
    refuse_pieces(model, "save_checkpoint")
    settings = engine.standing(model, optimizer)
    group, states = engine.group, _generators(next(iter(engine.parameters.values())).device)
    if group is None:
        _write(path, unwrapped(model), optimizer, engine, settings, [states])
        return
    each = group.gather(f"save_checkpoint after {engine.ledger.position} steps", states)
    group.by_first(
        f"the file of {engine.ledger.position} steps",
        lambda: _write(path, unwrapped(model), optimizer, engine, settings, each),
    )


def _write(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: PrivacyEngine,
    settings: Settings,
    generators: list[dict[str, Tensor]],
) -> None:
    """Write the file; `generators` are those of every process."""
    tensors = {f"{kind}/{name}": value for kind, name, value in _values(model)}
    slots, described = named_state(optimizer, model)
    tensors |= {f"optimizer/{name}": value for name, value in slots.items()}
    for rank, states in enumerate(generators):
        tensors |= {f"generator/{_of_rank(n, rank)}": state for n, state in states.items()}
    document = {
        "stack": "torch",
        "position": engine.ledger.position,
        "settings": asdict(settings),
        "trained": list(engine.parameters),
        "optimizer": described,
        "layout": weights.layout(model),
        "noise_layout": leaves.to_json(engine.noise_layout or ()),
        "bfloat16": [n for n, t in tensors.items() if t.dtype == torch.bfloat16],
        **checkpoint.pack_run(engine.ledger, path),
    }
    checkpoint.write(path, {name: _to_numpy(t) for name, t in tensors.items()}, document)


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    key: RootKey | Path | None = None,
    mapping: Mapping[str, str] | None = None,
    ledger: Path | None = None,
) -> PrivacyEngine:
    """Bring a run back into a model and an optimizer; `engine.resume(data_loader=)` goes on.

    Steps that were released after the checkpoint are run again: one whose clipped sum is the same
    repeats its noise and costs nothing, any other is a further release, which is accounted.

    Several processes that train together all call this with the same file; how many there are may
    differ from the run before. With as many, a run goes on bitwise; with more or fewer, sums are
    added in another order, and generators that were not saved stay as they are.

    Args:
        path: of `save_checkpoint`.
        model: of the same architecture; its parameters and buffers are overwritten.
        optimizer: over it, of the same kind and groups; its state is overwritten.
        key: the key or its file; None for `<path>.key`, or the plan's seed.
        mapping: for a file of the JAX stack, as in `dualdp.port.match`.
        ledger: the run's ledger file, if it was moved.

    Returns:
        An engine that knows what was spent; call its `resume`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the file is truncated, edited or foreign, or does not fit model or optimizer.
    """
    refuse_pieces(model, "load_checkpoint")
    group, inner = group_of(model), unwrapped(model)
    arrays, document = on_all(group, "load_checkpoint", lambda: checkpoint.read(path))
    if document.get("stack") == "jax":
        arrays, document = crossed(arrays, document, (inner, optimizer), mapping)
    elif document.get("stack") != "torch" or mapping is not None:
        raise ValueError(
            f"{os.fspath(path)} was saved by {document.get('stack')!r}, mapping={mapping!r}. "
            "Expected a file of either backend, with a mapping only for one of JAX's."
        )
    low = set(document["bfloat16"])
    tensors = {name: _to_tensor(array, name in low) for name, array in arrays.items()}
    slots = _below("optimizer/", tensors)

    def checked() -> tuple[Callable[[], None], Callable[[], None]]:
        put_model = _model_restorer(inner, tensors, document["trained"])
        return put_model, restorer(optimizer, inner, slots, document["optimizer"])

    put_model, put_optimizer = on_all(group, "the parts of the checkpoint", checked)
    resumed = resumed_by_first(
        group, document["plan"], lambda: checkpoint.unpack_run(document, path, key, ledger)
    )
    generators = _of(0 if group is None else group.rank, _below("generator/", tensors))
    try:
        settings = Settings(**document["settings"])
        engine = PrivacyEngine.loaded(
            resumed, settings, model, optimizer, lambda: _set_generators(generators), group
        )
    except BaseException:
        resumed.close()
        raise
    put_model()
    put_optimizer()
    engine.noise_layout = leaves.from_json(document["noise_layout"]) or None
    return engine


def crossed(
    arrays: Arrays,
    document: Mapping[str, Any],
    like: tuple[nn.Module, torch.optim.Optimizer],
    mapping: Mapping[str, Any] | None,
) -> tuple[Arrays, dict[str, Any]]:
    """A checkpoint of the other stack as this one would have written it for this model.

    What JAX does not have stays as it is: other buffers than running statistics, and the state of
    torch's generators. The loss is taken to be a mean over the batch.
    """
    model, optimizer = like
    ours = {f"{kind}/{name}": value for kind, name, value in _values(model)}
    described = {
        "layout": weights.layout(model),
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "optimizer": named_state(optimizer, model)[1],
    }
    wanted = {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in ours.items()
    }
    arrays, document = translate.to_torch(arrays, document, wanted, described, mapping)
    device = next(model.parameters()).device
    kept = ours | {f"generator/{name}": state for name, state in _generators(device).items()}
    arrays |= {n: _to_numpy(t) for n, t in kept.items() if n not in arrays}
    settings = Settings("mean", "auto", whole=True, has_target=True)
    return arrays, {**document, "settings": asdict(settings)}


def _values(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of every parameter and of the buffers that a `state_dict` holds."""
    parameters = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True).keys()
    return [
        *(("params", name, p) for name, p in parameters.items()),
        *(("buffers", name, b) for name, b in model.named_buffers() if name in kept),
    ]


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _model_restorer(
    model: nn.Module, tensors: Mapping[str, Tensor], trained: list[str]
) -> Callable[[], None]:
    """Check that the arrays are the model's; what is returned puts them there.

    Raises:
        ValueError: names, shapes, dtypes or what is trained differ.
    """
    ours = {f"{kind}/{name}": value for kind, name, value in _values(model)}
    theirs = {n: t for n, t in tensors.items() if n.startswith(("params/", "buffers/"))}
    missing, unknown = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if missing or unknown:
        raise ValueError(
            f"The checkpoint lacks {missing} and holds {unknown}. Expected that of a model with "
            "the same parameters and buffers."
        )
    for name, value in ours.items():
        saved = theirs[name]
        if (value.shape, value.dtype) != (saved.shape, saved.dtype):
            raise ValueError(
                f"{name!r} is {tuple(saved.shape)} {saved.dtype} in the checkpoint and "
                f"{tuple(value.shape)} {value.dtype} in the model. Expected the same."
            )
    current = [name for name, p in model.named_parameters() if p.requires_grad]
    if set(current) != set(trained):
        raise ValueError(
            f"The checkpoint's run trains {sorted(set(trained) - set(current))}, which are frozen, "
            f"and not {sorted(set(current) - set(trained))}. Freeze what was frozen."
        )

    def put() -> None:
        with torch.no_grad():
            for name, value in ours.items():
                value.copy_(theirs[name])

    return put


def _to_numpy(tensor: Tensor) -> Any:
    """The tensor's bits as an array; bfloat16 as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _to_tensor(array: Any, is_bfloat16: bool) -> Tensor:
    """A tensor of its own with the array's bits."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def _generators(device: torch.device) -> dict[str, Tensor]:
    """States of torch's global generators, from which dropout comes."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def _of_rank(name: str, rank: int) -> str:
    """The name of a generator's state in the file; those of rank 0 have no number."""
    return f"{name}.{rank}" if rank else name


def _of(rank: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of one process; none for one that the run before did not have."""
    names = {name.partition(".")[0] for name in states}
    return {name: states[_of_rank(name, rank)] for name in names if _of_rank(name, rank) in states}


def _set_generators(states: Mapping[str, Tensor]) -> None:
    """Put the global generators where they were."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

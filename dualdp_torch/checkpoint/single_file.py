# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a run in one file without code: parameters, optimizer, generators, plan.

Tensors are named "params/...", "buffers/...", "optimizer/<slot>/..." and "generator/...", in a
folder too, and a `RunDocument` says the rest, also in the checkpoint of a host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dualdp import _validate, checkpoint
from dualdp.checkpoint import RunDocument
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan
from dualdp.porting import convert_checkpoint, parameter_map
from dualdp_torch.checkpoint import weights
from dualdp_torch.checkpoint.optimizer_state import named_state, restorer
from dualdp_torch.parallel.fsdp import fsdp_layers, refuse_sharded
from dualdp_torch.parallel.process_group import Group, group_of, unwrapped
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import RunSettings, check_kinds
from dualdp_torch.training.engine import PrivacyEngine

Path = str | os.PathLike[str]
Arrays = dict[str, Any]


def save_checkpoint(
    path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, engine: PrivacyEngine
) -> None:
    """Write a run between two steps to one file.

    Beside it `<path>.ledger` holds the record, also of later releases, unless the engine was given
    a `ledger`. The file holds the state of torch's generator, from which dropout draws, and nothing
    that batches or noise were drawn from; it does not hold a learning rate scheduler. If several
    processes train together, all call this, and rank 0 writes one file.

    Args:
        path: path of the file; an existing one is replaced atomically.
        model: model that the engine trains.
        optimizer: optimizer that the engine uses.
        engine: attached `PrivacyEngine`.

    Raises:
        RuntimeError: a logical batch is half done, see `engine.is_between_steps`.
        TypeError: the optimizer keeps something else than tensors and plain values.
        ValueError: another model or optimizer.

    Guarantees:
        No file of a run holds the bits of a release.  [test_no_file_of_a_run_holds_its_bits]
    """
    require_savable(model, optimizer, engine)
    refuse_sharded(model, "save_checkpoint")
    generators = all_generators(engine)

    def write() -> None:
        _validate.new_file("path", path)
        tensors = run_tensors(model, optimizer) | generators
        write_file(path, tensors, run_document(engine, model, optimizer, path))

    engine.group.word(f"the file of {engine.ledger.position} steps", write)


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ledger: Path | None = None,
    mapping: Mapping[str, str] | None = None,
) -> PrivacyEngine:
    """Load a run into a model and an optimizer; `engine.resume(data_loader=)` continues it.

    A segment of the run begins: steps that were released after the checkpoint stay accounted, and
    are further releases when they run again, with batches and noise drawn anew.

    If several processes train together, all call this with the same file; their number may have
    changed.

    Args:
        path: file of `save_checkpoint`.
        model: model of the same architecture; its parameters and buffers are overwritten.
        optimizer: optimizer of the model, of the same class and groups; its state is overwritten.
        ledger: path of the run's ledger, if it was moved or copied.
        mapping: mapping between names for a JAX file, as in `dualdp.port.match`; or None.

    Returns:
        engine that knows what was spent; call its `resume`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the file is truncated, edited or foreign, or does not fit model or optimizer; or
            another process writes the ledger.
    """
    check_kinds(model, optimizer, "model")
    refuse_sharded(model, "load_checkpoint")
    arrays, document = group_of(model).on_all("load_checkpoint", lambda: checkpoint.read(path))
    if document["stack"] == "jax":
        arrays, document = converted(arrays, document, (unwrapped(model), optimizer), mapping)
    elif document["stack"] != "torch" or mapping is not None:
        raise ValueError(
            f"{os.fspath(path)} was saved by {document['stack']!r}, mapping={mapping!r}. "
            "Expected a file of either backend, with a mapping only for one of JAX's."
        )
    low = set(document["bfloat16"])
    tensors = {name: to_tensor(array, name in low) for name, array in arrays.items()}
    return load_run(tensors, document, path, ledger, model, optimizer)


def converted(
    arrays: Arrays,
    document: RunDocument,
    like: tuple[nn.Module, torch.optim.Optimizer],
    mapping: Mapping[str, str] | None,
) -> tuple[Arrays, RunDocument]:
    """Convert a JAX checkpoint to the one that this backend would have written for this model.

    State that JAX lacks is the model's own: buffers other than running statistics, and the states
    of torch's generators. The loss is assumed to be a mean over the batch.
    """
    if not isinstance(like, tuple | list) or len(like) != 2:
        raise TypeError(f"like is {_validate.kind(like)}. Expected (model, optimizer).")
    model, optimizer = like
    check_kinds(model, optimizer, "model")
    ours = model_tensors(model)
    described = {
        "layout": weights.description(model),
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "parameters": [name for name, _ in model.named_parameters()],
        "optimizer": named_state(optimizer, model)[1],
    }
    wanted = {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in ours.items()
    }
    checks = document["settings"]["checks"]
    found: Any
    arrays, found = convert_checkpoint.to_torch(arrays, document, wanted, described, mapping)
    kept = ours | generator_states(next(model.parameters()).device, rank=0)
    arrays |= {n: to_numpy(t) for n, t in kept.items() if n not in arrays}
    found["settings"] = asdict(RunSettings("mean", "auto", has_target=True, checks=checks))
    del found["settings"]["pass_end"]
    return arrays, found


def require_savable(model: object, optimizer: object, engine: object) -> None:
    """Refuse what is no run between two steps, or another one's model or optimizer."""
    check_kinds(model, optimizer, "model")
    if not isinstance(engine, PrivacyEngine):
        raise TypeError(f"engine is {_validate.kind(engine)}. Expected the run's PrivacyEngine.")
    engine.settings_to_save(model, optimizer)  # type: ignore[arg-type]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter, and the buffers that a `state_dict` holds, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    buffers = {f"buffers/{name}": b for name, b in model.named_buffers() if name in kept}
    return {f"params/{name}": p for name, p in model.named_parameters()} | buffers


def run_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer slots by name."""
    model = unwrapped(model)
    for layer in fsdp_layers(model):  # as outside of its forward
        layer.reshard()
    slots, _ = named_state(optimizer, model)
    tensors = model_tensors(model) | {f"optimizer/{name}": value for name, value in slots.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def run_document(
    engine: PrivacyEngine, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> RunDocument:
    """Return the document of a checkpoint at `path`; the ledger is in a file from now on."""
    document, inner = describe_run(engine, model, optimizer, path), unwrapped(model)
    document["optimizer"] = named_state(optimizer, inner)[1]
    document["layout"] = weights.description(inner)
    document["noise_layout"] = parameter_map.to_json(engine.noise_layout or ())
    return document


def describe_run(
    engine: PrivacyEngine, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> RunDocument:
    """Return the document of a run whose parameters another package saves."""
    plain = asdict(engine.settings_to_save(model, optimizer))
    return checkpoint.describe_run(
        engine.ledger,
        path,
        stack="torch",
        pass_end=plain.pop("pass_end"),
        settings=plain,
        trained=engine.parameters,
        parameters=[name for name, _ in unwrapped(model).named_parameters()],
    )


def write_file(path: Path, tensors: Mapping[str, Tensor], document: RunDocument) -> None:
    """Write tensors and document to the one file of a run."""
    document["bfloat16"] = [n for n, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    checkpoint.write(path, {n: to_numpy(tensor) for n, tensor in tensors.items()}, document)


def settings_in(document: RunDocument) -> RunSettings:
    """Return the settings of a saved run."""
    return RunSettings(**document["settings"], pass_end=document["pass_end"])


def open_ledger(
    group: Group, document: RunDocument, path: Path, ledger: Path | None = None
) -> Ledger:
    """Begin a segment of a saved run, on all processes.

    Rank 0 goes on with the file, the others with its record in memory.
    """
    found = list[Ledger]()

    def record() -> str:
        found.append(checkpoint.open_run(document, path, ledger))
        return found[0].to_json() if group.size > 1 else ""

    text = group.word("the ledger", record)
    if found:
        return found[0]
    plan = PrivacyPlan.from_json(json.dumps(document["plan"]))
    return Ledger.resume(text, plan=plan, step=document["position"], bound=document["bound"])


def load_run(
    tensors: Mapping[str, Tensor],
    document: RunDocument,
    path: Path,
    ledger: Path | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> PrivacyEngine:
    """Return the engine of a saved run, after loading model and optimizer; all is checked first."""
    group, inner, prefix = group_of(model), unwrapped(model), "optimizer/"
    slots = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    states = {name: t for name, t in tensors.items() if name.startswith("generator/")}

    def checked() -> tuple[Callable[[], None], Callable[[], None]]:
        put_model = _model_restorer(inner, tensors, document["trained"])
        return put_model, restorer(optimizer, inner, slots, document["optimizer"])

    put_model, put_optimizer = group.on_all("the parts of the checkpoint", checked)
    opened = open_ledger(group, document, path, ledger)
    settings, at_resume = settings_in(document), partial(set_generators, states, group.rank)
    engine = PrivacyEngine.loaded(model, optimizer, settings, opened, at_resume)
    put_model()
    put_optimizer()
    engine.noise_layout = parameter_map.from_json(document["noise_layout"]) or None
    return engine


def _model_restorer(
    model: nn.Module, tensors: Mapping[str, Tensor], trained: list[str]
) -> Callable[[], None]:
    """Check that the tensors fit the model; return a function that copies them into it."""
    ours = model_tensors(model)
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


def generator_states(device: torch.device, rank: int) -> dict[str, Tensor]:
    """Return the states of torch's global generators on this process, by name with its rank.

    Dropout draws from them, and nothing of ours.
    """
    states = {f"generator/cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"generator/cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return states


def all_generators(engine: PrivacyEngine) -> dict[str, Tensor]:
    """Return the `generator_states` of all processes, which call this together."""
    group, device = engine.group, next(iter(engine.parameters.values())).device
    point = f"save_checkpoint after {engine.ledger.position} steps"
    each = group.gather(point, generator_states(device, group.rank))
    return {name: state for states in each for name, state in states.items()}


def set_generators(states: Mapping[str, Tensor], rank: int) -> None:
    """Set the global generators, unless the saved run did not have this rank."""
    cpu, cuda = states.get(f"generator/cpu.{rank}"), states.get(f"generator/cuda.{rank}")
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return an array with the tensor's bits; bfloat16 as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: NDArray[Any], is_bfloat16: bool) -> Tensor:
    """Return a tensor with a copy of the array's bits."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor

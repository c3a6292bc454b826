# SPDX-License-Identifier: Apache-2.0
"""State of a run as named tensors and a `RunDocument`, the same in a file and a folder.

Tensors are named "params/...", "buffers/...", "optimizer/<slot>/..." and "generator/...".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dualdp import _validate, checkpoint
from dualdp.checkpoint import RunDocument
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan
from dualdp.porting import parameter_map
from dualdp_torch.checkpoint import weights
from dualdp_torch.checkpoint.optimizer_state import named_state, restorer
from dualdp_torch.parallel.fsdp import fsdp_layers
from dualdp_torch.parallel.process_group import Group, on_all
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import RunSettings, check_kinds
from dualdp_torch.training.engine import PrivacyEngine

Path = str | os.PathLike[str]


def settings_of(model: object, optimizer: object, engine: object) -> RunSettings:
    """Return the settings of a run that can be saved; refuse other models and optimizers."""
    check_kinds(model, optimizer, "model")
    if not isinstance(engine, PrivacyEngine):
        raise TypeError(f"engine is {_validate.kind(engine)}. Expected the run's PrivacyEngine.")
    return engine.settings_to_save(model, optimizer)  # type: ignore[arg-type]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter, and the buffers that a `state_dict` holds, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    buffers = {f"buffers/{name}": b for name, b in model.named_buffers() if name in kept}
    return {f"params/{name}": p for name, p in model.named_parameters()} | buffers


def run_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return parameters, buffers and optimizer slots by name, and the optimizer's plain data."""
    for layer in fsdp_layers(model):  # as outside of its forward
        layer.reshard()
    slots, described = named_state(optimizer, model)
    tensors = model_tensors(model) | {f"optimizer/{name}": value for name, value in slots.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}, described


def run_document(
    engine: PrivacyEngine,
    settings: RunSettings,
    model: nn.Module,
    described: dict[str, Any],
    path: Path,
) -> RunDocument:
    """Return the document of a checkpoint at `path`; the ledger is in a file from now on."""
    document = describe_run(engine, settings, model, path)
    document["optimizer"], document["layout"] = described, weights.description(model)
    document["noise_layout"] = parameter_map.to_json(engine.noise_layout or ())
    return document


def describe_run(
    engine: PrivacyEngine, settings: RunSettings, model: nn.Module, path: Path
) -> RunDocument:
    """Return the document of a run whose parameters another package saves."""
    plain = asdict(settings)
    return checkpoint.describe_run(
        engine.ledger,
        path,
        stack="torch",
        pass_end=plain.pop("pass_end"),
        settings=plain,
        trained=engine.parameters,
        parameters=[name for name, _ in model.named_parameters()],
    )


def settings_in(document: RunDocument) -> RunSettings:
    """Return the settings of a saved run."""
    return RunSettings(**document["settings"], pass_end=document["pass_end"])


def ledger_opener(
    group: Group | None, document: RunDocument, path: Path, ledger: Path | None = None
) -> Callable[[bool], Ledger]:
    """Return a function of `recalibrate` that begins a segment of a saved run, on all processes.

    Rank 0 goes on with the file, the others with its record in memory.
    """

    def opened(recalibrate: bool) -> Ledger:
        found = list[Ledger]()

        def record() -> str:
            found.append(checkpoint.open_run(document, path, ledger, recalibrate=recalibrate))
            return found[0].to_json() if group is not None else ""

        if group is None:
            record()
            return found[0]
        text = group.word("the ledger", record)
        if group.is_first:
            return found[0]
        return Ledger.resume(
            text,
            plan=PrivacyPlan.from_json(json.dumps(document["plan"])),
            step=document["position"],
            bound=document["bound"],
            recalibrate=recalibrate,
        )

    return opened


def load_run(
    tensors: Mapping[str, Tensor],
    document: RunDocument,
    path: Path,
    ledger: Path | None,
    *,
    model: nn.Module,
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group | None,
) -> PrivacyEngine:
    """Return the engine of a saved run, after loading model and optimizer; all is checked first.

    `inner` has the parameters by their saved names: it is `model`, or the module inside of it.
    """
    rank = 0 if group is None else group.rank

    def checked() -> tuple[Callable[[], None], Callable[[], None]]:
        put_model = _model_restorer(inner, tensors, document["trained"])
        prefix = "optimizer/"
        slots = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return put_model, restorer(optimizer, inner, slots, document["optimizer"])

    put_model, put_optimizer = on_all(group, "the parts of the checkpoint", checked)
    states = {name: t for name, t in tensors.items() if name.startswith("generator/")}
    engine = PrivacyEngine.loaded(
        model,
        optimizer,
        settings_in(document),
        ledger_opener(group, document, path, ledger),
        lambda: set_generators(states, rank),
        group,
    )
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

    Dropout draws from them, and nothing of ours; those of rank 0 have no number.
    """
    number = f".{rank}" if rank else ""
    states = {f"generator/cpu{number}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"generator/cuda{number}"] = torch.cuda.get_rng_state(device)
    return states


def all_generators(engine: PrivacyEngine) -> dict[str, Tensor]:
    """Return the `generator_states` of all processes, which call this together."""
    group, device = engine.group, next(iter(engine.parameters.values())).device
    if group is None:
        return generator_states(device, 0)
    point = f"save_checkpoint after {engine.ledger.position} steps"
    each = group.gather(point, generator_states(device, group.rank))
    return {name: state for states in each for name, state in states.items()}


def set_generators(states: Mapping[str, Tensor], rank: int) -> None:
    """Set the global generators, unless the saved run did not have this rank."""
    number = f".{rank}" if rank else ""
    cpu, cuda = states.get(f"generator/cpu{number}"), states.get(f"generator/cuda{number}")
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

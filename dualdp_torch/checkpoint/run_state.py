# SPDX-License-Identifier: Apache-2.0
"""State of a run as named tensors and a document of plain data, the same in a file and a folder.

Tensors are named "params/...", "buffers/...", "optimizer/<slot>/..." and "generator/...".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from dualdp import _validate, checkpoint
from dualdp.ledger.ledger import Ledger
from dualdp.porting import parameter_map
from dualdp_torch.checkpoint import weights
from dualdp_torch.checkpoint.optimizer_state import named_state, restorer
from dualdp_torch.parallel.fsdp import fsdp_layers
from dualdp_torch.parallel.process_group import Group, on_all
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import RunSettings, check_kinds
from dualdp_torch.training.engine import PrivacyEngine
from dualdp_torch.training.run_ledger import resume_ledger

Path = str | os.PathLike[str]


def check_parts(model: Any, optimizer: Any, engine: Any) -> None:
    """Refuse what is no model, optimizer or engine, before anything is saved."""
    check_kinds(model, optimizer, "model")
    if not isinstance(engine, PrivacyEngine):
        raise TypeError(f"engine is {_validate.kind(engine)}. Expected the run's PrivacyEngine.")


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
    described: Mapping[str, Any],
    path: Path,
) -> dict[str, Any]:
    """Return the document of a run; key and ledger are stored next to `path`."""
    return {
        "stack": "torch",
        "position": engine.ledger.position,
        "settings": asdict(settings),
        "trained": list(engine.parameters),
        "optimizer": described,
        "layout": weights.layout(model),
        "noise_layout": parameter_map.to_json(engine.noise_layout or ()),
        **checkpoint.pack_run(engine.ledger, path),
    }


def load_run(
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    resume: Callable[[], Ledger],
    *,
    model: nn.Module,
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group | None,
) -> PrivacyEngine:
    """Return the engine of a saved run, after loading model and optimizer; all is checked first.

    `resume` opens key and ledger on rank 0. `inner` has the parameters by their saved names: it is
    `model`, or the module inside of it.
    """
    rank = 0 if group is None else group.rank

    def checked() -> tuple[Callable[[], None], Callable[[], None]]:
        put_model = _model_restorer(inner, tensors, document["trained"])
        prefix = "optimizer/"
        slots = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return put_model, restorer(optimizer, inner, slots, document["optimizer"])

    put_model, put_optimizer = on_all(group, "the parts of the checkpoint", checked)
    settings = RunSettings.from_saved(document["settings"])
    states = {name: t for name, t in tensors.items() if name.startswith("generator/")}
    ledger = resume_ledger(group, document["plan"], resume)
    engine = PrivacyEngine.loaded(
        ledger, settings, model, optimizer, lambda: set_generators(states, rank), group
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
    """Return the states of torch's global generators on this process, by name with its rank."""
    states = {_name("cpu", rank): torch.get_rng_state()}
    if device.type == "cuda":
        states[_name("cuda", rank)] = torch.cuda.get_rng_state(device)
    return states


def all_generators(engine: PrivacyEngine) -> dict[str, Tensor]:
    """Return the `generator_states` of all processes, which call this together."""
    group, device = engine.group, next(iter(engine.parameters.values())).device
    if group is None:
        return generator_states(device, 0)
    point = f"save_checkpoint after {engine.ledger.position} steps"
    each = group.gather(point, generator_states(device, group.rank))
    return {name: state for states in each for name, state in states.items()}


def _name(device: str, rank: int) -> str:
    """Name of a generator's state; those of rank 0 have no number."""
    return f"generator/{device}.{rank}" if rank else f"generator/{device}"


def set_generators(states: Mapping[str, Tensor], rank: int) -> None:
    """Set the global generators, unless the saved run did not have this rank."""
    cpu, cuda = states.get(_name("cpu", rank)), states.get(_name("cuda", rank))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def to_numpy(tensor: Tensor) -> Any:
    """Return an array with the tensor's bits; bfloat16 as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: Any, is_bfloat16: bool) -> Tensor:
    """Return a tensor with a copy of the array's bits."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor

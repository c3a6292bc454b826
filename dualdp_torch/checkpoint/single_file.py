# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a run in one file without code: parameters, optimizer, generators, plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from dualdp import _validate, checkpoint
from dualdp.checkpoint import RunDocument
from dualdp.porting import convert_checkpoint
from dualdp_torch.checkpoint import weights
from dualdp_torch.checkpoint.optimizer_state import named_state
from dualdp_torch.checkpoint.run_state import (
    Path,
    all_generators,
    generator_states,
    load_run,
    model_tensors,
    run_document,
    run_tensors,
    settings_of,
    to_numpy,
    to_tensor,
)
from dualdp_torch.parallel.fsdp import refuse_sharded
from dualdp_torch.parallel.process_group import group_of, on_all, on_first, unwrapped
from dualdp_torch.training.arguments import RunSettings, check_kinds
from dualdp_torch.training.engine import PrivacyEngine

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
    settings, group = settings_of(model, optimizer, engine), engine.group
    refuse_sharded(model, "save_checkpoint")
    generators, inner = all_generators(engine), unwrapped(model)

    def write() -> None:
        _validate.new_file("path", path)
        tensors, described = run_tensors(inner, optimizer)
        tensors |= generators
        document = run_document(engine, settings, inner, described, path)
        document["bfloat16"] = [
            n for n, tensor in tensors.items() if tensor.dtype == torch.bfloat16
        ]
        checkpoint.write(path, {n: to_numpy(tensor) for n, tensor in tensors.items()}, document)

    on_first(group, f"the file of {engine.ledger.position} steps", write)


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
    group, inner = group_of(model), unwrapped(model)
    arrays, document = on_all(group, "load_checkpoint", lambda: checkpoint.read(path))
    if document["stack"] == "jax":
        arrays, document = converted(arrays, document, (inner, optimizer), mapping)
    elif document["stack"] != "torch" or mapping is not None:
        raise ValueError(
            f"{os.fspath(path)} was saved by {document['stack']!r}, mapping={mapping!r}. "
            "Expected a file of either backend, with a mapping only for one of JAX's."
        )
    low = set(document["bfloat16"])
    tensors = {name: to_tensor(array, name in low) for name, array in arrays.items()}
    return load_run(
        tensors,
        document,
        path,
        ledger,
        model=model,
        inner=inner,
        optimizer=optimizer,
        group=group,
    )


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
    settings = asdict(RunSettings("mean", "auto", has_target=True, checks=checks))
    del settings["pass_end"]
    found["settings"] = settings
    return arrays, found

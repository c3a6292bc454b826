# SPDX-License-Identifier: Apache-2.0
"""Noisy mean: the only place where this backend releases anything about the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.plan.plan import require_plan
from dualdp.randomness import grid_noise, run_registry, threefry
from dualdp_torch.noise.generators import Normals
from dualdp_torch.rules.base import Tensor, wide


@dataclass(frozen=True)
class Piece:
    """Shard of a parameter on one process: consecutive numbers in row-major order.

    Attributes:
        start: index of the shard's first number.
        numel: numbers in the whole parameter.
    """

    start: int
    numel: int


#: Sums of one device and dtype, by name; together they are one flat array.
Group = dict[str, Tensor]
#: (index of a group, where a parameter begins in its flat array, its piece, (k,) sums of the piece,
#: name) -> (k,) sums plus noise.
Adder = Callable[[int, int, Piece, Tensor, str], Tensor]


@dataclass(frozen=True)
class NoiseSettings:
    """Settings of the noise of one release.

    `names` are those of all parameters, in order; `sizes` the lengths of the groups' flat arrays,
    of which this process holds the whole or, under FSDP, pieces.
    """

    plan: Any
    step: int
    branch: int
    max_grad_norm: float
    names: list[str]
    groups: list[Group]
    sizes: list[int]
    is_whole: bool
    layout: Sequence[Any] | None

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise in the sum, gradient units."""
        return float(self.plan.noise_multiplier_at(self.step) * self.max_grad_norm)

    @property
    def key(self) -> Any:
        """(2,) uint32, secret."""
        return self.plan.step_key("noise", self.step, self.branch)


def noisy_mean(
    grads: Mapping[str, Tensor],
    plan: Any,
    step: int,
    *,
    branch: int | None = None,
    max_grad_norm: float | None = None,
    layout: Sequence[Any] | None = None,
    pieces: Mapping[str, Piece] | None = None,
) -> dict[str, Tensor]:
    """Add the noise of a step to a clipped sum and divide by the expected batch size.

    `plan.noise` selects the normals. "fast": torch's own generator, seeded by our key, in parallel
    over `torch.get_num_threads()` cores. "portable": those of JAX. Both are statistical generators
    of floating-point numbers: an adversary who sees an exact released number may be able to rule
    out a data set by it. "secure" is meant for that adversary (see `dualdp.randomness.grid_noise`).

    The noise of a release is handed out once, and if a ledger keeps the record
    (`engine.make_loader`, `Ledger`) only for releases on record. Without one, the noise of a plan
    with a seed is not limited, and a plan with a secret key gives the noise of one step only.

    Args:
        grads: mapping from every trainable parameter name to its clipped SUM over a logical batch.
        plan: `PrivacyPlan`.
        step: index of the release.
        branch: branch of the ledger, for a step that is released again with other gradients; None
            for the one on record.
        max_grad_norm: C of this step if the ledger adapts it; None for the plan's.
        layout: `dualdp.port.match(...)` to draw portable noise in the JAX model's shapes and order.
        pieces: mapping from name to the `Piece` that `grads` holds of a sharded parameter; only the
            noise of these pieces is drawn.

    Returns:
        mapping from name to (sum + noise) / expected_batch_size, float32 or wider; parameters of
        one dtype may be views of one array.

    Raises:
        AccountingError: the step is past the plan or not on record, its noise was handed out
            before, or something else draws this plan's noise.
        TypeError: inside `torch.func.vmap`, or while a CUDA graph is captured.
        ValueError: `layout` lacks a parameter, or came with `pieces`.

    Guarantees:
        Noise of standard deviation noise_multiplier times max_grad_norm, independent over
            parameters, steps and branches.
            [test_noise_has_the_declared_scale, test_noise_never_repeats]
        All 64 bits of the step's key count.  [test_noise_depends_on_the_whole_key]
        The same numbers on any number of threads.  [test_noise_does_not_depend_on_threads]
        The noise of pieces is that of the whole.  [test_noise_of_pieces_is_that_of_the_whole]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    require_plan(plan)
    _check_sum(grads)
    _refuse_repetition(grads)
    step = _checked_step(plan, step)
    with run_registry.drawing(plan, _SOURCE, _SOURCE, step, branch) as granted:
        if granted is None:
            raise run_registry.not_recorded(_SOURCE, step)
        return noised_mean(
            grads,
            plan,
            step,
            branch=granted,
            max_grad_norm=max_grad_norm,
            layout=layout,
            pieces=pieces,
        )


_SOURCE = "noisy_mean"


def _check_sum(grads: Any) -> None:
    """Refuse what is no clipped sum: a mapping from name to tensor."""
    if not isinstance(grads, Mapping):
        raise TypeError(
            f"grads is {_validate.kind(grads)}. Expected a mapping from name to tensor, such as "
            "clipped_grad_sum(...).grads."
        )
    for name, grad in grads.items():
        if not torch.is_tensor(grad) or grad.is_meta:
            what = "on the meta device" if torch.is_tensor(grad) else _validate.kind(grad)
            raise TypeError(f"grads[{name!r}] is {what}. Expected a torch tensor with numbers.")


def _refuse_repetition(grads: Mapping[str, Tensor]) -> None:
    """Refuse transformations that would add one draw of noise to several sums."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(grad) for grad in grads.values()):
        raise TypeError(
            "noisy_mean is inside torch.func.vmap or grad, where all members would get the same "
            "noise. Expected vmap around the clipped sums alone; each model of an ensemble has a "
            "plan of its own."
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise TypeError(
            "noisy_mean is inside the capture of a CUDA graph, which would add the same noise at "
            "every replay. Expected it outside of the graph."
        )


def _checked_step(plan: Any, step: Any) -> int:
    """Step as an int, after checking that the plan has it."""
    step = _validate.integer("step", step)
    if plan.num_steps is not None and step >= plan.num_steps:
        raise AccountingError(
            f"step={step} is past the plan's num_steps={plan.num_steps}. Plan more steps, or "
            "num_steps=None for an open-ended run."
        )
    return step


def noised_mean(
    grads: Mapping[str, Tensor],
    plan: Any,
    step: int,
    *,
    branch: int = 0,
    max_grad_norm: float | None = None,
    layout: Sequence[Any] | None = None,
    pieces: Mapping[str, Piece] | None = None,
) -> dict[str, Tensor]:
    """`noisy_mean` for a step that the caller has recorded and sealed itself."""
    step = _checked_step(plan, step)
    _validate.choice("noise", plan.noise, _ADDERS)
    if layout is not None and pieces is not None:
        raise ValueError(
            "layout came with pieces: the noise of a JAX model's shapes can't be drawn shard by "
            "shard. Consolidate the checkpoint and go on in one process, or leave layout out."
        )
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    bound = _validate.positive("max_grad_norm", bound)
    by_kind: dict[Any, Group] = {}
    for name, grad in grads.items():
        total = grad.detach().to(wide(grad.dtype))
        by_kind.setdefault((total.device, total.dtype), {})[name] = total
    groups, is_whole = list(by_kind.values()), pieces is None
    numel = {n: grad.numel() if pieces is None else pieces[n].numel for n, grad in grads.items()}
    sizes = [sum(numel[name] for name in group) for group in groups]
    release = NoiseSettings(plan, step, branch, bound, list(grads), groups, sizes, is_whole, layout)
    add, divisor = _ADDERS[plan.noise](release), plan.expected_batch_size_at(step)
    mean: dict[str, Tensor] = {}
    for index, group in enumerate(groups):
        if is_whole and plan.noise != "portable":  # whose keys are those of parameters
            flat = _flatten_dense_tensors(list(group.values()))
            flat = add(index, 0, Piece(0, sizes[index]), flat, "").div_(divisor)
            parts = _unflatten_dense_tensors(flat, list(group.values()))
            mean.update(zip(group, parts, strict=True))
            continue
        first = 0
        for name, total in group.items():
            piece = Piece(0, numel[name]) if pieces is None else pieces[name]
            noisy = add(index, first, piece, total.reshape(-1), name)
            mean[name] = noisy.div_(divisor).view_as(total)
            first += piece.numel
    return {name: mean[name] for name in grads}


def _fast(release: NoiseSettings) -> Adder:
    """Adder of the normals of torch's own generator."""
    normals = []
    for index, (group, size) in enumerate(zip(release.groups, release.sizes, strict=True)):
        key, like = threefry.fold_in(release.key, index), next(iter(group.values()))
        normals.append(Normals(key, size, release.stddev, like))
    return lambda index, first, piece, total, _: normals[index].add_at(first + piece.start, total)


def _portable(release: NoiseSettings) -> Adder:
    """Adder of the normals that JAX draws: leaf i from `fold_in(key, i)`."""
    leaves = {leaf.torch_name: leaf for leaf in release.layout or ()}
    missing = sorted(set(release.names) - set(leaves)) if release.layout is not None else []
    if missing:
        raise ValueError(
            f"layout lacks the parameters {missing}. Expected dualdp.port.match(model, params) of "
            "this model."
        )
    key = release.key

    def add(index: int, first: int, piece: Piece, total: Tensor, name: str) -> Tensor:
        dtype = np.float64 if total.dtype == torch.float64 else np.float32

        # A tensor may be several JAX leaves; `ParameterMap.normals` calls `draw` for each of them.
        def draw(number: int, shape: tuple[int, ...]) -> Any:
            return threefry.normal(threefry.fold_in(key, number), shape, dtype=dtype)

        if name in leaves:
            drawn = np.ascontiguousarray(leaves[name].normals(draw)).reshape(-1)
        else:
            own, start = threefry.fold_in(key, release.names.index(name)), piece.start
            stop = start + total.numel()
            drawn = threefry.normal_between(own, start, stop, size=piece.numel, dtype=dtype)
        return torch.from_numpy(drawn).to(total.device).mul_(release.stddev).add_(total)

    return add


def _secure(release: NoiseSettings) -> Adder:
    """Adder of noise on the public grid, on the host in float64."""
    plan, step, sizes, threads = release.plan, release.step, release.sizes, torch.get_num_threads()
    pitch = grid_noise.pitch(release.max_grad_norm, sum(sizes))
    cells = release.stddev / pitch
    options: Any = {"branch": release.branch, "cells": cells, "size": sum(sizes)}
    whole = None
    if release.is_whole:
        whole = grid_noise.grid_noise(plan, step, threads=threads, **options)

    def add(index: int, first: int, piece: Piece, total: Tensor, name: str) -> Tensor:
        start = sum(sizes[:index]) + first + piece.start
        stop = start + total.numel()
        if whole is None:
            noise = grid_noise.grid_noise_between(plan, step, start, stop, **options)
        else:
            noise = whole[start:stop]
        noisy = grid_noise.noisy_sum(total.cpu().numpy(), noise, pitch, threads=threads)
        return torch.from_numpy(noisy).to(total.device)

    return add


_ADDERS = {"fast": _fast, "portable": _portable, "secure": _secure}

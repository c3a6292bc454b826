# SPDX-License-Identifier: Apache-2.0
"""Noisy mean: the only place where this backend releases anything about the data."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dualdp import _validate
from dualdp.plan.correlated.noise import Path, Term, branch_at, recursion_of, window_terms
from dualdp.plan.plan import checked_step, require_plan
from dualdp.randomness import grid_noise, run_registry, threefry
from dualdp_torch.noise.generators import Normals
from dualdp_torch.noise.recursion import noise_of
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


class Cut(NamedTuple):
    """Piece of a parameter on one process, cut along one axis.

    Attributes:
        shape: shape of the whole parameter.
        axis: axis along which it is cut.
        start: index of the piece's first row along that axis.
    """

    shape: torch.Size
    axis: int
    start: int

    def padded(self, piece: Tensor) -> Tensor:
        """Return the piece in its place in a whole parameter of zeros."""
        whole = piece.new_zeros(self.shape)
        self.of(whole, piece.shape[self.axis]).copy_(piece)
        return whole

    def of(self, whole: Tensor, length: int) -> Tensor:
        """Return the piece, `length` long, of a whole parameter."""
        return whole.narrow(self.axis, self.start, length)


#: Sums of one device and dtype, by name; together they are one flat array.
Group = dict[str, Tensor]


class Part(NamedTuple):
    """Numbers whose noise is drawn at once: a whole group, or what is here of one parameter."""

    names: tuple[str, ...]
    group: int  # index of the group
    start: int  # of the first number, in the group's flat array
    length: int
    piece: Piece


#: (part, sums of its parameters, of k numbers) -> (k,) sums plus noise.
Adder = Callable[[Part, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class NoiseSettings:
    """Settings of the noise of one release.

    `terms` are the steps and branches whose normals add up to the noise, with their weights, the
    release's own first. `names` are those of all parameters, in order; `sizes` the lengths of the
    groups' flat arrays, of which this process holds the whole or, under FSDP, pieces.
    """

    plan: Any
    terms: list[Term]
    max_grad_norm: float
    names: list[str]
    groups: list[Group]
    sizes: list[int]
    is_whole: bool
    layout: Sequence[Any] | None

    @property
    def stddev(self) -> float:
        """Standard deviation of the normals of weight 1, gradient units."""
        return float(self.plan.draw_stddev(self.terms[0].step, self.max_grad_norm))

    @property
    def keys(self) -> list[tuple[Any, float]]:
        """Key, (2,) uint32 and secret, and factor of the standard normals of each term."""
        stddev = self.stddev
        return [
            (self.plan.step_key("noise", term.step, term.branch), stddev * term.weight)
            for term in self.terms
        ]


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

    With `plan.correlation` the noise of a step holds that of the steps before, from the same key. A
    window draws all its terms anew. A band or a buffered Toeplitz strategy keeps rows of noise in
    memory while the steps come in order, and draws them again otherwise.

    Returns:
        mapping from name to (sum + noise) / expected_batch_size, float32 or wider; parameters of
        one dtype may be views of one array.

    Raises:
        AccountingError: the step is past the plan or not on record, its noise was handed out
            before, or something else draws this plan's noise.
        TypeError: inside `torch.func.vmap`, or while a CUDA graph is captured.
        ValueError: `layout` lacks a parameter, or came with `pieces`; or `max_grad_norm` is not
            that of a plan with correlated noise.

    Guarantees:
        Noise of standard deviation noise_multiplier times max_grad_norm, independent over
            parameters, steps and branches.
            [test_noise_has_the_declared_scale, test_noise_never_repeats]
        With a correlation, normals z of standard deviation `plan.draw_stddev`, independent in the
            same way, of which step t gets sum_j w_j z_(t-j).
            [test_the_covariance_over_the_steps_is_that_of_the_strategy]
        All 64 bits of the step's key count.  [test_noise_depends_on_the_whole_key]
        The same numbers on any number of threads.  [test_noise_does_not_depend_on_threads]
        The noise of pieces is that of the whole.  [test_noise_of_pieces_is_that_of_the_whole]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    require_plan(plan)
    check_sum(grads)
    _refuse_repetition(grads)
    step = checked_step(plan, step)
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


def check_sum(grads: Any) -> None:
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
        if hasattr(grad, "device_mesh"):
            raise TypeError(
                f"grads[{name!r}] is a DTensor, of which a process holds a piece. Expected whole "
                "tensors, such as grad.full_tensor(), from which each process takes its piece of "
                "the result; or fully_shard with make_private, which draws the noise of pieces."
            )


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


def noised_mean(
    grads: Mapping[str, Tensor],
    plan: Any,
    step: int,
    *,
    branch: int | Path = 0,
    max_grad_norm: float | None = None,
    layout: Sequence[Any] | None = None,
    pieces: Mapping[str, Piece] | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> dict[str, Tensor]:
    """`noisy_mean` for a step that the caller has recorded and sealed itself.

    `branch` is that of all steps so far, or the path of a run with several (`Seal.path`). `cuts`
    has the parameters of a tensor parallel model of which `grads` holds a piece: the noise of one
    whole parameter after the other is drawn, and its piece taken.
    """
    step = checked_step(plan, step)
    _validate.choice("noise", plan.noise, _ADDERS)
    if layout is not None and pieces is not None:
        raise ValueError(
            "layout came with pieces: the noise of a JAX model's shapes can't be drawn shard by "
            "shard. Consolidate the checkpoint and go on in one process, or leave layout out."
        )
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    bound = _validate.positive("max_grad_norm", bound)
    if plan.is_correlated and bound != plan.max_grad_norm_at(step):
        raise ValueError(
            f"max_grad_norm={bound} with correlated noise, which holds that of earlier steps at "
            f"the plan's max_grad_norm={plan.max_grad_norm_at(step)}. Expected the plan's."
        )
    by_kind: dict[Any, Group] = {}
    for name, grad in grads.items():
        total = grad.detach().to(wide(grad.dtype))
        by_kind.setdefault((total.device, total.dtype), {})[name] = total
    groups, cuts = list(by_kind.values()), cuts or {}
    is_whole = pieces is None and not cuts
    held = pieces or {
        name: Piece(0, cuts[name].shape.numel() if name in cuts else grad.numel())
        for name, grad in grads.items()
    }
    sizes = [sum(held[name].numel for name in group) for group in groups]
    path = ((0, branch),) if isinstance(branch, int) else branch
    term = Term(step, branch_at(path, step), 1.0)
    release = NoiseSettings(plan, [term], bound, list(grads), groups, sizes, is_whole, layout)
    # The keys of portable noise are those of parameters.
    parts = _parts(groups, held, cuts, is_whole and plan.noise != "portable")
    mean: dict[str, Tensor] = {}
    with _no_secrets_in_tracebacks():
        add, divisor = _adder(release, path, parts), plan.expected_batch_size_at(step)
        for part in parts:
            here = [groups[part.group][name] for name in part.names]
            totals = [
                _padded(total, cuts.get(n)) for n, total in zip(part.names, here, strict=True)
            ]
            noisy = add(part, totals).div_(divisor)
            found = _unflatten_dense_tensors(noisy, totals)
            for name, value, total in zip(part.names, found, here, strict=True):
                mean[name] = _piece_of(value, total, cuts.get(name))
    return {name: mean[name] for name in grads}


def _padded(total: Tensor, cut: Cut | None) -> Tensor:
    """Sum of a whole parameter; where a piece of it is here, zeros in place of the others."""
    return total if cut is None else cut.padded(total)


def _piece_of(whole: Tensor, here: Tensor, cut: Cut | None) -> Tensor:
    """Copy of the piece that is here of a whole parameter; the whole as it is."""
    return whole if cut is None else cut.of(whole, here.shape[cut.axis]).clone()


@contextlib.contextmanager
def _no_secrets_in_tracebacks() -> Iterator[None]:
    """Clear the local variables of an error's frames: keys, and rows of noise."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _parts(
    groups: list[Group], held: Mapping[str, Piece], cuts: Mapping[str, Cut], by_group: bool
) -> list[Part]:
    """Parts in which the noise is drawn: whole groups, or what is here of each parameter.

    A parameter that was cut is drawn whole.
    """
    parts = []
    for index, group in enumerate(groups):
        first = 0
        for name, total in group.items():
            piece = held[name]
            length = piece.numel if name in cuts else total.numel()
            parts.append(Part((name,), index, first + piece.start, length, piece))
            first += piece.numel
        if by_group:
            parts[-len(group) :] = [Part(tuple(group), index, 0, first, Piece(0, first))]
    return parts


def _adder(release: NoiseSettings, path: Path, parts: list[Part]) -> Adder:
    """Adder of the noise of a release, independent or correlated."""
    plan, draws = release.plan, _ADDERS[release.plan.noise]
    step = release.terms[0].step
    if recursion_of(plan.correlation) is None:
        return draws(replace(release, terms=window_terms(plan.correlation, step, path)))

    def normals(step: int, branch: int) -> list[Tensor]:
        add = draws(replace(release, terms=[Term(step, branch, 1.0)]))
        likes = (next(iter(release.groups[part.group].values())) for part in parts)
        return [
            add(part, [like.new_zeros(part.length)])
            for part, like in zip(parts, likes, strict=True)
        ]

    kinds = [(name, total.device, total.dtype) for g in release.groups for name, total in g.items()]
    layout = release.names, kinds, parts, list(release.layout or ())
    size = sum(part.length for part in parts)
    noise = noise_of(plan, step, path, layout, size, normals)
    found = dict(zip(parts, noise, strict=True))
    return lambda part, totals: found[part] + _flatten_dense_tensors(totals)


def _fast(release: NoiseSettings) -> Adder:
    """Adder of the normals of torch's own generator."""
    normals, keys = [], release.keys
    for index, (group, size) in enumerate(zip(release.groups, release.sizes, strict=True)):
        terms = [(threefry.fold_in(key, index), factor) for key, factor in keys]
        normals.append(Normals(terms, size, next(iter(group.values()))))
    return lambda part, totals: normals[part.group].add_at(part.start, *totals)


def _portable(release: NoiseSettings) -> Adder:
    """Adder of the normals that JAX draws: leaf i from `fold_in(key, i)`."""
    leaves = {leaf.torch_name: leaf for leaf in release.layout or ()}
    missing = sorted(set(release.names) - set(leaves)) if release.layout is not None else []
    if missing:
        raise ValueError(
            f"layout lacks the parameters {missing}. Expected dualdp.port.match(model, params) of "
            "this model."
        )
    keys = release.keys

    def normals(key: Any, part: Part, dtype: Any) -> Any:
        (name,), start, size = part.names, part.piece.start, part.piece.numel

        # A tensor may be several JAX leaves; `ParameterMap.normals` calls `draw` for each of them.
        def draw(number: int, shape: tuple[int, ...]) -> Any:
            return threefry.normal(threefry.fold_in(key, number), shape, dtype=dtype)

        if name in leaves:
            return np.ascontiguousarray(leaves[name].normals(draw)).reshape(-1)
        own, stop = threefry.fold_in(key, release.names.index(name)), start + part.length
        return threefry.normal_between(own, start, stop, size=size, dtype=dtype)

    def add(part: Part, totals: Sequence[Tensor]) -> Tensor:
        total = _flatten_dense_tensors(totals)
        dtype = np.float64 if total.dtype == torch.float64 else np.float32
        drawn = (
            torch.from_numpy(normals(key, part, dtype)).to(total.device).mul_(factor)
            for key, factor in keys
        )
        return functools.reduce(Tensor.add_, drawn).add_(total)

    return add


def _secure(release: NoiseSettings) -> Adder:
    """Adder of noise on the public grid, on the host in float64."""
    plan, (step, branch, _), threads = release.plan, release.terms[0], torch.get_num_threads()
    sizes = release.sizes
    pitch = grid_noise.pitch(release.max_grad_norm, sum(sizes))
    cells = release.stddev / pitch
    options: Any = {"branch": branch, "cells": cells, "size": sum(sizes)}
    whole = None
    if release.is_whole:
        whole = grid_noise.grid_noise(plan, step, threads=threads, **options)

    def add(part: Part, totals: Sequence[Tensor]) -> Tensor:
        start = sum(sizes[: part.group]) + part.start
        stop = start + part.length
        if whole is None:
            noise = grid_noise.grid_noise_between(plan, step, start, stop, **options)
        else:
            noise = whole[start:stop]
        total = _flatten_dense_tensors(totals)
        noisy = grid_noise.noisy_sum(total.cpu().numpy(), noise, pitch, threads=threads)
        return torch.from_numpy(noisy).to(total.device)

    return add


_ADDERS = {"fast": _fast, "portable": _portable, "secure": _secure}

# SPDX-License-Identifier: Apache-2.0
"""Noisy mean: the only place where this backend releases anything about the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.randomness import grid_noise, run_registry, threefry
from dualdp_torch.noise.generators import Normals, add_normal
from dualdp_torch.noise.generators import keyed_generator as keyed_generator
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


@dataclass(frozen=True)
class NoiseSettings:
    """Settings of the noise of one release; `names` are those of the parameters, in order."""

    plan: Any
    step: int
    branch: int
    max_grad_norm: float
    names: list[str]

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
    _validate.choice("noise", plan.noise, _SOURCES)
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    bound = _validate.positive("max_grad_norm", bound)
    release = NoiseSettings(plan, step, branch, bound, list(grads))
    totals = {name: total.detach().to(wide(total.dtype)) for name, total in grads.items()}
    groups = _groups(totals)
    if pieces is not None:
        return _mean_of_pieces(release, groups, pieces, layout)
    mean: dict[str, Tensor] = {}
    for group, flat in zip(groups, _SOURCES[plan.noise](release, groups, layout), strict=True):
        flat.div_(plan.expected_batch_size_at(step))
        parts = _unflatten_dense_tensors(flat, list(group.values()))
        mean.update(zip(group, parts, strict=True))
    return {name: mean[name] for name in grads}


#: Sums of one device and dtype, by name; together they become one flat array.
Group = dict[str, Tensor]


def _groups(totals: Mapping[str, Tensor]) -> list[Group]:
    """Sums grouped by device and dtype."""
    groups: dict[Any, Group] = {}
    for name, total in totals.items():
        groups.setdefault((total.device, total.dtype), {})[name] = total
    return list(groups.values())


def _flat(group: Group) -> Tensor:
    """Flat array of a group's sums, which it may share memory with."""
    flat: Tensor = _flatten_dense_tensors(list(group.values()))
    return flat


# ---------------------------------------------------------------------- fast


def _fast(release: NoiseSettings, groups: list[Group], layout: Any) -> Iterator[Tensor]:
    """Sums plus normals of torch's own generator, one flat array per group."""
    for index, group in enumerate(groups):
        key = threefry.fold_in(release.key, index)
        yield add_normal(_flat(group), key, release.stddev)


# ---------------------------------------------------------------------- portable


def _portable(release: NoiseSettings, groups: list[Group], layout: Any) -> Iterator[Tensor]:
    """Sums plus the normals that JAX draws: leaf i from `fold_in(key, i)`."""
    leaves = {leaf.torch_name: leaf for leaf in layout or ()}
    missing = sorted(set().union(*groups) - set(leaves)) if layout is not None else []
    if missing:
        raise ValueError(
            f"layout lacks the parameters {missing}. Expected dualdp.port.match(model, params) of "
            "this model."
        )
    key = release.key

    def normals(name: str, like: Tensor) -> Tensor:
        dtype = np.float64 if like.dtype == torch.float64 else np.float32

        # A tensor may be several JAX leaves; `ParameterMap.normals` calls `draw` for each of them.
        def draw(number: int, shape: tuple[int, ...]) -> Any:
            return threefry.normal(threefry.fold_in(key, number), shape, dtype=dtype)

        if name in leaves:
            drawn = leaves[name].normals(draw)
        else:
            drawn = draw(release.names.index(name), tuple(like.shape))
        return torch.from_numpy(np.ascontiguousarray(drawn)).to(like.device)

    for group in groups:
        noise = _flatten_dense_tensors([normals(name, like) for name, like in group.items()])
        yield noise.mul_(release.stddev).add_(_flat(group))


# ---------------------------------------------------------------------- secure


def _secure(release: NoiseSettings, groups: list[Group], layout: Any) -> Iterator[Tensor]:
    """Sums plus noise on the public grid, added on the host in float64."""
    flats = [_flat(group) for group in groups]
    size, threads = sum(flat.numel() for flat in flats), torch.get_num_threads()
    pitch = grid_noise.pitch(release.max_grad_norm, size)
    noise = grid_noise.grid_noise(
        release.plan,
        release.step,
        branch=release.branch,
        cells=release.stddev / pitch,
        size=size,
        threads=threads,
    )
    for flat in flats:
        part, noise = np.split(noise, [flat.numel()])
        noisy = grid_noise.noisy_sum(flat.cpu().numpy(), part, pitch, threads=threads)
        yield torch.from_numpy(noisy).to(flat.device)


_SOURCES = {"fast": _fast, "portable": _portable, "secure": _secure}


# ---------------------------------------------------------------------- sharded parameters

#: (offset of the parameter in the group's flat array, piece, (k,) sums, name) -> sums plus noise.
Adder = Callable[[int, Piece, Tensor, str], Tensor]


def _mean_of_pieces(
    release: NoiseSettings, groups: list[Group], pieces: Mapping[str, Piece], layout: Any
) -> dict[str, Tensor]:
    """Noisy mean of each piece that this process holds, by parameter name."""
    if layout is not None:
        raise ValueError(
            "layout came with pieces: the noise of a JAX model's shapes can't be drawn shard by "
            "shard. Consolidate the checkpoint and go on in one process, or leave layout out."
        )
    sizes = [sum(pieces[name].numel for name in group) for group in groups]
    mean: dict[str, Tensor] = {}
    for index, group in enumerate(groups):
        add = _ADDERS[release.plan.noise](release, index, group, sizes)
        first = 0
        for name, total in group.items():
            piece = pieces[name]
            noisy = add(first, piece, total.reshape(-1), name)
            noisy.div_(release.plan.expected_batch_size_at(release.step))
            mean[name] = noisy.view_as(total)
            first += piece.numel
    return {name: mean[name] for name in release.names}


def _fast_adder(release: NoiseSettings, index: int, group: Group, sizes: list[int]) -> Adder:
    """Function that adds the normals of `_fast`."""
    key, like = threefry.fold_in(release.key, index), next(iter(group.values()))
    normals = Normals(key, sizes[index], release.stddev, like)
    return lambda first, piece, total, name: normals.add_at(first + piece.start, total)


def _portable_adder(release: NoiseSettings, index: int, group: Group, sizes: list[int]) -> Adder:
    """Function that adds the normals of JAX's leaf."""

    def add(first: int, piece: Piece, total: Tensor, name: str) -> Tensor:
        key = threefry.fold_in(release.key, release.names.index(name))
        dtype = np.float64 if total.dtype == torch.float64 else np.float32
        drawn = threefry.normal_between(
            key, piece.start, piece.start + total.numel(), size=piece.numel, dtype=dtype
        )
        return torch.from_numpy(drawn).to(total.device).mul_(release.stddev).add_(total)

    return add


def _secure_adder(release: NoiseSettings, index: int, group: Group, sizes: list[int]) -> Adder:
    """Function that adds the grid noise."""
    pitch, before = grid_noise.pitch(release.max_grad_norm, sum(sizes)), sum(sizes[:index])

    def add(first: int, piece: Piece, total: Tensor, name: str) -> Tensor:
        start = before + first + piece.start
        noise = grid_noise.grid_noise_between(
            release.plan,
            release.step,
            start,
            start + total.numel(),
            branch=release.branch,
            cells=release.stddev / pitch,
            size=sum(sizes),
        )
        noisy = grid_noise.noisy_sum(total.cpu().numpy(), noise, pitch)
        return torch.from_numpy(noisy).to(total.device)

    return add


_ADDERS = {"fast": _fast_adder, "portable": _portable_adder, "secure": _secure_adder}

# SPDX-License-Identifier: Apache-2.0
"""The noisy mean: the only place where this backend releases anything about the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dualdp import AccountingError, _validate, run_registry
from dualdp.randomness import counter, secure

from .normals import Normals, add_normal
from .normals import keyed_generator as keyed_generator
from .parts import wide
from .rules.base import Tensor


@dataclass(frozen=True)
class Piece:
    """Which part of a parameter a process holds: consecutive numbers in row-major order.

    Attributes:
        start: the first.
        numel: numbers in the whole parameter.
    """

    start: int
    numel: int


@dataclass(frozen=True)
class Release:
    """The numbers of one release.

    Attributes:
        plan: `PrivacyPlan`.
        step: index of the release.
        branch: of the ledger.
        max_grad_norm: C of this step, gradient units.
        names: of the parameters, in order.
    """

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

    `plan.noise` says which normals. "fast": torch's own generator, keyed by us, in parallel over
    `torch.get_num_threads()` cores. "portable": those of JAX. Both are statistical generators and
    floating-point numbers: whoever sees an exact released number may be able to rule a data set out
    by it. "secure" is meant for that adversary (see `dualdp.randomness.secure`).

    The noise of a release is handed out once, and where a ledger keeps the record
    (`engine.make_loader`, `Ledger`) only for releases on record. Without one, the noise of a plan
    with a seed is free, and that of a secret key ends after its first step.

    Args:
        grads: name -> SUM of clipped gradients of one logical batch, for every trainable parameter.
        plan: `PrivacyPlan`.
        step: index of the release.
        branch: the ledger's, for a step that is released again with other gradients; None for the
            one on record.
        max_grad_norm: C of this step where the ledger learns it; None for the plan's.
        layout: `dualdp.port.match(...)` draws portable noise in the JAX model's shapes and order.
        pieces: name -> which part of the parameter `grads` holds, where it is sharded; then only
            the noise of these parts is drawn.

    Returns:
        Name -> (sum + noise) / expected_batch_size, float32 or wider; the parameters of one dtype
        may be views of one array.

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
    """Refuse to be run once for several sums.

    Raises:
        TypeError: inside vmap, or while a CUDA graph is captured.
    """
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
    """The step, once it is one of the plan's.

    Raises:
        AccountingError: it is not.
    """
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
    """`noisy_mean` for a step that the caller has recorded and sealed itself.

    Args:
        grads: as in `noisy_mean`.
        plan: as there.
        step: as there.
        branch: of the ledger's seal.
        max_grad_norm: as there.
        layout: as there.
        pieces: as there.

    Returns:
        As there.
    """
    step = _checked_step(plan, step)
    _validate.choice("noise", plan.noise, _SOURCES)
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    bound = _validate.positive("max_grad_norm", bound)
    release = Release(plan, step, branch, bound, list(grads))
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


Group = dict[str, Tensor]


def _groups(totals: Mapping[str, Tensor]) -> list[Group]:
    """The sums by device and dtype: each group becomes one flat array."""
    groups: dict[Any, Group] = {}
    for name, total in totals.items():
        groups.setdefault((total.device, total.dtype), {})[name] = total
    return list(groups.values())


def _flat(group: Group) -> Tensor:
    """The sums of a group in a row; may share their memory."""
    flat: Tensor = _flatten_dense_tensors(list(group.values()))
    return flat


# ---------------------------------------------------------------------- fast


def _fast(release: Release, groups: list[Group], layout: Any) -> Iterator[Tensor]:
    """Normals of torch's own generator, in one flat array per device and dtype."""
    for index, group in enumerate(groups):
        key = counter.fold_in(release.key, index)
        yield add_normal(_flat(group), key, release.stddev)


# ---------------------------------------------------------------------- portable


def _portable(release: Release, groups: list[Group], layout: Any) -> Iterator[Tensor]:
    """The normals that JAX draws: leaf i from `fold_in(key, i)`."""
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

        # A tensor may be several JAX leaves: port's leaf asks for the normals of each.
        def draw(number: int, shape: tuple[int, ...]) -> Any:
            return counter.normal(counter.fold_in(key, number), shape, dtype=dtype)

        if name in leaves:
            drawn = leaves[name].normals(draw)
        else:
            drawn = draw(release.names.index(name), tuple(like.shape))
        return torch.from_numpy(np.ascontiguousarray(drawn)).to(like.device)

    for group in groups:
        noise = _flatten_dense_tensors([normals(name, like) for name, like in group.items()])
        yield noise.mul_(release.stddev).add_(_flat(group))


# ---------------------------------------------------------------------- secure


def _secure(release: Release, groups: list[Group], layout: Any) -> Iterator[Tensor]:
    """Sum and noise on the public grid, added on the host in float64."""
    flats = [_flat(group) for group in groups]
    size, threads = sum(flat.numel() for flat in flats), torch.get_num_threads()
    pitch = secure.pitch(release.max_grad_norm, size)
    noise = secure.grid_noise(
        release.plan,
        release.step,
        branch=release.branch,
        cells=release.stddev / pitch,
        size=size,
        threads=threads,
    )
    for flat in flats:
        part, noise = np.split(noise, [flat.numel()])
        noisy = secure.noisy_sum(flat.cpu().numpy(), part, pitch, threads=threads)
        yield torch.from_numpy(noisy).to(flat.device)


_SOURCES = {"fast": _fast, "portable": _portable, "secure": _secure}


# ---------------------------------------------------------------------- pieces

#: Place of some numbers in the flat array of their group, their sums, name -> sums plus noise.
Adder = Callable[[int, Tensor, str], Tensor]


def _mean_of_pieces(
    release: Release, groups: list[Group], pieces: Mapping[str, Piece], layout: Any
) -> dict[str, Tensor]:
    """Name -> noisy mean of the part of the parameter that this process holds."""
    if layout is not None:
        raise ValueError(
            "layout came with pieces: the noise of a JAX model's shapes can't be drawn shard by "
            "shard. Consolidate the checkpoint and go on in one process, or leave layout out."
        )
    mean: dict[str, Tensor] = {}
    for group, add in zip(
        groups, _ADDERS[release.plan.noise](release, groups, pieces), strict=True
    ):
        first = 0
        for name, total in group.items():
            piece = pieces[name]
            noisy = add(first + piece.start, total.reshape(-1), name)
            noisy.div_(release.plan.expected_batch_size_at(release.step))
            mean[name] = noisy.view_as(total)
            first += piece.numel
    return {name: mean[name] for name in release.names}


def _numel(group: Group, pieces: Mapping[str, Piece]) -> int:
    """Numbers in the whole parameters of a group."""
    return sum(pieces[name].numel for name in group)


def _fast_adders(
    release: Release, groups: list[Group], pieces: Mapping[str, Piece]
) -> Iterator[Adder]:
    """Of each group: adds the normals that `_fast` would add to these numbers of its flat array."""
    for index, group in enumerate(groups):
        key, size = counter.fold_in(release.key, index), _numel(group, pieces)
        yield Normals(key, size, release.stddev, next(iter(group.values()))).add_at


def _portable_adders(
    release: Release, groups: list[Group], pieces: Mapping[str, Piece]
) -> Iterator[Adder]:
    """Of each group: adds the normals of JAX's leaf at these places."""

    def add(start: int, total: Tensor, name: str) -> Tensor:
        piece, key = pieces[name], counter.fold_in(release.key, release.names.index(name))
        dtype = np.float64 if total.dtype == torch.float64 else np.float32
        drawn = counter.normal_between(
            key, piece.start, piece.start + total.numel(), size=piece.numel, dtype=dtype
        )
        return torch.from_numpy(drawn).to(total.device).mul_(release.stddev).add_(total)

    yield from (add for _ in groups)


def _secure_adders(
    release: Release, groups: list[Group], pieces: Mapping[str, Piece]
) -> Iterator[Adder]:
    """Of each group: adds the noise of the public grid at these places."""
    sizes = [_numel(group, pieces) for group in groups]
    pitch, before = secure.pitch(release.max_grad_norm, sum(sizes)), 0

    def adder(before: int) -> Adder:
        def add(start: int, total: Tensor, name: str) -> Tensor:
            noise = secure.grid_noise_between(
                release.plan,
                release.step,
                before + start,
                before + start + total.numel(),
                branch=release.branch,
                cells=release.stddev / pitch,
                size=sum(sizes),
            )
            noisy = secure.noisy_sum(total.cpu().numpy(), noise, pitch)
            return torch.from_numpy(noisy).to(total.device)

        return add

    for size in sizes:
        yield adder(before)
        before += size


_ADDERS = {"fast": _fast_adders, "portable": _portable_adders, "secure": _secure_adders}

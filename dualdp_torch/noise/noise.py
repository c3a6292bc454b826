# SPDX-License-Identifier: Apache-2.0
"""Noisy mean of a step: the only place where this backend releases anything about the data.

source = NoiseSource(plan)                     # held by an engine, or by a loop of one's own
release = ledger.record(step)                  # the ledger has the release before it is made
mean = source.noisy_mean(sums, release, noise_bits(plan.seed, step))
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.ledger import own_loops
from dualdp.ledger.ledger import Release
from dualdp.plan.correlated.strategies import Window
from dualdp.plan.plan import PrivacyPlan, checked_step, require_plan
from dualdp.porting.parameter_map import ParameterMap
from dualdp.randomness import fold_in, grid_noise, key_of, noise_bits, seeded_bits, threefry
from dualdp_torch.noise.correlated import Kept, next_noise
from dualdp_torch.noise.generators import Key, Normals
from dualdp_torch.rules.base import Tensor, wide


class Piece(NamedTuple):
    """Shard of a parameter on one process: consecutive numbers in row-major order.

    Attributes:
        start: index of the shard's first number.
        numel: numbers in the whole parameter.
    """

    start: int
    numel: int


class Part(NamedTuple):
    """Numbers whose noise is drawn at once: all of a device and dtype, or those of a parameter."""

    names: tuple[str, ...]
    group: int  # index of the flat array of all parameters of this device and dtype
    start: int  # of the first number, in that array
    length: int
    piece: Piece  # of the parameter, where it is one


@dataclass(frozen=True)
class Layout:
    """Order in which the noise of some sums is drawn; the same sums have equal layouts."""

    names: tuple[str, ...]
    kinds: tuple[tuple[torch.device, torch.dtype], ...]  # of each group
    sizes: tuple[int, ...]  # numbers in the whole flat array of each group
    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls, sums: Mapping[str, Tensor], pieces: Mapping[str, Piece] | None, *, by_group: bool
    ) -> Layout:
        """Return the layout of sums, of which `pieces` tells what lies here of each parameter."""
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Piece]] = {}
        for name, total in sums.items():
            piece = pieces[name] if pieces is not None else Piece(0, total.numel())
            groups.setdefault((total.device, total.dtype), {})[name] = piece
        parts, sizes = list[Part](), list[int]()
        for index, held in enumerate(groups.values()):
            size = 0
            own = list[Part]()
            for name, piece in held.items():
                start = size + piece.start
                own.append(Part((name,), index, start, sums[name].numel(), piece))
                size += piece.numel
            parts += [Part(tuple(held), index, 0, size, Piece(0, size))] if by_group else own
            sizes.append(size)
        return cls(tuple(sums), tuple(groups), tuple(sizes), tuple(parts))

    def like(self, part: Part) -> Tensor:
        """Return an empty tensor of the device and dtype of a part."""
        device, dtype = self.kinds[part.group]
        return torch.empty(0, device=device, dtype=dtype)


class Held(NamedTuple):
    """Where correlated noise stands: what is kept before `step`, for each part."""

    owner: tuple[int, int]  # process and segment
    step: int
    layout: Layout
    kept: list[Kept]


class NoiseSource:
    """Noise of the releases of one run, an object that its owner (engine, own loop) holds.

    `plan.noise` selects the normals. "fast": torch's own generator, seeded by the release's bits,
    in parallel over `torch.get_num_threads()` cores. "portable": those of JAX. Both are statistical
    generators of floating-point numbers: an adversary who sees an exact released number may be able
    to rule out a data set by it. "secure" is meant for that adversary, see
    `dualdp.randomness.grid_noise`.

    With `plan.correlation` the noise of a step holds that of the steps before it in its segment,
    of which the source keeps what is needed (`dualdp_torch.noise.correlated`) in memory.

    Guarantees:
        Noise of standard deviation noise_multiplier times max_grad_norm, independent over
            parameters, steps and segments.
            [test_noise_has_the_declared_scale, test_releases_share_no_noise]
        With a correlation, normals z of standard deviation `release.draw_stddev`, of which step t
            of a segment gets sum_j w_j z_(t-j).
            [test_the_covariance_over_the_steps_is_that_of_the_strategy]
        All 64 bits of the release's key count.  [test_noise_depends_on_the_whole_key]
        The same numbers on any number of threads.  [test_noise_does_not_depend_on_threads]
        The noise of pieces is that of the whole.  [test_noise_of_pieces_is_that_of_the_whole]
        No pickle, copy or repr has the noise.  [test_normals_are_in_no_pickle_and_no_repr]

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan = plan
        self._held: Held | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A noise source can't be copied: its normals take the noise away from what was "
            "released. A resumed run begins a segment with a source of its own."
        )

    def noisy_mean(
        self,
        sums: Mapping[str, Tensor],
        release: Release,
        bits: bytes,
        *,
        layout: Sequence[ParameterMap] | None = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> dict[str, Tensor]:
        """Return (sum + noise) / expected batch size of a release that is on record.

        Args:
            sums: mapping from every trained parameter to its clipped sum, or a piece of it.
            release: `Release` of `Ledger.record`.
            bits: 64 bytes of this release alone, see `dualdp.randomness.noise_bits`.
            layout: `dualdp.port.match(...)` to draw portable noise in the JAX model's shapes.
            pieces: mapping from name to the `Piece` that `sums` holds of a sharded parameter, whose
                noise alone is drawn; None for whole sums.

        Returns:
            mapping from name to tensors of float32 or wider; those of one dtype may be views of one
            array.

        Raises:
            ValueError: `layout` lacks a parameter, or came with `pieces`; or correlated noise is
                asked for other sums than at the step before.
        """
        plan = self._plan
        if layout is not None and pieces is not None:
            raise ValueError(
                "layout came with pieces: the noise of a JAX model's shapes can't be drawn shard "
                "by shard. Consolidate the checkpoint and go on in one process, or leave layout "
                "out."
            )
        totals = {name: total.detach().to(wide(total.dtype)) for name, total in sums.items()}
        # The keys of portable noise are those of parameters.
        by_group = pieces is None and plan.noise != "portable"
        flat = Layout.of(totals, pieces, by_group=by_group)
        here = [[totals[name] for name in part.names] for part in flat.parts]
        if plan.noise == "secure":
            noisy = _secure(flat, here, release, bits, is_whole=pieces is None)
        else:
            noisy = self._noise(flat, release, bits, layout)
            for noise, parts in zip(noisy, here, strict=True):
                torch._foreach_add_(_unflatten_dense_tensors(noise, parts), parts)
        mean: dict[str, Tensor] = {}
        for part, value, parts in zip(flat.parts, noisy, here, strict=True):
            value.div_(release.expected_batch_size)
            mean |= zip(part.names, _unflatten_dense_tensors(value, parts), strict=True)
        return {name: mean[name] for name in sums}

    def _noise(
        self,
        flat: Layout,
        release: Release,
        bits: bytes,
        leaves: Sequence[ParameterMap] | None,
    ) -> list[Tensor]:
        """Noise of each part, in arrays that nobody else holds."""
        draw = _portable(flat, leaves) if self._plan.noise == "portable" else _fast(flat)
        strategy = self._plan.correlation
        if strategy is None or not self._plan.is_correlated:
            return draw(key_of(bits), release.draw_stddev)
        held, first = self._held_before(release, flat), release.segment_start
        if held is not None:
            first = held.step
        kept: list[Kept] = [()] * len(flat.parts) if held is None else held.kept
        if isinstance(strategy, Window) and release.step - first >= len(strategy.weights):
            # Nothing before is needed: of a seeded plan any step may be asked for.
            first, kept = release.step - len(strategy.weights) + 1, [()] * len(flat.parts)
            first = max(first, release.segment_start)
        noise = list[Tensor]()
        for step in range(first, release.step + 1):
            index, key = step - release.segment_start, key_of(self._bits_of(step, release, bits))
            found = [
                next_noise(strategy, index, z, own, release.draw_stddev)
                for z, own in zip(draw(key, 1.0), kept, strict=True)
            ]
            noise, kept = [one for one, _ in found], [own for _, own in found]
        self._held = Held((os.getpid(), release.segment), release.step + 1, flat, kept)
        return noise

    def _held_before(self, release: Release, flat: Layout) -> Held | None:
        """What is kept of the segment before a release; None at its beginning."""
        held = self._held
        if held is None or held.owner != (os.getpid(), release.segment) or held.step > release.step:
            return None
        if held.layout != flat:
            raise ValueError(
                "The sums have other names, shapes, dtypes or devices than at the step before, "
                "whose noise is a part of this one. Expected the same at every step of a run with "
                "correlated noise; load_checkpoint begins a segment."
            )
        return held

    def _bits_of(self, step: int, release: Release, bits: bytes) -> bytes:
        """Bits of a step of the segment up to this release.

        A step before it whose release failed after it was recorded has no noise yet, and gets that
        of bits that nothing else has, on all processes the same.
        """
        if step == release.step:
            return bits
        if self._plan.seed is not None:
            return seeded_bits(self._plan.seed, "noise", step)
        return hashlib.blake2b(step.to_bytes(8, "little"), key=bits).digest()


#: (key, standard deviation) -> normals of each part.
Draw = Callable[[Key, float], list[Tensor]]


def _fast(flat: Layout) -> Draw:
    """Draw the normals of torch's own generator."""

    def draw(key: Key, stddev: float) -> list[Tensor]:
        likes = {part.group: flat.like(part) for part in flat.parts}
        arrays = {
            group: Normals(fold_in(key, group), stddev, flat.sizes[group], like)
            for group, like in likes.items()
        }
        return [arrays[p.group].between(p.start, p.start + p.length) for p in flat.parts]

    return draw


def _portable(flat: Layout, layout: Sequence[ParameterMap] | None) -> Draw:
    """Draw the normals that JAX draws: leaf i from `fold_in(key, i)`."""
    leaves = {leaf.torch_name: leaf for leaf in layout or ()}
    missing = sorted(set(flat.names) - set(leaves)) if layout is not None else []
    if missing:
        raise ValueError(
            f"layout lacks the parameters {missing}. Expected dualdp.port.match(model, params) of "
            "this model."
        )

    def normals(key: Key, part: Part, dtype: type[np.floating[Any]]) -> NDArray[Any]:
        (name,), (start, size) = part.names, part.piece

        # A tensor may be several JAX leaves; `ParameterMap.normals` calls `leaf` for each of them.
        def leaf(number: int, shape: tuple[int, ...]) -> NDArray[Any]:
            return threefry.normal(fold_in(key, number), shape, dtype=dtype)

        if name in leaves:
            return np.ascontiguousarray(leaves[name].normals(leaf)).reshape(-1)
        own, stop = fold_in(key, flat.names.index(name)), start + part.length
        return threefry.normal_between(own, start, stop, size=size, dtype=dtype)

    def draw(key: Key, stddev: float) -> list[Tensor]:
        found = list[Tensor]()
        for part in flat.parts:
            like = flat.like(part)
            dtype = np.float64 if like.dtype == torch.float64 else np.float32
            found.append(torch.from_numpy(normals(key, part, dtype)).to(like.device).mul_(stddev))
        return found

    return draw


def _secure(
    flat: Layout, totals: list[list[Tensor]], release: Release, bits: bytes, *, is_whole: bool
) -> list[Tensor]:
    """Sums with noise on the public grid, computed on the host in float64."""
    size, threads = sum(flat.sizes), torch.get_num_threads()
    pitch = grid_noise.pitch(release.max_grad_norm, size)
    cells = release.draw_stddev / pitch
    if is_whole:
        whole = grid_noise.grid_noise(bits, cells=cells, size=size, threads=threads)
    noisy = list[Tensor]()
    for part, parts in zip(flat.parts, totals, strict=True):
        start = sum(flat.sizes[: part.group]) + part.start
        stop = start + part.length
        if is_whole:
            noise = whole[start:stop]
        else:
            noise = grid_noise.grid_noise(bits, cells=cells, size=size, start=start, stop=stop)
        total = _flatten_dense_tensors(parts)
        found = grid_noise.noisy_sum(total.cpu().numpy(), noise, pitch, threads=threads)
        noisy.append(torch.from_numpy(found).to(total.device))
    return noisy


def noisy_mean(
    grads: Mapping[str, Tensor],
    plan: PrivacyPlan,
    step: int,
    *,
    max_grad_norm: float | None = None,
    layout: Sequence[ParameterMap] | None = None,
) -> dict[str, Tensor]:
    """Add the noise of a step to a clipped sum and divide by the expected batch size.

    For a loop of your own: `engine.make_loader(plan=plan)` draws its batches, `engine.record()`
    puts each release on record, and its noise is then drawn here, once. The noise of a plan with a
    seed is free while no such loop is open, for tests and comparisons. See `NoiseSource`.

    Args:
        grads: mapping from every trainable parameter name to its clipped SUM over a logical batch.
        plan: `PrivacyPlan`.
        step: index of the release.
        max_grad_norm: C of the step, of a plan with a seed whose bound adapts and that no loop
            records; None for the plan's, or that on record.
        layout: `dualdp.port.match(...)` to draw portable noise in the JAX model's shapes and order.

    Returns:
        mapping from name to (sum + noise) / expected_batch_size, see `NoiseSource.noisy_mean`.

    Raises:
        AccountingError: the step is past the plan, not on record, or its noise was drawn before.
        TypeError: inside `torch.func.vmap`, or while a CUDA graph is captured.
        ValueError: `max_grad_norm` is not that on record, or came with correlated noise.

    Source: Abadi et al. 2016, Algorithm 1, "add noise".
    """
    require_plan(plan)
    check_sum(grads)
    _refuse_repetition(grads)
    step = checked_step(plan, step)
    loop = own_loops.loop_of(plan)
    if loop is None and plan.seed is None:
        raise AccountingError(
            f"The noise of step={step} was asked for, but no loop that is open records the "
            "releases of this plan. Expected engine.make_loader(plan=plan), then engine.record() "
            "before each release; a plan with a seed gives its noise freely, for tests."
        )
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None and loop is None else max_grad_norm
    if loop is not None:
        release, source = loop.take(step), loop.source
    else:
        release, source = _free(plan, step, _validate.positive("max_grad_norm", bound)), None
    if bound is not None and bound != release.max_grad_norm:
        raise ValueError(
            f"max_grad_norm={bound} came for a release that is on record with "
            f"{release.max_grad_norm}. Expected that one, or none."
        )
    source = source if isinstance(source, NoiseSource) else NoiseSource(plan)
    return source.noisy_mean(grads, release, noise_bits(plan.seed, step), layout=layout)


def _free(plan: PrivacyPlan, step: int, bound: float) -> Release:
    """Release of a plan with a seed that nobody records."""
    if plan.is_correlated and bound != plan.max_grad_norm_at(step):
        raise ValueError(
            f"max_grad_norm={bound} with correlated noise, which holds that of earlier steps at "
            f"the plan's max_grad_norm={plan.max_grad_norm_at(step)}. Expected the plan's."
        )
    return Release(
        step=step,
        segment=0,
        segment_start=0,
        max_grad_norm=bound,
        noise_multiplier=plan.noise_multiplier_at(step),
        draw_stddev=plan.draw_stddev(step, bound),
        expected_batch_size=plan.expected_batch_size_at(step),
    )


def check_sum(grads: Mapping[str, Tensor]) -> None:
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

# SPDX-License-Identifier: Apache-2.0
"""Noisy mean of a step: the only place where this backend releases anything about the data.

source = NoiseSource(plan)                     # held by an engine, or by a loop of one's own
release = ledger.record(step)                  # the ledger has the release before it is made
mean = source.noisy_mean(sums, release, noise_bits(plan.seed, step))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.ledger import own_loops
from dualdp.ledger.ledger import Release
from dualdp.plan.correlated.strategies import BLT, Band, Strategy, Window
from dualdp.plan.plan import PrivacyPlan, checked_step, require_plan
from dualdp.porting.parameter_map import ParameterMap
from dualdp.randomness import fold_in, grid_noise, key_of, noise_bits, seeded_bits, threefry
from dualdp.randomness.parallel import fill_blocks
from dualdp_torch.rules.base import Tensor, on_host, wide

Key = NDArray[np.uint32]  # (2,)
Kept = tuple[Tensor, ...]  # arrays kept of earlier steps, the newest first

_STATE_WORDS = 624  # words of the Mersenne Twister behind torch's CPU generator
_STATE_OFFSET = 24  # bytes before these words in the saved state
_BLOCK = 1 << 16  # numbers that one keyed generator draws on the CPU
FEW = 16  # blocks up to which one thread draws them all
DEVICE_BLOCK = 1 << 22  # numbers per block on other devices, where each draw costs a launch


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

    segment: int
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
    of which the source keeps what is needed (`next_noise`) in memory: it takes the noise away from
    what was released, so it is in no checkpoint, pickle or `repr`.

    Attributes:
        held: `Held`, what is kept of correlated noise; None for other noise, or before a release.

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
        self.held: Held | None = None

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
            noisy = _secure(flat, here, release, bits)
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
        draw: Draw = partial(_fast, flat)
        if self._plan.noise == "portable":
            draw = partial(_portable, flat, leaves)
        strategy = self._plan.correlation
        if strategy is None or not self._plan.is_correlated:
            return draw(key_of(bits), release.draw_stddev)
        begin = release.segment_start
        if isinstance(strategy, Window):  # a step of a seed may be asked for without those before
            begin = max(begin, release.step + 1 - len(strategy.weights))
        held = self._held_before(release, flat)
        first, kept = begin, list[Kept]([()] * len(flat.parts))
        if held is not None and held.step >= begin:
            first, kept = held.step, held.kept
        noise = list[Tensor]()
        for step in range(first, release.step + 1):
            index, key = step - release.segment_start, key_of(self._bits_of(step, release, bits))
            found = [
                next_noise(strategy, index, z, own, release.draw_stddev)
                for z, own in zip(draw(key, 1.0), kept, strict=True)
            ]
            noise, kept = [one for one, _ in found], [own for _, own in found]
        self.held = Held(release.segment, release.step + 1, flat, kept)
        return noise

    def _held_before(self, release: Release, flat: Layout) -> Held | None:
        """What is kept of the segment before a release; None at its beginning."""
        held = self.held
        if held is None or held.segment != release.segment or held.step > release.step:
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


def next_noise(
    strategy: Strategy, index: int, z: Tensor, kept: Kept, stddev: float
) -> tuple[Tensor, Kept]:
    """Return the correlated noise C^-1 z of a step, and what is kept for the next.

    A window keeps its normals, a band as many noises as it has coefficients, a buffered Toeplitz
    strategy its buffers, and any other strategy all normals of the segment.

    Args:
        strategy: `Strategy` of the plan.
        index: int, number of the step in its segment.
        z: (k,) standard normals of the step, which may be overwritten.
        kept: arrays (k,) of the step before; () at the beginning.
        stddev: float, standard deviation of z in the sum, gradient units.

    Source: Denisov et al. 2022 (arXiv 2202.08312); McMahan et al. 2024 (arXiv 2404.16706) for BLT.
    """
    if isinstance(strategy, Band):
        first, *taps = strategy.weights
        noise = z.mul_(stddev)
        for tap, earlier in zip(taps, kept, strict=False):
            noise.sub_(earlier * tap)
        noise.mul_(1 / first)
        return noise.clone(), (noise, *kept)[: len(taps)]
    if isinstance(strategy, BLT):
        buffers = kept or tuple(z.new_zeros(len(z)) for _ in strategy.decays)
        noise = z.mul_(stddev)
        for scale, buffer in zip(strategy.scales, buffers, strict=True):
            noise.sub_(buffer * scale)  # rounded twice, on any device and in any part
        pairs = zip(strategy.decays, buffers, strict=True)
        return noise, tuple((buffer * decay).add_(noise) for decay, buffer in pairs)
    is_window = isinstance(strategy, Window)
    weights = strategy.weights if isinstance(strategy, Window) else strategy.inverse(index + 1)
    noise = z * (stddev * float(weights[0]))
    for weight, earlier in zip(weights[1:], kept, strict=False):
        noise.add_(earlier * (stddev * float(weight)))
    return noise, (z, *kept)[: len(weights) - is_window]


def keyed_generator(key: Key, device: torch.device, block: int = 0) -> torch.Generator:
    """Return the generator of one block of a key's numbers, which depends on all 64 bits of it.

    On the CPU its whole state is derived from (key, block): torch's own seeding keeps 32 bits of a
    seed, so that keys of different steps would soon collide.
    """
    generator = torch.Generator(device)
    if device.type != "cpu":
        key = fold_in(key, block)
        return generator.manual_seed((int(key[0]) << 32) | int(key[1]))
    secret = np.array([*key, block], "<u8").tobytes()
    words = np.frombuffer(hashlib.shake_128(secret).digest(4 * _STATE_WORDS), "<u4")
    state = generator.get_state().numpy()
    state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS].view(np.uint64)[:] = words
    return generator.set_state(torch.from_numpy(state))


def normals_between(
    key: Key, stddev: float, start: int, stop: int, *, size: int, like: Tensor
) -> Tensor:
    """Return the normals start..stop-1 of a flat array of `size`, of the kind of `like`.

    Each block of the array has a generator of its own. On the CPU, where torch draws on one core,
    blocks are drawn in parallel; the numbers do not depend on the number of threads.
    """
    noise, length = like.new_empty(stop - start), _BLOCK if on_host(like) else DEVICE_BLOCK
    first = start // length

    def fill(number: int) -> None:
        low, high = (first + number) * length, min((first + number + 1) * length, size)
        part = noise[max(start, low) - start : min(stop, high) - start]
        block = part if len(part) == high - low else like.new_empty(high - low)
        block.normal_(0.0, stddev, generator=keyed_generator(key, like.device, first + number))
        if block is not part:
            part.copy_(block[max(start, low) - low :][: len(part)])

    count = -(-stop // length) - first if len(noise) else 0
    # A few blocks take less time than a thread needs to start while torch's own threads spin.
    threads = torch.get_num_threads() if length == _BLOCK and count > FEW else 1
    fill_blocks(fill, count, threads)
    return noise


#: Function of (key, standard deviation) -> normals of each part.
Draw = Callable[[Key, float], list[Tensor]]


def _fast(flat: Layout, key: Key, stddev: float) -> list[Tensor]:
    """Draw the normals of torch's own generator."""
    found = list[Tensor]()
    for part in flat.parts:
        own, size, like = fold_in(key, part.group), flat.sizes[part.group], flat.like(part)
        stop = part.start + part.length
        found.append(normals_between(own, stddev, part.start, stop, size=size, like=like))
    return found


def _portable(
    flat: Layout, layout: Sequence[ParameterMap] | None, key: Key, stddev: float
) -> list[Tensor]:
    """Draw the normals that JAX draws: leaf i from `fold_in(key, i)`."""
    leaves, found = {leaf.torch_name: leaf for leaf in layout or ()}, list[Tensor]()
    missing = sorted(set(flat.names) - set(leaves)) if layout is not None else []
    if missing:
        raise ValueError(
            f"layout lacks the parameters {missing}. Expected dualdp.port.match(model, params) of "
            "this model."
        )
    for part in flat.parts:
        (name,), start, like = part.names, part.piece.start, flat.like(part)
        dtype: Any = np.float64 if like.dtype == torch.float64 else np.float32
        if name in leaves:  # a tensor may be several leaves of JAX
            leaf = partial(_leaf, key, dtype)
            drawn = np.ascontiguousarray(leaves[name].normals(leaf)).reshape(-1)
        else:
            own, stop = fold_in(key, flat.names.index(name)), start + part.length
            drawn = threefry.normal_between(own, start, stop, dtype=dtype)
        found.append(torch.from_numpy(drawn).to(like.device).mul_(stddev))
    return found


def _leaf(key: Key, dtype: Any, number: int, shape: tuple[int, ...]) -> NDArray[Any]:
    return threefry.normal(fold_in(key, number), shape, dtype=dtype)


def _secure(
    flat: Layout, totals: list[list[Tensor]], release: Release, bits: bytes
) -> list[Tensor]:
    """Sums with noise on the public grid, computed on the host in float64."""
    size, threads, noisy = sum(flat.sizes), torch.get_num_threads(), list[Tensor]()
    pitch = grid_noise.pitch(release.max_grad_norm, size)
    cells = release.draw_stddev / pitch
    for part, parts in zip(flat.parts, totals, strict=True):
        start = sum(flat.sizes[: part.group]) + part.start
        where = {"start": start, "stop": start + part.length, "threads": threads}
        noise = grid_noise.grid_noise(bits, cells=cells, size=size, **where)
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
        if not torch.is_tensor(grad) or grad.is_meta or hasattr(grad, "device_mesh"):
            what = _validate.kind(grad)
            what += f" on {grad.device}" if torch.is_tensor(grad) else ""
            raise TypeError(
                f"grads[{name!r}] is {what}. Expected a torch tensor with numbers, and whole: of a "
                "DTensor grad.full_tensor(), or fully_shard with make_private."
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

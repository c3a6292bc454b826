# SPDX-License-Identifier: Apache-2.0
"""The noise of the pieces that processes hold is the noise that one process would add."""

import numpy as np
import pytest
import torch

from dualdp.plan.correlated import strategies
from dualdp.randomness import grid_noise, threefry
from dualdp_torch.noise import noise
from dualdp_torch.noise.noise import Held, NoiseSource, Piece

from .releases import plan, released

SUMS = {
    "table": torch.randn(700, 201),
    "bias": torch.randn(5),
    "double": torch.randn(3, 31_001, dtype=torch.float64),
    "one": torch.randn(1, 4),
    "head": torch.randn(64, 512),
}


def pieces(rank, size):
    """Sums and places of the rows that one of `size` processes holds, as FSDP cuts them."""
    sums, places = {}, {}
    for name, total in SUMS.items():
        rows = -(-len(total) // size)
        first = min(rank * rows, len(total))
        sums[name] = total[first : first + rows].clone()
        places[name] = Piece(first * total[:1].numel(), total.numel())
    return sums, places


CORRELATED = {"sampler": "fixed_order", "num_examples": 500, "accountant": "pld"}


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"noise": "fast"}, 3),
        ({"noise": "fast"}, 7),
        ({"noise": "portable"}, 3),
        ({"noise": "secure"}, 3),
        ({**CORRELATED, "correlation": strategies.window([1.0, -0.5, 0.25])}, 2),
        ({**CORRELATED, "correlation": strategies.band([2.0, 0.8, 0.3]), "noise": "portable"}, 2),
        ({**CORRELATED, "correlation": strategies.blt(decays=[0.9], scales=[0.2])}, 3),
    ],
)
def test_noise_of_pieces_is_that_of_the_whole(changes, size):
    """Each process draws, and keeps of earlier steps, what its own pieces need."""
    run, bits = plan(seed=None, **changes), [bytes([step] * 64) for step in range(4)]
    steps, found = range(3, 4) if "correlation" not in changes else range(4), []
    for rank in (None, *range(size)):
        sums, places = pieces(rank, size) if rank is not None else (SUMS, None)
        source = NoiseSource(run)
        for step in steps:
            mean = released(sums, run, step, source, bits=bits[step], pieces=places)
        found.append(mean)
        held = sum(len(row) for rows in (source.held or Held(0, 0, None, [])).kept for row in rows)
        assert held <= 3 * sum(total.numel() for total in sums.values())
    whole, *parts = found
    for name, mean in whole.items():
        joined = torch.cat([part[name] for part in parts])
        assert joined.dtype == mean.dtype
        assert torch.equal(joined, mean)
        assert not torch.equal(joined, SUMS[name].to(mean.dtype) / 50)


@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_a_piece_draws_its_own_blocks_only(mode, monkeypatch):
    """No process holds the whole noise: what is drawn for a piece is bounded by its length."""
    drawn = []
    for module, name, numbers in (
        (threefry, "threefry2x32", lambda key, high, low: len(high)),
        (grid_noise, "keystream", lambda key, first, num_bytes: num_bytes // 8),
        (noise, "keyed_generator", lambda *args: 1 << 16),
    ):
        right = getattr(module, name)

        def seen(*args, right=right, numbers=numbers):
            drawn.append(numbers(*args))
            return right(*args)

        monkeypatch.setattr(module, name, seen)
    length, numel = 100, 10_000_000
    sums = {"w": torch.zeros(length)}
    released(sums, plan(noise=mode, seed=None), 0, pieces={"w": Piece(5_000_000, numel)})
    assert 0 < sum(drawn) <= 2 << 16


def test_a_layout_of_jax_is_refused_for_pieces():
    sums, places = pieces(0, 2)
    with pytest.raises(ValueError, match="layout came with pieces.*Consolidate the checkpoint"):
        released(sums, plan(noise="portable"), 0, layout=(), pieces=places)


def test_other_devices_draw_in_blocks_too(monkeypatch):
    """As on a GPU: each block by a generator of its own, of which a piece draws what it meets."""
    monkeypatch.setattr(noise, "DEVICE_BLOCK", 1000)
    monkeypatch.setattr(noise, "on_host", lambda like: False)
    size, like, key = 4321, torch.empty(0, dtype=torch.float64), np.array([3, 4], np.uint32)
    blocks = [
        part.normal_(0.0, 2.0, generator=noise.keyed_generator(key, like.device, block))
        for block, part in enumerate(torch.zeros(size, dtype=like.dtype).split(1000))
    ]
    whole = torch.cat(blocks)
    for start, stop in ((0, size), (999, 1001), (4000, size), (70, 70)):
        drawn = noise.normals_between(key, 2.0, start, stop, size=size, like=like)
        assert torch.equal(drawn, whole[start:stop])

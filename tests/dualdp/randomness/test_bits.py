# SPDX-License-Identifier: Apache-2.0
"""Bits of a run: those of a seed are a published function, all others live as long as a process."""

import copy
import hashlib
import os
import pickle

import numpy as np
import pytest

from dualdp.randomness import PURPOSES, SegmentBits, fresh_bits, key_of, noise_bits, seeded_bits
from tests.mistakes import refused


def test_seeded_bits_are_blake2b_of_seed_purpose_and_step():
    seed = (7).to_bytes(16, "little")
    root = hashlib.blake2b(seed, person=b"dualdp seed", digest_size=16).digest()
    digest = hashlib.blake2b(b"noise\0" + (258).to_bytes(8, "little"), key=root).digest()
    assert seeded_bits(7, "noise", 258) == digest
    high, low = key_of(digest)
    assert int(high) << 32 | int(low) == int.from_bytes(digest[:8], "big")
    assert noise_bits(7, 258) == digest
    assert SegmentBits(7).bits("noise", 258) == digest


@pytest.mark.parametrize("seed", [0, None])
def test_step_keys_are_distinct(seed):
    bits = SegmentBits(seed)
    keys = {tuple(bits.key(purpose, step)) for purpose in PURPOSES for step in range(1000)}
    assert len(keys) == 1000 * len(PURPOSES)
    assert tuple(SegmentBits(1).key("noise", 0)) not in keys


def test_releases_have_bits_of_their_own():
    drawn = [noise_bits(None, step) for step in [*range(500), *range(500)]]
    assert len(set(drawn)) == 1000
    assert {len(bits) for bits in drawn} == {64}
    ones = np.unpackbits(np.frombuffer(b"".join(drawn), np.uint8)).mean()
    assert abs(ones - 0.5) < 6 * 0.5 / np.sqrt(512_000)


def test_fresh_bits_do_not_follow_numpys_seed():
    np.random.seed(0)  # noqa: NPY002 - that a user's seed does not reach us is the point
    first = fresh_bits()
    np.random.seed(0)  # noqa: NPY002
    assert first != fresh_bits()


def test_a_segment_draws_the_same_again():
    """A batch that was drawn and not used is the same when it is asked for again."""
    bits = SegmentBits(None)
    assert bits.bits("sampling", 3) == bits.bits("sampling", 3)
    assert bits.bits("sampling", 3) != SegmentBits(None).bits("sampling", 3)
    other = SegmentBits(None, bits.secret)  # another process of the same run
    assert other.bits("sampling", 3) == bits.bits("sampling", 3)


@pytest.mark.filterwarnings("ignore:.*fork")  # of other tests' threads
def test_copies_and_forks_draw_bits_of_their_own():
    bits = SegmentBits(None)
    own = bits.bits("sampling", 0)
    copies = [pickle.loads(pickle.dumps(bits)), copy.copy(bits), copy.deepcopy(bits)]
    drawn = {copied.bits("sampling", 0) for copied in copies}
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, bits.bits("sampling", 0) + bits.bits("sampling", 0))
        os._exit(0)
    os.wait()
    child = os.read(read, 128)
    assert child[:64] == child[64:]  # a segment of its own
    assert len({own, child[:64], *drawn}) == 5
    assert bits.bits("sampling", 0) == own
    seeded = SegmentBits(3)
    assert pickle.loads(pickle.dumps(seeded)).bits("rows", 1) == seeded.bits("rows", 1)


def test_no_repr_or_pickle_holds_bits():
    bits = SegmentBits(None)
    for held in (bits.secret, bits.bits("noise", 0), bits.bits("noise", 0)[:8]):
        for text in (repr(bits).encode(), str(vars(SegmentBits)).encode(), pickle.dumps(bits)):
            assert held not in text
            assert held.hex().encode() not in text
            assert repr(held).encode() not in text
    assert repr(bits) == "SegmentBits(fresh)"
    assert repr(SegmentBits(3)) == "SegmentBits(seed=3)"
    assert SegmentBits(3).secret is None


def test_bad_seeds_purposes_and_steps_are_refused():
    for seed in (-1, 1 << 128):
        for use in (SegmentBits, lambda seed: seeded_bits(seed, "noise", 0)):
            refused(lambda: use(seed), ValueError, "seed=.* is out of range")  # noqa: B023
    for bits in (SegmentBits(0), SegmentBits(None)):
        words = "purpose='other' is unknown. Expected one of check"
        refused(lambda: bits.bits("other", 0), ValueError, words)  # noqa: B023
        refused(lambda: bits.key("noise", -1), ValueError, "step=-1 is out of range")  # noqa: B023

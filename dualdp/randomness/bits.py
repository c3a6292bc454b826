# SPDX-License-Identifier: Apache-2.0
"""Secret bits of a run: fresh ones of the operating system, or those of a seed.

    bits = noise_bits(plan.seed, step)            # of one release, drawn when it is on record
    batches = SegmentBits(plan.seed)              # of what is drawn before releases
    indices = drawn_indices(plan, batches, step)

A secret lives as long as its holder: it is stored in no plan, file, checkpoint or pickle, so none
can be copied or used twice. With a seed the same step has the same bits on every stack, for tests,
comparisons and papers; whoever knows the seed can take the noise away.
"""

from __future__ import annotations

import hashlib
import os
import secrets

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate

PURPOSES = ("sampling", "noise", "dropout", "count", "check", "rows", "views")
_SECRET_BYTES = 16


def fresh_bits(size: int = 64) -> bytes:
    """Return bytes of the operating system's generator, the only source of secret bits."""
    return secrets.token_bytes(size)


def seeded_bits(seed: int, purpose: str, step: int) -> bytes:
    """Return the 64 bytes of a step for a purpose, the same for the same seed.

    Args:
        seed: int in [0, 2^128).
        purpose: one of `PURPOSES`.
        step: int >= 0.

    Raises:
        ValueError: the seed is out of range, or the purpose is unknown.

    Source: Aumasson et al. 2013 (BLAKE2), keyed mode; RFC 7693.
    """
    number = checked_seed(seed).to_bytes(16, "little")
    root = hashlib.blake2b(number, person=b"dualdp seed", digest_size=_SECRET_BYTES)
    return _derived(root.digest(), purpose, step)


def checked_seed(seed: int) -> int:
    """Return a seed as an integer, if it is one below 2^128."""
    number = _validate.integer("seed", seed, maximum=1 << 4096)
    if number >= 1 << 128:
        raise ValueError(f"seed={number} is out of range. Expected an integer below 2**128.")
    return number


def key_of(bits: bytes) -> NDArray[np.uint32]:
    """Return (2,) uint32, the first 8 bytes as big-endian words: a key as `jax.random` has it."""
    return np.frombuffer(bits[:8], dtype=">u4").astype(np.uint32)


def noise_bits(seed: int | None, step: int) -> bytes:
    """Return the 64 bytes of one release: fresh ones, or those of the seed and step.

    Drawn by the process that has put the release on record, and sent to no others than those that
    add the noise of this run. They are dropped with the step: whoever has them can take its noise
    away.

    Guarantees:
        Without a seed two calls never share their bits.  [test_releases_have_bits_of_their_own]
    """
    return fresh_bits() if seed is None else seeded_bits(seed, "noise", step)


def _derived(secret: bytes, purpose: str, step: int) -> bytes:
    """64 bytes of (purpose, step) under a secret of 16 bytes."""
    _validate.choice("purpose", purpose, PURPOSES)
    number = _validate.integer("step", step).to_bytes(8, "little")
    return hashlib.blake2b(purpose.encode() + b"\0" + number, key=secret).digest()


class SegmentBits:
    """Bits of what is drawn before a release: batches, dropout, views, the choice of rows.

    A segment of a run holds one, in one process. Within it a batch that was drawn and not released
    is the same when it is asked for again, so that a loop can't reject batches. A pickle, a copy
    and a fork have fresh bits of their own, and their batches are drawn anew; workers of a loader
    that need a key get it as an argument.

    Args:
        seed: int, or None for fresh bits.
        secret: 16 bytes from another process of the same run, which then draws the same batches.

    Guarantees:
        Copies, pickles and forks draw other bits.  [test_copies_and_forks_draw_bits_of_their_own]
        `repr` and pickles hold no bits.  [test_no_repr_or_pickle_holds_bits]
    """

    def __init__(self, seed: int | None, secret: bytes | None = None) -> None:
        self.seed = None if seed is None else checked_seed(seed)
        self._pid = os.getpid()
        self._secret = secret if secret or seed is not None else fresh_bits(_SECRET_BYTES)

    @property
    def secret(self) -> bytes | None:
        """The 16 bytes that the first process of a run sends to the others; None with a seed."""
        if self.seed is None and self._pid != os.getpid():  # a fork
            self._pid, self._secret = os.getpid(), fresh_bits(_SECRET_BYTES)
        return self._secret

    def bits(self, purpose: str, step: int) -> bytes:
        """Return the 64 bytes of a step for one of `PURPOSES`.

        Guarantees:
            No two (purpose, step) share them.  [test_step_keys_are_distinct]
        """
        secret = self.secret
        if secret is None:
            assert self.seed is not None  # the constructor drew a secret otherwise
            return seeded_bits(self.seed, purpose, step)
        return _derived(secret, purpose, step)

    def key(self, purpose: str, step: int) -> NDArray[np.uint32]:
        """Return the (2,) uint32 key of a step for a purpose; see `key_of`."""
        return key_of(self.bits(purpose, step))

    def __reduce__(self) -> tuple[type[SegmentBits], tuple[int | None]]:
        return SegmentBits, (self.seed,)

    def __repr__(self) -> str:
        return f"SegmentBits({'fresh' if self.seed is None else f'seed={self.seed}'})"

# SPDX-License-Identifier: Apache-2.0
"""Secret root key of a run and the step keys derived from it.

The root key allows anyone to remove the noise, so it is never written to a plan's JSON, a ledger, a
log or a `repr`; those have its SHA-256. It is stored in a key file that only its owner can read.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp._validate import newer
from dualdp.randomness import used_keys

FORMAT_VERSION = 1
KEY_BYTES = 16
PURPOSES = ("sampling", "noise", "dropout", "count", "check", "digest", "rows", "views")


class RootKey:
    """Secret key of 128 bits, left out of `repr`, pickles and copies.

    `seed` is the integer from which the bytes were derived, None for bytes of the operating system.
    A fork of `pid`, the process in which the object was made, may not begin a run with it.

    Guarantees:
        A pickle or a copy is a `LockedKey`, unless the key comes from a seed.
            [test_no_pickle_copy_or_exception_holds_the_secret]
    """

    __slots__ = ("pid", "secret", "seed")

    def __init__(self, secret: bytes, seed: int | None = None) -> None:
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
            raise ValueError(f"A root key of another form came. Expected {KEY_BYTES} bytes.")
        self.secret, self.seed, self.pid = secret, seed, os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.seed is not None:
            return RootKey.from_seed, (self.seed,)
        return LockedKey, (self.sha256,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RootKey) and (self.secret, self.seed) == (other.secret, other.seed)

    def __hash__(self) -> int:
        return hash((self.secret, self.seed))

    def __repr__(self) -> str:
        origin = "operating system" if self.seed is None else f"seed={self.seed}"
        return f"RootKey(sha256={self.sha256[:12]}..., {origin})"

    @classmethod
    def draw(cls) -> RootKey:
        """Return a new key from the operating system's generator."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int) -> RootKey:
        """Return a reproducible key, for tests and comparisons: it is as secret as the seed."""
        seed = _validate.integer("seed", seed, maximum=1 << 4096)
        if seed >= 1 << 128:
            raise ValueError(f"seed={seed} is out of range. Expected an integer below 2**128.")
        digest = hashlib.blake2b(
            seed.to_bytes(16, "little"), person=b"dualdp seed", digest_size=KEY_BYTES
        )
        return cls(digest.digest(), seed)

    @property
    def sha256(self) -> str:
        """SHA-256 of the secret, which may be published."""
        return hashlib.sha256(self.secret).hexdigest()

    def step_key(self, purpose: str, step: int, branch: int = 0) -> NDArray[np.uint32]:
        """Return the (2,) uint32 key of one step for one of `PURPOSES`, as `jax.random` accepts it.

        These are the first 64 bits of BLAKE2b(root, purpose, step, branch), as big-endian words.
        `branch` is not 0 if the step was repeated with another sum.

        Guarantees:
            No two (purpose, step, branch) share a key, but for a 64-bit collision.
                [test_step_keys_are_distinct]

        Source: Aumasson et al. 2013 (BLAKE2), keyed mode; RFC 7693.
        """
        digest = self.step_secret(purpose, step, branch)
        return np.frombuffer(digest[:8], dtype=">u4").astype(np.uint32)

    def step_secret(self, purpose: str, step: int, branch: int = 0) -> bytes:
        """Return 64 bytes, starting with `step_key`, for generators with a longer key."""
        _validate.choice("purpose", purpose, PURPOSES)
        message = purpose.encode() + b"\0" + _validate.integer("step", step).to_bytes(8, "little")
        if _validate.integer("branch", branch):
            message += branch.to_bytes(8, "little")
        return hashlib.blake2b(message, key=self.secret).digest()

    def digest(self, parts: Iterable[bytes | memoryview]) -> str:
        """Return a keyed digest of private numbers, which is equal only for equal numbers.

        Source: Aumasson et al. 2013 (BLAKE2), keyed mode.
        """
        state = hashlib.blake2b(key=self.secret, person=b"dualdp seal", digest_size=16)
        for part in parts:
            state.update(part)
        return state.hexdigest()

    def require_secret(self) -> RootKey:
        """Return the key itself; `LockedKey.require_secret` raises."""
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new key file, mode 0600, and beside it the marker of a run with this key."""
        path = _validate.path("path", path)
        expected = "a new path, in a folder that exists; a key file is never overwritten"
        with _validate.file_errors("written", path, expected):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(self._text())  # no variable of a traceback holds the secret
            used_keys.note_file(self.sha256, path)
            for _, mark in used_keys.marks(self.sha256)[:1]:
                used_keys.leave(self.sha256, mark, is_new=False)
        except BaseException:
            os.unlink(path)
            used_keys.forget_file(self.sha256, path)
            raise

    def _text(self) -> str:
        data = {"dualdp_key": FORMAT_VERSION, "secret": self.secret.hex(), "seed": self.seed}
        return json.dumps(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RootKey:
        """Return the key in a key file."""
        path = _validate.path("key", path)
        with _validate.file_errors("read", path, "a key file written by plan.save_key"):
            root, version = _read(path)
        # Raised here, where no exception and no variable holds the content of the file.
        if root is not None:
            used_keys.note_file(root.sha256, path)
            return root
        if version is not None:
            raise ValueError(newer(os.fspath(path), "key file", version, FORMAT_VERSION))
        raise ValueError(
            f"{os.fspath(path)} is not a key file. Expected a file written by plan.save_key."
        )


def _read(path: str | os.PathLike[str]) -> tuple[RootKey | None, int | None]:
    """(key, None), or (None, version of the format) if the file can't be read as a key."""
    try:
        content = json.loads(Path(path).read_text())
        version, seed = content["dualdp_key"], content["seed"]
        if version != FORMAT_VERSION:
            return None, version if isinstance(version, int) else None
        root = RootKey(bytes.fromhex(content["secret"]), seed)
        is_true = seed is None or RootKey.from_seed(seed) == root
        return (root if is_true else None), None
    except (KeyError, RecursionError, TypeError, ValueError):
        return None, None


@dataclass(frozen=True)
class LockedKey:
    """Reference to the key of a plan read from JSON, before the key file is given."""

    sha256: str
    seed: None = None

    def require_secret(self) -> RootKey:
        """Raise, because the secret is not available."""
        raise ValueError(
            f"The key of this plan (sha256 {self.sha256[:12]}...) is not loaded. Expected its key "
            "file; pass key= to PrivacyPlan.from_json. A copy or a pickle of a plan has no key."
        )


def unlock(sha256: str, key: RootKey | str | os.PathLike[str]) -> RootKey:
    """Return the root key, given or read from its file, after comparing its SHA-256."""
    root = key if isinstance(key, RootKey) else RootKey.load(key)
    if root.sha256 != sha256:
        raise ValueError(
            f"The key has sha256 {root.sha256[:12]}... but the plan was made with {sha256[:12]}... "
            "Expected the key file that plan.save_key wrote for this plan."
        )
    return root


def root_key(
    key: RootKey | LockedKey | str | os.PathLike[str] | None, seed: int | None
) -> RootKey | LockedKey:
    """Return the given key, or that of the seed, or a new one."""
    if key is None:
        return RootKey.draw() if seed is None else RootKey.from_seed(seed)
    root = key if isinstance(key, RootKey | LockedKey) else RootKey.load(key)
    if seed is not None and root != RootKey.from_seed(seed):
        raise ValueError(
            f"seed={seed} and a key that does not come from it. Expected one of the two."
        )
    return root

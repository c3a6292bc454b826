# SPDX-License-Identifier: Apache-2.0
"""Counter-based streams against published vectors; keys that are distinct, secret and stable."""

import json
import stat

import numpy as np
import pytest
from scipy import stats

from dualdp.randomness import PURPOSES, LockedKey, RootKey, bits, fold_in, normal, unlock
from dualdp.randomness.threefry import threefry2x32

KEY = np.array([7, 11], np.uint32)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers(key, counter, expected):
    """The vectors that Salmon et al. publish with Random123 (kat_vectors, threefry2x32, 20)."""
    words = [np.array([word], np.uint32) for word in counter]
    x, y = threefry2x32(np.array(key, np.uint32), *words)
    assert (int(x[0]), int(y[0])) == expected


@pytest.mark.parametrize("width", [32, 64])
def test_a_stream_is_a_function_of_position(width):
    """Longer than one chunk; the beginning does not depend on the length."""
    long = bits(KEY, (3, 20_001), width=width).reshape(-1)
    np.testing.assert_array_equal(bits(KEY, 1000, width=width), long[:1000])
    assert np.unique(long).size > 0.999 * long.size
    assert bits(KEY, (0, 4), width=width).shape == (0, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normals_are_normal(dtype):
    draws = normal(KEY, 200_000, dtype=dtype)
    assert draws.dtype == dtype
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    assert stats.kstest(draws * 1.02, "norm").pvalue < 1e-3  # the test sees two per cent
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


def test_fold_in_derives_distinct_keys():
    keys = {tuple(fold_in(KEY, index)) for index in range(1000)}
    assert len(keys) == 1000
    with pytest.raises(ValueError, match=r"data=4294967296 is out of range"):
        fold_in(KEY, 1 << 32)


def test_bad_widths_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="width=16 is unknown. Expected 32 or 64"):
        bits(KEY, 3, width=16)
    with pytest.raises(TypeError, match=r"Expected numpy.float32 or numpy.float64"):
        normal(KEY, 3, dtype=np.float16)


def test_step_keys_are_distinct():
    root = RootKey.from_seed(0)
    keys = {
        tuple(root.step_key(purpose, step, branch))
        for purpose in PURPOSES
        for step in range(1000)
        for branch in (0, 1, 2)
    }
    assert len(keys) == 3000 * len(PURPOSES)
    assert tuple(RootKey.from_seed(1).step_key("noise", 0)) not in keys


def test_step_key_is_blake2b_of_root_purpose_and_step():
    import hashlib

    root = RootKey(bytes(range(16)))
    digest = hashlib.blake2b(b"noise\0" + (258).to_bytes(8, "little"), key=bytes(range(16)))
    high, low = root.step_key("noise", 258)
    assert int(high) << 32 | int(low) == int.from_bytes(digest.digest()[:8], "big")


def test_fresh_keys_differ_and_do_not_follow_numpys_seed():
    np.random.seed(0)  # noqa: NPY002 - that a user's seed does not reach us is the point
    first = RootKey.draw()
    np.random.seed(0)  # noqa: NPY002
    assert first.secret != RootKey.draw().secret


def test_repr_hides_the_secret():
    root = RootKey.draw()
    assert root.secret.hex() not in repr(root)
    assert str(root.secret) not in repr(root)
    assert root.sha256[:12] in repr(root)


def test_key_file_round_trip_is_private_and_never_overwritten(tmp_path):
    path = tmp_path / "run.key"
    root = RootKey.draw()
    root.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RootKey.load(path) == root
    with pytest.raises(FileExistsError, match="a key file is never overwritten"):
        root.save(path)
    assert RootKey.load(path) == root


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"dualdp_key": 1, "secret": "00"})])
def test_a_foreign_key_file_is_refused(tmp_path, text):
    path = tmp_path / "foreign"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a key file. Expected a file written by"):
        RootKey.load(path)


def test_unlock_proves_that_the_key_is_the_one():
    root = RootKey.draw()
    assert unlock(root.sha256, root) is root
    with pytest.raises(ValueError, match="but the plan was made with"):
        unlock(RootKey.draw().sha256, root)
    with pytest.raises(ValueError, match=r"is not loaded. Expected its key file"):
        LockedKey(root.sha256).require_secret()


@pytest.mark.parametrize("seed", [-1, 1 << 128])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match="seed=.* is out of range"):
        RootKey.from_seed(seed)


def test_bad_roots_and_purposes_are_refused():
    with pytest.raises(ValueError, match="Expected 16 bytes"):
        RootKey(b"short")
    with pytest.raises(ValueError, match="purpose='other' is unknown. Expected one of check"):
        RootKey.from_seed(0).step_key("other", 0)

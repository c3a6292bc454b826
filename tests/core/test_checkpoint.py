# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or refused by what is wrong with them; the key never inside."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

import dualdp
from dualdp import checkpoint
from tests.core.test_ledger import release
from tests.core.test_plan import make

ARRAYS = {
    "params/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/b": np.zeros((0, 4)),
    "optimizer/step": np.asarray(3, np.int64),
}


def saved(path, steps=3, **changes):
    """A run of some steps, saved; its ledger and key lie beside."""
    ledger = dualdp.Ledger(make(**changes))
    for step in range(steps):
        release(ledger, step)
    checkpoint.write(path, ARRAYS, {"stack": "none", **checkpoint.pack_run(ledger, path)})
    return ledger


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "run"
    ledger = saved(path)
    arrays, document = checkpoint.read(path)
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
    ledger.close()
    again = checkpoint.unpack_run(document, path)
    assert (again.position, again.plan) == (3, ledger.plan)
    assert again.entries == ledger.entries
    assert again.plan.step_key("noise", 5).tolist() == ledger.plan.step_key("noise", 5).tolist()


def test_the_key_lies_apart(tmp_path):
    path = tmp_path / "run"
    ledger = saved(path)
    secret = ledger.plan.root.secret
    for file in (path, tmp_path / "run.ledger"):
        data = file.read_bytes()
        assert secret not in data
        assert secret.hex().encode() not in data
    assert os.stat(tmp_path / "run.key").st_mode & 0o777 == 0o600
    ledger.close()
    (tmp_path / "run.key").rename(tmp_path / "elsewhere")
    _, document = checkpoint.read(path)
    with pytest.raises(FileNotFoundError, match="run.key does not exist. Expected the key file"):
        checkpoint.unpack_run(document, path)
    again = checkpoint.unpack_run(document, path, key=tmp_path / "elsewhere")
    assert again.plan.root == ledger.plan.root


def test_what_came_after_the_checkpoint_is_known(tmp_path):
    path = tmp_path / "run"
    ledger = saved(path)
    for step in (3, 4):
        release(ledger, step, [np.zeros(2)])
    ledger.close()
    _, document = checkpoint.read(path)
    assert len(checkpoint.unpack_run(document, path)) == 5
    (tmp_path / "run.ledger").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="run.ledger does not exist. Expected the ledger"):
        checkpoint.unpack_run(document, path)
    assert len(checkpoint.unpack_run(document, path, ledger=tmp_path / "moved")) == 5


def test_a_later_checkpoint_shares_ledger_and_key(tmp_path):
    ledger = saved(tmp_path / "first")
    release(ledger, 3)
    checkpoint.write(tmp_path / "second", {}, checkpoint.pack_run(ledger, tmp_path / "second"))
    ledger.close()
    again = checkpoint.unpack_run(checkpoint.read(tmp_path / "second")[1], tmp_path / "second")
    assert again.position == 4
    assert again.path == str(tmp_path / "first.ledger")


def test_another_runs_key_is_not_overwritten(tmp_path):
    saved(tmp_path / "run").close()
    (tmp_path / "run.ledger").unlink()
    with pytest.raises(ValueError, match="run.key holds the key of another run"):
        saved(tmp_path / "run")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run"
    checkpoint.write(path, ARRAYS, {"number": 1})
    before = path.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(
                checkpoint.os, name, lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
            )
            with pytest.raises(OSError, match="full"):
                checkpoint.write(path, ARRAYS, {"number": 2})
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_broken_files_are_refused_by_what_is_wrong(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="run does not exist"):
        checkpoint.read(path)
    checkpoint.write(path, ARRAYS, {"number": 1})
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="truncated or no safetensors file"):
            checkpoint.read(path)
    edited = bytearray(whole)
    edited[-1] ^= 1
    path.write_bytes(edited)
    with pytest.raises(ValueError, match="changed after it was written: its SHA-256 differs"):
        checkpoint.read(path)
    path.write_bytes(whole.replace(b"number", b"numbre"))
    with pytest.raises(ValueError, match="changed after it was written: its SHA-256 differs"):
        checkpoint.read(path)
    save_file(ARRAYS, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="safetensors file of something else"):
        checkpoint.read(path)
    text = json.dumps({"dualdp_checkpoint": 7})
    digest = checkpoint._digest({}, text)
    save_file({}, path, metadata={"document": text, "sha256": digest})
    with pytest.raises(ValueError, match="has version 7 of the checkpoint's format. Expected 1"):
        checkpoint.read(path)
    with pytest.raises(ValueError, match="says nothing of its run"):
        checkpoint.unpack_run({}, path)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or refused by what is wrong with them; the key never inside."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

import dualdp
from dualdp import checkpoint
from tests.core.ledger.test_ledger import release
from tests.core.plan.test_plan import make

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


def test_a_checkpoint_holds_a_position_and_a_hash_of_the_ledger(tmp_path):
    """The text of 200,000 steps made a header that no reader of the format accepts."""
    path = tmp_path / "run"
    sizes = []
    for steps in (1, 300):
        folder = tmp_path / str(steps)
        folder.mkdir()
        saved(folder / "run", steps, num_steps=1000).close()
        sizes.append((folder / "run").stat().st_size)
    assert sizes[1] - sizes[0] < 20
    ledger = saved(path)
    state = checkpoint.read(path)[1]["ledger"]
    assert set(state) == {"position", "branch", "max_grad_norm", "num_lines", "hash"}
    assert (state["num_lines"], state["hash"]) == (7, ledger.chain.last_hash)
    ledger.close()
    other = saved(tmp_path / "other")
    other.close()
    _, document = checkpoint.read(path)
    with pytest.raises(ValueError, match="other.ledger does not continue the ledger that was"):
        checkpoint.unpack_run(document, path, ledger=tmp_path / "other.ledger")
    lines = (tmp_path / "run.ledger").read_text().splitlines(keepends=True)
    (tmp_path / "run.ledger").write_text("".join(lines[:5]))
    with pytest.raises(ValueError, match="run.ledger does not continue the ledger that was"):
        checkpoint.unpack_run(document, path)


def test_the_ledger_is_found_beside_a_checkpoint_that_was_moved(tmp_path):
    ledger = dualdp.Ledger(make(), path=tmp_path / "elsewhere.ledger")
    release(ledger, 0)
    path = tmp_path / "run"
    checkpoint.write(path, ARRAYS, {"stack": "none", **checkpoint.pack_run(ledger, path)})
    ledger.close()
    folder = tmp_path / "moved"
    folder.mkdir()
    for old, new in (("run", "run"), ("run.key", "run.key"), ("elsewhere.ledger", "run.ledger")):
        (tmp_path / old).rename(folder / new)
    again = checkpoint.unpack_run(checkpoint.read(folder / "run")[1], folder / "run")
    assert again.path == str(folder / "run.ledger")


@pytest.mark.slow
def test_a_checkpoint_does_not_grow_with_the_steps(tmp_path):
    """The ledger's lines were in it once: past 100 MB, 200,000 steps, it could not be read."""
    path = tmp_path / "run"
    ledger = saved(path, 20_000, num_steps=20_000)
    ledger.close()
    again = checkpoint.unpack_run(checkpoint.read(path)[1], path)
    assert (again.position, len(again)) == (20_000, 20_000)
    assert path.stat().st_size < 10_000


def test_a_plan_with_a_long_table_is_saved(tmp_path):
    """Its numbers stand in the checkpoint, and past 100 MB they fit no header."""
    path = tmp_path / "run"
    ledger = saved(path, 1, num_steps=20_000, max_grad_norm=lambda k: 1 + 1 / (1 + k))
    ledger.close()
    with path.open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 1000  # bytes of the header
    assert checkpoint.unpack_run(checkpoint.read(path)[1], path).plan == ledger.plan


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
    for text, message in (
        ('{"dualdp_checkpoint": 7}', "is a checkpoint of format 7, and this version of dualdp re"),
        ('{"dualdp_checkpoint": "x"}', "has version 'x' of the checkpoint's format. Expected one"),
        ("[]", "holds no JSON object that says what it is"),
        ("[" * 100_000, "holds no JSON object that says what it is"),
    ):
        digest = checkpoint._digest({}, text)
        save_file({}, path, metadata={"document": text, "sha256": digest})
        with pytest.raises(ValueError, match=message):
            checkpoint.read(path)
    with pytest.raises(ValueError, match="run is a checkpoint of format 7"):
        checkpoint.unpack_run({"dualdp_checkpoint": 7}, path)
    with pytest.raises(ValueError, match="says nothing of its run"):
        checkpoint.unpack_run({}, path)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or refused by what is wrong with them, and without any secret."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import dualdp
from dualdp import checkpoint
from dualdp.plan.accounting import Segment
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.ledger.test_ledger import release
from tests.dualdp.plan.test_plan import make

ARRAYS = {
    "params/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/b": np.zeros((0, 4)),
    "optimizer/step": np.asarray(3, np.int64),
}


def save(path, ledger, **changes):
    """Write a checkpoint of a run."""
    known = {"stack": "none", "settings": {"checks": 0.5}, "trained": ["a"]}
    document = checkpoint.describe_run(
        ledger, path, **{**known, "parameters": ["a", "b"], **changes}
    )
    checkpoint.write(path, ARRAYS, document)


def saved(path, steps=3, **changes):
    """A run of some steps, saved; its ledger lies beside."""
    ledger = dualdp.Ledger(make(**changes))
    for step in range(steps):
        release(ledger, step)
    save(path, ledger)
    return ledger


def opened(path, **options):
    """The ledger of a saved run that goes on."""
    return checkpoint.open_run(checkpoint.read(path)[1], path, **options)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "run"
    ledger = saved(path)
    arrays, document = checkpoint.read(path)
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
    assert document == {
        "dualdp_checkpoint": 3,
        "stack": "none",
        "plan": json.loads(ledger.plan.to_json()),
        "position": 3,
        "pass_end": 0,
        "bound": None,
        "ledger": {"file": "run.ledger", "num_lines": 4, "hash": ledger.chain.last_hash},
        "settings": {"checks": 0.5},
        "trained": ["a"],
        "parameters": ["a", "b"],
    }
    ledger.close()
    again = opened(path)
    assert (again.position, again.plan, len(again.segments)) == (3, ledger.plan, 2)
    assert again.entries == ledger.entries
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "run.ledger"]


def test_what_came_after_the_checkpoint_is_known(tmp_path):
    path = tmp_path / "run"
    ledger = saved(path)
    for step in (3, 4):
        release(ledger, step)
    ledger.close()
    again = opened(path)
    assert again.segments == (Segment(0, 5), Segment(3, 3))
    again.close()
    (tmp_path / "run.ledger").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="run.ledger does not exist. Expected the ledger"):
        opened(path)
    assert len(opened(path, ledger=tmp_path / "moved")) == 5


def test_a_copied_checkpoint_goes_on_with_its_own_ledger(tmp_path):
    saved(tmp_path / "run").close()
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("run", "run.ledger"):
        (folder / name).write_bytes((tmp_path / name).read_bytes())
    runs = opened(tmp_path / "run"), opened(folder / "run")
    for run in runs:
        release(run, 3)
    assert [len(run) for run in runs] == [4, 4]
    assert runs[0].path != runs[1].path


def test_a_bound_and_a_recalibration_are_handed_on(tmp_path):
    path = tmp_path / "run"
    ledger = saved(path, max_grad_norm=AdaptiveNorm(0.1))
    bound = ledger.max_grad_norm
    release(ledger, 3)
    ledger.close()
    again = opened(path)
    again.recalibrate()
    assert (again.max_grad_norm, again.position) == (bound, 3)
    assert again.segments[-1].noise_scale > 1


def test_no_ledger_is_overwritten(tmp_path):
    """A notebook's cell that was run twice saves another run under the same name."""
    path = tmp_path / "run"
    first, second = saved(path, 2), saved(path, 3)
    assert (tmp_path / "run.ledger").read_text() == first.to_json()
    assert second.path == f"{path}.ledger.2"
    second.close()
    assert opened(path).path == second.path


def test_a_checkpoint_holds_a_position_and_a_hash_of_the_ledger(tmp_path):
    """The text of 200,000 steps made a header that no reader of the format accepts."""
    path, sizes = tmp_path / "run", []
    for steps in (1, 300):
        (tmp_path / str(steps)).mkdir()
        saved(tmp_path / str(steps) / "run", steps, num_steps=1000).close()
        sizes.append((tmp_path / str(steps) / "run").stat().st_size)
    assert sizes[1] - sizes[0] < 20
    saved(path).close()
    saved(tmp_path / "other").close()
    with pytest.raises(ValueError, match="other.ledger does not continue the ledger that was"):
        opened(path, ledger=tmp_path / "other.ledger")
    lines = (tmp_path / "run.ledger").read_text().splitlines(keepends=True)
    (tmp_path / "run.ledger").write_text("".join(lines[:2]))
    with pytest.raises(ValueError, match="run.ledger does not continue the ledger that was"):
        opened(path)


def test_the_ledger_is_found_beside_a_checkpoint_that_was_moved(tmp_path):
    ledger = dualdp.Ledger(make(), path=tmp_path / "elsewhere.ledger")
    release(ledger, 0)
    save(tmp_path / "run", ledger)
    ledger.close()
    folder = tmp_path / "moved"
    folder.mkdir()
    for old, new in (("run", "run"), ("elsewhere.ledger", "run.ledger")):
        (tmp_path / old).rename(folder / new)
    assert opened(folder / "run").path == str(folder / "run.ledger")
    moved = checkpoint.relocated(checkpoint.read(folder / "run")[1], tmp_path / "x", folder / "run")
    assert moved["ledger"]["file"] == "../elsewhere.ledger"


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
    with pytest.raises(ValueError, match="is a checkpoint of format None, and this version of d"):
        checkpoint.read(path)
    save_file({}, path, metadata={"dualdp_checkpoint": "2", "sha256": ""})
    with pytest.raises(ValueError, match="is a checkpoint of format 2, and this version of dualdp"):
        checkpoint.read(path)
    for text in ("[]", "{", "[" * 100_000):  # with a hash that is true
        body = {"document": np.frombuffer(text.encode(), np.uint8)}
        whole = checkpoint.digest(body)
        save_file(body, path, metadata={"dualdp_checkpoint": "3", "sha256": whole})
        with pytest.raises(ValueError, match="run says nothing of its run"):
            checkpoint.read(path)
    with pytest.raises(ValueError, match="run is a checkpoint of format 7"):
        checkpoint.open_run({"dualdp_checkpoint": 7}, path)
    with pytest.raises(ValueError, match="says nothing of its run"):
        checkpoint.open_run({"dualdp_checkpoint": 3}, path)

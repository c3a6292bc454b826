# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or refused by what is wrong with them, and without any secret."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import dualdp
from dualdp import checkpoint
from dualdp.plan.accounting import Segment
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.ledger.test_ledger import release
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused

ARRAYS = {
    "params/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/b": np.zeros((0, 4)),
    "optimizer/step": np.asarray(3, np.int64),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


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


def test_what_is_written_is_read(path):
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
    assert sorted(file.name for file in path.parent.iterdir()) == ["run", "run.ledger"]


def test_what_came_after_the_checkpoint_is_known(path):
    ledger = saved(path)
    for step in (3, 4):
        release(ledger, step)
    ledger.close()
    again = opened(path)
    assert again.segments == (Segment(0, 5), Segment(3, 3))
    again.close()
    moved = (path.parent / "run.ledger").rename(path.parent / "moved")
    words = "run.ledger does not exist. Expected the ledger"
    refused(lambda: opened(path), FileNotFoundError, words)
    assert len(opened(path, ledger=moved)) == 5


def test_a_copied_checkpoint_goes_on_with_its_own_ledger(path):
    saved(path).close()
    folder = path.parent / "copy"
    folder.mkdir()
    copies = [shutil.copy(file, folder) for file in (path, f"{path}.ledger")]
    runs = opened(path), opened(copies[0])
    for run in runs:
        release(run, 3)
    assert [len(run) for run in runs] == [4, 4]
    assert runs[0].path != runs[1].path


def test_a_bound_and_a_recalibration_are_handed_on(path):
    ledger = saved(path, max_grad_norm=AdaptiveNorm(0.1))
    bound = ledger.max_grad_norm
    release(ledger, 3)
    ledger.close()
    again = opened(path)
    again.recalibrate()
    assert (again.max_grad_norm, again.position) == (bound, 3)
    assert again.segments[-1].noise_scale > 1


def test_no_ledger_is_overwritten(path):
    """A notebook's cell that was run twice saves another run under the same name."""
    first, second = saved(path, 2), saved(path, 3)
    assert (path.parent / "run.ledger").read_text() == first.to_json()
    assert second.path == f"{path}.ledger.2"
    second.close()
    assert opened(path).path == second.path


def test_a_checkpoint_holds_a_position_and_a_hash_of_the_ledger(path):
    """The text of 200,000 steps made a header that no reader of the format accepts."""
    other, foreign = path.parent / "other", "other.ledger does not continue the ledger that was"
    saved(other, 300, num_steps=1000).close()
    long = other.stat().st_size
    saved(path, 1, num_steps=1000).close()
    assert long - path.stat().st_size < 20
    refused(lambda: opened(path, ledger=f"{other}.ledger"), ValueError, foreign)
    ledger = path.parent / "run.ledger"
    ledger.write_text(ledger.read_text().splitlines(keepends=True)[0])
    words = "run.ledger does not continue the ledger that was"
    refused(lambda: opened(path), ValueError, words)


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


def test_a_failed_save_leaves_the_old_checkpoint(path, monkeypatch):
    def full(*_):
        raise OSError(28, "full")

    checkpoint.write(path, ARRAYS, {"number": 1})
    before = path.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, name, full)
            with pytest.raises(OSError, match="full"):
                checkpoint.write(path, ARRAYS, {"number": 2})
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == ["run"]


def test_broken_files_are_refused_by_what_is_wrong(path):
    def unread(words, data=None, error=ValueError):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(error, match=words):
            checkpoint.read(path)

    unread("run does not exist", error=FileNotFoundError)
    checkpoint.write(path, ARRAYS, {"number": 1})
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        unread("truncated or no safetensors file", whole[:cut])
    for edited in (whole[:-1] + bytes([whole[-1] ^ 1]), whole.replace(b"number", b"numbre")):
        unread("changed after it was written: its SHA-256 differs", edited)
    save_file(ARRAYS, path, metadata={"format": "pt"})
    unread("is a checkpoint of format None, and this version of d")
    save_file({}, path, metadata={"dualdp_checkpoint": "2", "sha256": ""})
    unread("is a checkpoint of format 2, and this version of dualdp")
    for text in ("[]", "{", "[" * 100_000):  # with a hash that is true
        body = {"document": np.frombuffer(text.encode(), np.uint8)}
        told = {"dualdp_checkpoint": "3", "sha256": checkpoint.digest(body)}
        save_file(body, path, metadata=told)
        unread("run says nothing of its run")
    for version, words in ((7, "run is a checkpoint of format 7"), (3, "says nothing of its run")):
        document = {"dualdp_checkpoint": version}
        refused(lambda: checkpoint.open_run(document, path), ValueError, words)  # noqa: B023

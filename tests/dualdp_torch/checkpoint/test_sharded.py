# SPDX-License-Identifier: Apache-2.0
"""Runs of sharded models on disk: a folder, on other numbers of processes, in one file."""

import shutil

import pytest

import dualdp_torch as dpt
from dualdp import checkpoint
from dualdp_torch.checkpoint import sharded
from tests.distributed import checkpoints as worker
from tests.distributed import models
from tests.distributed.spawn import together

pytestmark = [
    pytest.mark.xdist_group("sharded folder"),  # which the tests share
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that two processes saved after step 6, and where one device ends from there."""
    folder = tmp_path_factory.mktemp("saved")
    together(worker.save, 2, folder, folder / "run", 6)
    worker.save(folder, folder / "alone", 6, sharded=False)
    return folder, worker.go_on(folder, folder / "alone", sharded=False)


@pytest.fixture
def run(saved, tmp_path):
    """The folder for this test alone, with its ledger."""
    shutil.copytree(saved[0] / "run", tmp_path / "run")
    shutil.copy(saved[0] / "run.ledger", tmp_path / "run.ledger")
    return tmp_path / "run"


def assert_ends_there(ended, expected):
    assert models.distance(ended[0], expected[0]) < 1e-10
    assert ended[1:] == expected[1:]
    assert ended[2] == 10


@pytest.mark.slow
def test_a_consolidated_checkpoint_goes_on_in_one_process(saved, run):
    path = run.parent / "one"
    sharded.consolidate_checkpoint(run, path)
    ended = worker.go_on(run.parent, path, sharded=False, load=dpt.load_checkpoint)
    assert_ends_there(ended, saved[1])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_checkpoints_load_on_other_numbers_of_processes(saved, run, size):
    for ended in together(worker.go_on, size, run.parent, run):
        assert_ends_there(ended, saved[1])


@pytest.mark.slow
def test_one_process_reads_the_folder(saved, run):
    assert [entry.name for entry in run.iterdir()] == ["2"]  # the older one is gone
    assert_ends_there(worker.go_on(run.parent, run, sharded=False), saved[1])


def one_process(folder):
    """A run on one process, saved after its first step; what takes a step and saves again."""
    model, data = models.build()
    engine, model, optimizer, loader = models.begin(model, data, models.plan(num_steps=5))
    batches = iter(loader)

    def go_on():
        models.step(model, optimizer, next(batches))
        sharded.save_sharded_checkpoint(folder, model=model, optimizer=optimizer, engine=engine)

    go_on()
    return go_on


def position(folder):
    """After how many steps the newest checkpoint was saved; it is whole."""
    sharded.consolidate_checkpoint(folder, folder.parent / "one")
    return checkpoint.read(folder.parent / "one")[1]["position"]


def test_an_interrupted_sharded_save_leaves_the_older_one(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    again = one_process(folder)
    for name in ("_sha256", "_dcp"):
        with monkeypatch.context() as patch:
            patch.setattr(sharded, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                again()
        assert checkpoint.numbers(folder) == [1]
        assert position(folder) == 1
    again()
    assert [entry.name for entry in folder.iterdir()] == ["2"]
    assert position(folder) == 4


def test_broken_folders_are_refused(tmp_path):
    folder = tmp_path / "run"

    def load(kind="mlp"):
        model = models.build(kind)[0]
        return sharded.load_sharded_checkpoint(
            folder, model=model, optimizer=worker.optimizer_of(model)
        )

    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load()
    one_process(folder)
    with pytest.raises(ValueError, match="lacks .*and holds"):
        load("cnn")
    (file,) = (folder / "1").glob("*.distcp")
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), None):
        file.write_bytes(broken) if broken else file.unlink()
        with pytest.raises(ValueError, match="was changed or removed after it was written"):
            load()
    with pytest.raises(ValueError, match="was changed or removed after it was written"):
        sharded.consolidate_checkpoint(folder, tmp_path / "one")

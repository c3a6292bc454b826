# SPDX-License-Identifier: Apache-2.0
"""Runs of sharded models on disk: a folder, on other numbers of processes, in one file."""

import shutil

import pytest
import torch

import dualdp_torch as dpt
from dualdp import checkpoint
from dualdp_torch.checkpoint import sharded
from dualdp_torch.checkpoint.sharded import (
    consolidate_checkpoint,
    load_sharded_checkpoint,
    save_sharded_checkpoint,
)
from tests.distributed import sharded_checkpoints as worker
from tests.distributed import sharded_models as models
from tests.distributed.spawn import together
from tests.dualdp_torch.parallel.test_fsdp import relative

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that two processes saved after step 6, and where one device ends from there."""
    folder = tmp_path_factory.mktemp("saved")
    together(worker.save, 2, folder, folder / "run", 6)
    model, data = models.build("mlp", torch.float64)
    run, optimizer = models.plan(**worker.PLAN), worker.optimizer_of(model)
    engine, model, optimizer, loader = models.begin(model, data, run, optimizer=optimizer)
    for batch in loader:
        models.step(model, optimizer, batch)
        if engine.is_between_steps and engine.ledger.position == 6:
            break
    dpt.save_checkpoint(folder / "alone", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model = models.build("mlp", torch.float64)[0]
    return folder, *worker.go_on(folder / "alone", model, load=dpt.load_checkpoint)[:2]


@pytest.fixture
def copy(saved, tmp_path):
    """The folder for this test alone, with its ledger."""
    shutil.copytree(saved[0] / "run", tmp_path / "run")
    shutil.copy(saved[0] / "run.ledger", tmp_path / "run.ledger")
    return tmp_path / "run"


def check(saved, ended):
    parameters, epsilon, releases = ended
    assert relative(parameters, saved[1]) < 1e-10
    assert (epsilon, releases) == (saved[2], 10)


@pytest.mark.slow
def test_a_consolidated_checkpoint_goes_on_in_one_process(saved, copy):
    path = copy.parent / "one"
    consolidate_checkpoint(copy, path)
    model = models.build("mlp", torch.float64)[0]
    check(saved, worker.go_on(path, model, load=dpt.load_checkpoint))


def test_one_process_reads_the_folder(saved, copy):
    assert sorted(entry.name for entry in copy.iterdir()) == ["2"]  # the older one is gone
    check(saved, worker.go_on(copy, models.build("mlp", torch.float64)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sharded_checkpoints_load_on_other_numbers_of_processes(saved, copy, size):
    for ended in together(worker.load, size, copy.parent, copy):
        check(saved, ended)


def one_process(folder):
    """A run on one process, saved after its first step; what takes a step and saves again."""
    model, data = models.build("mlp")
    engine, model, optimizer, loader = models.begin(model, data, models.plan(num_steps=5))
    batches = iter(loader)

    def go_on():
        models.step(model, optimizer, next(batches))
        save_sharded_checkpoint(folder, model=model, optimizer=optimizer, engine=engine)

    go_on()
    return go_on


def position(folder):
    """After how many steps the newest checkpoint was saved; it is whole."""
    consolidate_checkpoint(folder, folder.parent / "one")
    return checkpoint.read(folder.parent / "one")[1]["position"]


def load(folder, model=None):
    model = model or models.build("mlp")[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return load_sharded_checkpoint(folder, model=model, optimizer=optimizer)


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
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load(folder)
    one_process(folder)
    with pytest.raises(ValueError, match="lacks .*and holds"):
        load(folder, models.build("cnn")[0])
    (file,) = (folder / "1").glob("*.distcp")
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="was changed or removed after it was written"):
            load(folder)
        with pytest.raises(ValueError, match="was changed or removed after it was written"):
            consolidate_checkpoint(folder, tmp_path / "one")
    file.unlink()
    with pytest.raises(ValueError, match="was changed or removed after it was written"):
        load(folder)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in shards by Orbax; on several devices they are in parallel/."""

import sys

import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp_jax.checkpoint.sharded import (
    consolidate_checkpoint,
    load_sharded_checkpoint,
    save_sharded_checkpoint,
)
from tests.dualdp_jax.runs import make_plan, private


def begun():
    """Engine and state after a step."""
    engine, step, state, loader = private(plan=make_plan(seed=None))
    return engine, step(state, next(iter(loader)))[0]


def test_what_is_no_sharded_checkpoint_is_refused(tmp_path, monkeypatch):
    engine, state = begun()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
            load_sharded_checkpoint(folder, like=state)
    with pytest.raises(TypeError, match="like is a dict"):
        load_sharded_checkpoint(tmp_path, like=state.params)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match="need the package orbax-checkpoint"):
        save_sharded_checkpoint(tmp_path / "run", state=state, engine=engine)


def test_a_sharded_checkpoint_on_one_device(tmp_path):
    engine, state = begun()
    save_sharded_checkpoint(tmp_path / "run", state=state, engine=engine)
    engine.detach()
    other = dpj.TrainState.create({"w": np.zeros(2, np.float32), "b": 0.0}, optax.sgd(0.1))
    with pytest.raises(ValueError, match="'params/w' is float32"):
        load_sharded_checkpoint(tmp_path / "run", like=other)
    consolidate_checkpoint(tmp_path / "run", tmp_path / "file")
    found, again = dpj.load_checkpoint(tmp_path / "file", like=state)
    assert found.step == 1
    np.testing.assert_array_equal(found.params["w"], state.params["w"])
    assert len(again.ledger) == 1

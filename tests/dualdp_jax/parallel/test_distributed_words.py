# SPDX-License-Identifier: Apache-2.0
"""What processes say to each other when something is wrong, as far as one process can show it."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp_jax.checkpoint.sharded import (
    consolidate_checkpoint,
    load_sharded_checkpoint,
    save_sharded_checkpoint,
)
from dualdp_jax.parallel.process_group import Group


@pytest.mark.parametrize("shown", [True, False])
def test_the_first_difference_is_named(shown, monkeypatch):
    ours, theirs = ({"a": {"b": [number]}, "c": 1} for number in (2.0, 3.0))
    group = Group()
    group.size = 2
    others = iter([b"another digest", theirs])
    monkeypatch.setattr(group, "gather", lambda point, value: [value, next(others)])
    says = r"is \[2.0\] on process 0 and \[3.0\]" if shown else "differs on process 0 and"
    said = (
        rf"The processes disagree: plan\['a'\]\['b'\] {says} on process 1. Expected the same on all"
    )
    with pytest.raises(ValueError, match=said):
        group.require_same("plan", ours, shown=shown)


def devices(*owners):
    return [SimpleNamespace(process_index=owner) for owner in owners]


def test_a_mesh_over_some_of_the_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert Group.of(devices(1, 1)) is None
    assert Group.of(devices(0, 1, 2, 2)).size == 3
    with pytest.raises(ValueError, match=r"devices of the processes \[0, 2\], but there are 3"):
        Group.of(devices(0, 2))


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_broken_connection_is_a_lost_process_and_nothing_else_is(kind):
    group = Group()
    with (
        pytest.raises(RuntimeError, match=r"lost another process at step 3 \(UNKNOWN: Gloo"),
        group.collective("step 3"),
    ):
        raise kind("UNKNOWN: Gloo all-reduce failed: Connection closed by peer\nmore")
    for text in ("RESOURCE_EXHAUSTED: Out of memory", "shapes differ", ""):
        with pytest.raises(kind) as found, group.collective("step 3"):
            raise kind(text)
        assert str(found.value) == text


def odd():
    """Raises what can't be sent to another process."""

    class Odd(Exception):
        pass

    raise Odd("odd")


def test_one_process_is_a_group_that_agrees_with_itself():
    group = Group()
    assert (group.rank, group.size, group.is_first) == (0, 1, True)
    assert Group.current() is None
    assert group.gather("here", b"word") == [b"word"]
    assert group.gather("here", b"w" * 100) == [b"w" * 100]
    group.require_same("the plan", {"a": 1})
    assert group.on_first("here", lambda: [1, 2]) == [1, 2]
    with pytest.raises(RuntimeError, match="Odd: odd"):
        group.on_first("here", odd)
    with pytest.raises(KeyError, match="gone"):
        group.on_first("here", lambda: {}["gone"])


# ---------------------------------------------------------------------- sharded checkpoints


def begun(seed=None):
    engine = dpj.PrivacyEngine()
    data = np.arange(20, dtype=np.float32)
    step, state, loader = engine.make_private(
        loss_fn=lambda p, x: p["w"] * x,
        params={"w": np.float32(1)},
        optimizer=optax.sgd(0.1),
        data=data,
        expected_batch_size=4,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_steps=3,
        accountant="rdp",
        seed=seed,
    )
    return engine, step(state, next(iter(loader)))[0]


def test_a_sharded_checkpoint_needs_orbax(tmp_path, monkeypatch):
    engine, state = begun()
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match="need the package orbax-checkpoint"):
        save_sharded_checkpoint(tmp_path / "run", state=state, engine=engine)


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    _, state = begun()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
            load_sharded_checkpoint(folder, like=state)
    with pytest.raises(TypeError, match="like is a dict"):
        load_sharded_checkpoint(tmp_path, like=state.params)


def test_a_sharded_checkpoint_on_one_device(tmp_path):
    engine, state = begun()
    save_sharded_checkpoint(tmp_path / "run", state=state, engine=engine)
    engine.detach()
    other = dpj.TrainState.create({"w": np.zeros(2, np.float32)}, optax.sgd(0.1))
    with pytest.raises(ValueError, match="'params/w' is float32"):
        load_sharded_checkpoint(tmp_path / "run", like=other)
    consolidate_checkpoint(tmp_path / "run", tmp_path / "file")
    found, again = dpj.load_checkpoint(tmp_path / "file", like=state)
    assert found.step == 1
    np.testing.assert_array_equal(found.params["w"], state.params["w"])
    assert len(again.ledger) == 1

# SPDX-License-Identifier: Apache-2.0
"""Checks on several real processes that are one run, against one device."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.plan.schedules import AdaptiveNorm
from dualdp_jax.checkpoint.sharded import load_sharded_checkpoint, save_sharded_checkpoint
from dualdp_jax.parallel.mesh import DataMesh, whole
from dualdp_jax.parallel.process_group import Group
from tests.dualdp_jax.runs import train
from tests.dualdp_jax.workers import launch
from tests.dualdp_jax.workers.models import (
    BOUND,
    MODELS,
    arguments,
    begin,
    distance,
    mesh_of,
    mlp,
    place,
    plan,
)  # fmt: skip

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[4])


def everywhere():
    return mesh_of((jax.device_count(),))


@cache
def alone(model, dtype, **changes):
    """The last parameters of a run on one device, which process 0 makes for both."""

    def parameters():
        with jax.enable_x64(dtype == "float64"):
            state = train(*begin(MODELS[model](), dtype=dtype, run=plan(**changes))[1:])
            return jax.tree.map(np.asarray, state.params)

    return Group().on_first(f"{model} alone", parameters)


def together(model, split=None, dtype="float32", ledger=None, **changes):
    expected = alone(model, dtype, **changes)
    given = {"run": plan(**changes), "ledger": ledger, "checks": None if ledger else 0}
    with jax.enable_x64(dtype == "float64"):
        engine, *run = begin(MODELS[model](), everywhere(), split, dtype, **given)
        assert distance(train(*run).params, expected) <= BOUND[dtype]
    records_are_the_same(engine)
    return engine


def refused(kind, text):
    return pytest.raises(kind, match=re.escape(text))


def records_are_the_same(engine):
    ledger = engine.ledger
    segments = [[segment.start, segment.stop, segment.noise_scale] for segment in ledger.segments]
    Group().require_same("the record", [ledger.entries, segments, ledger.get_epsilon()])


# ---------------------------------------------------------------------- the same run


def mlp_and_its_ledger():
    path = FOLDER / "mlp.ledger"
    engine = together("mlp", physical_batch_size=2, ledger=path)
    assert engine.ledger.path == (str(path) if RANK == 0 else None)
    assert engine.get_epsilon(delta=1e-4) == plan().epsilon()
    engine.detach()
    if RANK == 0:
        assert path.read_text() == engine.ledger.to_json()
    assert len(engine.ledger) == plan().num_steps


def words_in_float64():
    together("words", "data", "float64")


def sparse_batches_and_an_adaptive_bound():
    sparse = {"expected_batch_size": 3, "physical_batch_size": 1}
    engine = together("mlp", "data", max_grad_norm=AdaptiveNorm(0.3), **sparse)
    Group().require_same("the bound", engine.ledger.max_grad_norm)


def fresh_bits_and_secure_noise():
    """Of batches and noise those of process 0 are taken."""
    for noise in ("fast", "secure"):
        run = plan(seed=None, noise=noise, num_steps=3)
        engine, *parts = begin(mlp(), everywhere(), "data", run=run)
        state = train(*parts)
        Group().require_same("what was learned", float(whole(state.params["w"]).sum()))
        records_are_the_same(engine)


class Watched(np.ndarray):
    """Data that note which rows are read."""

    def __getitem__(self, rows):
        if isinstance(rows, np.ndarray):
            self.read.update(rows.tolist())
        return np.asarray(super().__getitem__(rows))


def each_process_reads_its_own_rows():
    params, loss, data = mlp()
    x = data[0].astype("float32").view(Watched)
    x.read = set()
    given = arguments((params, loss, data), everywhere()) | {"data": (x, data[1])}
    *_, loader = dpj.PrivacyEngine().make_private(plan=plan(num_steps=1), **given)
    x.read.clear()
    next(iter(loader))
    drawn = set(plan(num_steps=1).batch_indices(0).tolist())
    ours = x.read - {0}
    both = Group().gather("the rows", ours)
    assert set.union(*both) == drawn - {0}
    assert sum(map(len, both)) == len(drawn - {0}), "a row was read twice"
    assert all(len(rows) > len(drawn) / 4 for rows in both)


def users_are_those_of_one_device():
    owners = np.arange(203) ** 2 % 71
    run = {"unit": "user", "rows_per_unit": 3, "num_examples": len(np.unique(owners))}
    run = plan(**run, num_steps=5, expected_batch_size=6, physical_batch_size=1)
    ends = [train(*begin(mlp(), *at, run=run, users=owners)[1:]) for at in ((), (everywhere(),))]
    assert distance(ends[1].params, ends[0].params) <= BOUND["float32"]


def loops_of_ones_own_are_recorded():
    given = arguments(mlp(), everywhere())
    sharding = {"data_sharding": given["data_sharding"]}
    engine, run = dpj.PrivacyEngine(), plan(num_steps=4, seed=None)
    loader = engine.make_loader(data=given["data"], plan=run, **sharding)
    rolled = tuple(np.roll(part, RANK, 0) for part in given["data"])
    with refused(ValueError, "rows were compared differs on process 0 and on process 1"):
        dpj.PrivacyEngine().make_loader(data=rolled, plan=plan(), **sharding)
    assert len(loader) == 4
    assert engine.record(2) == range(2)
    sums = place(mlp()[0], everywhere(), "data", "float32")
    mean = dpj.noisy_mean(sums, loader.plan, 0)
    Group().require_same("the noise", [float(whole(leaf).sum()) for leaf in mean.values()])
    assert mean["w"].sharding == sums["w"].sharding
    with refused(AccountingError, "noise_keys came in a program of several processes"):
        dpj.noise_keys(1)
    records_are_the_same(engine)


# ---------------------------------------------------------------------- checkpoints


def checkpoints_of_both_kinds():
    for name, save, load in (
        ("file", dpj.save_checkpoint, dpj.load_checkpoint),
        ("folder", save_sharded_checkpoint, load_sharded_checkpoint),
    ):
        run, path = plan(num_steps=8, noise="portable"), FOLDER / f"run.{name}"
        engine, step, state, loader = begin(mlp(), everywhere(), "data", run=run)
        state = train(step, state, loader, 3)
        save(path, state=state, engine=engine)
        end, spent = train(step, state, loader), engine.get_epsilon(delta=1e-4)
        engine.detach()
        given = arguments(mlp(), everywhere(), "data")
        like = dpj.TrainState.create(given["params"], given["optimizer"])
        state, engine = load(path, like=like)
        assert state.params["w"].sharding == like.params["w"].sharding
        again = train(*engine.resume(**given))
        for one, two in zip(jax.tree.leaves(end), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(whole(one), whole(two))
        assert engine.get_epsilon(delta=1e-4) > spent
        assert len(engine.ledger) == 8 + 5
        records_are_the_same(engine)
        engine.detach()


# ---------------------------------------------------------------------- disagreements


def disagreements_are_named_before_the_first_step():
    rank, model = RANK, mlp()
    half = tuple(part[rank::2] for part in model[2])
    shifted = tuple(np.roll(part, rank, 0) for part in model[2])
    moved = {name: jnp.asarray(leaf + rank, jnp.float32) for name, leaf in model[0].items()}
    with_key = lambda p, x, y, key=None: model[1](p, x, y)  # noqa: E731
    of_users = plan(unit="user", rows_per_unit=2, num_examples=29)
    taken = FOLDER / "taken.ledger"
    taken.touch()
    for text, changes in (
        ("the plan['noise_multiplier']", {"plan": plan(noise_multiplier=1.0 + rank)}),
        ("the plan['seed']", {"plan": plan(seed=rank)}),
        ("the run['method']", {"method": ("vmap", "auto")[rank]}),
        ("of which 16 rows were compared", {"data": shifted}),
        ("the plan['num_examples']", {"data": half, "plan": plan(num_examples=len(half[0]))}),
        ("the run['needs_key']", {"needs_key": bool(rank), "loss_fn": with_key}),
        ("users differs", {"users": np.roll(np.arange(203) // 7, rank), "plan": of_users}),
        ("the run['optimizer']", {"optimizer": (optax.sgd(0.1), optax.adam(0.1))[rank]}),
        ("the first state differs on process 0 and on process 1", {"params": moved}),
        ("taken.ledger exists", {"ledger": taken}),
    ):
        with refused((ValueError, FileExistsError), text):
            dpj.PrivacyEngine().make_private(
                **{**arguments(model, everywhere()), "plan": plan(), **changes}
            )


def processes_at_different_places_are_told():
    with refused(RuntimeError, "Process 0 is at here and process 1 at there"):
        Group().gather(("here", "there")[RANK], None)
    assert Group().gather("all", {"a": [RANK] * 500}) == [{"a": [rank] * 500} for rank in (0, 1)]
    assert Group().on_first("one", lambda: [RANK] * 500) == [0] * 500


def meshes_of_some_processes():
    """Devices of one process make a run of its own."""
    own = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    data_mesh = DataMesh.of(NamedSharding(own, P("data")))
    assert data_mesh.group is None
    engine = dpj.PrivacyEngine()
    given = arguments(mlp(), data_sharding=NamedSharding(own, P("data")))
    end = train(*engine.make_private(plan=plan(num_steps=5), **given))
    assert distance(end.params, alone("mlp", "float32", num_steps=5)) <= 1e-5


CHECKS = [
    mlp_and_its_ledger,
    words_in_float64,
    sparse_batches_and_an_adaptive_bound,
    fresh_bits_and_secure_noise,
    each_process_reads_its_own_rows,
    users_are_those_of_one_device,
    loops_of_ones_own_are_recorded,
    checkpoints_of_both_kinds,
    disagreements_are_named_before_the_first_step,
    processes_at_different_places_are_told,
    meshes_of_some_processes,
]

if __name__ == "__main__":
    launch.connect(sys.argv[3], int(sys.argv[2]), RANK)
    launch.say(launch.checked(CHECKS))

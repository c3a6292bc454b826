# SPDX-License-Identifier: Apache-2.0
"""Checks on one process with eight virtual devices, against one device."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dualdp.units
import dualdp_jax as dpj
from dualdp import correlated
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import bits, noise_bits
from dualdp_jax.checkpoint.sharded import (
    consolidate_checkpoint,
    load_sharded_checkpoint,
    save_sharded_checkpoint,
)
from dualdp_jax.noise import noise
from tests.dualdp_jax.runs import keeper, train
from tests.dualdp_jax.workers import launch
from tests.dualdp_jax.workers.models import (
    BOUND,
    MODELS,
    N,
    arguments,
    begin,
    cnn,
    distance,
    mesh_of,
    mlp,
    place,
    plan,
    words,
)  # fmt: skip

#: Shape and names of a mesh, axis that splits parameters, axes that split examples.
MESHES = {
    "eight": ((8,), ("data",), None, "data"),
    "eight, split": ((8,), ("data",), "data", "data"),
    "two by four": ((2, 4), ("data", "model"), "model", "data"),
    "replicas": ((2, 4), ("replica", "data"), "data", ("replica", "data")),
}


def where(name):
    shape, names, split, data_axes = MESHES[name]
    return {"mesh": mesh_of(shape, names), "split": split, "data_axes": data_axes}


@cache
def alone(model, dtype, **changes):
    """Engine and last state of a run on one device."""
    with jax.enable_x64(dtype == "float64"):
        engine, *run = begin(MODELS[model](), dtype=dtype, run=plan(**changes))
        return engine, train(*run)


def same_as_alone(model, mesh, dtype="float32", checks=0, **changes):
    theirs, expected = alone(model, dtype, **changes)
    with jax.enable_x64(dtype == "float64"):
        engine, step, state, loader = begin(
            MODELS[model](), dtype=dtype, run=plan(**changes), checks=checks, **where(mesh)
        )
        placed = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
        state = train(step, state, loader)
        assert placed == jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
        found = distance((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert found <= BOUND[dtype], found
    assert engine.get_epsilon(delta=1e-4) == theirs.get_epsilon(delta=1e-4)
    assert engine.ledger.max_grad_norm == theirs.ledger.max_grad_norm
    run = engine._run
    assert run._add._cache_size() == run._apply._cache_size() == 1


# ---------------------------------------------------------------------- the same run


def fast():
    same_as_alone("mlp", "eight, split", physical_batch_size=2, checks=None)


#: Three examples a step on eight devices; some draws are empty.
SPARSE = {"expected_batch_size": 3, "physical_batch_size": 1}


def every_model_and_mesh():
    same_as_alone("mlp", "replicas")
    same_as_alone("cnn", "two by four")
    same_as_alone("words", "eight, split", "float64")
    same_as_alone("mlp", "eight", max_grad_norm=AdaptiveNorm(0.3), **SPARSE)
    same_as_alone("layers", "eight", clipping="per_layer")


def augment(example, key):
    x, *others = example
    return x + 0.1 * jax.random.normal(key, x.shape, x.dtype), *others


def views_and_users():
    """Keys are those of the plan, whatever device has the row; some users have no rows."""
    owners = dualdp.units.user_rows(np.sort(np.arange(N) ** 2 % 71), num_users=71)
    assert owners.counts.min() == 0
    of_users = plan(unit="user", rows_per_unit=3, num_examples=71, physical_batch_size=2)
    of_views = {"run": plan(physical_batch_size=2), "views": 3, "augment": augment}
    for model, given in ((mlp(), of_views), (words(), {"run": of_users, "users": owners})):
        ends = [train(*begin(model, **given | at)[1:], 8) for at in ({}, where("eight, split"))]
        assert distance(ends[1].params, ends[0].params) <= BOUND["float32"]
    engine, *run = begin(mlp(), run=of_users, users=owners, checks=1.0, **where("eight, split"))
    train(*run, 4)
    assert engine.ledger.last_check == 3


def norms_sums_and_gradients_are_the_same():
    stages = []
    for at in ({}, where("two by four")):
        engine, *run = begin(cnn(), run=plan(num_steps=1), **at)
        engine.keep_per_sample = True
        train(*run)
        stages.append(engine.stages())
    found, expected = stages
    assert distance(found.unprotected_norms, expected.unprotected_norms) <= 1e-6
    assert distance(found.unprotected_sum, expected.unprotected_sum) <= 1e-6
    assert distance(found.unprotected_grads, expected.unprotected_grads) <= 1e-5


# ---------------------------------------------------------------------- noise


def _noise_alone(kind, mesh=None, split=None, steps=2, **changes):
    """What an optimizer that keeps the mean gets when the loss is constant: noise alone."""
    params = {"w": np.zeros((64, 48)), "b": np.zeros(16), "odd": np.zeros((5, 7))}
    model = params, lambda p, x, y: 0.0 * (p["w"].sum() + p["b"].sum() + p["odd"].sum()), mlp()[2]
    seed = None if kind == "secure" else 5
    run = plan(noise=kind, num_steps=steps, seed=seed, **changes)
    _, step, state, loader = begin(model, mesh, split, run=run, optimizer=keeper())
    return train(step, state, loader).opt_state


#: Where parameters lie: on one device, on each of eight, and split over eight and over four.
_PLACES = (
    lambda: (),
    lambda: (mesh_of((8,)), None),
    lambda: (mesh_of((8,)), "data"),
    lambda: (mesh_of((4,)), "data"),
)


def _same_bits(found):
    for other in found[1:]:
        for one, two in zip(*map(jax.tree.leaves, (found[0], other)), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert found[2]["w"].sharding.spec[0] == "data"


def noise_is_that_of_one_device_bitwise():
    """Of the same bits, which are fresh otherwise."""
    plain, bits.fresh_bits = bits.fresh_bits, lambda size=64: bytes(range(size))
    try:
        for kind in ("fast", "secure"):
            _same_bits([_noise_alone(kind, *at()) for at in _PLACES])
    finally:
        bits.fresh_bits = plain


def correlated_noise_is_that_of_one_device_bitwise():
    for strategy in (
        correlated.window([1.0, -0.6, 0.2]),
        correlated.blt(decays=[0.9, 0.4], scales=[0.2, 0.3]),
    ):
        changes = {"steps": 4, "sampler": "fixed_order", "correlation": strategy}
        _same_bits([_noise_alone("fast", *at(), **changes) for at in _PLACES[:3]])


# ---------------------------------------------------------------------- compiled programs


def _programs(split, **changes):
    """Compiled text of the functions of a step, by name, and the parameters' bytes."""
    params = {"w": np.ones((64, 48)), "v": np.ones((48, 8))}
    model = params, lambda p, x, y: jnp.sum(jnp.tanh(x @ p["w"][:12]) @ p["v"]) * (1 + y), mlp()[2]
    at = {"mesh": mesh_of((8,)), "split": split}
    engine, step, state, loader = begin(model, run=plan(num_steps=1, **changes), **at)
    run, batch = engine._run, next(iter(loader))
    inputs = run.inputs(state.params, batch, np.zeros(2, np.uint32), 0.5)
    arrays, totals = inputs.arrays, run._nothing
    add = run._add.lower(arrays, inputs.parts[0], *inputs[2:], totals).compile()
    collect = run._collect.lower(totals).compile()
    whole, _ = run.total(inputs._replace(parts=[]))
    release = engine.ledger.record(0)
    drawn = noise.NoiseSource(engine.plan).drawn(whole.sums, release, noise_bits(5, 0))
    stddev = np.float32(1)
    update = run._apply.lower(arrays[0], state.opt_state, whole, drawn, stddev).compile()
    texts = {"add": add.as_text(), "collect": collect.as_text(), "update": update.as_text()}
    return texts, 4 * sum(leaf.size for leaf in params.values())


_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"f32\[([\d,]*)\]")


def moved(text):
    """Kind of collective -> bytes of what it gives on one device, of a compiled program."""
    found = {}
    for shapes, kind in _COLLECTIVE.findall(text):
        sizes = [int(np.prod([int(n) for n in s.split(",") if n])) for s in _SHAPE.findall(shapes)]
        found[kind] = found.get(kind, 0) + 4 * sum(sizes)
    return found


def each_sum_is_reduced_once():
    texts, size = _programs(None)
    assert moved(texts["add"]) == {}
    assert list(moved(texts["collect"])) == ["all-reduce"]
    assert size <= moved(texts["collect"])["all-reduce"] <= size + 64  # and the loss
    assert moved(texts["update"]) == {}
    texts, size = _programs("data")
    assert moved(texts["add"]) == {"all-gather": size, "reduce-scatter": size // 8}
    assert moved(texts["collect"]).get("all-reduce", 0) <= 64
    assert moved(texts["update"]) == {}


def no_device_holds_the_whole_noise():
    whole = re.compile(r"\[(64,48|48,8|3072|384)\]")
    texts, _ = _programs("data", noise="portable")
    assert "8,48" in texts["update"]
    assert not whole.search(texts["update"])
    texts, _ = _programs(None, noise="portable")
    assert whole.search(texts["update"]), "the check sees what it looks for"


# ---------------------------------------------------------------------- loops of the user's own


def own_loop():
    """make_loader, clipped_grad_sum and add_noise in one jitted step; the noise is the same."""
    ends = []
    for mesh in (None, mesh_of((8,))):
        given = arguments(mlp(), mesh, "data" if mesh else None)
        run, engine = plan(num_steps=6, physical_batch_size=8), dpj.PrivacyEngine()
        sharding = {"data_sharding": given["data_sharding"]}
        loader = engine.make_loader(data=given["data"], plan=run, **sharding)
        optimizer = optax.chain(dpj.add_noise(run), optax.sgd(0.1))

        @jax.jit
        def update(params, opt_state, sums, key):
            updates, opt_state = optimizer.update(sums, opt_state, params, key=key)  # noqa: B023
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = given["params"], optimizer.init(given["params"])
        for batch in loader.remaining():
            engine.record()
            total = [dpj.clipped_grad_sum(given["loss_fn"], params, c).grads for c in batch.chunks]
            total = jax.tree.map(lambda *parts: sum(parts), *total)
            params, opt_state = update(params, opt_state, total, dpj.noise_keys(1)[0])
        ends.append(params)
        engine.detach()
    assert distance(ends[1], ends[0]) <= 1e-5


def explicit_axes():
    """A mesh as jax.make_mesh gives it by default, whose types say where arrays lie."""
    mesh = mesh_of((8,), kind=AxisType.Explicit)
    _, *run = begin(mlp(), mesh, "data")
    state = train(*run)
    assert distance(state.params, alone("mlp", "float32")[1].params) <= 1e-5


# ---------------------------------------------------------------------- checkpoints


_KINDS = {
    "file": (dpj.save_checkpoint, dpj.load_checkpoint),
    "folder": (save_sharded_checkpoint, load_sharded_checkpoint),
}


def checkpoints_load_on_other_meshes():
    """Saved on eight devices; goes on with eight, with two by four, and with one."""
    changes = {"num_steps": 6, "physical_batch_size": 4}
    expected = alone("cnn", "float32", **changes)[1]
    for kind, meshes in (("file", [{}]), ("folder", [where("two by four"), where("eight, split")])):
        with tempfile.TemporaryDirectory() as name:
            folder, (save, load) = Path(name, "saved"), _KINDS[kind]
            folder.mkdir()
            engine, *run = begin(cnn(), run=plan(**changes), **where("eight, split"))
            state = train(*run, 3)
            save(folder / "run", state=state, engine=engine)
            engine.detach()
            for number, at in enumerate(meshes):  # each from a copy: other steps are releases
                copy = Path(name, str(number))
                shutil.copytree(folder, copy)
                _goes_on(load, copy / "run", at, state, expected)
            if kind == "folder":
                consolidate_checkpoint(folder / "run", folder / "one")
                _goes_on(dpj.load_checkpoint, folder / "one", {}, state, expected)


def _goes_on(load, path, at, state, expected):
    given = arguments(cnn(), **at)
    like = dpj.TrainState.create(given["params"], given["optimizer"])
    found, engine = load(path, like=like)
    assert distance(found.params, state.params) == 0
    assert found.params["v"].sharding == like.params["v"].sharding
    again = train(*engine.resume(**given))
    assert distance(again.params, expected.params) <= 1e-5
    assert (again.step, len(engine.ledger)) == (6, 6)  # nothing ran again
    engine.detach()


def an_interrupted_sharded_save_leaves_the_older_one():
    handler = orbax.checkpoint.JsonCheckpointHandler

    def full(self, *args, **options):
        raise OSError("no space left on device")

    with tempfile.TemporaryDirectory() as name:
        path, at = Path(name, "run"), where("eight, split")
        engine, step, state, loader = begin(mlp(), run=plan(num_steps=4), **at)
        first = train(step, state, loader, 1)
        save_sharded_checkpoint(path, state=first, engine=engine)
        second = train(step, first, loader, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handler, "finalize", full)
            with pytest.raises(Exception, match="no space left"):
                save_sharded_checkpoint(path, state=second, engine=engine)
        engine.detach()
        given = arguments(mlp(), **at)
        like = dpj.TrainState.create(given["params"], given["optimizer"])
        found, engine = load_sharded_checkpoint(path, like=like)
        assert found.step == 1
        assert distance(found.params, first.params) == 0
        found = train(*engine.resume(**given), 1)
        assert len(engine.ledger) == 3, "the second step ran again"
        save_sharded_checkpoint(path, state=found, engine=engine)
        assert [entry.name for entry in path.iterdir() if entry.name.isdigit()] == ["2"]


def refusals():
    mesh, other = mesh_of((8,)), mesh_of((4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    params = place(mlp()[0], other, "model", "float32")
    for text, changes in (
        ("data_sharding is Mesh", {"data_sharding": mesh}),
        ("one that splits axis 0", {"data_sharding": NamedSharding(mesh, P())}),
        (
            "splits axis 0, the examples",
            {"data_sharding": NamedSharding(other, P("data", "model"))},
        ),
        ("data_sharding is missing", {"data_sharding": None, "params": params}),
        ("Expected both on one mesh", {"data_sharding": rows, "params": params}),
    ):
        with pytest.raises(ValueError, match=text):
            dpj.PrivacyEngine().make_private(plan=plan(), **{**arguments(mlp()), **changes})


CHECKS = {
    "fast": [fast],
    "optimized": [
        each_sum_is_reduced_once,
        no_device_holds_the_whole_noise,
        correlated_noise_is_that_of_one_device_bitwise,
    ],
    "slow": [
        every_model_and_mesh,
        views_and_users,
        norms_sums_and_gradients_are_the_same,
        noise_is_that_of_one_device_bitwise,
        own_loop,
        explicit_axes,
        checkpoints_load_on_other_meshes,
        an_interrupted_sharded_save_leaves_the_older_one,
        refusals,
    ],
}

if __name__ == "__main__":
    kind = sys.argv[4]
    jax.config.update("jax_disable_most_optimizations", kind != "optimized")  # to compile faster
    assert N % 8
    launch.say(launch.checked(CHECKS[kind]))

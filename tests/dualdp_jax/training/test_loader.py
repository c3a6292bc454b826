# SPDX-License-Identifier: Apache-2.0
"""Batches of the plan: nothing is cut, padded or changed, and each is released once."""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tests.dualdp_jax.runs import X, Y, loss_fn, make_plan, private, train

SAMPLERS = {
    "poisson": {},
    "fixed_size": {"neighboring_relation": "replace"},
    "balls_in_bins": {},
    "shuffle": {"expected_batch_size": 7},
    "cyclic_poisson": {"min_separation": 3},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_loader_cuts_no_draw(sampler):
    changes = {"physical_batch_size": 4, "expected_batch_size": 1, "num_steps": 40}
    plan = make_plan(sampler=sampler, accountant="pld", **{**changes, **SAMPLERS[sampler]})
    *_, loader = private(plan=plan)
    sizes = set()
    for t in range(40):
        batch = loader.batch(t)
        indices = np.concatenate([c.indices[c.mask] for c in batch.chunks])
        np.testing.assert_array_equal(indices, plan.batch_indices(t))
        for chunk in batch.chunks:
            assert [arg.shape[0] for arg in chunk.batch] == [4, 4]
            np.testing.assert_array_equal(chunk.batch[0], X[chunk.indices])
        sizes.add(len(indices))
    if "oisson" in sampler:
        assert {0, 1} <= sizes


class Batch(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    unit: str


STRUCTURES = {
    "dict": ({"x": X, "y": Y, "unit": "m"}, lambda b: (b["x"], b["y"])),
    "namedtuple": (Batch(X, Y, "m"), lambda b: (b.x, b.y)),
    "list": (([X, {"y": Y, "none": None}],), lambda b: (b[0], b[1]["y"])),
    "jax array": (jnp.concatenate([X, Y[:, None]], 1), lambda b: (b[:3], b[3])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_data_of_any_structure_is_one_argument(name):
    """known_failures 48."""
    data, read = STRUCTURES[name]
    loss = lambda p, batch: loss_fn(p, *read(batch))  # noqa: E731
    ours = train(*private(loss_fn=loss, data=data, plan=make_plan(), checks=0)[1:])
    expected = train(*private(plan=make_plan(), checks=0)[1:])
    np.testing.assert_allclose(ours.params["w"], expected.params["w"], rtol=1e-6)


def test_length_is_true():
    """known_failures 46: chunks do not count, and a pass that was left goes on."""
    _, step, state, loader = private(plan=make_plan(physical_batch_size=2))
    assert len(loader.remaining()) == len(list(loader.remaining())) == 6
    for batch in loader:
        state, _ = step(state, batch)
        if batch.step == 1:
            break
    assert len(loader) == len(list(loader)) == 4
    assert next(iter(loader)).step == 2


def test_foreign_batches_are_refused():
    _, step, state, loader = private(plan=make_plan())
    *_, other = private(plan=make_plan())
    with pytest.raises(TypeError, match="that this engine's loader did not draw"):
        step(state, next(iter(other)))
    with pytest.raises(TypeError, match=r"can't be unpacked.*Expected step\(state, batch\)"):
        x, y = next(iter(loader))


CHANGES = {
    "parts repeated": lambda b: replace(b, parts=b.parts * 2),
    "a part left out": lambda b: replace(b, parts=b.parts[1:]),
    "mask set": lambda b: with_part(b, mask=np.ones_like(b.parts[-1].mask)),
    "indices changed": lambda b: with_part(b, indices=b.parts[-1].indices + 1),
    "other rows": lambda b: with_part(b, arrays=b.parts[0].arrays),
    "another step": lambda b: replace(b, step=b.step + 1),
    "a copy": replace,
}


def with_part(batch, **changes):
    """The batch, its last part changed."""
    return replace(batch, parts=(*batch.parts[:-1], batch.parts[-1]._replace(**changes)))


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_batch_is_refused(name):
    """known_failures 84: 10.6 C from 12 examples."""
    engine, step, state, loader = private(plan=make_plan(physical_batch_size=5))
    batch = next(iter(loader))
    with pytest.raises(TypeError, match="or that was changed since"):
        step(state, CHANGES[name](batch))
    assert len(engine.ledger) == 0
    step(state, batch)


def test_the_arrays_of_a_batch_cannot_be_written():
    """Those of the user can; its containers are its own."""
    data = {"x": X, "y": [jnp.asarray(Y)]}
    loss = lambda p, d: loss_fn(p, d["x"], d["y"][0])  # noqa: E731
    _, step, state, loader = private(plan=make_plan(), data=(data,), loss_fn=loss)
    batch = next(iter(loader))
    chunk = batch.chunks[0]
    (rows,) = chunk.batch
    for array in (chunk.mask, chunk.indices, rows["x"]):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.flags.writeable = True
    rows["x"] = rows["x"] * 100
    np.testing.assert_array_equal(batch.chunks[0].batch[0]["x"], X[chunk.indices])
    step(state, batch)
    assert X.flags.writeable

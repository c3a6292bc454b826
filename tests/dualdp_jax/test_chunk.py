# SPDX-License-Identifier: Apache-2.0
"""A loop of the user's own: its chunks carry mask, weights and bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp
import dualdp.jax as dpj
from dualdp import AccountingError
from tests.dualdp_jax import runs

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(60, 4)).astype("f"), jnp.ones(4)
OWNERS = np.arange(60) // 3


def loss_fn(w, x):
    return (w @ x) ** 2


def run(users=None, **changes):
    """Engine and loader of a run."""
    given = {"num_examples": 60, "expected_batch_size": 20, "num_steps": 9, "seed": 0}
    engine, plan = dpj.PrivacyEngine(), runs.make_plan(**given | changes)
    return engine, engine.make_loader(data=X, plan=plan, users=users)


USERS = {"unit": "user", "rows_per_unit": 3, "num_examples": 20, "expected_batch_size": 8}
KINDS = {
    "parts": (None, {"physical_batch_size": 8}),
    "users": (OWNERS, USERS),
    "parts of users": (OWNERS, {**USERS, "physical_batch_size": 3}),
    "per layer": (None, {"clipping": "per_layer"}),
    "automatic": (None, {"clipping": "automatic"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_has_all_that_its_sum_needs(kind):
    """Whole, and part by part by one program."""
    users, changes = KINDS[kind]
    _, loader = run(users, **changes)
    plan, batch = loader.plan, next(iter(loader))
    jitted = jax.jit(lambda chunk: dpj.clipped_grad_sum(loss_fn, W, chunk))
    whole = dpj.clipped_grad_sum(loss_fn, W, batch)
    np.testing.assert_allclose(
        whole.grads, sum(jitted(part).grads for part in batch.chunks), rtol=1e-5
    )
    kept, options = np.flatnonzero(batch.mask), {}
    rows = batch.indices[kept]
    if users is not None:
        rows = (np.asarray(batch.indices)[kept, None] * 3 + np.arange(3)).ravel()
        options["rows_per_unit"] = 3
    alone = dpj.clipped_grad_sum(
        loss_fn, W, X[rows], max_grad_norm=0.5, clipping=plan.clipping, **options
    )
    np.testing.assert_allclose(whole.grads, alone.grads, rtol=1e-5)
    norms = dpj.per_sample_norms(loss_fn, W, batch)
    for found in (whole.norms, norms):
        np.testing.assert_allclose(np.asarray(found)[kept], alone.norms, rtol=1e-5)
    assert dpj.per_sample_grads(loss_fn, W, batch).shape == (len(batch.mask), 4)


def test_what_a_chunk_is():
    """A pytree of arrays, which a jitted function takes."""
    _, loader = run(physical_batch_size=8, max_grad_norm=dualdp.schedules.Linear(2.0, 1.0, 9))
    batches = list(loader)
    assert [int(batch.step) for batch in batches] == [0, 1, 2]
    for step, batch in enumerate(batches):
        assert float(batch.bound) == loader.plan.max_grad_norm_at(step)
        assert batch.weights is None
        assert batch.mask.sum() == len(loader.plan.batch_indices(step))
        np.testing.assert_array_equal(batch.batch[0], X[batch.indices])
        assert {part.mask.shape for part in batch.chunks} == {(8,)}
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batches[0]))
    chunk = batches[1].chunks[0]
    rows, masked, step = jax.jit(lambda c: (c.batch[0], c.mask * c.bound, c.step))(chunk)
    np.testing.assert_array_equal(rows, chunk.batch[0])
    np.testing.assert_allclose(masked, chunk.mask * chunk.bound)
    assert int(step) == 1


def test_what_a_chunk_has_is_not_given_beside_it():
    """Another bound than that of the noise, above all."""
    chunk = next(iter(run()[1]))
    given = {"mask": np.ones(60, bool), "max_grad_norm": 25.0, "clipping": "flat"}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"{name}= came beside a Chunk, which has its own"):
            dpj.clipped_grad_sum(loss_fn, W, chunk, **{name: value})


@pytest.mark.slow
def test_constants_may_be_as_many_as_the_rows_of_a_chunk():
    """The loader looked at all of the data, whose number of rows is another one."""
    plan = runs.make_plan(physical_batch_size=3)
    loader = dpj.PrivacyEngine().make_loader(data=(X, (1.0, 2.0, 0.5)), plan=plan)
    chunk = next(iter(loader)).chunks[0]
    sums = dpj.clipped_grad_sum(lambda w, x, scales: scales[2] * loss_fn(w, x), W, chunk)
    expected = dpj.clipped_grad_sum(
        lambda w, x: 0.5 * loss_fn(w, x), W, *chunk.batch[:1], mask=chunk.mask, max_grad_norm=0.5
    )
    np.testing.assert_allclose(sums.grads, expected.grads, rtol=1e-6)


@pytest.mark.slow
def test_loops_beside_each_other_do_not_meet():
    """known_failures 98: two bounds, users beside examples, an unrelated model; all of one size."""
    loops = [run(max_grad_norm=bound) for bound in (2.0, 0.5)] + [run(OWNERS, **USERS)]
    for _, loader in (*loops, *loops):
        chunk = next(iter(loader))
        found = dpj.clipped_grad_sum(loss_fn, W, chunk)
        assert np.linalg.norm(found.grads) <= float(chunk.bound) * chunk.mask.sum() * (1 + 1e-4)
        rows = len(chunk.batch[0])
        dpj.clipped_grad_sum(loss_fn, W, X[:rows], max_grad_norm=9.0)
    for engine, loader in loops:
        engine.record()
        dpj.noisy_mean(W, next(iter(loader.remaining())).plan, 0)
    with pytest.raises(AccountingError, match="step=0 has no release on record whose noise"):
        dpj.noisy_mean(W, loops[0][1].plan, 0)


def test_two_loops_of_one_plan_have_noise_of_their_own():
    """A chunk leads to its own loop, wherever the plan leads."""
    plan, means = runs.make_plan(seed=None), []
    engines = [dpj.PrivacyEngine() for _ in range(2)]
    loaders = [engine.make_loader(data=X, plan=plan) for engine in engines]
    for engine, loader in zip(engines, loaders, strict=True):
        chunk = next(iter(loader))
        with pytest.raises(AccountingError, match="step=0 has no release on record"):
            dpj.noisy_mean(W, chunk)
        engine.record()
        means.append(dpj.noisy_mean(W, chunk))
        with pytest.raises(AccountingError, match="step=0 has no release on record"):
            dpj.noisy_mean(W, chunk)
        assert engine.get_epsilon() > 0
    assert (means[0] != means[1]).all()
    chunk = next(iter(loaders[0]))
    engines[0].record()
    engines[0].detach()
    with pytest.raises(AccountingError, match="no loop that is open records the releases"):
        dpj.noisy_mean(W, chunk)


def test_a_loop_in_one_program():
    """Sums, noise and update of a chunk jitted together; the bits are an argument."""
    engine, loader = run(seed=None, num_steps=4, physical_batch_size=40)
    traces = []

    @jax.jit
    def update(w, chunk, key):
        traces.append(1)
        sums = dpj.clipped_grad_sum(loss_fn, w, chunk).grads
        return w - 0.1 * dpj.noisy_mean(sums, chunk, key=key)

    w = W
    for chunk in loader.remaining():
        engine.record()
        (key,) = dpj.noise_keys(1)
        w = update(w, chunk, key)
    assert len(traces) == 1
    assert np.isfinite(w).all()
    assert engine.get_epsilon() == pytest.approx(loader.plan.epsilon())


def test_indices_are_those_of_the_batches():
    """For readers of the user's own, instead of chunks."""
    engine, loader = run(OWNERS, **USERS)
    for step, (indices, mask) in enumerate(loader.remaining().indices()):
        assert indices.dtype == np.int64
        assert indices.shape == mask.shape
        np.testing.assert_array_equal(indices[mask], loader.plan.batch_indices(step))
        engine.record()
    assert step == 8

# SPDX-License-Identifier: Apache-2.0
"""A loop of the user's own: a chunk's sum needs its mask, its weights and the plan's bound."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp
import dualdp.jax as dpj

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(60, 4)).astype("f"), jnp.ones(4)
OWNERS = np.arange(60) // 3


def loss_fn(w, x):
    return (w @ x) ** 2


def run(users=None, **changes):
    """Engine and first chunk of a run."""
    given = {"num_examples": 60, "expected_batch_size": 20, "num_steps": 9, "delta": 1e-3}
    given |= {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "seed": 0}
    engine = dpj.PrivacyEngine()
    loader = engine.make_loader(data=X, plan=dualdp.PrivacyPlan(**given | changes), users=users)
    return engine, next(iter(loader)).chunks[-1]


def refused(message, *args, **given):
    """The eager call and the one inside of jit say the same."""
    sums = lambda *args: dpj.clipped_grad_sum(loss_fn, W, *args, **given).grads  # noqa: E731
    for call in (sums, jax.jit(sums)):
        with pytest.raises(ValueError, match=message):
            call(*args)


@pytest.fixture(autouse=True)
def loops_of_other_tests_end():
    gc.collect()


def test_a_chunk_without_its_mask_is_refused():
    """Its padding repeats an example, which moved the sum by as many C."""
    engine, chunk = run(physical_batch_size=8)
    assert not chunk.mask.all()
    refused("of chunks of engine.make_loader, and no mask", *chunk.args, max_grad_norm=0.5)
    joined = np.concatenate([chunk.args[0]] * 2)
    with pytest.raises(ValueError, match="16 rows came, as of chunks"):
        dpj.clipped_grad_sum(loss_fn, W, joined, max_grad_norm=0.5)
    parts = chunk.args[0].reshape(len(chunk.mask) // 2, 2, 4)
    with pytest.raises(ValueError, match="2 rows came"):
        jax.lax.map(lambda x: dpj.clipped_grad_sum(loss_fn, W, x, max_grad_norm=0.5).grads, parts)
    given = {"max_grad_norm": 0.5}
    found = dpj.clipped_grad_sum(loss_fn, W, *chunk.args, mask=chunk.mask, **given)
    live = chunk.args[0][chunk.mask]
    whole = dpj.clipped_grad_sum(loss_fn, W, live, mask=np.ones(len(live), bool), **given)
    np.testing.assert_allclose(found.grads, whole.grads, rtol=1e-6)
    engine.detach()
    dpj.clipped_grad_sum(loss_fn, W, X[:8], max_grad_norm=0.5)  # the loop has ended


def test_chunks_that_are_always_full_need_no_mask():
    engine, chunk = run(
        sampler="fixed_size", neighboring_relation="replace", physical_batch_size=10
    )
    dpj.clipped_grad_sum(loss_fn, W, *chunk.args, max_grad_norm=0.5)
    assert engine.get_epsilon() == 0


def test_a_larger_bound_than_that_of_the_noise_is_refused():
    engine, chunk = run()
    refused("max_grad_norm=25.0, and the noise", *chunk.args, mask=chunk.mask, max_grad_norm=25.0)
    traced = jax.jit(
        lambda c: dpj.clipped_grad_sum(loss_fn, W, *chunk.args, mask=chunk.mask, max_grad_norm=c)
    )
    for bound in (0.5, 0.1, np.float32(0.5), jnp.float32(0.5)):
        assert traced(bound).norms.shape == chunk.mask.shape
    assert engine.get_epsilon() == 0


@pytest.mark.parametrize("given", [{}, {"rows_per_unit": 2}, {"rows_per_unit": 3}])
def test_rows_of_users_need_their_number_and_weights(given):
    sizes = {"unit": "user", "rows_per_unit": 3, "num_examples": 20, "expected_batch_size": 8}
    engine, chunk = run(OWNERS, **sizes)
    mask = {1: None, 2: None, 3: chunk.mask}[given.get("rows_per_unit", 1)]
    if mask is None:
        mask = np.ones(len(chunk.args[0]) // given.get("rows_per_unit", 1), bool)
    refused("with 3 rows of each user", *chunk.args, mask=mask, max_grad_norm=0.5, **given)
    given = {"rows_per_unit": 3, "row_weights": chunk.row_weights, "mask": chunk.mask}
    dpj.clipped_grad_sum(loss_fn, W, *chunk.args, max_grad_norm=0.5, **given)
    assert engine.get_epsilon() == 0

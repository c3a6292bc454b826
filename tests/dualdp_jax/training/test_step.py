# SPDX-License-Identifier: Apache-2.0
"""The private step: recorded before its noise, compiled twice, and the textbook's."""

import os
import sys

import jax
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.exactness import check_at
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import SegmentBits
from dualdp_jax.training.step import PrivateStep
from tests.dualdp_jax.runs import X, Y, loss_fn, make_plan, params, private, train

ADAPTIVE = {"max_grad_norm": AdaptiveNorm(0.5)}
SCHEDULES = {
    "max_grad_norm": lambda step: 1 + step,
    "expected_batch_size": lambda step: 3 + step / 9,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "dtype", "checks"),
    [({}, "bfloat16", 0), ({}, "float32", 1), (ADAPTIVE, "float32", 0), (SCHEDULES, "float32", 1)],
    ids=["bfloat16", "checks", "adaptive", "schedules"],
)
def test_two_compilations_serve_every_draw(changes, dtype, checks):
    """And one more all checks, which compare the step's own programs with plain autodiff."""
    sizes = {"expected_batch_size": 3, "physical_batch_size": 2, "num_steps": 12}
    plan = make_plan(**sizes | changes)
    start = jax.tree.map(lambda leaf: leaf.astype(dtype), params())

    def compilations():
        events = []
        given = {"params": start, "optimizer": optax.adam(0.1), "checks": checks}
        _, step, state, loader = private(plan=plan, **given)
        assert len({len(batch.chunks) for batch in loader}) > 2
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, seconds, **kwargs: events.append(name)
        )
        try:
            train(step, state, loader)
        finally:
            jax.monitoring.clear_event_listeners()
        return sum("backend_compile" in name for name in events)

    compilations()  # of jax's own small functions, too
    assert compilations() == 2 + checks


def test_step_records_before_it_releases(monkeypatch):
    engine, step, state, loader = private(plan=make_plan())
    recorded = []

    def no_noise(*arguments):
        recorded.append(len(engine.ledger))
        raise MemoryError("no noise today")

    monkeypatch.setattr(PrivateStep, "release", no_noise)
    with pytest.raises(MemoryError, match="no noise today"):
        step(state, next(iter(loader)))
    assert recorded == [1]


def test_a_batch_is_released_once():
    engine, step, state, loader = private(plan=make_plan())
    batch = next(iter(loader))
    step(state, batch)
    with pytest.raises(AccountingError, match="step=0 came after 1 recorded releases"):
        step(state, batch)
    assert len(engine.ledger) == 1


def test_an_older_state_is_told():
    """A loop that keeps no state spends epsilon and learns nothing."""
    _, step, first, loader = private(plan=make_plan())
    batches = iter(loader.remaining())
    state, _ = step(first, next(batches))
    with pytest.warns(UserWarning, match="a state of 0 steps after it had returned one of 1.*Keep"):
        step(first, next(batches))
    step(state, next(batches))  # as new as what that call returned


def test_aux_comes_back_per_chunk():
    """And the mean loss of the batch; all parameters are 0."""
    with_aux = lambda p, x, y: (loss_fn(p, x, y), y)  # noqa: E731
    plan = make_plan(physical_batch_size=4)
    _, step, state, loader = private(loss_fn=with_aux, plan=plan, has_aux=True)
    batch = next(iter(loader))
    _, metrics = step(state, batch)
    expected = (Y[plan.batch_indices(0)] ** 2).mean()
    np.testing.assert_allclose(metrics["unprotected_loss"], expected, rtol=1e-5)
    for aux, chunk in zip(metrics["unprotected_aux"], batch.chunks, strict=True):
        np.testing.assert_array_equal(aux[chunk.mask], chunk.batch[1][chunk.mask])


def test_an_interrupted_step_leaves_no_half_sum(monkeypatch):
    """known_failures 9: an error inside a logical batch, caught by a loop that goes on.

    Totals release nothing, so nothing is accounted; the batch can be tried again.
    """
    plan = make_plan(physical_batch_size=4)
    engine, step, state, loader = private(plan=plan)
    batch, right = next(iter(loader)), PrivateStep.total

    def interrupted(run, inputs):
        right(run, inputs._replace(parts=inputs.parts[:1]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PrivateStep, "total", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, batch)
    assert len(engine.ledger) == 0
    state, _ = step(state, batch)
    rows = plan.batch_indices(0)
    expected = dpj.clipped_grad_sum(loss_fn, params(), X[rows], Y[rows], max_grad_norm=0.5)
    moved = -0.1 * dpj.noisy_mean(expected.grads, plan, 0)["w"]
    np.testing.assert_allclose(state.params["w"], moved, rtol=1e-5)
    assert len(engine.ledger) == 1


def test_a_step_makes_few_calls_of_ours():
    """After the first; a step is checks of its arguments, two programs, a line of the ledger."""
    _, step, state, loader = private(plan=make_plan(num_steps=9, seed=None), checks=0.02)
    loader.bits = SegmentBits(None, bytes(16))  # which draws no check of step 3
    assert check_at(loader.bits, 3, 0.02) is None
    batches = iter(loader.remaining())
    for _ in range(3):
        state, _ = step(state, next(batches))
    batch, calls = next(batches), []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code))
    try:
        step(state, batch)
    finally:
        sys.setprofile(None)
    ours = [code for code in calls if f"{os.sep}dualdp" in code.co_filename]
    assert len(ours) <= 90
    assert len({code.co_filename for code in ours}) <= 10

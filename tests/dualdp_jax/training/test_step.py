# SPDX-License-Identifier: Apache-2.0
"""The private step: recorded before its noise, compiled twice, and the textbook's."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.exactness import check_at
from dualdp.plan.schedules import AdaptiveNorm, Cosine, Exponential, Linear, Step, Warmup
from dualdp.randomness import SegmentBits
from dualdp_jax.training.step import PrivateStep
from tests.dualdp_jax.runs import X, Y, loss_fn, make_plan, params, private, train
from tests.tiers import first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, jnp.float32),
        ({}, jnp.bfloat16),
        ({"max_grad_norm": AdaptiveNorm(0.5)}, jnp.float32),
        (
            {"max_grad_norm": lambda step: 1 + step, "expected_batch_size": lambda k: 3 + k / 9},
            None,
        ),
    ],
    ids=["plain", "bfloat16", "adaptive", "schedules"],
)
@pytest.mark.parametrize(("checks", "programs"), [(0, 2), (1, 3)])
def test_two_compilations_serve_every_draw(changes, dtype, checks, programs):
    """And one more all checks, which compare the step's own programs with plain autodiff."""
    plan = make_plan(
        **{"expected_batch_size": 3, "physical_batch_size": 2, "num_steps": 12} | changes
    )
    start = jax.tree.map(lambda leaf: leaf.astype(dtype or leaf.dtype), params())

    def compilations():
        events = []
        _, step, state, loader = private(
            plan=plan, params=start, optimizer=optax.adam(0.1), checks=checks
        )
        assert len({len(batch.chunks) for batch in loader}) > 2
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, seconds, **kwargs: events.append(name)
        )
        try:
            state = train(step, state, loader)
        finally:
            jax.monitoring.clear_event_listeners()
        return sum("backend_compile" in name for name in events)

    compilations()  # of jax's own small functions, too
    assert compilations() == programs


def test_a_step_that_fails_before_its_totals_is_not_recorded(monkeypatch):
    """Totals release nothing, so nothing is accounted; the batch can be tried again."""

    def broken(*arguments):
        raise RuntimeError("no memory today")

    engine, step, state, loader = private(plan=make_plan())
    batch = next(iter(loader))
    with monkeypatch.context() as patch:
        patch.setattr(PrivateStep, "total", broken)
        with pytest.raises(RuntimeError, match="no memory today"):
            step(state, batch)
    assert len(engine.ledger) == 0
    step(state, batch)
    assert len(engine.ledger) == 1


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
    assert next(iter(loader)).step == 1
    assert len(engine.ledger) == 1


def test_an_older_state_is_told():
    """A loop that keeps no state spends epsilon and learns nothing."""
    _, step, first, loader = private(plan=make_plan())
    batches = iter(loader.remaining())
    state, _ = step(first, next(batches))
    with pytest.warns(UserWarning, match="a state of 0 steps after it had returned one of 1.*Keep"):
        step(first, next(batches))
    step(state, next(batches))  # as new as what that call returned


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.dropout(x))


def test_nnx_module_trains_and_its_dropout_follows_the_plan():
    model = Net(nnx.Rngs(0))
    before = np.asarray(model.layer.kernel.get_value())
    runs = []
    for size in (3, None):
        _, step, state, loader = private(
            loss_fn=lambda m, x, y: (m(x)[0] - y) ** 2,
            params=model,
            plan=make_plan(physical_batch_size=size),
        )
        state = train(step, state, loader)
        runs.append(np.asarray(state.params["layer"]["kernel"].get_value()))
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)
    np.testing.assert_array_equal(before, model.layer.kernel.get_value())
    nnx.update(model, state.params)
    np.testing.assert_array_equal(runs[1], model.layer.kernel.get_value())


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    first(
        2,
        [
            Step(1.0, 0.5, 2),
            Exponential(1.0, 0.8),
            Linear(0.5, 2.0, 4),
            Cosine(2.0, 0.5, 5),
            Warmup(1.0, 3),
            lambda step: 1 + step**2,
        ],
    ),
    ids=lambda value: type(value).__name__,
)
def test_one_value_is_read_by_clipper_noiser_and_ledger(schedule):
    """known_failures 5."""
    plan = make_plan(max_grad_norm=schedule, noise_multiplier=schedule)
    engine, step, state, loader = private(plan=plan, loss_fn=lambda p, x, y: 1e3 * loss_fn(p, x, y))
    for t, batch in enumerate(loader.remaining()):
        before, (state, _) = state, step(state, batch)
        bound, stages = plan.max_grad_norm_at(t), engine.stages()
        rows = plan.batch_indices(t)
        total = dpj.clipped_grad_sum(
            lambda p, x, y: 1e3 * loss_fn(p, x, y),
            before.params,
            X[rows],
            Y[rows],
            max_grad_norm=bound,
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            stages.unprotected_sum,
            total.grads,
        )
        expected = dpj.noisy_mean(total.grads, plan, t)["w"]
        np.testing.assert_allclose(stages.noisy_mean["w"], expected, rtol=1e-4, atol=1e-5)
        moved = before.params["w"] - 0.1 * expected
        np.testing.assert_allclose(state.params["w"], moved, rtol=1e-4, atol=1e-5)
        assert engine.ledger.entries[t]["step"] == t
        assert engine.ledger.entries[t]["noise_multiplier"] == plan.noise_multiplier_at(t)


def test_an_interrupted_step_leaves_no_half_sum(monkeypatch):
    """known_failures 9: an error inside a logical batch, caught by a loop that goes on."""
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

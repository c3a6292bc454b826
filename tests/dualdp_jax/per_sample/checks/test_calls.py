# SPDX-License-Identifier: Apache-2.0
"""Calls that are compared with plain autodiff, outside `jit`, and those that warn inside it."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp
import dualdp_jax as dpj
from dualdp_jax.per_sample.checks import calls, identity
from dualdp_jax.rules import RULES
from dualdp_jax.rules.estimate import Estimate
from tests.dualdp_jax.runs import make_plan

RNG = np.random.default_rng(11)
FAILED = "A spot check failed: "


@pytest.fixture(autouse=True)
def _forgotten():
    """Nothing is known from other tests."""
    calls.seen.clear()


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def dense(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"]) ** 2)


MODEL = dense, {"w": draw(6, 5)}, draw(4, 3, 6)
clipped = functools.partial(dpj.clipped_grad_sum, max_grad_norm=0.1)
#: A function of a rule that is wrong, and a call that goes by it.
WRONG = {
    "grads": dpj.per_sample_grads,
    "norms": dpj.per_sample_norms,
    "weighted_sum": clipped,
}


def too_large(found):
    """What a rule gives, half a percent too large."""
    if isinstance(found, Estimate):
        return found._replace(sq_norms=1.01 * found.sq_norms)
    return 1.005 * found


def plant(patch, field):
    right = RULES["dot_general"]
    wrong = lambda *arguments: too_large(getattr(right, field)(*arguments))  # noqa: E731
    patch.setitem(RULES, "dot_general", right._replace(**{field: wrong}))


@pytest.mark.slow
@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_rule_stops_the_call(field, monkeypatch):
    """At every call, unless checks are off."""
    plant(monkeypatch, field)
    for _ in range(2):
        with pytest.raises(dualdp.ExactnessError, match=f"{FAILED}.*'w'"):
            WRONG[field](*MODEL, method="book_keeping")
    WRONG[field](*MODEL, method="book_keeping", check="off")


def test_check_looks_once_and_then_jit_is_quiet(monkeypatch):
    loss, params, x = MODEL
    options = {"max_grad_norm": 0.1, "method": "book_keeping"}
    with monkeypatch.context() as patch:
        plant(patch, "weighted_sum")
        with pytest.raises(dualdp.ExactnessError, match=FAILED):
            dpj.check(loss, params, x, **options)

    def in_jit(x):
        return jax.jit(lambda p, x: dpj.clipped_grad_sum(loss, p, x, **options).grads)(params, x)

    with pytest.warns(UserWarning, match="called inside jit, where it has no numbers") as seen:
        in_jit(x)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_jit(jnp.concatenate([x, x]))  # the same kind, which warned before
        calls.seen.clear()
        dpj.check(loss, params, x, **options)
        in_jit(x)


def by_rule(function):
    """A loss whose function sees all rows of a `vmap`."""

    @jax.custom_batching.custom_vmap
    def identity(x):
        return x

    identity.def_vmap(lambda axis_size, in_batched, x: (function(x), True))
    return lambda p, x: p["w"] @ identity(x)


@pytest.mark.parametrize("method", ["auto", pytest.param("loop", marks=pytest.mark.slow)])
def test_rows_that_meet_each_other_are_refused(method):
    """Each of eight rows gets the gradient of its neighbour, which is as long as its own.

    Calls before, of a row alone and of another function, do not hide it.
    """
    params, x = {"w": draw(6)}, draw(8, 6)
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    mixed = by_rule(lambda x: jnp.roll(x, 1, 0))
    for loss, rows in ((mixed, x[:1]), (by_rule(lambda x: x), x)):
        clipped(loss, params, rows, method=method)
        with pytest.raises(dualdp.ExactnessError, match=FAILED):
            clipped(mixed, params, x, method=method)


def loop_of(x, rows=2):
    sizes = {"num_examples": len(x), "expected_batch_size": rows, "physical_batch_size": rows}
    engine, plan = dpj.PrivacyEngine(), make_plan(sampler="shuffle", max_grad_norm=0.1, **sizes)
    return engine, next(iter(engine.make_loader(data=np.asarray(x), plan=plan)))


@pytest.mark.slow
def test_auto_goes_by_vmap_where_a_rule_is_wrong(monkeypatch):
    """From the first call on, and the ledger of its loop says so; a named method is refused."""
    loss, params, x = dense, {"w": draw(60, 40)}, draw(8, 3, 60)
    plant(monkeypatch, "weighted_sum")
    engine, chunk = loop_of(x, rows=8)
    expected = dpj.clipped_grad_sum(loss, params, chunk, method="vmap").grads["w"]
    for _ in range(2):
        found = dpj.clipped_grad_sum(loss, params, chunk).grads["w"]
        np.testing.assert_array_equal(found, expected)
    assert engine.ledger.to_json().count("auto went by vmap") == 1
    with pytest.raises(dualdp.ExactnessError, match=FAILED):
        dpj.clipped_grad_sum(loss, params, chunk, method="book_keeping")


def test_the_ledger_notes_a_traced_call_that_nobody_looked_at():
    loss, params, x = MODEL
    engine, chunk = loop_of(x)
    total = lambda: jax.jit(lambda p, c: dpj.clipped_grad_sum(loss, p, c).grads)  # noqa: E731
    with pytest.warns(UserWarning, match="called inside jit, where it has no numbers"):
        total()(params, chunk)
    total()(params, chunk)  # warns and notes no more
    assert engine.ledger.to_json().count("check_impossible") == 1
    calls.seen.clear()
    engine, chunk = loop_of(x)
    dpj.check(loss, params, chunk)
    total()(params, chunk)
    assert "check_impossible" not in engine.ledger.to_json()


def test_check_needs_numbers_and_rows():
    loss, params, x = MODEL
    with pytest.raises(TypeError, match="check was called inside jit, where there are no numbers"):
        jax.jit(lambda p: dpj.check(loss, p, x))(params)
    with pytest.raises(ValueError, match="The batch has no examples. Expected at least one to"):
        dpj.check(loss, params, x[:0])


@pytest.fixture
def looked_at(monkeypatch):
    """The rows whose norms were compared with plain autodiff, one list for each check."""
    found = []
    right, right_row = identity.check, identity.Comparison.of_row

    def counted(*arguments, **options):
        found.append([])
        return right(*arguments, **options)

    def row(comparison, k):
        found[-1].append(k)
        return right_row(comparison, k)

    monkeypatch.setattr(identity, "check", counted)
    monkeypatch.setattr(identity.Comparison, "of_row", row)
    return found


@pytest.mark.slow
def test_the_first_call_of_a_kind_is_checked(looked_at):
    params, x = {"w": draw(6, 5)}, draw(8, 3, 6)
    for _ in range(3):
        dpj.per_sample_norms(dense, params, x)
    dpj.per_sample_norms(dense, params, x[:5])  # n is no part of the kind
    assert len(looked_at) == 1
    norms = dpj.per_sample_norms(dense, params, x)
    assert {int(np.argmax(norms)), int(np.argmin(norms))} <= set(looked_at[0])
    others = [
        lambda: dpj.per_sample_norms(dense, params, x[:, :2]),
        lambda: dpj.per_sample_norms(dense, {"w": draw(6, 4)}, x),
        lambda: dpj.per_sample_norms(dense, params, x, method="vmap"),
        lambda: dpj.per_sample_norms(lambda p, x: 2 * dense(p, x), params, x),
        lambda: dpj.per_sample_grads(dense, params, x),
        lambda: clipped(dense, params, x, physical_batch_size=3),
        lambda: clipped(dense, params, x, clipping="automatic"),
    ]
    for count, other in enumerate(others, start=2):
        other()
        assert len(looked_at) == count
        other()
        assert len(looked_at) == count


@pytest.mark.slow
def test_each_way_of_auto_is_checked(looked_at):
    """Few rows are differentiated whole, many go by the rules."""
    params, x = {"w": draw(60, 40)}, draw(8, 3, 60)
    for n in (2, 8, 3, 7):
        clipped(dense, params, x[:n])
    assert len(looked_at) == 2


def test_a_lambda_in_a_loop_is_one_function(looked_at):
    x, params = draw(4, 3, 6), {"w": draw(6, 5)}
    for scale in (1.0, 1.0, 2.0):
        for _ in range(3):
            dpj.per_sample_norms(lambda p, x: scale * dense(p, x), params, x)  # noqa: B023
    assert len(looked_at) == 2


def test_always_and_off(looked_at):
    params, x = {"w": draw(6, 5)}, draw(4, 3, 6)
    for _ in range(2):
        dpj.per_sample_norms(dense, params, x, check="off")
    assert not looked_at
    for _ in range(2):
        dpj.per_sample_norms(dense, params, x, check="always")
    assert len(looked_at) == 2
    with pytest.raises(ValueError, match="check='never' is unknown. Expected one of"):
        dpj.per_sample_norms(dense, params, x, check="never")


def test_no_example_does_not_use_up_the_first_check(looked_at):
    params, x = {"w": draw(6, 5)}, draw(4, 3, 6)
    clipped(dense, params, x[:0])
    clipped(dense, params, x, mask=np.zeros(4, bool))
    assert not any(looked_at)
    clipped(dense, params, x, mask=np.arange(4) == 1)
    assert looked_at[-1] == [1]


def kinked(p, x):
    """A step at a number that rounding decides about."""
    h = x @ p["w"]
    return jnp.sum(jnp.where(jnp.sin(1e7 * h) > 0, h, 2 * h))


def cancelling(p, x):
    """A small difference of large numbers."""
    h = 1e6 * jnp.sum(x @ p["w"])
    return jnp.sin(h) + jnp.cos(h)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [kinked, cancelling])
def test_losses_that_amplify_rounding_raise_no_alarm(loss):
    clipped(loss, {"w": draw(30, 20)}, draw(6, 5, 30), method="book_keeping", check="always")


@pytest.mark.slow
def test_a_fault_in_a_loss_that_amplifies_rounding_is_seen(monkeypatch):
    """Rounding excuses a difference only if it moves plain autodiff as far."""
    plant(monkeypatch, "weighted_sum")
    ill = lambda p, x: jnp.sum(jnp.tanh(3e3 * (x @ p["w"]) / 1e3))  # noqa: E731
    with pytest.raises(dualdp.ExactnessError, match=FAILED):
        clipped(ill, {"w": draw(6, 5)}, draw(4, 3, 6), method="book_keeping")


def test_a_loss_that_is_no_function_is_stopped():
    """What draws anew at each call has no gradient that could be clipped."""

    def noisy(p, x):
        noise = jax.pure_callback(
            lambda: RNG.normal(size=3).astype(np.float32), jax.ShapeDtypeStruct((3,), np.float32),
            vmap_method="sequential",
        )  # fmt: skip
        return jnp.sum(x * p["w"] * noise)

    with pytest.raises(dualdp.ExactnessError, match=FAILED):
        dpj.per_sample_grads(noisy, {"w": draw(3)}, draw(4, 3))

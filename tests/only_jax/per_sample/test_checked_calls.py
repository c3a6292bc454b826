# SPDX-License-Identifier: Apache-2.0
"""Calls that check themselves: outside `jit` on their own examples, inside it on stand-ins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp
import dualdp_jax as dpj
from dualdp_jax.per_sample.checks import spot_check, stand_ins, trials
from dualdp_jax.rules import RULES
from dualdp_jax.rules.estimate import Estimate

RNG = np.random.default_rng(11)
FAILED = "A spot check failed: "


@pytest.fixture(autouse=True)
def _forgotten():
    """Nothing is known from other tests."""
    trials.forget()


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def dense(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"]) ** 2)


def lookup(p, i):
    return jnp.sum(jnp.tanh(p["w"][i]) ** 2)


def convolution(p, x):
    return jnp.sum(jnp.tanh(jax.lax.conv(x[None], p["w"], (1, 1), "SAME")) ** 2)


MODELS = {
    "dot_general": (dense, {"w": draw(6, 5)}, draw(4, 3, 6)),
    "gather": (lookup, {"w": draw(9, 4)}, jnp.asarray(RNG.integers(0, 9, (4, 5)))),
    "conv_general_dilated": (convolution, {"w": draw(3, 2, 3, 3)}, draw(4, 2, 5, 5)),
}
FUNCTIONS = {
    "per_sample_grads": (dpj.per_sample_grads, "grads"),
    "per_sample_norms": (dpj.per_sample_norms, "norms"),
    "clipped_grad_sum": (
        functools.partial(dpj.clipped_grad_sum, max_grad_norm=0.1),
        "weighted_sum",
    ),
}


def too_large(found):
    """What a rule gives, half a percent too large."""
    if isinstance(found, Estimate):
        return found._replace(sq_norms=1.01 * found.sq_norms)
    return 1.005 * found


def plant(patch, primitive, field):
    right = RULES[primitive]
    wrong = lambda *arguments: too_large(getattr(right, field)(*arguments))  # noqa: E731
    patch.setitem(RULES, primitive, right._replace(**{field: wrong}))


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("primitive", MODELS)
def test_a_wrong_rule_stops_the_call(primitive, name, jit, monkeypatch):
    loss, params, x = MODELS[primitive]
    function, field = FUNCTIONS[name]
    plant(monkeypatch, primitive, field)

    def call(params, x, check="first"):
        return function(loss, params, x, method="book_keeping", check=check)

    run = jax.jit(call, static_argnums=2) if jit else call
    with pytest.raises(dualdp.ExactnessError, match=f"{FAILED}.*{name}.*'w'"):
        run(params, x)
    with pytest.raises(dualdp.ExactnessError, match=FAILED):
        run(params, x)  # and again
    run(params, x, "off")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("around", ["vmap", "scan", "grad", "remat", "cond", "shard_map"])
def test_the_error_passes_through_every_transformation(name, around, monkeypatch):
    loss, params, x = MODELS["dot_general"]
    function, field = FUNCTIONS[name]
    plant(monkeypatch, "dot_general", field)

    def total(params, x):
        found = function(loss, params, x, method="book_keeping")
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(found))

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    wrapped = {
        "vmap": lambda p, x: jax.vmap(total, (None, 0))(p, x[None]),
        "scan": lambda p, x: jax.lax.scan(lambda c, _: (c + total(p, x), None), 0.0, None, 2),
        "grad": jax.grad(total),
        "remat": jax.grad(jax.checkpoint(total)),
        "cond": lambda p, x: jax.lax.cond(x[0, 0, 0] > 0, total, lambda p, x: 0.0, p, x),
        "shard_map": jax.shard_map(total, mesh=mesh, in_specs=(spec, spec), out_specs=spec),
    }
    with pytest.raises(dualdp.ExactnessError, match=FAILED):
        wrapped[around](params, x)


# ---------------------------------------------------------------------- when a call is checked


@pytest.fixture
def looked_at(monkeypatch):
    """The examples that were compared with plain autodiff, outside `jit`."""
    found = []
    right = spot_check.examine

    def counted(asked, rows, where):
        found.append((where, list(rows)))
        return right(asked, rows, where)

    monkeypatch.setattr(spot_check, "examine", counted)
    return found


def test_the_first_call_of_a_kind_is_checked(looked_at):
    params, x = {"w": draw(6, 5)}, draw(8, 3, 6)
    for _ in range(3):
        dpj.per_sample_norms(dense, params, x)
    dpj.per_sample_norms(dense, params, x[:5])  # n is no part of the kind
    assert len(looked_at) == 1
    (_, rows) = looked_at[0]
    norms = dpj.per_sample_norms(dense, params, x)
    assert int(np.argmax(norms)) in rows
    others = [
        lambda: dpj.per_sample_norms(dense, params, x[:, :2]),
        lambda: dpj.per_sample_norms(dense, {"w": draw(6, 4)}, x),
        lambda: dpj.per_sample_norms(dense, params, x, method="vmap"),
        lambda: dpj.per_sample_norms(dense, params, x, per_parameter=True),
        lambda: dpj.per_sample_norms(dense, params, x, physical_batch_size=3),
        lambda: dpj.per_sample_norms(lambda p, x: dense(p, x), params, x),
        lambda: dpj.per_sample_grads(dense, params, x),
        lambda: dpj.clipped_grad_sum(dense, params, x, max_grad_norm=1.0),
        lambda: dpj.clipped_grad_sum(dense, params, x, max_grad_norm=1.0, clipping="automatic"),
    ]
    for count, other in enumerate(others, start=2):
        other()
        assert len(looked_at) == count
        other()
        assert len(looked_at) == count


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
    call = functools.partial(dpj.clipped_grad_sum, dense, params, max_grad_norm=1.0)
    call(x[:0])
    call(x, mask=np.zeros(4, bool))
    assert not looked_at
    call(x, mask=np.array([False, True, False, False]))
    assert looked_at == [("clipped_grad_sum", [1])]


def test_a_program_is_tried_once(monkeypatch):
    tried = []
    right = trials._tried

    def counted(*arguments):
        tried.append(1)
        return right(*arguments)

    monkeypatch.setattr(trials, "_tried", counted)
    params, x = {"w": draw(6, 5)}, draw(4, 3, 6)

    def run(x):
        return jax.jit(lambda p, x: dpj.per_sample_norms(dense, p, x))(params, x)

    for _ in range(2):
        run(x)
    assert len(tried) == 1
    run(jnp.concatenate([x, x]))  # another n: other choices may be made
    assert len(tried) == 2
    jax.jit(lambda p, x: dpj.per_sample_norms(dense, p, x, check="always"))(params, x)
    assert len(tried) == 3


def test_the_choices_are_those_of_the_real_number_of_examples(monkeypatch):
    """Two rows would be worked on in another way than ten thousand."""
    ways = []
    right = trials.answer

    def watched(request, call, mask, size):
        from dualdp_jax.per_sample import methods
        from dualdp_jax.rules.base import num_examples

        ways.append(methods.is_small(call, num_examples(call.rows[1])))
        return right(request, call, mask, size)

    monkeypatch.setattr(trials, "answer", watched)
    shape = jax.ShapeDtypeStruct((10_000, 100), jnp.float32)
    loss = lambda p, x: jnp.sum((x @ p["w"]) ** 2)  # noqa: E731
    params = {"w": draw(100, 8)}
    for n, small in ((4, True), (10_000, False)):
        jax.eval_shape(
            lambda p, x: dpj.per_sample_norms(loss, p, x),
            params,
            jax.ShapeDtypeStruct((n, *shape.shape[1:]), jnp.float32),
        )
        assert ways[-1] == small


# ---------------------------------------------------------------------- what can't be judged


def verdict(loss, params, *batch, **options):
    return dpj.explain(loss, params, *batch, **options)["check"]


def test_numbers_that_are_none_are_not_checked():
    params, x = {"w": draw(3)}, draw(4, 3)
    found = verdict(lambda p, x: jnp.sum(x * p["w"]) * jnp.log(-1 - jnp.sum(x**2)), params, x)
    assert found["status"] == "not checked"
    assert found["reason"] == "no stand-in gave numbers that could be compared"
    assert all("not usable" in outcome for outcome in found["trials"].values())
    constant = verdict(lambda p, x: jnp.sum(x), params, x)
    assert constant["status"] == "not checked"


def test_what_cannot_be_tried_is_said():
    params, x = {"w": draw(3)}, draw(4, 3)

    def with_callback(p, x):
        jax.debug.print("{}", x)
        return jnp.sum(x * p["w"])

    assert "side effects" in verdict(with_callback, params, x)["reason"]

    def of_this_thread(p, x):
        return jax.pure_callback(lambda: np.float32(1 / 0), x[0]) * jnp.sum(x * p["w"])

    found = verdict(of_this_thread, params, x)
    assert found["status"] == "not checked"
    assert found["reason"]
    large = {"w": jax.ShapeDtypeStruct((trials._LARGE + 1,), jnp.float32)}
    said = []
    jax.eval_shape(
        lambda p, x: said.append(verdict(lambda p, x: jnp.sum(p["w"]) * x, p, x)),
        large,
        jax.ShapeDtypeStruct((2,), jnp.float32),
    )
    assert "too many for stand-ins" in said[0]["reason"]


def test_a_failed_trial_is_told_by_explain(monkeypatch):
    plant(monkeypatch, "dot_general", "weighted_sum")
    loss, params, x = MODELS["dot_general"]
    found = verdict(loss, params, x, method="book_keeping")
    assert found["status"] == "failed"
    assert FAILED in found["reason"]


def kinked(p, x):
    """A step at a number that rounding decides about."""
    h = x @ p["w"]
    return jnp.sum(jnp.where(jnp.sin(1e7 * h) > 0, h, 2 * h))


def cancelling(p, x):
    """A small difference of large numbers."""
    h = 1e6 * jnp.sum(x @ p["w"])
    return jnp.sin(h) + jnp.cos(h)


@pytest.mark.parametrize("loss", [kinked, cancelling])
@pytest.mark.parametrize("jit", [False, True])
def test_losses_that_amplify_rounding_raise_no_alarm(loss, jit):
    params, x = {"w": draw(30, 20)}, draw(6, 5, 30)
    for function, _ in FUNCTIONS.values():
        call = lambda p, x, f=function: f(loss, p, x, method="book_keeping", check="always")  # noqa: E731
        (jax.jit(call) if jit else call)(params, x)


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


# ---------------------------------------------------------------------- stand-ins


def limits(function, *arguments):
    return stand_ins.index_limits(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_integers_stay_within_what_they_index():
    table, i = jnp.ones((7, 3)), jnp.zeros(4, int)
    assert limits(lambda t, i: t[i], table, i) == {1: 7}
    assert limits(lambda t, i: jnp.take(t, i, axis=1), table, i) == {1: 3}
    assert limits(lambda i: jax.nn.one_hot(i, 5), i) == {0: 5}
    assert limits(lambda t, i: jax.lax.dynamic_slice(t, (i[0], 0), (2, 3)), table, i) == {1: 6}
    assert limits(lambda t, i: t.at[i].add(1.0), table, i) == {1: 7}
    assert limits(lambda i: jax.lax.switch(i[0], [jnp.sin, jnp.cos, jnp.tan], 1.0), i)[0] <= 3
    inner = lambda t, i: jax.lax.scan(lambda c, k: (c + t[k].sum(), None), 0.0, i)[0]  # noqa: E731
    assert limits(jax.jit(inner), table, i) == {1: 7}
    both = lambda t, s, i: t[i].sum() + s[i].sum()  # noqa: E731
    assert limits(both, table, jnp.ones(4), i) == {2: 4}
    assert limits(lambda i: i.astype(jnp.float32), i) == {}
    assert limits(lambda i: (table[i], i), i)[0] == 7


def test_stand_ins_have_the_types_of_the_program():
    kinds = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.bool_]
    rows = [jax.ShapeDtypeStruct((3, 2), kind) for kind in kinds]
    weights = [jax.ShapeDtypeStruct((5, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)]
    for trial in stand_ins.TRIALS:
        trained, batch = stand_ins.fill(trial, weights, rows, 6, {4: 100, 5: 1000})
        assert [(x.shape, x.dtype) for x in trained] == [(w.shape, w.dtype) for w in weights]
        assert [x.shape for x in batch] == [(6, 3, 2)] * len(kinds)
        assert [x.dtype for x in batch] == kinds
        assert batch[2].min() >= 0
        assert batch[2].max() < 100
        assert batch[3].max() <= 255
    keys = stand_ins.array((4,), jax.random.key(0).dtype, np.random.default_rng(0))
    assert keys.shape == (4,)
    assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)

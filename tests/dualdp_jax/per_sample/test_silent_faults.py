# SPDX-License-Identifier: Apache-2.0
"""Ordinary programs whose numbers were wrong without a word (known_failures, part F)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp_jax.per_sample.methods import METHODS
from tests.dualdp_jax.workers import launch, spread
from tests.pairwise import pairwise
from tests.tiers import first

RNG = np.random.default_rng(0)
ALL = (*METHODS, "auto")


def draw(*shape, scale=1.0):
    return (scale * RNG.normal(size=shape)).astype(np.float32)


def length(tree):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum((leaf**2).sum() for leaf in leaves)))


def contributions(loss, params, batch, bound, method, **options):
    """What each example of a batch contributes to the sum of one program."""
    n = len(batch[0])
    run = jax.jit(
        lambda mask: dpj.clipped_grad_sum(
            loss, params, *batch, max_grad_norm=bound, mask=mask, method=method, check="off",
            **options,
        ).grads
    )  # fmt: skip
    run(np.ones(n, bool))
    return [run(np.arange(n) == k) for k in range(n)]


def assert_right(loss, params, batch, bound, method, off=1e-4, **options):
    """Each contribution is that of plain autodiff, and at most the bound."""
    found = contributions(loss, params, batch, bound, method, **options)
    for k, ours in enumerate(found):
        grads = jax.grad(loss)(params, *(part[k] for part in batch))
        factor = min(1.0, bound / (1 + 1e-4) / length(grads))
        gap = jax.tree.map(lambda a, b: np.float64(a) - factor * np.float64(b), ours, grads)  # noqa: B023
        assert length(ours) <= bound, (method, k)
        assert length(gap) <= off * bound, (method, k)


# ---------------------------------------------------------------------- 73


def by_take(p, i):
    return 50 * jnp.sum(jnp.take(p["t"], i, axis=0) ** 3)


def by_index(p, i):
    return 50 * jnp.sum(jnp.tanh(p["t"][i]) @ p["w"])


def summed(p, i):
    return 50 * jnp.sum(jnp.take(p["t"], i, axis=0).sum(0) ** 2)


def out_of_range(mode):
    """Some of the doubled numbers are no row."""
    return lambda p, i: 50 * jnp.sum(p["t"].at[i * 2].get(mode=mode, fill_value=0.0) ** 2)


def in_a_scan(p, i):
    step = lambda h, part: (jnp.tanh(h + jnp.take(part[0], part[1], axis=0)).sum(0), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, jnp.zeros(4), (p["s"], i.reshape(3, -1)))[0] ** 2)


LOOKUPS = {
    "take": by_take,
    "index": by_index,
    "sum of rows": summed,
    "clip": out_of_range("clip"),
    "drop": out_of_range("fill"),
    "tables in a scan": in_a_scan,
}
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    pairwise(LOOKUPS, DTYPES, ("book_keeping", "two_pass", "materialize", "auto")),
)
def test_indices_of_any_dtype(name, dtype, method):
    """73: bytes as they lie in a file gave contributions of 950,000 C."""
    # int8 can't count to 256, and XLA's older emitters (conftest.py) write beyond the table then.
    rows = 100 if dtype == "int8" else 256
    params = {"t": draw(rows, 4), "w": draw(4, 2), "s": draw(3, rows, 4)}
    most = min(rows // 2 + 10, np.iinfo(dtype).max // 2) if name in ("clip", "drop") else rows
    with jax.enable_x64("64" in dtype):
        batch = (RNG.integers(0, most, (5, 6)).astype(dtype),)
        assert_right(LOOKUPS[name], params, batch, 0.01, method)


def test_indices_beyond_the_largest_signed_number_are_clipped():
    """An index of 2**32 - 1 is no index of -1."""
    params, batch = {"t": draw(6, 4)}, (np.array([[1, 2**32 - 1], [5, 3]], np.uint32),)
    loss = lambda p, i: jnp.sum(jnp.take(p["t"], i, axis=0, mode="clip") ** 2)  # noqa: E731
    for method in ("book_keeping", "materialize"):
        assert_right(loss, params, batch, 0.01, method)


def test_a_table_that_cannot_be_counted_is_refused():
    rows = 2**31 - 1
    with pytest.raises(ValueError, match="has more rows than int32 counts. Use method='vmap'"):
        jax.eval_shape(
            lambda p, i: dpj.per_sample_norms(
                lambda p, i: jnp.sum(p[i] ** 2), p, i, method="book_keeping", check="off"
            ),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
            jax.ShapeDtypeStruct((4, 3), jnp.int32),
        )


# ---------------------------------------------------------------------- 75


def square(p, x, y):
    return 0.5 * jnp.sum((x @ p["w"] - y) ** 2)


def convolved(p, x, y):
    names = ("NHC", "HIO", "NHC")
    out = jax.lax.conv_general_dilated(
        x[None], p["w"][None], (1,), "VALID", dimension_numbers=names
    )
    return 0.5 * jnp.sum((out[0] - y) ** 2)


def tied(p, x, y):
    return jnp.sum((x @ p["w"]) * y) + jnp.sum((x[::-1] @ p["w"]) * y)


def unit(a):
    return a / np.linalg.norm(a, axis=2, keepdims=True)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("loss", [square, convolved])
def test_a_gram_form_that_overflows_is_not_taken_for_safe(loss, method):
    """75: nearly equal positions of opposite sign, so large that the bound of the error is inf."""
    near, u = unit(draw(4, 1, 256)), unit(draw(4, 1, 256))
    x = np.concatenate([near, near + draw(4, 1, 256, scale=4e-6)], 1) * np.float32(1e9)
    y = np.concatenate([u, -u], 1) * np.float32(1.2e10)
    # What is compared are differences of numbers 1e5 times as large.
    assert_right(loss, {"w": np.zeros((256, 256), np.float32)}, (x, y), 1.0, method, off=0.1)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("loss", [square, convolved, tied])
@pytest.mark.parametrize("t", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_squares_that_are_flushed_are_not_taken_for_zero(loss, t, method):
    """75: activations of 1e-21 against gradients of 1e18, and the other way round."""
    params = {"w": draw(200, 200, scale=0.05)}
    for small, large in ((1e-21, 1e18), (1e-16, 1e15)):
        x, y = draw(4, t, 200) * np.float32(small), draw(4, t, 200) * np.float32(large)
        assert_right(loss, params, (x, y), 1e-4, method)


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_each_group_is_judged_by_what_its_factor_is_made_of(clipping):
    """58: beside a layer with a large gradient the error of a small one counted for nothing."""
    rng = np.random.default_rng(3)
    signs = rng.normal(size=(6, 4, 128))
    signs -= signs.mean(1, keepdims=True)
    near = (1 + 1e-5 * rng.normal(size=(6, 4, 128))).astype(np.float32)
    batch = (near, signs.astype(np.float32), draw(6, 4, 128, scale=1e3))

    def loss(p, near, signs, large):
        small = jnp.sum((near @ p["small"]["w"]) * signs)
        return small + 0 * jnp.sum(large) + jnp.sum((large @ p["large"]["w"]) * signs)

    params = {"small": {"w": np.zeros((128, 128), np.float32)},
              "large": {"w": np.zeros((128, 128), np.float32)}}  # fmt: skip
    bound = 1e-3 if clipping == "per_layer" else 100.0
    for ours in contributions(loss, params, batch, bound, "book_keeping", clipping=clipping):
        if clipping == "per_layer":
            assert max(length(ours["small"]), length(ours["large"])) <= bound / np.sqrt(2)
        else:
            assert length(ours) <= bound


@pytest.mark.parametrize("t", [2, 6])
@pytest.mark.parametrize("method", ["book_keeping", "two_pass"])
def test_rounding_of_the_sum_is_part_of_the_norm(method, t):
    """A gradient that nearly cancels is summed in another order than its norm was taken in."""
    loss = lambda p, x, y: jnp.sum((x @ p["w"]) * y)  # noqa: E731
    params = {"w": np.zeros((64, 64), np.float32)}
    for near in (1e-5, 1e-6, 1e-7):
        y = draw(8, t, 64)
        y = (y - y.mean(1, keepdims=True)) * np.float32(1e9)
        x = unit(draw(8, 1, 64)) + draw(8, t, 64, scale=near / 8)
        for ours in contributions(loss, params, (x, y), 1.0, method):
            assert length(ours) <= 1.0


# ---------------------------------------------------------------------- 76


steep = jax.custom_vjp(lambda x: x)
steep.defvjp(lambda x: (x, ()), lambda _, g: (jnp.clip(g, -0.05, 0.05),))
shifted = jax.custom_vjp(lambda x: x)
shifted.defvjp(lambda x: (x, ()), lambda _, g: (g + 0.01,))


def weight_used_twice(p, x):
    w = steep(p["w"])
    return jnp.sum(jnp.tanh(jnp.tanh(x @ p["u"] @ w) @ w) ** 2)


def weight_in_a_scan(p, x):
    step = lambda h, row: (jnp.tanh(row @ p["u"] + h @ shifted(p["w"].T)), None)  # noqa: E731
    return 20 * jnp.sum(jax.lax.scan(step, jnp.zeros(16), x)[0] ** 2)


def weight_inside_jit(p, x):
    w = jax.jit(lambda w: 2 * steep(w))(p["w"])
    return jnp.sum((x @ p["u"] @ w) ** 2) + jnp.sum(jnp.sin(x @ p["u"] @ w))


def hidden_state(p, x):
    step = lambda h, row: (steep(jnp.tanh(row @ p["u"] + h @ p["w"])), None)  # noqa: E731
    return 20 * jnp.sum(jax.lax.scan(step, jnp.zeros(16), x)[0] ** 2)


CUSTOM = [weight_used_twice, weight_in_a_scan, weight_inside_jit, hidden_state]


@pytest.mark.parametrize("loss", first(2, CUSTOM))
@pytest.mark.parametrize("method", first(3, [m for m in ALL if m != "two_pass"]))
def test_a_backward_that_is_no_linear_map_gets_the_whole_cotangent(loss, method):
    params = {"u": draw(8, 16), "w": draw(16, 16, scale=0.4)}
    assert_right(loss, params, (draw(5, 12, 8),), 0.05, method)


@pytest.mark.parametrize("loss", CUSTOM)
def test_two_passes_refuse_a_custom_backward(loss):
    """76: contributions of 3.5 C, because the loss is multiplied by the clip factor."""
    params, x = {"u": draw(8, 16), "w": draw(16, 16)}, draw(5, 12, 8)
    with pytest.raises(
        ValueError, match="method='two_pass' multiplies the loss by the clip factor"
    ):
        dpj.clipped_grad_sum(loss, params, x, max_grad_norm=1.0, method="two_pass")


def test_two_passes_refuse_a_backward_in_low_precision():
    half = jax.custom_jvp(lambda x: x)
    half.defjvp(lambda x, t: (x[0], t[0].astype(jnp.bfloat16).astype(jnp.float32)))
    params, x = {"u": draw(8, 16)}, draw(5, 8)
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in bfloat16"):
        dpj.clipped_grad_sum(
            lambda p, x: jnp.sum(half(x @ p["u"]) ** 2), params, x, max_grad_norm=1.0,
            method="two_pass",
        )  # fmt: skip


# ---------------------------------------------------------------------- 77

REARRANGED = {
    "order F": lambda w: w.reshape(6, 10, order="F"),
    "dimensions": lambda w: jax.lax.reshape(w, (6, 10), dimensions=(2, 0, 1)),
    "ravel F": lambda w: w.ravel(order="F").reshape(6, 10),
    "reversed": lambda w: jnp.flip(w, (0, 2)).reshape(6, 10),
    "swapped": lambda w: jnp.moveaxis(w, 0, -1).reshape(6, 10),
    "broadcast": lambda w: jax.lax.broadcast_in_dim(w, (1, 3, 4, 5), (1, 2, 3)).reshape(6, 10),
    "halves exchanged": lambda w: jnp.roll(w, 1, axis=0).reshape(6, 10),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_rearranged_weights_have_their_own_gradients(name):
    """77: a reshape in Fortran's order made a sum that points elsewhere (cosine 0.00)."""
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ REARRANGED[name](p["w"])) ** 2)  # noqa: E731
    for method in ("book_keeping", "two_pass", "materialize"):
        assert_right(loss, {"w": draw(3, 4, 5, scale=0.3)}, (draw(5, 4, 6),), 0.1, method)


# ---------------------------------------------------------------------- 74 and 78, on four devices


@pytest.fixture(scope="module")
def report():
    """What the checks on several devices found."""
    (found,) = launch.reports("spread", "all", processes=1, devices=4, seconds=500)
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("spread")
@pytest.mark.parametrize("name", [check.__name__ for check in spread.CHECKS])
def test_on_several_devices(report, name):
    assert report[name] == "held"


@pytest.mark.slow
def test_a_shard_map_with_its_defaults():
    """74: the gradient of a replicated parameter was summed over the devices."""
    (found,) = launch.reports("spread", "fast", processes=1, devices=4, seconds=200)
    assert found == {check.__name__: "held" for check in spread.FAST}


@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "book_keeping"])
def test_a_backward_that_is_not_linear_raises_nothing(method):
    """The sum of the losses has another gradient than the losses; the definition is theirs."""

    @jax.custom_vjp
    def clipped(w):
        return jnp.round(w * 8) / 8

    clipped.defvjp(lambda w: (clipped(w), None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    loss = lambda p, x: ((x @ clipped(p["w"])) ** 2).sum()  # noqa: E731
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 4)).astype("f")}
    x = rng.normal(size=(6, 5)).astype("f")
    found = dpj.clipped_grad_sum(loss, params, x, max_grad_norm=0.2, method=method, check="always")
    each = [jax.grad(loss)(params, row)["w"] for row in x]
    expected = sum(g * min(1, 0.2 / (1 + 1e-4) / np.linalg.norm(g)) for g in each)
    np.testing.assert_allclose(found.grads["w"], expected, rtol=1e-4, atol=1e-5)


LABELS = np.arange(6, dtype="f")


@pytest.mark.parametrize(
    "labels",
    [
        LABELS.tolist(),
        tuple(LABELS.tolist()),
        list(LABELS),
        LABELS[:, None].tolist(),
        {"labels": (None, list(LABELS.astype(int)))},
        range(6),
        bytes(6),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_labels_that_are_no_array_are_refused(labels):
    """They are handed on whole: each example's loss would read the labels of all."""

    def loss(p, x, y):
        y = jax.tree.leaves(y) if isinstance(y, dict) else list(y)
        return ((x @ p - jnp.asarray(y, "f").ravel()) ** 2).mean()

    x = np.ones((6, 3), "f")
    with pytest.raises(TypeError, match="of 6 Python numbers, one for each example"):
        dpj.clipped_grad_sum(loss, jnp.ones(3), x, labels, max_grad_norm=1.0)
    for constant in ([0.5, 2.0], ("a",) * 6, 6.0, None):  # which are the same for every example
        scaled = lambda p, x, c: ((x @ p) ** 2).sum()  # noqa: E731
        dpj.clipped_grad_sum(scaled, jnp.ones(3), x, constant, max_grad_norm=1.0)


def test_an_optimizer_that_wants_more_is_refused_before_the_run():
    with pytest.raises(
        TypeError, match="update failed on .*value.*Expected an optimizer that need"
    ):
        dpj.PrivacyEngine().make_private(
            loss_fn=lambda p, x: ((x @ p["w"]) ** 2).sum(),
            params={"w": np.ones(3, "f")},
            optimizer=optax.lbfgs(),
            data=np.ones((8, 3), "f"),
            expected_batch_size=4,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            num_steps=2,
            accountant="rdp",
            seed=1,
        )

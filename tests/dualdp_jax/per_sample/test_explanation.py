# SPDX-License-Identifier: Apache-2.0
"""The record of what a method does: what `auto` chooses, and why."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj
from tests.tiers import first

RNG = np.random.default_rng(0)


def arrays(*shapes):
    return [jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32) for shape in shapes]


def dense(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]))


def convolution(p, x):
    y = lax.conv_general_dilated(x[None], p["w"], (1,), "SAME", dimension_numbers=CHANNELS_LAST)
    return jnp.sum(jnp.tanh(y))


def recurrence(p, x):
    return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(row + h @ p["w"]), None), x[0], x)[0])


CHANNELS_LAST = ("NHC", "HIO", "NHC")
MODELS = {
    "a few products": (dense, {"w": (6, 4), "b": (4,)}, (6,), "vmap", "lengths"),
    "a large product": (dense, {"w": (900, 400), "b": (400,)}, (900,), "uses", "lengths"),
    "few positions": (dense, {"w": (300, 200), "b": (200,)}, (4, 300), "uses", "gram"),
    "many positions": (dense, {"w": (40, 30), "b": (30,)}, (300, 40), "uses", "gradients"),
    "a small convolution": (convolution, {"w": (3, 2, 4)}, (9, 2), "uses", "gradients"),
    "a convolution of few pixels": (convolution, {"w": (3, 64, 64)}, (4, 64), "uses", "gram"),
    "a small recurrence": (recurrence, {"w": (8, 8)}, (8, 8), "vmap", "gradients"),
    "a wide recurrence": (recurrence, {"w": (200, 200)}, (4, 200), "uses", "gram"),
}


def made(name, n=16):
    loss, shapes, x, *expected = MODELS[name]
    params = dict(zip(shapes, arrays(*shapes.values()), strict=True))
    return loss, params, *arrays((n, *x)), *expected


@pytest.mark.slow
@pytest.mark.parametrize("name", first(3, MODELS))
def test_the_record_says_what_auto_does(name):
    loss, params, x, way, form = made(name)
    found = dpj.explain(loss, params, x)
    assert (found["way"], found["uses"][0]["form"]) == (way, form)
    assert json.loads(json.dumps(found)) == found

    def run(method):
        options = {"max_grad_norm": 1.0, "method": method, "check": "off"}
        return lambda params, x: dpj.clipped_grad_sum(loss, params, x, **options)

    programs = [str(jax.make_jaxpr(run(method))(params, x)) for method in ("auto", "vmap")]
    assert (programs[0] == programs[1]) == (way == "vmap")
    ours, truth = run("auto")(params, x), run("loop")(params, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("width", "way"), [(8, "vmap"), (16, "vmap"), (40, "uses")])
def test_few_channels_are_left_to_vmap(width, way):
    """In a loop of 8 x 8 products the uses one by one took 3 to 5 times as long."""
    step = lambda p, h, row: (jnp.tanh(h @ p["w"] + row), None)  # noqa: E731
    loss = lambda p, x: jax.lax.scan(partial(step, p), x[0], x)[0].sum()  # noqa: E731
    params = {"w": jnp.ones((width, width))}
    assert dpj.explain(loss, params, jnp.ones((4000, 9, width)))["way"] == way


def test_the_record_names_every_use_and_what_is_instantiated():
    w, b, table = arrays((900, 400), (400,), (5000, 900))
    loss = lambda p, i: jnp.sum(p["table"][i].sum(0) @ p["w"] + p["b"])  # noqa: E731
    found = dpj.explain(loss, {"w": w, "b": b, "table": table}, jnp.zeros((8, 5), int))
    assert found == {
        "method": "auto",
        "way": "uses",
        "uses": [
            {"parameters": ["table"], "primitive": "gather", "form": "counts", "keeps": False},
            {"parameters": ["w"], "primitive": "dot_general", "form": "lengths", "keeps": False},
        ],
        "instantiated": ["b"],
    }


def test_choices_depend_on_shapes_alone_and_nothing_is_run():
    def loss(p, x):
        jax.debug.callback(lambda: pytest.fail("the loss was run"))
        return dense(p, x)

    _, params, x, *_ = made("few positions")
    assert dpj.explain(loss, params, x) == dpj.explain(loss, params, 1e3 * x)
    jax.effects_barrier()


def test_a_record_needs_an_example():
    _, params, x, *_ = made("few positions")
    with pytest.raises(ValueError, match="The batch has no examples. Expected at least one"):
        dpj.explain(dense, params, x[:0])

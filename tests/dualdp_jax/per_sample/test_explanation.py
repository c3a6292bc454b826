# SPDX-License-Identifier: Apache-2.0
"""The record of what a method does: what `auto` chooses, and why."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj

RNG = np.random.default_rng(0)


def arrays(*shapes):
    return [jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32) for shape in shapes]


def dense(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"]))


def convolution(p, x):
    numbers = ("NHC", "HIO", "NHC")
    y = lax.conv_general_dilated(x[None], p["w"], (1,), "SAME", dimension_numbers=numbers)
    return jnp.sum(jnp.tanh(y))


def recurrence(p, x):
    return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(row + h @ p["w"]), None), x[0], x)[0])


MODELS = {
    "a small product": (dense, (6, 4), (6,), "vmap", "lengths"),
    "a large product": (dense, (900, 400), (900,), "uses", "lengths"),
    "few positions": (dense, (300, 200), (4, 300), "uses", "gram"),
    "many positions": (dense, (40, 30), (300, 40), "uses", "gradients"),
    "a small convolution": (convolution, (3, 2, 4), (9, 2), "uses", "gradients"),
    "few pixels": (convolution, (3, 64, 64), (4, 64), "uses", "gram"),
    "a small recurrence": (recurrence, (8, 8), (8, 8), "vmap", "gradients"),
    "16 channels": (recurrence, (16, 16), (9, 16), "vmap", "gram"),
    "40 channels": (recurrence, (40, 40), (9, 40), "uses", "gram"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_record_says_what_auto_does(name):
    loss, shape, x, way, form = MODELS[name]
    w, x = arrays(shape, (16, *x))
    found = dpj.explain(loss, {"w": w}, x)
    assert (found["way"], found["uses"][0]["form"]) == (way, form)
    assert json.loads(json.dumps(found)) == found

    def program(method):
        given = {"max_grad_norm": 1.0, "method": method, "check": "off"}
        sums = lambda w: dpj.clipped_grad_sum(loss, {"w": w}, x, **given)  # noqa: E731
        return str(jax.make_jaxpr(sums)(w))

    assert (program("auto") == program("vmap")) == (way == "vmap")


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

    (w, x), explained = arrays((300, 200), (8, 4, 300)), lambda x: dpj.explain(loss, {"w": w}, x)
    assert explained(x) == explained(1e3 * x)
    jax.effects_barrier()
    with pytest.raises(ValueError, match="The batch has no examples. Expected at least one"):
        explained(x[:0])

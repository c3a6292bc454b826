# SPDX-License-Identifier: Apache-2.0
"""Programs lowered for a GPU: they call nothing on the host and move nothing to it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp_jax.per_sample.methods import METHODS
from tests.dualdp_jax.runs import make_plan, private

RNG = np.random.default_rng(0)
SHAPES = {"table": (5, 3), "w": (6, 4), "b": (4,)}
PARAMS = {name: jnp.asarray(RNG.normal(size=s), jnp.float32) for name, s in SHAPES.items()}
DATA = RNG.integers(0, 5, (20, 2)), RNG.integers(0, 4, 20)


def loss(params, x, y):
    outputs = jnp.tanh(params["table"][x].reshape(-1) @ params["w"] + params["b"])
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y)


def plan():
    return make_plan(num_examples=20, expected_batch_size=5, num_steps=4)


def host_calls(function, *arguments):
    """Operations of the program for CUDA that leave the device, or call what XLA does not know."""
    lowered = function.trace(*arguments).lower(lowering_platforms=("cuda",))
    return re.findall(r"stablehlo\.(custom_call @\w+|send|recv|infeed|outfeed)", lowered.as_text())


def test_what_xla_does_not_know_is_found():
    (found,) = host_calls(jax.jit(jnp.linalg.cholesky), jnp.eye(2))
    assert found == "custom_call @cusolver_potrf_ffi"


@pytest.mark.parametrize("method", METHODS)
def test_no_method_leaves_the_device(method):
    options = {"max_grad_norm": 1.0, "method": method, "check": "off"}
    clipped = jax.jit(lambda p, *batch: dpj.clipped_grad_sum(loss, p, *batch, **options)[:3])
    assert host_calls(clipped, PARAMS, *DATA) == []


def test_no_program_of_an_engine_leaves_the_device(monkeypatch):
    found, jit = {}, jax.jit

    def watched(function, **options):
        compiled = jit(function, **options)

        def call(*arguments):
            found[function.__name__] = host_calls(compiled, *arguments)
            return compiled(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", watched)
        given = {"loss_fn": loss, "params": PARAMS, "data": DATA, "optimizer": optax.adam(0.1)}
        _, step, state, loader = private(plan=plan(), checks=0, **given)
    step(state, next(iter(loader)))
    assert found == {"_add_chunk": [], "_update": []}


def test_noise_inside_a_program_asks_nobody():
    noisy = jax.jit(lambda sums, key: dpj.noisy_mean(sums, plan(), 0, key=key))
    assert host_calls(noisy, PARAMS, np.zeros(2, np.uint32)) == []

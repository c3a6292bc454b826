# SPDX-License-Identifier: Apache-2.0
"""Ordinary JAX models: a private step is that of a plain float64 loop, or is refused."""

from functools import partial

import jax
import numpy as np
import pytest

from dualdp import ExactnessError, UnsupportedLayerError
from dualdp_jax.per_sample.methods import METHODS
from tests.zoo import jax_check
from tests.zoo.entry import one_each
from tests.zoo.jax_models import JAX

pytestmark = pytest.mark.usefixtures("slow_unchecked")

REFUSALS = (UnsupportedLayerError, ExactnessError)
jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
#: Those of the fast tier: a model of every kind.
FAST = {
    *("bytes", "stacked_layers", "selective_state_space", "experts_by_weights", "in_shard_map"),
    *("graph", "linen_lora", "eqx_lstm", "hk_tokens"),
    *("experts_by_ragged_dot", "custom_gradient", "nnx_weight_norm", "linen_u_net"),
}


def entries():
    """Parameters of a test, marked slow where they are."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(entry, id=entry.name, marks=[] if entry.name in FAST else slow)
        for entry in JAX
    ]


def check(entry, step, refusal):
    """Exact, or refused for the reason that the table gives."""
    problem = entry.build()
    if refusal is not None:
        with pytest.raises(REFUSALS, match=refusal):
            step(problem, 1.0)
        return
    truth = jax_check.truth_of(entry)
    bound = float(np.median(truth.norms))
    jax_check.assert_exact(truth, bound, *step(problem, bound))


@pytest.mark.parametrize("entry", entries())
def test_clipped_grad_sum_is_that_of_the_loop(entry):
    check(entry, jax_check.call, entry.refusal)


@pytest.mark.parametrize("entry", entries())
def test_a_step_of_the_engine_is_that_of_the_loop(entry):
    check(entry, jax_check.engine_step, entry.engine_refusal)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "method"), one_each(JAX, METHODS)[1::2])
def test_methods_in_turn_are_that_of_the_loop(entry, method):
    check(entry, partial(jax_check.call, method=method), entry.refusal)


def test_at_most_one_model_in_ten_is_refused():
    refused = [entry.name for entry in JAX if entry.refusal or entry.engine_refusal]
    assert len(refused) <= len(JAX) / 10, refused

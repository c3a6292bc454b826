# SPDX-License-Identifier: Apache-2.0
"""The traced loss: what is traced is counted, and every method runs that program."""

import functools
from collections import Counter

import pytest

import dualdp_jax as dpj
from dualdp_jax.per_sample.methods import METHODS
from tests.dualdp_jax.two_layers import drawn, loss_fn
from tests.tiers import first

CALLS = {
    "grads": dpj.per_sample_grads,
    "norms": dpj.per_sample_norms,
    "sum": functools.partial(dpj.clipped_grad_sum, max_grad_norm=0.5),
}


@pytest.mark.parametrize("method", first(1, ["auto", *METHODS]))
@pytest.mark.parametrize("name", CALLS)
def test_each_call_traces_the_loss_once(name, method):
    """Its check included."""
    params, x, y = drawn()
    traced = Counter()

    def counted(params, x, y):
        traced["loss"] += 1
        return loss_fn(params, x, y)

    CALLS[name](counted, params, x, y, method=method, check="always")
    assert traced["loss"] == 1

# SPDX-License-Identifier: Apache-2.0
"""The traced loss: what is traced is counted, and every method runs that program."""

from collections import Counter

import pytest

import dualdp_jax as dpj
from dualdp_jax.per_sample.methods import METHODS
from tests.dualdp_jax.two_layers import drawn, loss_fn


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=() if m == "auto" else pytest.mark.slow) for m in ("auto", *METHODS)],
)
def test_each_call_traces_the_loss_once(method):
    """Its check included."""
    params, x, y = drawn()
    traced = Counter()

    def counted(params, x, y):
        traced["loss"] += 1
        return loss_fn(params, x, y)

    for call, options in (
        (dpj.per_sample_grads, {}),
        (dpj.per_sample_norms, {}),
        (dpj.clipped_grad_sum, {"max_grad_norm": 0.5}),
    ):
        traced.clear()
        call(counted, params, x, y, method=method, check="always", **options)
        assert traced["loss"] == 1

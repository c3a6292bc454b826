# SPDX-License-Identifier: Apache-2.0
"""Kinds of clipping: a contribution is at most its bound, whatever the scale."""

import jax
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp.plan.clipping import CLIPPING
from dualdp_jax.per_sample.methods import METHODS
from tests.closeness import factors_of
from tests.dualdp_jax.two_layers import (
    assert_trees_close,
    drawn,
    loss_fn,
    norms_of,
    per_sample,
    weighted,
)

#: Each method by one kind of clipping, and "book_keeping" by all.
PAIRS = {(m, CLIPPING[k % 3]) for k, m in enumerate(METHODS)}
PAIRS |= {("book_keeping", clipping) for clipping in CLIPPING}


@pytest.mark.parametrize(
    ("method", "clipping"),
    [
        pytest.param(*p, marks=pytest.mark.slow if p[0] in ("vmap", "loop") else ())
        for p in sorted(PAIRS)
    ],
)
def test_contributions_are_bounded(method, clipping):
    """Of each row of eight, the others masked: none is cut off from its batch (59)."""
    params, x, y = drawn(8)

    @jax.jit
    def contribution(scale, bound, mask):
        scaled = lambda p, x, y: loss_fn(p, x, y) * scale  # noqa: E731
        return dpj.clipped_grad_sum(
            scaled, params, x, y, max_grad_norm=bound, clipping=clipping, method=method, mask=mask
        ).grads

    for scale in (1e-30, 1e-18, 1e-6, 1.0, 1e8):
        for bound in (1e-30, 1e-12, 1e-3, 1.0, 1e6):
            for k in (0, 5):
                grads = contribution(scale, bound, np.arange(8) == k)
                norm = norms_of(jax.tree.map(lambda g: np.asarray(g)[None], grads))[0]
                assert norm <= bound * (1 + 1e-4), (scale, bound)


def test_per_layer_groups_share_the_bound():
    params, x, y = drawn()
    grads, bounds = per_sample(params, x, y), {"a": 0.3, "b": 2.0}
    given = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bounds, clipping="per_layer")
    for group, bound in bounds.items():
        factors = factors_of(norms_of(grads[group]), bound)
        assert_trees_close(given.grads[group], weighted(factors, grads[group]))
    np.testing.assert_allclose(given.norms, norms_of(grads), rtol=1e-5)
    even, share = (
        dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bound, clipping="per_layer")
        for bound in (1.0, dict.fromkeys("ab", 0.5**0.5))
    )
    assert_trees_close(even.grads, share.grads)

# SPDX-License-Identifier: Apache-2.0
"""Clip factors: bounded for every input, exact below the bound, and each example's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualdp.plan import clipping

NORMS = st.lists(
    st.floats(0, 1e30, allow_nan=False) | st.sampled_from([np.inf, np.nan]), min_size=1, max_size=8
)
BOUND = st.floats(1e-6, 1e6)


@pytest.mark.parametrize("kind", clipping.CLIPPING)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(norms=NORMS, bound=BOUND)
def test_factors_bound_the_norm(kind, dtype, norms, bound):
    with np.errstate(over="ignore"):
        norms = np.asarray(norms, dtype)
    factors = clipping.factors_for(kind, norms, dtype(bound), xp=np)
    finite = np.isfinite(norms)
    assert factors.dtype == dtype
    assert factors.shape == norms.shape
    assert (factors >= 0).all()
    assert (factors[~finite] == 0).all()
    product = factors[finite].astype(np.float64) * norms[finite].astype(np.float64)
    limit = float(dtype(bound)) / (1 + clipping.margin_of(dtype(0).dtype))
    assert (product <= limit * (1 + 2 * np.finfo(dtype).eps)).all()


@given(norms=NORMS, bound=BOUND, other=st.floats(0, 1e30))
def test_factors_are_per_sample(norms, bound, other):
    for kind in clipping.CLIPPING:
        alone = clipping.factors_for(kind, np.asarray(norms), bound, xp=np)
        among = clipping.factors_for(kind, np.asarray([*norms, other]), bound, xp=np)
        np.testing.assert_array_equal(alone, among[:-1])


def test_gradients_within_the_bound_are_untouched():
    for dtype in (np.float32, np.float64):
        limit = 1 / dtype(1 + clipping.margin_of(np.dtype(dtype)))
        norms = np.array([0.0, 0.5, limit, 1.0, 2.0], dtype)
        factors = clipping.factors_for("flat", norms, 1.0, xp=np)
        assert (factors[:3] == 1).all()
        assert (factors[3:] < 1).all()
        assert factors[4] == limit / 2


def test_the_margin_is_that_of_the_sums():
    assert clipping.margin_of(np.dtype("float64")) == clipping.margin_of("torch.float64") == 1e-12
    assert clipping.margin_of(np.dtype("float32")) == clipping.margin_of("torch.bfloat16") == 1e-4


def test_a_large_gradient_is_scaled_down_and_a_small_one_is_not():
    """The factor is min(1, C / norm), not min(norm / C, 1), which lets large gradients pass."""
    factors = clipping.factors_for("flat", np.array([10.0, 0.1, 4.0]), 1.0, xp=np)
    np.testing.assert_allclose(factors, [0.1, 1.0, 0.25])


def test_automatic_factors_are_those_of_auto_s():
    factors = clipping.factors_for("automatic", np.array([0.0, 1.99]), 2.0, xp=np)
    np.testing.assert_allclose(factors, [200.0, 1.0])


def test_group_bounds_keep_the_whole_sensitivity():
    bounds = clipping.group_bounds(["a", "b", "c"], 2.0)
    assert np.sqrt(sum(bound**2 for bound in bounds.values())) == pytest.approx(2.0)
    assert clipping.group_bounds(["a"], {"a": 0.5}) == {"a": 0.5}


def test_group_bounds_refuse_missing_and_unknown_groups():
    with pytest.raises(ValueError, match=r"lacks \['b'\] and names \['c'\]. Expected one bound"):
        clipping.group_bounds(["a", "b"], {"a": 1.0, "c": 1.0})
    with pytest.raises(ValueError, match=r"max_grad_norm\['a'\]=-1.0 is out of range"):
        clipping.group_bounds(["a"], {"a": -1.0})

# SPDX-License-Identifier: Apache-2.0
"""The shared grid: every case, both stacks, every method, against one float64 loop."""

import numpy as np
import pytest

from tests import reference
from tests.cases import layers
from tests.closeness import (
    assert_sum_close,
    factors_of,
    whole_norms,
)
from tests.conftest import BACKENDS

both = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
#: One of each kind, for properties that do not depend on the layer.
SOME = tuple(case for case in layers.ALL if case.name in {"mlp", "cnn", "token_net", "tied"})


def clipped(grads, factors):
    """Sum of per-sample gradients {name: (n, *shape)} scaled by factors (n,)."""
    return {name: np.tensordot(factors, grad, axes=1) for name, grad in grads.items()}


def middle_norm(grads):
    """A bound that clips some examples and not others."""
    whole = whole_norms(grads)
    return float(np.median(whole)) if len(whole) else 1.0


@both
@pytest.mark.parametrize(
    ("case", "size"),
    [(case, size) for case, sizes in zip(SOME, ((1, 2), (2,), (3,), (5,)), strict=True)
     for size in sizes],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_physical_batches_equal_one_logical_batch(backend, case, size):
    bound = middle_norm(reference.per_sample_grads(case))
    once = backend.clipped_grad_sum(case, max_grad_norm=bound)
    parts = backend.clipped_grad_sum(case, max_grad_norm=bound, physical_batch_size=size)
    for name, total in once[0].items():
        np.testing.assert_allclose(parts[0][name], total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(parts[1], once[1], rtol=1e-5)
    np.testing.assert_allclose(parts[2], once[2], rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@both
def test_an_example_with_nan_contributes_zero(backend, monkeypatch):
    case = next(case for case in SOME if case.name == "mlp")
    grads = reference.per_sample_grads(case)
    clean = layers.inputs
    spoilt = lambda case: np.where(np.arange(case.n)[:, None] == 1, np.nan, clean(case))  # noqa: E731
    monkeypatch.setattr(layers, "inputs", lambda case: spoilt(case).astype(case.dtype))
    bound = middle_norm(grads)
    factors = factors_of(whole_norms(grads), bound, case.dtype) * [1, 0, 1]
    for method in ("auto", *backend.METHODS):
        sums, whole, _ = backend.clipped_grad_sum(case, max_grad_norm=bound, method=method)
        assert_sum_close(sums, clipped(grads, factors), grads, case.dtype)
        assert not np.isfinite(whole[1])
    sums, whole, losses = backend.clipped_grad_sum(
        case, max_grad_norm=bound, mask=np.array([True, False, True])
    )
    assert_sum_close(sums, clipped(grads, factors), grads, case.dtype)
    assert whole[1] == losses[1] == 0

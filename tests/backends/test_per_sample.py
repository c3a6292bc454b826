# SPDX-License-Identifier: Apache-2.0
"""The shared grid: every case, both stacks, every method, against one float64 loop."""

import importlib

import numpy as np
import pytest

from tests import reference
from tests.cases import layers
from tests.closeness import (
    assert_grads_close,
    assert_sum_close,
    factors_of,
    norms,
    whole_norms,
)
from tests.conftest import BACKENDS

both = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
every_case = pytest.mark.parametrize("case", layers.ALL, ids=lambda case: case.name)
#: One of each kind, for properties that do not depend on the layer.
SOME = tuple(case for case in layers.ALL if case.name in {"mlp", "cnn", "token_net", "tied"})
some_cases = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)


def clipped(grads, factors):
    """Sum of per-sample gradients {name: (n, *shape)} scaled by factors (n,)."""
    return {name: np.tensordot(factors, grad, axes=1) for name, grad in grads.items()}


def middle_norm(grads):
    """A bound that clips some examples and not others."""
    whole = whole_norms(grads)
    return float(np.median(whole)) if len(whole) else 1.0


def methods_for(backend, turn):
    """All of torch's. JAX compiles each, so that the methods take turns."""
    ways = ("auto", *backend.METHODS)
    return ways if backend.NAME == "torch" else (ways[turn % len(ways)],)


def check_grads(backend, case, methods):
    truth = reference.per_sample_grads(case)
    for method in methods:
        assert_grads_close(backend.per_sample_grads(case, method=method), truth, case.dtype)


def check_norms(backend, case, methods):
    truth = reference.per_sample_grads(case)
    for method in methods:
        whole = backend.per_sample_norms(case, method=method)
        np.testing.assert_allclose(whole, whole_norms(truth), rtol=RTOL[case.dtype])


def check_sums(backend, case, methods):
    truth = reference.per_sample_grads(case)
    bound = middle_norm(truth)
    factors = factors_of(whole_norms(truth), bound, case.dtype)
    for method in methods:
        sums, whole, losses = backend.clipped_grad_sum(case, max_grad_norm=bound, method=method)
        assert_sum_close(sums, clipped(truth, factors), truth, case.dtype)
        np.testing.assert_allclose(whole, whole_norms(truth), rtol=RTOL[case.dtype])
        np.testing.assert_allclose(losses, reference.losses(case), rtol=1e-5, atol=2e-6)


@both
@every_case
@pytest.mark.parametrize("check", [check_grads, check_norms, check_sums])
def test_the_grid_matches_the_loop(backend, case, check):
    check(backend, case, methods_for(backend, layers.ALL.index(case)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax"], indirect=True)
@every_case
@pytest.mark.parametrize("shift", [1, 3])
def test_two_more_methods_of_jax_match_the_loop(backend, case, shift):
    """So that every kind of layer meets every method; the checks take turns, as the methods do."""
    turn = layers.ALL.index(case) + shift
    check = (check_grads, check_norms, check_sums)[(turn + turn // 3) % 3]
    check(backend, case, methods_for(backend, turn))


@both
@every_case
def test_norms_per_parameter_match_the_loop(backend, case):
    truth = reference.per_sample_grads(case)
    method = methods_for(backend, layers.ALL.index(case))[0]
    parts = backend.per_sample_norms(case, per_parameter=True, method=method)
    assert sorted(parts) == sorted(truth)
    for name, part in parts.items():
        floor = 1e-6 * float(whole_norms(truth).max(initial=0))
        np.testing.assert_allclose(part, norms(truth[name]), rtol=1e-4, atol=floor)


RTOL = {"float32": 2e-5, "float64": 1e-10}


@every_case
def test_the_stacks_agree_directly(case):
    backends = [importlib.import_module(f"tests.backends._{name}") for name in BACKENDS]
    ours, theirs = (
        backend.per_sample_grads(case, method=methods_for(backend, layers.ALL.index(case))[0])
        for backend in backends
    )
    assert_grads_close(ours, theirs, case.dtype)


@both
@some_cases
def test_a_masked_example_contributes_nothing(backend, case):
    grads = reference.per_sample_grads(case)
    mask = np.array([True, False, True])
    bound = middle_norm(grads)
    sums, whole, losses = backend.clipped_grad_sum(case, max_grad_norm=bound, mask=mask)
    factors = mask * factors_of(whole_norms(grads), bound, case.dtype)
    assert_sum_close(sums, clipped(grads, factors), grads, case.dtype)
    assert whole[1] == losses[1] == 0
    np.testing.assert_allclose(whole[mask], whole_norms(grads)[mask], rtol=2e-5)
    nothing, whole, losses = backend.clipped_grad_sum(
        case, max_grad_norm=bound, mask=np.zeros(3, bool)
    )
    assert not whole.any()
    assert not losses.any()
    assert all(not total.any() for total in nothing.values())


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


@both
@some_cases
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("bound", [1e-3, 0.1, 1e4])
def test_every_contribution_is_bounded(backend, case, clipping, bound):
    """One example alone: what is summed, measured in float64, is at most C (known_failures 1)."""
    turn = SOME.index(case) + ("flat", "per_layer", "automatic").index(clipping)
    for method in methods_for(backend, turn):
        for seed in range(3):
            sums, _, _ = backend.clipped_grad_sum(
                case.but(n=1, seed=seed), max_grad_norm=bound, clipping=clipping, method=method
            )
            size = np.sqrt(sum((np.asarray(total, float) ** 2).sum() for total in sums.values()))
            assert 0 < size <= bound * (1 + 1e-4)


@both
@some_cases
def test_a_huge_bound_gives_the_plain_gradient(backend, case):
    truth = reference.per_sample_grads(case)
    sums, _, _ = backend.clipped_grad_sum(case, max_grad_norm=1e9)
    assert_sum_close(sums, clipped(truth, np.ones(case.n)), truth, case.dtype)


@both
@some_cases
def test_per_layer_clipping_bounds_each_module(backend, case):
    """A group is a module in torch, a branch of the tree in JAX; the grid's tree is flat."""
    grads = reference.per_sample_grads(case)
    group_of = {"torch": lambda name: name.rpartition(".")[0], "jax": lambda name: ""}[backend.NAME]
    groups = sorted({group_of(name) for name in grads})
    bound = middle_norm(grads)
    sums, whole, _ = backend.clipped_grad_sum(case, max_grad_norm=bound, clipping="per_layer")
    np.testing.assert_allclose(whole, whole_norms(grads), rtol=2e-5)
    expected = {}
    for group in groups:
        part = {name: grad for name, grad in grads.items() if group_of(name) == group}
        share = bound / np.sqrt(len(groups))
        expected |= clipped(part, factors_of(whole_norms(part), share, case.dtype))
    assert_sum_close(sums, expected, grads, case.dtype)


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


@both
def test_the_checker_sees_a_wrong_backend(backend):
    """A gradient that is off by one part in a thousand, in one example of one parameter, fails."""
    case = SOME[0]
    truth = reference.per_sample_grads(case)
    wrong = {name: grad.copy() for name, grad in backend.per_sample_grads(case).items()}
    assert_grads_close(wrong, truth, case.dtype)
    name = next(iter(wrong))
    wrong[name][0] *= 1.001
    with pytest.raises(AssertionError, match="off by"):
        assert_grads_close(wrong, truth, case.dtype)
    with pytest.raises(AssertionError):
        assert_grads_close({**wrong, "extra": wrong[name]}, truth, case.dtype)

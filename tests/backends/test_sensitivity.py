# SPDX-License-Identifier: Apache-2.0
"""One example moves the sum before noise by at most C: the fact that all accounting stands on."""

import numpy as np
import pytest

import dualdp_torch.per_sample.api
import dualdp_torch.per_sample.clip
from dualdp import ExactnessError
from dualdp.plan.clipping import CLIPPING
from tests.cases import layers
from tests.conftest import BACKENDS

both = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
clippings = pytest.mark.parametrize("clipping", CLIPPING)
SLACK = 1 + 1e-4
N = 5
#: Every model of the grid once; sizes and precisions do not matter here.
MODELS = tuple(
    case.but(n=N) for case in (*layers._LINEAR, *layers._CONV, *layers._EMBEDDING, *layers._NORM)
) + tuple(case.but(n=N) for case in layers._SPECIAL)
SOME = tuple(case for case in MODELS if case.name.split("[")[0] in {"mlp", "cnn", "tied"})


def ids_of(case):
    return case.name


def ordinary(x, rng):
    """As the grid draws it."""
    return x


def outlier(x, rng):
    """One example that is far larger than the others."""
    return np.concatenate([x[:1] * 1e3, x[1:]])


def tiny(x, rng):
    """Gradients that lie below the bound, or far below it."""
    return x * 10.0 ** rng.uniform(-4, 0)


def equal(x, rng):
    """Examples that pull in one direction."""
    return np.repeat(x[:1], len(x), axis=0)


KINDS = {"float": (ordinary, outlier, tiny, equal), "ids": (ordinary, equal)}


def moved(one, other):
    """L2 distance of two sums, in float64."""
    assert one.keys() == other.keys()
    squares = (np.square(one[n].astype(float) - other[n].astype(float)).sum() for n in one)
    return float(np.sqrt(sum(squares)))


def without(*rows):
    """Mask of a batch that lacks these rows."""
    return ~np.isin(np.arange(N), rows)


def check(backend, case, clipping, bound, method="auto"):
    """Take out one example, another one, and so change one for another."""
    options = {"max_grad_norm": bound, "clipping": clipping, "method": method}
    whole = backend.clipped_grad_sum(case, mask=without(), **options)[0]
    first, last = (
        backend.clipped_grad_sum(case, mask=without(k), **options)[0] for k in (0, N - 1)
    )
    assert moved(whole, first) <= bound * SLACK
    assert moved(whole, last) <= bound * SLACK
    assert moved(first, last) <= 2 * bound * SLACK
    return max(moved(whole, first), moved(whole, last)) / bound


def change_inputs(monkeypatch, kind, seed=0):
    """Draw batches of another kind, in the case's precision."""
    real = layers.inputs

    def drawn(case):
        x = real(case)
        return kind(x, np.random.default_rng(seed)).astype(x.dtype)

    monkeypatch.setattr(layers, "inputs", drawn)


@both
@pytest.mark.parametrize("case", MODELS, ids=ids_of)
def test_one_example_moves_the_sum_by_at_most_the_bound(backend, case):
    """Each kind of clipping in turn; the slow test below has all."""
    check(backend, case, CLIPPING[MODELS.index(case) % len(CLIPPING)], 0.7)


@pytest.mark.slow
@both
@clippings
@pytest.mark.parametrize("case", MODELS, ids=ids_of)
def test_every_model_under_every_clipping(backend, case, clipping):
    check(backend, case, clipping, 0.7)


@both
@clippings
@pytest.mark.parametrize("case", SOME, ids=ids_of)
def test_the_bound_is_reached(backend, case, clipping):
    """So that the tests here look at clipped examples, and not at small ones."""
    reached = check(backend, case, clipping, 1e-3)
    assert reached > (0.3 if clipping == "per_layer" else 0.9)


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
@pytest.mark.parametrize("case", MODELS, ids=ids_of)
def test_any_batch_and_every_method(backend, case, monkeypatch):
    clipping = CLIPPING[(MODELS.index(case) + 1) % len(CLIPPING)]
    for kind in KINDS[case.kind]:
        with monkeypatch.context() as patch:
            change_inputs(patch, kind)
            for method, bound in zip(backend.METHODS, (1e-3, 0.1, 1.0, 30.0, 0.5), strict=True):
                check(backend, case, clipping, bound, method)


@clippings
@pytest.mark.parametrize("backend", ["jax"], indirect=True)
@pytest.mark.parametrize("kind", [outlier, equal])
@pytest.mark.parametrize("case", SOME[:2], ids=ids_of)
def test_any_batch_on_jax(backend, case, clipping, kind, monkeypatch):
    change_inputs(monkeypatch, kind)
    check(backend, case, clipping, 0.7)


@both
@clippings
@pytest.mark.parametrize("case", SOME, ids=ids_of)
def test_a_batch_without_the_row_is_a_batch_with_it_masked(backend, case, clipping):
    """Removed for good: the batch of one example less, whose rows are the first ones of this."""
    options = {"max_grad_norm": 0.7, "clipping": clipping}
    assert np.array_equal(layers.inputs(case)[:-1], layers.inputs(case.but(n=N - 1)))
    shorter = backend.clipped_grad_sum(case.but(n=N - 1), **options)[0]
    whole = backend.clipped_grad_sum(case, **options)[0]
    masked = backend.clipped_grad_sum(case, mask=without(N - 1), **options)[0]
    assert moved(whole, shorter) <= 0.7 * SLACK
    assert moved(masked, shorter) <= 0.7 * 1e-4


@clippings
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
@pytest.mark.parametrize(
    "fault",
    [
        lambda clipping, norms, bound, *, xp: xp.ones_like(norms),
        lambda clipping, norms, bound, *, xp: bound / norms * 1.001,
        lambda clipping, norms, bound, *, xp: (norms / bound).clamp(max=1.0),
        lambda clipping, norms, bound, *, xp: bound / norms * len(norms) / norms.isfinite().sum(),
    ],
    ids=["not clipped", "a thousandth too large", "the inverse", "right"],
)
def test_the_test_sees_a_wrong_clip(backend, clipping, fault, monkeypatch, request):
    monkeypatch.setattr(dualdp_torch.per_sample.clip, "factors_for", fault)
    if "right" not in request.node.callspec.id:  # the spot check sees it before this test does
        with pytest.raises(ExactnessError, match="of one example differs from plain autodiff"):
            check(backend, SOME[0], clipping, 1e-3)
    monkeypatch.setattr(dualdp_torch.per_sample.api, "check_numbers", lambda *_: None)
    if "right" in request.node.callspec.id:
        check(backend, SOME[0], clipping, 1e-3)
        return
    with pytest.raises(AssertionError):
        check(backend, SOME[0], clipping, 1e-3)

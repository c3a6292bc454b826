# SPDX-License-Identifier: Apache-2.0
"""The one grid: form x layer x method x clipping x unit x dtype x stack, covered by pairs.

Every case equals the float64 loop, and each unit's contribution to the clipped sum is at most C.
"""

import itertools

import numpy as np
import pytest

import dualdp_torch as dpt
from dualdp.plan.clipping import CLIPPING, MARGIN
from tests.closeness import assert_grads_close, assert_sum_close, factors_of, norms, whole_norms
from tests.dualdp_torch.checks import Ways
from tests.grid.problems import (
    ANSWERS,
    FORMS,
    METHODS,
    OF_TORCH,
    SHARED,
    UNITS,
    Setting,
    losses,
    truth_of_units,
)
from tests.pairwise import pairwise

FASTEST = "book_keeping"
OF_NORMS = ("gram", "lengths", "pairs", "keep", "discard")  # forms that `materialize` never takes
RTOL = {"float32": 2e-5, "float64": 1e-10}


def cases_of(stack, problems):
    """(problem, setting) in which every two values meet; problems with the same forms together."""
    for kind in sorted({problem.kind for problem in problems}):
        forms = FORMS.get((stack, kind), FORMS[stack, "linear"])
        alike = [problem for problem in problems if problem.kind == kind]
        never = {("two_pass", "per_layer")}  # refused by torch
        never |= set(itertools.product(("vmap", "loop"), forms[1:]))  # they have no forms
        never |= set(itertools.product(("materialize",), OF_NORMS))
        never |= {(p, m) for p in alike for m in METHODS if m not in p.methods}
        factors = (METHODS, CLIPPING, UNITS, RTOL, forms)
        for problem, *setting in pairwise(alike, *factors, never=never):
            yield problem, Setting(*setting)


def parameters(stack, problems):
    """Cases for pytest; compiling a program takes JAX seconds."""
    return [
        pytest.param(
            stack,
            problem,
            setting,
            id="-".join((stack, problem.name, *setting)),
            marks=pytest.mark.slow if is_slow(stack, setting) else (),
        )
        for problem, setting in cases_of(stack, problems)
    ]


def is_slow(stack, setting):
    """What takes no rule is slow, and JAX compiles each case: one method is fast."""
    return setting.method in ("vmap", "loop") or (stack == "jax" and setting.method != FASTEST)


def expected_factors(grads, clipping, bound, dtype):
    """Name -> (units,) factors of the definition, float64."""
    if clipping == "automatic":
        whole = whole_norms(grads)
        found = bound / (whole + 0.01) / (1 + MARGIN[dtype])
        return dict.fromkeys(grads, found)
    if clipping == "flat":
        return dict.fromkeys(grads, factors_of(whole_norms(grads), bound, dtype))
    groups = {}
    for name in grads:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    share = bound / np.sqrt(len(groups))
    return {
        name: factors_of(whole_norms({n: grads[n] for n in names}), share, dtype)
        for names in groups.values()
        for name in names
    }


@pytest.mark.parametrize(
    ("stack", "problem", "setting"),
    [*parameters("torch", SHARED), *parameters("torch", OF_TORCH), *parameters("jax", SHARED)],
)
def test_every_contribution_is_bounded(stack, problem, setting):
    """Gradients, norms and sum are the loop's; a unit alone adds at most C (known_failures 1)."""
    truth, dtype = truth_of_units(problem, setting.unit), setting.dtype
    whole = whole_norms(truth)
    bound = float(np.median(whole))
    answer = ANSWERS[stack](problem, setting, bound)

    assert_grads_close(answer.grads, truth, dtype)
    np.testing.assert_allclose(answer.norms, whole, rtol=RTOL[dtype])
    for name, part in answer.parts.items():
        floor = 1e-6 * whole.max()
        np.testing.assert_allclose(part, norms(truth[name]), rtol=5 * RTOL[dtype], atol=floor)

    factors = expected_factors(truth, setting.clipping, bound, dtype)
    everybody = np.ones(len(whole), bool)
    sums, found = answer.clipped(everybody)
    np.testing.assert_allclose(found, whole, rtol=RTOL[dtype])
    expected = {name: np.tensordot(factors[name], grad, axes=1) for name, grad in truth.items()}
    assert_sum_close(sums, expected, truth, dtype)

    for unit in range(len(whole)):
        alone, found = answer.clipped(np.arange(len(whole)) == unit)
        size = np.sqrt(sum(np.square(part.astype(float)).sum() for part in alone.values()))
        assert size <= bound * (1 + 1e-4)
        assert (found[np.arange(len(whole)) != unit] == 0).all()
        expected = {name: factors[name][unit] * grad[unit] for name, grad in truth.items()}
        assert_sum_close(alone, expected, truth, dtype)


@pytest.mark.parametrize("problem", [*SHARED, *OF_TORCH], ids=lambda problem: problem.name)
def test_auto_takes_the_fast_way(problem, monkeypatch):
    """A rule that falls through to vmap would be right and slow."""
    model, loss, batch = problem.torch_model("float32")
    ways = Ways(monkeypatch)
    dpt.per_sample_norms(loss, model, *batch, method="auto")
    assert ways.taken == [problem.way]


@pytest.mark.parametrize("problem", OF_TORCH, ids=lambda problem: problem.name)
def test_a_recorded_forward_gives_the_same(problem):
    """The ambient form of the user's own loop."""
    model, loss, batch = problem.torch_model("float32")
    truth = truth_of_units(problem, "rows")
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        losses(model, *batch).mean().backward()
    assert_grads_close({n: g.numpy() for n, g in record.grads().items()}, truth, "float32")
    np.testing.assert_allclose(record.norms().numpy(), whole_norms(truth), rtol=2e-5)

# SPDX-License-Identifier: Apache-2.0
"""The one grid: form x layer x method x clipping x unit x dtype x stack, covered by pairs.

Every case equals the float64 loop, and each unit's contribution to the clipped sum is at most C.
"""

import itertools

import numpy as np
import pytest
from torch.utils import _pytree as pytree

import dualdp_torch as dpt
from dualdp.plan.clipping import CLIPPING, MARGIN
from dualdp_torch.rules import conv, conv_forms, linear, together
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
OF_ROWS = ("gram", "discard", "unfold")  # forms of torch that gradients of units never take
WITHOUT_RULES = ("vmap", "loop")  # methods that meet one model of a kind
OF_NORMS = ("gram", "lengths", "pairs", "keep", "discard")  # forms that `materialize` never takes
RTOL = {"float32": 2e-5, "float64": 1e-10}
AT_LEAST = 5  # cases that a fault in a form must fail


def cases_of(stack, problems):
    """(problem, setting) in which every two values meet; problems with the same forms together."""
    for kind in sorted({problem.kind for problem in problems}):
        forms = FORMS.get((stack, kind), FORMS[stack, "linear"])
        alike = [problem for problem in problems if problem.kind == kind]
        never = {("two_pass", "per_layer")}  # refused by torch
        never |= set(itertools.product(WITHOUT_RULES, forms[1:]))
        never |= set(itertools.product(("materialize",), OF_NORMS))
        never |= set(itertools.product(alike[1:], WITHOUT_RULES))
        never |= set(itertools.product([*UNITS][1:], OF_ROWS if stack == "torch" else ()))
        factors = (METHODS, CLIPPING, UNITS, RTOL, forms)
        for problem, *setting in pairwise(alike, *factors, never=never):
            yield stack, problem, Setting(*setting)


CASES = [*cases_of("torch", (*SHARED, *OF_TORCH)), *cases_of("jax", SHARED)]


def parameters(cases):
    """Cases for pytest; compiling a program takes JAX seconds, so one method is fast."""
    for stack, problem, setting in cases:
        is_slow = stack == "jax" and setting.method != FASTEST
        name = "-".join((stack, problem.name, *setting))
        marks = pytest.mark.slow if is_slow else ()
        yield pytest.param(stack, problem, setting, id=name, marks=marks)


def expected_factors(grads, clipping, bound, dtype):
    """Name -> (units,) factors of the definition, float64."""
    if clipping == "automatic":
        found = bound / (whole_norms(grads) + 0.01) / (1 + MARGIN[dtype])
        return dict.fromkeys(grads, found)
    group = {name: name.rpartition(".")[0] if clipping == "per_layer" else "" for name in grads}
    share = bound / np.sqrt(len(set(group.values())))
    factors = {}
    for name in grads:
        members = {other: grad for other, grad in grads.items() if group[other] == group[name]}
        factors[name] = factors_of(whole_norms(members), share, dtype)
    return factors


def assert_exact(stack, problem, setting):
    """Gradients, norms and sums of units, of all together and of each alone."""
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
    for mask in (np.ones(len(whole), bool), *np.eye(len(whole), dtype=bool)):
        sums, found = answer.clipped(mask)
        np.testing.assert_allclose(found, np.where(mask, whole, 0), rtol=RTOL[dtype])
        expected = {
            name: np.tensordot(factors[name] * mask, grad, axes=1) for name, grad in truth.items()
        }
        assert_sum_close(sums, expected, truth, dtype)
        size = np.sqrt(sum(np.square(part.astype(float)).sum() for part in sums.values()))
        assert size <= bound * mask.sum() * (1 + 1e-4)


@pytest.mark.parametrize(("stack", "problem", "setting"), [*parameters(CASES)])
def test_every_contribution_is_bounded(stack, problem, setting):
    """Gradients, norms and sum are the loop's; a unit alone adds at most C (known_failures 1)."""
    assert_exact(stack, problem, setting)


def smaller(made):
    """0.8 of the numbers that a form makes: gradients, or the products of a Gram matrix."""
    if not isinstance(made, together.Gram):
        return pytree.tree_map(lambda part: 0.8 * part, made)

    def fill(*out):
        made.fill(*out)
        out[0].mul_(0.8)

    return made._replace(fill=fill)


#: (kind, form) -> where its numbers are made. For JAX: tests/dualdp_jax/rules/test_forms.py.
PLACES = {
    ("linear", "gram"): (vars(linear), "Gram"),
    ("linear", "keep"): (linear.RULE.grads, "weight"),
    ("linear", "discard"): (vars(linear), "weight_grads"),
    ("convolution", "gram"): (vars(conv), "Gram"),
    **{("convolution", form): (conv_forms.FORMS, form) for form in conv_forms.FORMS},
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), PLACES)
def test_a_fault_in_a_form_fails_five_cases(kind, form, monkeypatch):
    """Of those whose setting takes the form (known_failures 96)."""
    owner, name = PLACES[kind, form]
    right = owner[name]
    monkeypatch.setitem(owner, name, lambda *a, **k: smaller(right(*a, **k)))
    failed = 0
    for stack, problem, setting in CASES:
        if (stack, problem.kind, setting.form) == ("torch", kind, form) and failed < AT_LEAST:
            try:
                assert_exact(stack, problem, setting)
            except AssertionError:
                failed += 1
    assert failed >= AT_LEAST


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

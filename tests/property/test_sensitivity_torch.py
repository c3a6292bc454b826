# SPDX-License-Identifier: Apache-2.0
"""One example replaced moves the engine's clipped sum by at most 2 C, whatever loss is written.

Every loss of `torch.nn.functional`, with every mistake of `losses.MISTAKES`, on ten architectures:
the library refuses it, or the property holds. Written correctly, it is accepted and exact.
"""

import random
import warnings
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.property import losses
from tests.property.losses import ARCHITECTURES, CORRECT, LOSSES, MISTAKES, N
from tests.property.torch_engine import (
    clipped_sum,
    distance,
    expected_sum,
    is_refusal,
    plain_gradient,
)

# A person reads the warning about broadcasting or does not; the property holds in both cases.
pytestmark = pytest.mark.filterwarnings("ignore")
BOUND, SLACK = 1e-2, 1 + 1e-9
#: Scales of the example that replaces another one.
SCALES = (1.0, 30.0, 1e3)
SAMPLE = 120


def pairs(forms):
    """(loss, form) that can be written."""
    return [
        (loss, form)
        for loss, of in LOSSES.items()
        for form, how in forms.items()
        if how.fits(loss, of)
    ]


def sampled(forms, count, seed):
    """Some (loss, form, architecture); every form once at least."""
    rng = random.Random(seed)
    every = [(*pair, architecture) for pair in pairs(forms) for architecture in ARCHITECTURES]
    chosen = [rng.choice([case for case in every if case[1] == form]) for form in forms]
    return sorted({*chosen, *rng.sample(every, count - len(chosen))})


def built(loss, architecture):
    """Model, inputs and targets, and those that replace them."""
    torch.manual_seed(0)
    of, how = LOSSES[loss], ARCHITECTURES[architecture]
    model = how.build().double()
    return model, (how.inputs(N, 1), of.target(N, 2)), (how.inputs(1, 3), of.target(1, 4))


def criterion_of(loss, form):
    """(model, inputs, targets) -> scalar."""
    return partial(form.criterion, LOSSES[loss])


def accepted_sum(model, criterion, data, form):
    """The engine's sum, or None where the library refuses, in words of its own."""
    try:
        return clipped_sum(model, criterion, data, bound=BOUND, reduction=form.reduction)
    except (ValueError, RuntimeError, TypeError) as error:
        assert is_refusal(error), f"{type(error).__name__}: {error}"
        return None


def neighbours(data, other):
    """The data with the last example replaced: by another one, by its inputs, by its target."""
    x, t = data
    for scale in SCALES:
        new_x, new_t = (part * scale if part.is_floating_point() else part for part in other)
        yield torch.cat([x[:-1], new_x]), torch.cat([t[:-1], new_t])
        yield torch.cat([x[:-1], new_x]), t
        yield x, torch.cat([t[:-1], new_t])


def violation(loss, form, architecture):
    """How far beyond 2 C a replaced example moves the sum, or None; in units of C."""
    how = MISTAKES[form]
    model, data, other = built(loss, architecture)
    criterion = criterion_of(loss, how)
    try:
        plain_gradient(model, criterion, data)
    except (ValueError, RuntimeError, IndexError):
        return None  # torch itself does not run it
    sums = accepted_sum(model, criterion, data, how)
    if sums is None:
        return None
    worst = 0.0
    for neighbour in neighbours(data, other):
        if LOSSES[loss].call is F.binary_cross_entropy and not (neighbour[1] <= 1).all():
            continue
        try:
            plain_gradient(model, criterion, neighbour)
        except (ValueError, RuntimeError, IndexError):
            continue
        moved = accepted_sum(model, criterion, neighbour, how)
        worst = max(worst, 0.0 if moved is None else distance(sums, moved) / BOUND)
    return worst if worst > 2 * SLACK else None


@pytest.mark.parametrize(("loss", "form", "architecture"), sampled(MISTAKES, SAMPLE, seed=0))
def test_a_mistake_is_refused_or_harmless(loss, form, architecture):
    assert violation(loss, form, architecture) is None


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "form"), pairs(MISTAKES))
def test_every_mistake_is_refused_or_harmless(loss, form):
    found = {a: violation(loss, form, a) for a in ARCHITECTURES}
    assert not {a: worst for a, worst in found.items() if worst is not None}


def check_correct(loss, form, architecture):
    """Accepted, and what plain autograd gives of each row alone."""
    how = CORRECT[form]
    model, data, _ = built(loss, architecture)
    criterion = criterion_of(loss, how)
    sums = clipped_sum(model, criterion, data, bound=BOUND, reduction=how.reduction)
    expected = expected_sum(model, criterion, data, bound=BOUND)
    assert distance(sums, expected) <= 1e-9 * BOUND


@pytest.mark.parametrize(("loss", "form", "architecture"), sampled(CORRECT, SAMPLE, seed=1))
def test_the_correct_form_is_accepted_and_exact(loss, form, architecture):
    check_correct(loss, form, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "form"), pairs(CORRECT))
def test_every_correct_form_is_accepted_and_exact(loss, form):
    for architecture in ARCHITECTURES:
        check_correct(loss, form, architecture)


def test_every_loss_of_torch_is_here():
    named = {name for name in dir(F) if name.endswith("_loss") and not name.startswith("_")}
    named |= {name for name in dir(F) if "cross_entropy" in name} | {"kl_div"}
    assert named == set(LOSSES)

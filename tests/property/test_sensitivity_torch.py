# SPDX-License-Identifier: Apache-2.0
"""One example replaced moves the engine's clipped sum by at most 2 C, whatever loss is written.

Losses of `torch.nn.functional`, with every mistake of `losses.MISTAKES`, each pair on one of five
architectures: the library refuses it, or the property holds. Written correctly, it is accepted and
exact.
"""

import itertools
from functools import partial

import pytest
import torch

from tests.pairwise import pairwise
from tests.property.losses import ARCHITECTURES, CORRECT, LOSSES, MISTAKES, N
from tests.property.torch_engine import (
    clipped_sum,
    distance,
    expected_sum,
    is_refusal,
    median_norm,
    rows_believed,
)

# A person reads the warning about broadcasting or does not; the property holds in both cases.
pytestmark = pytest.mark.filterwarnings("ignore")
SLACK = 1 + 1e-9
#: C, in units of the median norm of the examples' gradients.
SHARES = (1e-2, 1.0, 10.0)
#: Scales of the example that replaces another one.
SCALES = (1.0, 30.0, 1e3)


def pairs(forms):
    """(loss, form) that can be written."""
    return [
        (loss, form)
        for loss, of in LOSSES.items()
        for form, how in forms.items()
        if how.fits(loss, of)
    ]


def cases(forms):
    """(loss, form, architecture): each loss with each form once, the architectures in turn."""
    fitting = pairs(forms)
    never = {*itertools.product(LOSSES, forms)} - {*fitting}
    found = {case[:2]: case for case in pairwise(LOSSES, forms, ARCHITECTURES, never=never)}
    return [found[pair] for pair in fitting]


def built(loss, architecture):
    """Model, inputs and targets, and those that replace them."""
    torch.manual_seed(0)
    of, how = LOSSES[loss], ARCHITECTURES[architecture]
    model = how.build().double()
    return model, (how.inputs(N, 1), of.target(N, 2)), (how.inputs(1, 3), of.target(1, 4))


def engine_sum(model, criterion, data, bound, reduction):
    """The engine's sum, or None where the library refuses, in words of its own."""
    try:
        return clipped_sum(model, criterion, data, bound=bound, reduction=reduction)
    except (ValueError, RuntimeError, TypeError) as error:
        if not is_refusal(error):
            raise
        return None


def neighbours(data, other):
    """Nine: the last example replaced by another one, by its inputs, by its target."""
    x, t = data
    for scale in SCALES:
        new_x, new_t = (part * scale if part.is_floating_point() else part for part in other)
        yield torch.cat([x[:-1], new_x]), torch.cat([t[:-1], new_t])
        yield torch.cat([x[:-1], new_x]), t
        yield x, torch.cat([t[:-1], new_t])


def runs(model, criterion, data, reduction):
    """The rows' gradients as they are heard, or None where torch itself does not run the loss."""
    try:
        return rows_believed(model, criterion, data, reduction)
    except (ValueError, RuntimeError, IndexError, TypeError):
        return None


def violation(loss, form, architecture):
    """How far beyond 2 C a replaced example moves the sum, in units of C, or None."""
    reduction = MISTAKES[form].reduction
    model, data, other = built(loss, architecture)
    criterion = partial(MISTAKES[form].criterion, LOSSES[loss])
    rows = runs(model, criterion, data, reduction)
    if rows is None or engine_sum(model, criterion, data, 1.0, reduction) is None:
        return None
    worst, unit = 0.0, median_norm(rows)
    replaced = [*neighbours(data, other)]
    for turn, bound in enumerate(share * unit for share in SHARES if unit > 0):
        sums = engine_sum(model, criterion, data, bound, reduction)
        # Every bound meets every scale and every kind of replacement, if not each with each.
        for neighbour in (replaced[3 * k + (turn + k) % 3] for k in range(len(SCALES))):
            if sums is None or runs(model, criterion, neighbour, reduction) is None:
                continue
            moved = engine_sum(model, criterion, neighbour, bound, reduction)
            worst = max(worst, 0.0 if moved is None else distance(sums, moved) / bound)
    return worst if worst > 2 * SLACK else None


#: Mistakes that no twin can follow: numbers that the loop reads from the batch (docs/promises.md,
#: "What remains yours"). At most 4 % of the mistakes may be here.
UNSEEN = {("kl_div", "weights read as numbers")}


def test_few_mistakes_are_not_seen():
    assert UNSEEN <= set(pairs(MISTAKES))
    assert len(UNSEEN) <= 0.04 * len(pairs(MISTAKES))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "form", "architecture"), cases(MISTAKES))
def test_every_mistake_is_refused_or_harmless(loss, form, architecture, request):
    if (loss, form) in UNSEEN:  # and found to be so: one that is refused leaves the table
        request.applymarker(pytest.mark.xfail(strict=True, reason="read into Python numbers"))
    assert violation(loss, form, architecture) is None


@pytest.mark.parametrize(("loss", "form", "architecture"), cases(CORRECT))
def test_every_correct_form_is_accepted_and_exact(loss, form, architecture):
    """Accepted, and what plain autograd gives of each row alone."""
    how = CORRECT[form]
    model, data, _ = built(loss, architecture)
    criterion = partial(how.criterion, LOSSES[loss])
    bound = median_norm(rows_believed(model, criterion, data, how.reduction)) or 1.0
    sums = clipped_sum(model, criterion, data, bound=bound, reduction=how.reduction)
    expected = expected_sum(model, criterion, data, bound=bound)
    assert distance(sums, expected) <= 1e-9 * bound

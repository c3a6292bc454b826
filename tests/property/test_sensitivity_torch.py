# SPDX-License-Identifier: Apache-2.0
"""One example replaced moves the engine's clipped sum by at most 2 C, whatever loss is written.

Every loss of `torch.nn.functional`, with every mistake of `losses.MISTAKES`, on ten architectures:
the library refuses it, or the property holds. Written correctly, it is accepted and exact.
"""

import itertools
from functools import cache, partial

import pytest
import torch
from torch.nn import functional as F

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


#: The only case in which this mistake breaks the bound, of six examples.
ALONE = {("l1_loss", "weights by counts"): "reused"}


@cache
def architectures_of(is_mistake):
    """(loss, form) -> architectures of a covering set, of each the fifth after it, and `ALONE`."""
    forms, names = MISTAKES if is_mistake else CORRECT, list(ARCHITECTURES)
    fitting = set(pairs(forms))
    never = {pair for pair in itertools.product(LOSSES, forms) if pair not in fitting}
    found = {}
    for loss, form, architecture in pairwise(LOSSES, forms, names, never=never):
        other = names[(names.index(architecture) + 5) % len(names)]
        alone = {ALONE.get((loss, form), architecture)}
        found.setdefault((loss, form), set()).update(alone, (architecture, other))
    return found


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


def violation(loss, form, architecture, sum_of=engine_sum):
    """How far beyond 2 C a replaced example moves the sum, in units of C, or None."""
    reduction = MISTAKES[form].reduction
    model, data, other = built(loss, architecture)
    criterion = partial(MISTAKES[form].criterion, LOSSES[loss])
    rows = runs(model, criterion, data, reduction)
    if rows is None or sum_of(model, criterion, data, 1.0, reduction) is None:
        return None
    worst, unit = 0.0, median_norm(rows)
    replaced = [*neighbours(data, other)]
    for turn, bound in enumerate(share * unit for share in SHARES if unit > 0):
        sums = sum_of(model, criterion, data, bound, reduction)
        # Every bound meets every scale and every kind of replacement, if not each with each.
        for neighbour in (replaced[3 * k + (turn + k) % 3] for k in range(len(SCALES))):
            if sums is None or runs(model, criterion, neighbour, reduction) is None:
                continue
            moved = sum_of(model, criterion, neighbour, bound, reduction)
            worst = max(worst, 0.0 if moved is None else distance(sums, moved) / bound)
    return worst if worst > 2 * SLACK else None


#: Mistakes that no twin can follow: numbers that the loop reads from the batch (docs/promises.md,
#: "What remains yours"). At most 4 % of the mistakes may be here.
UNSEEN = {
    (loss, "weights read as numbers")
    for loss in ("kl_div", "soft_margin_loss", "hinge_embedding_loss", "cosine_embedding_loss")
}


def test_few_mistakes_are_not_seen():
    assert UNSEEN <= set(pairs(MISTAKES))
    assert len(UNSEEN) <= 0.04 * len(pairs(MISTAKES))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "form"), pairs(MISTAKES))
def test_every_mistake_is_refused_or_harmless(loss, form, request):
    """On two architectures or more; every loss and every mistake meets all ten."""
    if (loss, form) in UNSEEN:  # and found to be so: one that is refused leaves the table
        request.applymarker(pytest.mark.xfail(strict=True, reason="read into Python numbers"))
    found = {a: violation(loss, form, a) for a in architectures_of(True)[loss, form]}
    assert not {a: worst for a, worst in found.items() if worst is not None}


def check_correct(loss, form, architecture):
    """Accepted, and what plain autograd gives of each row alone."""
    how = CORRECT[form]
    model, data, _ = built(loss, architecture)
    criterion = partial(how.criterion, LOSSES[loss])
    bound = median_norm(rows_believed(model, criterion, data, how.reduction)) or 1.0
    sums = clipped_sum(model, criterion, data, bound=bound, reduction=how.reduction)
    expected = expected_sum(model, criterion, data, bound=bound)
    assert distance(sums, expected) <= 1e-9 * bound


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "form"), pairs(CORRECT))
def test_every_correct_form_is_accepted_and_exact(loss, form):
    """On two architectures or more; every loss and every form meets all ten."""
    for architecture in architectures_of(False)[loss, form]:
        check_correct(loss, form, architecture)


def test_every_loss_of_torch_is_here():
    named = {name for name in dir(F) if name.endswith("_loss") and not name.startswith("_")}
    named |= {name for name in dir(F) if "cross_entropy" in name} | {"kl_div"}
    assert named == set(LOSSES)

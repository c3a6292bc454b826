# SPDX-License-Identifier: Apache-2.0
"""Norms, clipped sum and weighted sums of one batch, whatever its gradients are made of.

A method gives two functions of a batch's gradients: the norms, and the sum for any weights. What is
released, and what is compared with plain autograd, is made of these two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dualdp_torch.per_sample.checks.identity import Numbers
from dualdp_torch.per_sample.clip import (
    SecondPass,
    Terms,
    clip_factors,
    clipped_sums,
    norms_of,
    passes_again,
    weighted_sums,
)
from dualdp_torch.per_sample.gradients import Captured, Formed, Limits
from dualdp_torch.rules.base import Tensor


def numbers_of(
    gradients: Captured,
    losses: Tensor,
    terms: Terms,
    *,
    limits: Limits | None = None,
    second_pass: SecondPass | None = None,
    is_definition: bool = False,
    is_checked: bool = True,
) -> Numbers:
    """Return the norms and the clipped sum of a batch; without bounds, the norms alone.

    Args:
        gradients: per-sample gradients of the batch, by any method.
        losses: (n,) losses of the forward that they come from.
        terms: clipping settings.
        limits: precision of norms without bounds.
        second_pass: function that computes sums by a second forward and backward, or None.
        is_definition: bool, True if each row ran alone.
        is_checked: bool, False if nothing will be compared.
    """
    own = Numbers(
        norms=losses,
        losses=losses,
        weighted_sum=partial(weighted_sums, gradients),
        clipping=terms.clipping,
        gradients=gradients,
        runs_examples=isinstance(gradients, Formed),
        is_definition=is_definition,
    )
    if not terms.bounds and limits is None and not is_checked:
        return own  # gradients alone were asked for
    if not terms.bounds:
        squares, norms = norms_of(gradients, limits or Limits(), len(losses))
        roots = {name: square.sqrt().to(norms.dtype) for name, square in squares.of.items()}
        own = replace(own, norms=norms, lengths=roots if limits else {})
    else:
        factors = clip_factors(gradients, len(losses), terms.bounds, terms.clipping, terms.mask)
        again = second_pass if passes_again(gradients, factors.rows) else None

        def weighted(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
            if again is None:
                return weighted_sums(gradients, weights)
            return again(next(iter(weights.values())))

        own = replace(
            own,
            norms=factors.norms,
            weighted_sum=weighted,
            factors=factors.of,
            bounds=terms.bounds,
            sums=clipped_sums(gradients, factors, again),
        )
        is_checked = is_checked and again is None  # a second backward needs no norm to be doubted
    return replace(own, doubt=gradients.doubt) if is_checked else own

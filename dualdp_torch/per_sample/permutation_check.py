# SPDX-License-Identifier: Apache-2.0
"""Check that the examples of a batch are in the rows that were found on another batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.parameter_use import Use
from dualdp_torch.rules.base import Tensor

#: Problem of a use, whose name is filled in.
PERMUTED = "The examples lie in other rows of {} than in the batches before, as the data say."


def permuted_use(
    capture: Capture,
    losses: Tensor,
    batch_axes: Sequence[BatchAxis | None],
    parameters: Mapping[str, Tensor],
    *,
    rounds: int | None = None,
) -> Use | None:
    """Return a use in which an example's gradient is in another example's rows, or None.

    For each binary digit of the row number, the losses of the half with digit 0 and of that with
    digit 1 are differentiated: any two examples are in different halves once. The graph is kept.

    `rounds` is the number of digits, equal on processes that share a model; None for those of n.
    """
    n, found = len(losses), list[Use]()
    rows = torch.arange(n, device=losses.device)
    try:
        for digit in range((n - 1).bit_length() if rounds is None else rounds):
            for value in (0, 1):
                half = (rows >> digit & 1) == value
                capture.backward(losses[half].sum(), parameters, retain=True)
                found += [
                    use
                    for use, batch_axis in zip(capture.uses, batch_axes, strict=True)
                    if batch_axis is not None and _reaches_others(use, batch_axis, half)
                ]
    finally:
        for use in capture.uses:
            use.grads_out = None
    return found[0] if found else None


def _reaches_others(use: Use, batch_axis: BatchAxis, examples: Tensor) -> bool:
    """True if a use's gradient is nonzero outside the rows of `examples`, (n,) bool."""
    if use.grads_out is None:
        return False
    if not batch_axis.fits(use.out_shape, len(examples)):
        return True
    rows = batch_axis.batch_first(use.grads_out, len(examples))
    return bool(rows[~examples.to(rows.device)].any())

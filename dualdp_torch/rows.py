# SPDX-License-Identifier: Apache-2.0
"""Whether the examples of one batch lie where the proof, made on another, has found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dualdp import UnsupportedLayerError

from .capture import Capture
from .layout import Layout
from .outputs import projected
from .rules.base import Tensor
from .uses import Use

#: Of a use.
MOVED = "The examples lie in other rows of {} than in the batches before, as the data say."


def moved_use(
    capture: Capture,
    losses: Tensor,
    layouts: Sequence[Layout | None],
    parameters: Mapping[str, Tensor],
    *,
    rounds: int | None = None,
) -> Use | None:
    """A use at which one example's gradient lies in another's rows, every example looked at.

    The losses of half of the examples are differentiated at a time, halved by each digit of their
    numbers: any two examples are in different halves once. The graph can still be used.

    Args:
        capture: of the forward.
        losses: (n,).
        layouts: of the uses.
        parameters: as in `Capture.backward`.
        rounds: digits; None for those of n. Processes that share a model look equally often.
    """
    n, found = len(losses), list[Use]()
    numbers = torch.arange(n, device=losses.device)
    try:
        for digit in range((n - 1).bit_length() if rounds is None else rounds):
            for value in (0, 1):
                half = (numbers >> digit & 1) == value
                capture.backward(losses[half].sum(), parameters, retain=True)
                found += [
                    use
                    for use, layout in zip(capture.uses, layouts, strict=True)
                    if layout is not None and _reaches_others(use, layout, half)
                ]
    finally:
        for use in capture.uses:
            use.grads_out = None
    return found[0] if found else None


def _reaches_others(use: Use, layout: Layout, examples: Tensor) -> bool:
    """Whether a gradient is anywhere but in the rows of these of the examples, (n,) bool."""
    if use.grads_out is None:
        return False
    if not layout.fits(use.out_shape, len(examples)):
        return True
    rows = layout.batch_first(use.grads_out, len(examples))
    return bool(rows[~examples.to(rows.device)].any())


def refuse_moved(
    capture: Capture,
    outputs: Any,
    n: int,
    layouts: Sequence[Layout | None],
    parameters: Mapping[str, Tensor],
    *,
    rounds: int | None = None,
) -> None:
    """Refuse a recorded forward whose data brought examples to other rows than were proved.

    Args:
        capture: of the forward.
        outputs: of the model.
        n: examples.
        layouts: of the uses.
        parameters: as in `Capture.backward`.
        rounds: as in `moved_use`; with a number it is always looked at.

    Raises:
        UnsupportedLayerError: they did.
    """
    if rounds is None and (n < 2 or not capture.moves.matter(n)):
        return
    total = projected(lambda: outputs, (), {})  # type: ignore[arg-type]
    use = moved_use(capture, total, layouts, parameters, rounds=rounds)
    if use is not None:
        raise UnsupportedLayerError(
            f"{MOVED.format(use)} Keep the examples in place, or use clipped_grad_sum or "
            'grad_sample_mode="functorch".'
        )

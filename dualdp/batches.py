# SPDX-License-Identifier: Apache-2.0
"""From logical to physical batches: what the accountant sees, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate


def num_physical_batches(num_drawn: int, size: int | None) -> int:
    """How many physical batches a draw of `num_drawn` examples takes; an empty draw takes one."""
    return 1 if size is None else max(1, -(-num_drawn // size))


def physical_batches(
    indices: NDArray[np.int64], size: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Cut one logical batch into physical ones of a single static shape; no draw is ever cut off.

    Args:
        indices: (k,) examples of the logical batch.
        size: rows of a physical batch; None for one batch of exactly the drawn size.

    Yields:
        `(indices, mask)`, each (size,): padding repeats example 0 and has mask False. An empty
        draw yields one fully masked batch, since it releases noise like every other.

    Guarantees:
        The unmasked rows of all batches are `indices`, in order.  [test_batches_lose_nothing]
    """
    indices = np.asarray(indices, dtype=np.int64)
    if size is not None:
        _validate.integer("physical_batch_size", size, minimum=1)
    rows = max(1, len(indices)) if size is None else size
    for start in range(0, num_physical_batches(len(indices), size) * rows, rows):
        part = indices[start : start + rows]
        padded = np.zeros(rows, np.int64)
        padded[: len(part)] = part
        yield padded, np.arange(rows) < len(part)

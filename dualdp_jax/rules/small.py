# SPDX-License-Identifier: Apache-2.0
"""Where a model or a use is so small that XLA's overhead decides; measured on one CPU thread.

The rest of the cost model is `dualdp.costs`, of both backends.
"""

from __future__ import annotations

#: Numbers of per-sample gradients below which `vmap(grad)`, a program of few operations, is the
#: fastest way, by what the use is: a product with one position, with several (its number counted
#: for every step of a loop), a table of rows. Models of 20 to 10,000 parameters.
SMALL = {"product": 2**12, "products": 2**16, "lookup": 3 * 2**12}

#: Numbers of all per-sample gradients of a model above which nothing of this is looked at.
SMALL_MODEL = 2**19

#: Numbers of kept gradients that stay in the processor's cache: keeping costs next to nothing.
CACHED = 2**18

#: Numbers in patches of few channels beyond which writing them costs more than thin products.
PATCHES = 2**20


def is_small(kind: str, numbers: int) -> bool:
    """Whether a use is small enough for `vmap(grad)`; it is chosen where all uses are.

    >>> is_small("product", 64 * 16), is_small("product", 64 * 784 * 10)
    (True, False)
    """
    return numbers <= SMALL[kind]


def prefers_patches(channels: int, numbers: int) -> bool:
    """Whether one product over written patches beats one per kernel offset: where these are thin.

    Args:
        channels: inputs of a convolution, per group.
        numbers: in the patches of all examples.

    >>> prefers_patches(16, 2**16), prefers_patches(16, 2**24), prefers_patches(32, 2**16)
    (True, False, False)
    """
    return channels == 1 or (channels <= 16 and numbers <= PATCHES)

# SPDX-License-Identifier: Apache-2.0
"""Sizes below which XLA's overhead decides the cost of a model or use; measured on one CPU thread.

The rest of the cost model is `dualdp.costs`, shared by both backends.
"""

from __future__ import annotations

#: Elements of all per-sample gradients of a use up to which `vmap(grad)`, a program of few
#: operations, is fastest, by kind of use: a product with one position, with several, a table of
#: rows. Every step of a loop counts. Measured on models of 20 to 10,000 parameters.
SMALL = {"product": 2**12, "products": 2**16, "lookup": 3 * 2**12}

#: Elements of one weight up to which this holds for any number of examples: with few channels the
#: work on positions, which every method shares, outweighs the gradients. (A product with one
#: position has no such size: for 16 x 16 elements its norms cost less than its gradients.)
SMALL_WEIGHT = {"product": 0, "products": 2**8, "lookup": 2**10}

#: Elements of all per-sample gradients of a model, and of its parameters; above both no model is
#: examined for being small.
SMALL_MODEL = 2**19
SMALL_PARAMETERS = 2**12

#: Elements of kept gradients that fit the processor's cache: keeping costs next to nothing.
CACHED = 2**18

#: Elements of patches of few channels beyond which writing them costs as much as thin products.
PATCHES = 2**22


def is_small(kind: str, weights: int, copies: int) -> bool:
    """True if a use is small enough for `vmap(grad)`, chosen if all uses are.

    `weights` counts the elements of the weight, `copies` the examples times the steps of a loop.

    >>> is_small("product", 16, 64), is_small("product", 7840, 64), is_small("products", 64, 9999)
    (True, False, True)
    """
    return weights <= SMALL_WEIGHT[kind] or copies * weights <= SMALL[kind]


def is_worth_a_look(num_rows: int, parameters: int) -> bool:
    """True if a model with so many rows and parameters may be small.

    >>> is_worth_a_look(64, 8000), is_worth_a_look(10_000, 400), is_worth_a_look(64, 10_000)
    (True, True, False)
    """
    return num_rows * parameters <= SMALL_MODEL or parameters <= SMALL_PARAMETERS


def prefers_patches(channels: int, numbers: int) -> bool:
    """True if one product over patches beats one product per kernel offset.

    `channels` are those of one group; `numbers` counts the elements of all patches.

    >>> prefers_patches(16, 2**16), prefers_patches(16, 2**24), prefers_patches(32, 2**16)
    (True, False, False)
    """
    return channels == 1 or (channels <= 16 and numbers <= PATCHES)

# SPDX-License-Identifier: Apache-2.0
"""Where a model or a use is so small that XLA's overhead decides; measured on one CPU thread.

The rest of the cost model is `dualdp.costs`, of both backends.
"""

from __future__ import annotations

#: Numbers of per-sample gradients below which `vmap(grad)`, a program of few operations, is the
#: fastest way, by what the use is: a product with one position, with several (its number counted
#: for every step of a loop), a table of rows. Models of 20 to 10,000 parameters.
SMALL = {"product": 2**12, "products": 2**16, "lookup": 3 * 2**12}

#: Numbers of one weight below which this holds for any number of examples: with few channels the
#: work on positions, which every way shares, outweighs the gradients. (A product with one position
#: has no such size: of 16 x 16 numbers its norms cost less than its gradients.)
SMALL_WEIGHT = {"product": 0, "products": 2**8, "lookup": 2**10}

#: Numbers of all per-sample gradients of a model, and of its parameters, above both of which
#: nothing of this is looked at.
SMALL_MODEL = 2**19
SMALL_PARAMETERS = 2**12

#: Numbers of kept gradients that stay in the processor's cache: keeping costs next to nothing.
CACHED = 2**18

#: Numbers in patches of few channels beyond which writing them costs more than thin products.
PATCHES = 2**20


def is_small(kind: str, weights: int, copies: int) -> bool:
    """Whether a use is small enough for `vmap(grad)`; it is chosen where all uses are.

    Args:
        kind: of use, see `SMALL`.
        weights: numbers in the weight.
        copies: examples, times the steps of a loop around the use.

    >>> is_small("product", 16, 64), is_small("product", 7840, 64), is_small("products", 64, 9999)
    (True, False, True)
    """
    return weights <= SMALL_WEIGHT[kind] or copies * weights <= SMALL[kind]


def is_worth_a_look(num_rows: int, parameters: int) -> bool:
    """Whether a model of that many numbers may be small at all.

    >>> is_worth_a_look(64, 8000), is_worth_a_look(10_000, 400), is_worth_a_look(64, 10_000)
    (True, True, False)
    """
    return num_rows * parameters <= SMALL_MODEL or parameters <= SMALL_PARAMETERS


def prefers_patches(channels: int, numbers: int) -> bool:
    """Whether one product over written patches beats one per kernel offset: where these are thin.

    Args:
        channels: inputs of a convolution, per group.
        numbers: in the patches of all examples.

    >>> prefers_patches(16, 2**16), prefers_patches(16, 2**24), prefers_patches(32, 2**16)
    (True, False, False)
    """
    return channels == 1 or (channels <= 16 and numbers <= PATCHES)

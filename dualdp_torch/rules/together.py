# SPDX-License-Identifier: Apache-2.0
"""Squared norms of many parameters at once: a few kernels for all layers, not a few for each.

On a GPU a small model spends its time on starting kernels. A rule therefore describes a norm, as
`Product` or `Gram`, and `table_of` computes those of a whole model in the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from dualdp_torch.rules.base import Norms, Tensor, lengths

#: The Gram form's rounding error is below eps (GRAM_ERROR (sum_t l_t)^2 + GRAM_SPREAD sum_t l_t^2),
#: l_t = |a_t| |g_t|: one product errs by up to 8 eps (measured, 512 inputs), but not all at once.
GRAM_ERROR, GRAM_SPREAD = 2.0, 12.0
#: Loss to underflow in a product of up to 2^20 terms, in units of `tiny`.
LOST = 2.0**20
#: Numbers in the Gram matrices of inputs that are in memory at once, unless one layer has more.
AT_ONCE = 1 << 22


class Product(NamedTuple):
    """Norm of a gradient with one position, the product of two lengths: (n, i), (n, o)."""

    acts: Tensor
    grads_out: Tensor


class Gram(NamedTuple):
    """Norm from Gram matrices: the sum of the products of two, of inputs and output gradients.

    Attributes:
        shape: (m, t), m matrices of t by t per example, whose sums add up.
        like: tensor of the device and dtype of the matrices.
        fill: function that writes both matrices, (n, m, t, t) each, into the given tensors.
    """

    shape: tuple[int, int]
    like: Tensor
    fill: Callable[[Tensor, Tensor], None]


Described = Norms | Product | Gram
#: Function that returns (k, n) bounds on errors.
Bounds = Callable[[], Tensor]


def _chunks(grams: Sequence[Gram], n: int) -> Iterator[list[int]]:
    """Yield the indices of norms of one shape whose matrices are in memory together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for k, gram in enumerate(grams):
        alike.setdefault(gram.shape, []).append(k)
    for (m, t), indices in alike.items():
        most = max(AT_ONCE // max(n * m * t * t, 1), 1)
        yield from (indices[start : start + most] for start in range(0, len(indices), most))


def gram_norms(grams: Sequence[Gram], n: int) -> tuple[list[int], Tensor, Tensor]:
    """Return indices of the norms, and in this order (k, n) squared norms and error bounds.

    Terms of different positions may cancel, so the error bound is in terms of the positions'
    lengths, the roots of the diagonals.
    """
    order, squares = list[int](), list[Tensor]()
    positions = max(m * t for (m, t), *_ in grams)
    diagonals = grams[0].like.new_zeros(2, len(grams), n, positions)
    for indices in _chunks(grams, n):
        m, t = grams[indices[0]].shape
        pair = diagonals.new_empty(2, len(indices), n, m, t, t)
        for k, index in enumerate(indices):
            grams[index].fill(pair[0, k], pair[1, k])
        part = diagonals[:, len(order) : len(order) + len(indices), :, : m * t]
        part.view(*pair.shape[:-1]).copy_(pair.diagonal(dim1=-2, dim2=-1))
        squares.append(pair[0].mul_(pair[1]).sum((2, 3, 4)))
        order += indices
    limits = torch.finfo(diagonals.dtype)
    # (sum_t |a_t|)^2 <= t sum_t |a_t|^2, and so for g.
    lost = diagonals.sum((0, 3)).mul_(LOST * limits.tiny * positions)
    sq_lengths = diagonals[0].mul_(diagonals[1])  # l_t^2
    error = sq_lengths.sum(2).mul_(GRAM_SPREAD * limits.eps).add_(lost)
    error.add_(sq_lengths.sqrt_().sum(2).square_(), alpha=GRAM_ERROR * limits.eps)
    found = squares[0] if len(squares) == 1 else torch.cat(squares)
    return order, found.clamp_(min=0), error


class Table(NamedTuple):
    """Squared norms of parameters.

    Attributes:
        names: names of p parameters.
        squares: (p, n).
        bounded: names of the k of them that have error bounds.
        errors: function that returns these bounds, (k, n).
        largest: function that returns the largest squared length, (), of those that the squares
            were made of, with errors of products only; None where others matter.
        share: factor of the squares.
    """

    names: list[str]
    squares: Tensor
    bounded: list[str]
    errors: Bounds
    largest: Callable[[], Tensor] | None = None
    share: float = 1.0

    def by_name(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Name -> (n,) squared norms, in the order of the names."""
        rows = dict(zip(self.names, self.squares.unbind(0), strict=True))
        return {name: rows[name] for name in names}

    def are_moderate(self, tolerated: float) -> bool:
        """True if no length is so large that errors add up to more, or that a sum overflows.

        False may be too careful. The device is read once.
        """
        if self.largest is None or not self.squares.numel():
            return False
        limits = torch.finfo(self.squares.dtype)
        room = limits.max / (len(self.names) * max(self.share, 1.0))
        lost = LOST * limits.tiny * self.share * 2 * len(self.bounded)
        return float(self.largest()) <= min(room, math.sqrt(room), tolerated / lost) / 2


def table_of(
    described: Mapping[str, Described],
    known: Mapping[str, Tensor],
    shared: Mapping[str, str],
    *,
    n: int,
    scale: float = 1.0,
) -> Table:
    """Return the squared norms of parameters with one dtype, multiplied by `scale` squared.

    Args:
        described: name -> norm that needs no gradient.
        known: name -> (n,) lengths of the gradients.
        shared: name -> name of the product whose `grads_out` is the gradient.
        n: number of examples.
        scale: factor of the gradients.
    """
    products = {name: d for name, d in described.items() if isinstance(d, Product)}
    grams = {name: d for name, d in described.items() if isinstance(d, Gram)}
    rows, bounds = list[tuple[list[str], Tensor]](), list[tuple[list[str], Bounds]]()
    share, k, largest = scale**2, len(products), None
    acts = {name: lengths(product.acts) for name, product in products.items()}
    grads = {name: lengths(product.grads_out) for name, product in products.items()}
    found = acts | {name: grads[product] for name, product in shared.items()} | {**known}
    if found:
        squares = torch.stack([*found.values(), *acts.values(), *grads.values()]).square_()
        made_of, factors = squares[k:], squares[len(found) :]
        if k:
            squares[:k].mul_(factors[k:])
            lost = LOST * torch.finfo(squares.dtype).tiny * share
            bounds.append(([*products], lambda: (factors[:k] + factors[k:]).mul_(lost)))
            largest = made_of.max
        rows.append(([*found], squares[: len(found)]))
    if grams:
        order, squares, errors = gram_norms([*grams.values()], n)
        names = [[*grams][index] for index in order]
        rows.append((names, squares))
        bounds.append((names, partial(errors.mul, share)))
    for name, norms in described.items():
        if not isinstance(norms, Product | Gram):
            square, error = norms
            rows.append(([name], square.unsqueeze(0)))
            if error is not None:
                bounds.append(([name], partial(error.unsqueeze(0).mul, share)))
    table = stacked([row for _, row in rows])
    return Table(
        [name for each, _ in rows for name in each],
        table if share == 1 else table * share,
        [name for each, _ in bounds for name in each],
        lambda: stacked([errors() for _, errors in bounds]),
        largest if len(rows) == 1 else None,
        share,
    )


def sq_norms_of(found: Described, n: int) -> Norms:
    """(n,) squared norms and error bounds, or None, of one description."""
    norms = table_of({"": found}, {}, {}, n=n)
    return norms.squares[0], norms.errors()[0] if norms.bounded else None


def stacked(rows: list[Tensor]) -> Tensor:
    """(k, n) each -> (all k, n); a single one is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.empty(0)

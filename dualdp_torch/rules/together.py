# SPDX-License-Identifier: Apache-2.0
"""Squared norms of many parameters at once: a few kernels for all layers, not a few for each.

On a GPU a small model spends its time on starting kernels. A rule therefore describes a norm, as
`Product` or `Gram`, and `NormTable` computes those of a whole model in the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from dualdp_torch.rules.base import Norms, Tensor, lengths
from dualdp_torch.rules.precision import in_full_precision

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


def sq_norms_of(found: Described, n: int) -> Norms:
    """(n,) squared norms and error bounds, or None, of one description."""
    table = NormTable(n, 1.0)
    table.add("", found)
    norms = table.finish()
    return norms.squares[0], norms.errors()[0] if norms.bounded else None


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


class NormTable:
    """Squared norms of parameters with one dtype, of n examples, multiplied by `scale` squared.

    They are added one by one, as a description, as lengths, or as shared with a product, and
    computed by `finish`.
    """

    def __init__(self, n: int, scale: float) -> None:
        self._n, self._share = n, scale**2
        self._products: dict[str, Product] = {}
        self._grams: dict[str, Gram] = {}
        self._others: dict[str, Norms] = {}
        self._lengths: dict[str, Tensor] = {}
        self._shared: dict[str, int] = {}

    def add(self, name: str, found: Described) -> None:
        """Add a norm that needs no gradient."""
        if isinstance(found, Product):
            self._products[name] = found
        elif isinstance(found, Gram):
            self._grams[name] = found
        else:
            self._others[name] = found

    def add_length(self, name: str, found: Tensor) -> None:
        """Add the (n,) lengths of one parameter's gradients."""
        self._lengths[name] = found

    def shares(self, name: str, grads: Tensor) -> bool:
        """Add a gradient whose length is a factor of a product in the table; False if it is not."""
        for index, product in enumerate(self._products.values()):
            if product.grads_out is grads:
                self._shared[name] = index
                return True
        return False

    @in_full_precision
    def finish(self) -> Table:
        """Return the squared norms of all parameters."""
        rows, bounds = list[tuple[list[str], Tensor]](), list[tuple[list[str], Bounds]]()
        products, k, largest = self._products.values(), len(self._products), None
        acts = [lengths(product.acts) for product in products]
        grads = [lengths(product.grads_out) for product in products]
        shared = {name: grads[index] for name, index in self._shared.items()}
        found = dict(zip(self._products, acts, strict=True)) | shared | self._lengths
        if found:
            names = [*found]
            squares = torch.stack([*found.values(), *acts, *grads]).square_()
            made_of, factors = squares[k:], squares[len(names) :]
            if k:
                squares[:k].mul_(factors[k:])
                lost = LOST * torch.finfo(squares.dtype).tiny * self._share
                bounds.append(([*self._products], lambda: (factors[:k] + factors[k:]).mul_(lost)))
                largest = made_of.max
            rows.append((names, squares[: len(names)]))
        if self._grams:
            order, squares, errors = gram_norms([*self._grams.values()], self._n)
            names = [[*self._grams][index] for index in order]
            rows.append((names, squares))
            bounds.append((names, partial(errors.mul, self._share)))
        for name, (square, error) in self._others.items():
            rows.append(([name], square.unsqueeze(0)))
            if error is not None:
                bounds.append(([name], partial(error.unsqueeze(0).mul, self._share)))
        bounded = [name for each, _ in bounds for name in each]
        names = [name for each, _ in rows for name in each]
        table = stacked([row for _, row in rows])
        return Table(
            names,
            table if self._share == 1 else table * self._share,
            bounded,
            lambda: stacked([errors() for _, errors in bounds]),
            largest if len(rows) == 1 else None,
            self._share,
        )


def stacked(rows: list[Tensor]) -> Tensor:
    """(k, n) each -> (all k, n); a single one is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.empty(0)

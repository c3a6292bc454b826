# SPDX-License-Identifier: Apache-2.0
"""Linear: y = x W^T + b, with any number of positions per example."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dualdp import costs
from dualdp.plan.clipping import margin_of
from dualdp_torch.rules import base
from dualdp_torch.rules.base import (
    Rule,
    Tensor,
    all_but_last,
    lengths,
    may_keep,
    on_host,
    row_slices,
    sq_norms,
)
from dualdp_torch.rules.together import Described, Gram, Product

#: Multiplications in products of a batch that cost as much as moving one number, on a host
#: (measured with two threads, 64 to 512 positions: 24 to 60, mostly 30) and elsewhere.
MOVE, MOVE_ELSEWHERE = 32.0, 64.0
#: Rounding of a formed gradient is below FORMED eps times the product of both factors' norms.
FORMED = 4.0


def flatten_positions(x: Tensor) -> Tensor:
    """(n, ..., d) -> (n, t, d), with t = 1 if there are no position axes."""
    return x if x.dim() == 3 else x.reshape(x.shape[0], _positions(x), x.shape[-1])


def _positions(x: Tensor) -> int:
    """(n, ..., d) -> number t of positions."""
    return math.prod(x.shape[1:-1])


def weight_grads(acts: Tensor, grads_out: Tensor, **_: Any) -> Tensor:
    """(n, ..., i), (n, ..., o) -> (n, o, i) per-sample gradients."""
    a, g = flatten_positions(acts), flatten_positions(grads_out)
    return torch.bmm(g.mT, a)


def _without_gradient(acts: Tensor, grads_out: Tensor) -> Product | Gram:
    """(n, ..., i), (n, ..., o) -> description of norms that form no gradient."""
    t = _positions(acts)
    if t == 1:
        return Product(acts, grads_out)

    def fill(*by: Tensor) -> None:
        for x, out in zip(map(flatten_positions, (acts, grads_out)), by, strict=True):
            torch.bmm(x, x.mT, out=out.squeeze(1))

    return Gram((1, t), acts, fill)


@functools.lru_cache(1024)
def _cheapest(t: int, d_in: int, d_out: int, move: float, *, keeps: bool) -> str:
    """Return the cheapest method: "gram", "discard", or with `keeps` also "keep"."""
    sizes: Any = {"t": t, "d_in": d_in, "d_out": d_out, "move": move}
    if keeps and costs.keeps_gradient(n=1, **sizes):
        return "keep"
    return "gram" if t == 1 or costs.prefers_gram(**sizes) else "discard"


def _way(acts: Tensor, grads_out: Tensor, *, can_keep: bool) -> str:
    """(n, ..., i), (n, ..., o) -> method: "gram", "discard", or if it `can_keep` also "keep"."""
    sizes = _positions(acts), acts.shape[-1], grads_out.shape[-1]
    move = MOVE if on_host(acts) else MOVE_ELSEWHERE
    way = _cheapest(*sizes, move, keeps=True)
    way = base.choose("linear", way, base.OPERATIONS["linear"], sizes)
    return way if can_keep or way != "keep" else _cheapest(*sizes, move, keeps=False)


def weight_sq_norms(
    acts: Tensor, grads_out: Tensor, *, can_keep: bool = False, **_: Any
) -> Described | None:
    """Return (n,) squared norms by the cheaper of Gram form and forming the gradient.

    Both cancel in finite precision: for examples whose error bound is too large the caller forms
    the gradient, and uses that same gradient in the sum. None if the gradients are better kept and
    fit in memory. Source: Li et al. 2022, eq. 3.
    """
    if acts.dim() == 2 and not base.FORCED:
        return Product(acts, grads_out)
    numbers = acts.shape[-1] * grads_out.shape[-1]
    way = _way(acts, grads_out, can_keep=can_keep and may_keep(len(acts) * numbers, acts))
    if way == "keep":
        return None
    if way == "gram":
        return _without_gradient(acts, grads_out)
    a, g = flatten_positions(acts), flatten_positions(grads_out)
    rows = row_slices(len(a), numbers, a)
    norms = torch.cat([sq_norms(weight_grads(a[part], g[part])) for part in rows])
    return norms, formed_error(a, g)


def formed_error(acts: Tensor, grads_out: Tensor) -> Tensor:
    """(n, ...), (n, ...) -> (n,) bound on the error of squared norms of a gradient formed twice.

    The gradient is formed once for its norm and once in the product that sums over the examples;
    where positions cancel, the two differ by rounding. The bound on the length is squared and
    scaled to the units in which the caller compares bounds of squares.
    """
    return rounding_error(lengths(acts).mul_(lengths(grads_out)).square_())


def rounding_error(sq_lengths: Tensor) -> Tensor:
    """(n,) squared sums of lengths -> (n,) bound in the units of `formed_error`; in place."""
    share = FORMED * torch.finfo(sq_lengths.dtype).eps
    return sq_lengths.mul_(share**2 / margin_of(sq_lengths.dtype))


def weight_sum(acts: Tensor, grads_out: Tensor, **_: Any) -> Tensor:
    """(n, ..., i), (n, ..., o) -> (o, i) sum over the examples, one product for the whole batch."""
    g, a = grads_out.reshape(-1, grads_out.shape[-1]), acts.reshape(-1, acts.shape[-1])
    return g.T @ a


def bias_grads(_: None, grads_out: Tensor, **__: Any) -> Tensor:
    """(n, ..., o) -> (n, o) per-sample gradients."""
    return grads_out if grads_out.dim() == 2 else flatten_positions(grads_out).sum(1)


def bias_sum(_: None, grads_out: Tensor, **__: Any) -> Tensor:
    """(n, ..., o) -> (o,) sum over the examples."""
    return grads_out.reshape(-1, grads_out.shape[-1]).sum(0)


def join(uses: Sequence[tuple[Tensor | None, Tensor]]) -> tuple[Tensor | None, Tensor]:
    """Join uses of one weight: (n, ..., i), (n, ..., o) each -> (n, t, i), (n, t, o), t in all."""
    acts = [flatten_positions(a) for a, _ in uses if a is not None]
    grads_out = torch.cat([flatten_positions(g) for _, g in uses], 1)
    return torch.cat(acts, 1) if acts else None, grads_out


def _right(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a weight for y = x W, whose gradient is (i, o)."""

    def turned(acts: Tensor, grads_out: Tensor, **options: Any) -> Any:
        return function(grads_out, acts, **options)

    return turned


def _is_plain_product(call: Mapping[str, Any]) -> bool:
    """True for x W with a matrix W on the right and at most a vector added."""
    left, right = call.get("mat1", call.get("input")), call.get("mat2", call.get("other"))
    plain = call.get("beta", 1) == call.get("alpha", 1) == 1
    return bool(plain and right.dim() == 2 and left.dim() >= 2) and (
        "mat1" not in call or call["input"].dim() == 1
    )


RULE = Rule(
    arguments=("input", "weight", "bias"),
    grads={"weight": weight_grads, "bias": bias_grads},
    sq_norms={"weight": weight_sq_norms},
    sums={"weight": weight_sum, "bias": bias_sum},
    batch_axes=all_but_last,
    rows_are_free=True,
    join=join,
)
#: x @ W with W (i, o).
MATMUL = Rule(
    arguments=("input", "other"),
    grads={"other": _right(weight_grads)},
    sq_norms={"other": weight_sq_norms},
    sums={"other": _right(weight_sum)},
    light=frozenset(),
    batch_axes=all_but_last,
    rows_are_free=True,
    join=join,
    applies=_is_plain_product,
)
#: b + x @ W, as in the `Conv1D` layers of GPT-2.
ADDMM = Rule(
    arguments=("input", "mat1", "mat2"),
    grads={"mat2": _right(weight_grads), "input": bias_grads},
    sq_norms={"mat2": weight_sq_norms},
    sums={"mat2": _right(weight_sum), "input": bias_sum},
    acts="mat1",
    light=frozenset({"input"}),
    batch_axes=all_but_last,
    rows_are_free=True,
    join=join,
    applies=_is_plain_product,
)

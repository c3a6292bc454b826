# SPDX-License-Identifier: Apache-2.0
"""Matrix products of float32 on a CPU, by the library that is fastest there.

`torch.mm` and `torch.bmm` use MKL, which limits itself to narrow instructions on AMD processors
newer than family 25. There oneDNN, which torch uses for LSTMs and convolutions, takes half the time
(measured: 240 against 105 GFLOP/s). On family 25 oneDNN takes 0.7 to 0.9 of MKL's time for
operands in rows and 1.1 to 2 times for all others. Both accumulate in float32. The choice depends
on the processor's model, not on a clock, so that a repeated run does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from dualdp_torch.rules.base import Tensor, on_host


def amd_family(described: str) -> int:
    """Family of an AMD processor in the text of /proc/cpuinfo: 25 for Zen 3 and 4; 0 for others."""
    lines = (line.partition(":") for line in described.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    family = fields.get("cpu family", "")
    return int(family) if fields.get("vendor_id") == "AuthenticAMD" and family.isdigit() else 0


_DESCRIBED = Path("/proc/cpuinfo")
_FAMILY = amd_family(_DESCRIBED.read_text() if _DESCRIBED.exists() else "")
_MKL_IS_NARROW = _FAMILY > 25
#: Multiplications in `products` that cost as much as moving one number, and those on this host
#: (measured on family 25, two threads, 64 to 512 positions: 24 to 60, mostly 30; on an Intel
#: processor with AVX-512 a step of the benchmarks' GPT is 9 % shorter with 12 to 48 than with 64).
MOVE = 64.0
MOVE_OF_HOST = MOVE if _MKL_IS_NARROW else 32.0
#: Multiplications in a product below which a call of oneDNN costs more than it saves: operands in
#: rows, operands in columns, each product of a batch, and a product that is added.
SMALL = 1 << 21
COLUMNS = SMALL if _MKL_IS_NARROW else sys.maxsize
EACH = 1 << 22 if _MKL_IS_NARROW else sys.maxsize
ADDED = SMALL if _MKL_IS_NARROW else 1 << 25
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


def move(like: Tensor) -> float:
    """Return the `move` of the cost model on the device of a tensor."""
    return MOVE_OF_HOST if on_host(like) else MOVE


def by_onednn(*operands: Tensor) -> bool:
    """True if oneDNN can multiply the operands: float32 on a CPU, not recorded by autograd."""
    has_graph = torch.is_grad_enabled()
    for x in operands:
        if not on_host(x) or x.dtype != torch.float32 or (has_graph and x.requires_grad):
            return False
    return bool(_HAS_ONEDNN and torch.backends.mkldnn.enabled)


def _dense(x: Tensor) -> Tensor:
    """Operand in rows or columns without gaps: oneDNN is slow with any other strides."""
    return x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(m, k), (o, k), (o,) -> (m, o) by oneDNN."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(m, k), (o, k), (o,) -> (m, o): x weight^T + bias.

    oneDNN copies its first operand into rows: if that is stored by columns, the smaller is first.
    """
    least = SMALL if x.is_contiguous() else COLUMNS
    if x.numel() * weight.shape[0] < least or not by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if bias is None and len(weight) < len(x) and not x.is_contiguous():
        return _multiply(weight, _dense(x)).T.contiguous()
    return _multiply(x, _dense(weight), bias)


def adder(weight: Tensor, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """(o, k) weight, m rows -> function of contiguous y (m, o), x (m, k) for y + x weight^T."""
    if rows * weight.numel() < ADDED or not by_onednn(weight):
        return lambda y, x: torch.addmm(y, x, weight.T)
    weight, add = weight.contiguous(), torch.ops.mkldnn._linear_pointwise.binary
    return lambda y, x: torch.as_tensor(add(x, y, weight, None, "add"))


def products(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """(n, a, k), (n, b, k) -> (n, a, b), one product per example, into `out` if it is given.

    oneDNN copies its first operand, so the smaller one is first; the result may be a view of
    (n, b, a).
    """
    n, a, k = x.shape
    if a * y.shape[1] * k < EACH or not by_onednn(x, y):
        return torch.bmm(x, y.mT, out=out)  # type: ignore[arg-type]
    if a > y.shape[1]:
        return products(y, x, None if out is None else out.mT).mT
    out = x.new_empty(n, a, y.shape[1]) if out is None else out
    for left, right, to in zip(x.unbind(0), y.unbind(0), out.unbind(0), strict=True):
        to.copy_(_multiply(left, _dense(right)))
    return out

# SPDX-License-Identifier: Apache-2.0
"""Activated gates of an LSTM, read from the workspace of oneDNN's training forward.

oneDNN leaves the gates of every step at the start of that workspace, whose layout is not
documented. The gates are used only after `are_gates` has checked them against the last cell state
that the layer returned and against the last step's input; otherwise they are computed again.
"""

from __future__ import annotations

from typing import Any

import torch

from dualdp_torch.rules import choices
from dualdp_torch.rules.base import Tensor
from dualdp_torch.rules.matmul import by_onednn

#: `mode` of an LSTM in `aten::mkldnn_rnn_layer`.
_LSTM = 2
#: Largest difference of gates or cell states that is taken for rounding.
TOLERANCE = 1e-4
_layer: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)


def lstm_with_gates(
    x: Tensor, h: Tensor, c: Tensor, weights: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Output (t, n, h), last states (n, h) twice, activated gates i, f, g, o (t, n, 4, h).

    From x (t, n, i), first states (n, h), weights (4 h, i) and (4 h, h), and two biases (4 h,).
    None if oneDNN cannot run the layer or returns no such workspace, and where data may not be
    read: the gates must be checked.
    """
    if _layer is None or torch.is_autocast_enabled("cpu") or not x.numel() or choices.is_static():
        return None
    if not by_onednn(x, h, c, *weights):
        return None
    first = weights[0].detach().requires_grad_()  # oneDNN returns its workspace for training only
    options: tuple[Any, ...] = (False, [], _LSTM, h.shape[1], 1, True, False, False, True)
    with torch.enable_grad():
        operands = (x.detach(), first, *weights[1:], h, c)  # oneDNN assumes contiguous operands
        found = _layer(*(operand.contiguous() for operand in operands), *options)
    out, last_h, last_c, workspace = found
    steps, n, width = len(x), len(h), 4 * h.shape[1]
    row = row_stride(width)
    if workspace is None or workspace.dtype != torch.uint8 or len(workspace) < 4 * steps * n * row:
        return None
    rows = workspace.detach()[: 4 * steps * n * row].view(torch.float32).view(steps, n, row)
    gates = rows[:, :, :width].unflatten(2, (4, -1)).clone()  # a quarter of the workspace
    return out.detach(), last_h.detach().view_as(h), last_c.detach().view_as(c), gates


def row_stride(numbers: int) -> int:
    """Row stride of the workspace in numbers: whole cache lines, and no power of two."""
    numbers = -(-numbers // 16) * 16
    return numbers + 16 if numbers % 256 == 0 else numbers


def are_gates(gates: Tensor, cells: Tensor, last_c: Tensor, last_sums: Tensor) -> bool:
    """True if activated gates (t, n, 4, h) agree with the layer's last cell state and last step.

    `cells`, (t + 1, n, h), were computed from the gates; the layer returned `last_c`, (n, h);
    `last_sums`, (n, 4 h), are the gates of the last step before activation.
    """
    i, f, g, o = last_sums.chunk(4, 1)
    expected = torch.stack([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)

    def near(x: Tensor, y: Tensor) -> bool:
        return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)

    return near(gates[-1], expected) and near(cells[-1], last_c)

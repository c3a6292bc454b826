# SPDX-License-Identifier: Apache-2.0
"""The gates of an LSTM from what oneDNN keeps for its own backward, where it can be had.

oneDNN's training forward leaves the activated gates of every step at the start of its workspace,
whose layout is not documented: they are used only if they give, from the first cell state, the last
one that the layer returned, and are what the last step's input gives. Else gates are computed anew.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import Tensor
from .products import by_onednn

#: `mode` of an LSTM in `aten::mkldnn_rnn_layer`.
_LSTM = 2
#: Largest difference of gates and cell states that rounding explains.
TOLERANCE = 1e-4
_layer: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)


def lstm_with_gates(
    x: Tensor, h: Tensor, c: Tensor, weights: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Output (t, n, h), last states (n, h) twice, activated gates i, f, g, o (t, n, 4, h).

    Args:
        x: (t, n, i).
        h: (n, h) first hidden state.
        c: (n, h) first cell state.
        weights: input (4 h, i), hidden (4 h, h), and two biases (4 h,).

    Returns:
        None where oneDNN can't be asked.
    """
    if _layer is None or torch.is_autocast_enabled("cpu") or not x.numel():
        return None
    if not by_onednn(x, h, c, *weights):
        return None
    first = weights[0].detach().requires_grad_()  # only then the workspace is returned
    options: tuple[Any, ...] = (False, [], _LSTM, h.shape[1], 1, True, False, False, True)
    with torch.enable_grad():
        operands = (x.detach(), first, *weights[1:], h, c)  # it takes them for contiguous
        found = _layer(*(operand.contiguous() for operand in operands), *options)
    out, last_h, last_c, workspace = found
    steps, n, width = len(x), len(h), 4 * h.shape[1]
    row = _row(width)
    if workspace is None or workspace.dtype != torch.uint8 or len(workspace) < 4 * steps * n * row:
        return None
    rows = workspace.detach()[: 4 * steps * n * row].view(torch.float32).view(steps, n, row)
    gates = rows[:, :, :width].unflatten(2, (4, -1)).clone()  # a quarter of the workspace
    return out.detach(), last_h.detach().view_as(h), last_c.detach().view_as(c), gates


def _row(numbers: int) -> int:
    """Numbers from one row to the next: whole cache lines, and no power of two."""
    numbers = -(-numbers // 16) * 16
    return numbers + 16 if numbers % 256 == 0 else numbers


def are_gates(gates: Tensor, cells: Tensor, last_c: Tensor, last_sums: Tensor) -> bool:
    """Whether these are the gates.

    Args:
        gates: (t, n, 4, h), activated.
        cells: (t + 1, n, h) cell states that they give.
        last_c: (n, h) that the layer returned.
        last_sums: (n, 4 h) gates of the last step, before activation.
    """
    i, f, g, o = last_sums.chunk(4, 1)
    expected = torch.stack([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)

    def near(x: Tensor, y: Tensor) -> bool:
        return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)

    return near(gates[-1], expected) and near(cells[-1], last_c)

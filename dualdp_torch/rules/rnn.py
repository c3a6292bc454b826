# SPDX-License-Identifier: Apache-2.0
"""nn.LSTM, nn.GRU and nn.RNN as they are: torch's fused forward, then the recursion of the deltas.

`delta[t]` is the gradient of step t's gates before their nonlinearity. With all deltas at hand the
weights are those of linear uses over all steps: (x, delta) and (h of the step before, delta).
Letters: t steps, n examples, i inputs, h hidden, p projected; gates g in {1, 3, 4} times h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from . import linear
from .base import Tensor
from .deltas import (
    Cell,
    by_example,
    gru_deltas,
    lstm_cells,
    lstm_deltas,
    lstm_gates,
    rnn_deltas,
    rows_of,
    steps_of,
    tanh,
)
from .products import product


class _Recurrence(torch.autograd.Function):
    """Fused forward; backward hands the deltas to the tokens, at whose edges they are caught."""

    @staticmethod
    def forward(ctx: Any, cell: Cell, *inputs: Any) -> Any:
        """Tokens of x, h, projection; x (t, n, i), h (n, p), c (n, h) -> out (t, n, p), states."""
        *_, x, h, c = inputs
        out, states, gates = cell.forward(x, h, c)
        previous = by_example(len(x), h)
        previous[0], previous[1:] = h, out[:-1]  # (t, n, p)
        extra = [previous]
        if cell.w_hr is not None:
            opened = lstm_gates(cell.gate_sums(x, previous), cell.alive)
            squashed = tanh(lstm_cells(opened, c)[1:])
            extra.append(opened[:, :, 3] * squashed)  # what is projected, (t, n, h)
        ctx.cell = cell
        known = (None, None) if gates is None else (gates, states[1])
        ctx.save_for_backward(x, previous, out if c is None else c, *known)
        ctx.mark_non_differentiable(*extra)
        return (out, *states, *extra)

    @staticmethod
    def backward(ctx: Any, out_grads: Tensor, *state_grads: Tensor) -> Any:
        """The deltas for the tokens, and the gradients of x and the first states."""
        cell: Cell = ctx.cell
        x, previous, last, gates, last_c = ctx.saved_tensors
        if cell.alive is not None:
            out_grads = out_grads * cell.alive
        found: tuple[Any, ...]
        if cell.kind == "lstm":
            known = None if gates is None else (gates, last_c)
            found = lstm_deltas(cell, x, previous, last, known, out_grads, *state_grads[:2])
        elif cell.kind == "gru":
            found = gru_deltas(cell, x, previous, out_grads, state_grads[0])
        else:
            found = rnn_deltas(cell, last, out_grads, state_grads[0])
        x_deltas, h_deltas, projected, dh, dc = found
        needed = ctx.needs_input_grad[4]
        dx = steps_of(product(rows_of(x_deltas), cell.w_ih.T), x) if needed else None
        return None, x_deltas, h_deltas, projected, dx, dh, dc


_recurrence: Callable[..., Any] = _Recurrence.apply


@dataclass(frozen=True)
class _Call:
    """The arguments of torch.lstm, torch.gru and torch.rnn_*, padded or packed."""

    data: Tensor
    sizes: Tensor | None
    state: tuple[Tensor, ...]
    weights: Sequence[Tensor]
    has_bias: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> _Call:
        """The arguments in their order, padded (..., batch_first) or packed (data, sizes, ...)."""
        packed = not isinstance(args[2], list | tuple) or torch.is_tensor(args[2][0])
        packed = packed and isinstance(args[3], list | tuple)
        data, sizes, rest = (args[0], args[1], args[2:]) if packed else (args[0], None, args[1:])
        state = tuple(rest[0]) if isinstance(rest[0], list | tuple) else (rest[0],)
        has_bias, layers, dropout, train, bidirectional = rest[2:7]
        first = not packed and rest[7]
        return cls(
            data, sizes, state, rest[1], has_bias, layers, dropout, train, bidirectional, first
        )


def recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.lstm` and its like, written as uses of their weights."""

    def rewritten(capture: Any, *args: Any) -> Any:
        call = _Call.of(args)
        x, state, alive, order = _padded(capture, call)
        finals: list[tuple[Tensor, ...]] = []
        directions = 2 if call.bidirectional else 1
        per = len(call.weights) // (call.layers * directions)
        for layer in range(call.layers):
            outs = []
            for direction in range(directions):
                k = layer * directions + direction
                weights = call.weights[k * per : (k + 1) * per]
                turned = _reversed(x, alive) if direction else x
                first = tuple(s[k] for s in state)
                out, final = _one(capture, function, turned, first, weights, call.has_bias, alive)
                outs.append(_reversed(out, alive) if direction else out)
                finals.append(final)
            x = outs[0] if directions == 1 else torch.cat(outs, -1)
            if call.dropout and call.train and layer < call.layers - 1:
                x = F.dropout(x, call.dropout)
        stacked = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
        if call.sizes is not None and alive is not None:
            lengths = alive.sum((0, 2)).cpu()
            if order is not None:
                x, lengths = x[:, order], lengths[order.cpu()]
                stacked = tuple(s[:, order] for s in stacked)
            data = torch._pack_padded_sequence(x, lengths, False)[0]
            if order is not None:
                capture.moves.follow(data, None, order)
                for s in stacked:
                    capture.moves.follow(s, 1, order)
            return (data, *stacked)
        return (x.transpose(0, 1) if call.batch_first else x, *stacked)

    return rewritten


def _padded(
    capture: Any, call: _Call
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """X (t, n, i) and states in the order of the batch; who is alive (t, n, 1); packed order."""
    if call.sizes is None:
        return call.data.transpose(0, 1) if call.batch_first else call.data, call.state, None, None
    sizes = call.sizes
    n = int(sizes[0])
    x, _ = torch._pad_packed_sequence(call.data, sizes, False, 0.0, len(sizes))
    device = call.data.device
    alive = (torch.arange(n) < sizes.unsqueeze(1)).unsqueeze(2).to(device)
    order = capture.moves.order_of(call.data)
    if order is None:
        return x, call.state, alive, None
    back = order.argsort()
    return x[:, back], tuple(s[:, back] for s in call.state), alive[:, back], order


def _reversed(x: Tensor, alive: Tensor | None) -> Tensor:
    """Every sequence backwards in time, within its own length."""
    if alive is None:
        return x.flip(0)
    steps = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    index = torch.where(alive, alive.sum(0, keepdim=True) - 1 - steps, steps)
    return x.gather(0, index.expand_as(x))


def _one(
    capture: Any,
    function: Callable[..., Any],
    x: Tensor,
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_bias: bool,
    alive: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction, its weights recorded as linear uses over all steps."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if has_bias else (None, None)
    w_hr = weights[-1] if len(weights) in (3, 5) else None
    plain = [None if w is None else w.detach() for w in (w_ih, w_hh, b_ih, b_hh, w_hr)]
    cell = Cell(function.__name__, *plain, alive=alive)  # type: ignore[arg-type, misc]
    h, c = state if len(state) == 2 else (state[0], None)

    def token(width: int) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:2], width).requires_grad_()

    tokens = [token(len(w_ih)), token(len(w_ih)), None if w_hr is None else token(len(w_hr))]
    out, *rest = _recurrence(cell, *tokens, x, h, c)
    states, (previous, *projected) = tuple(rest[: len(state)]), rest[len(state) :]
    capture.record(function, linear.RULE, {"weight": w_ih, "bias": b_ih}, x, tokens[0])
    capture.record(function, linear.RULE, {"weight": w_hh, "bias": b_hh}, previous, tokens[1])
    if w_hr is not None:
        capture.record(function, linear.RULE, {"weight": w_hr}, projected[0], tokens[2])
    return out, states

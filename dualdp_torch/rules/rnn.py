# SPDX-License-Identifier: Apache-2.0
"""nn.LSTM, nn.GRU and nn.RNN by torch's fused forward and a backward recursion for the deltas.

`delta[t]` is the gradient of step t's gates before their nonlinearity. Given all deltas, weights
have linear uses over all steps: (x, delta) and (previous h, delta).
Letters: t steps, n examples, i inputs, h hidden, p projected; gates g in {1, 3, 4} times h.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dualdp_torch.rules import linear
from dualdp_torch.rules.base import Tensor, on_host
from dualdp_torch.rules.rnn_backward import (
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

#: Hidden units up to which a device's fused layer is worth its product with a unit matrix.
FUSED = 256


class _Recurrence(torch.autograd.Function):
    """Fused forward; backward passes the deltas to tokens, inputs whose gradients are captured."""

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
            extra.append(opened[:, :, 3] * squashed)  # input of the projection, (t, n, h)
        ctx.cell = cell
        known = (None, None) if gates is None else (gates, states[1])
        ctx.save_for_backward(x, previous, out if c is None else c, *known)
        ctx.mark_non_differentiable(*extra)
        return (out, *states, *extra)

    @staticmethod
    def backward(ctx: Any, out_grads: Tensor, *state_grads: Tensor) -> Any:
        """Deltas as gradients of the tokens, and gradients of x and the first states."""
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
        dx = steps_of(F.linear(rows_of(x_deltas), cell.w_ih.T), x) if needed else None
        return None, x_deltas, h_deltas, projected, dx, dh, dc


_recurrence: Callable[..., Any] = _Recurrence.apply


def recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.lstm` or a similar function, rewritten as linear uses of its weights."""

    def rewritten(capture: Any, *args: Any) -> Any:
        # Padded: data, state, weights, ..., batch_first. Packed: data, sizes, state, weights, ...
        sizes = args[1] if isinstance(args[3], list | tuple) else None
        given, weights, has_bias, layers, dropout, train, two_way, *batch_first = (
            args[1:] if sizes is None else args[2:]
        )
        state = tuple(given) if isinstance(given, list | tuple) else (given,)
        x, alive, order = args[0], None, None
        if sizes is not None:
            x, state, alive, order = _padded(capture, x, sizes, state)
        elif batch_first[0]:
            x = x.transpose(0, 1)
        finals: list[tuple[Tensor, ...]] = []
        directions = 2 if two_way else 1
        per = len(weights) // (layers * directions)
        for layer in range(layers):
            outs = []
            for direction in range(directions):
                k = layer * directions + direction
                own = weights[k * per : (k + 1) * per]
                ordered = _reversed(x, alive) if direction else x
                first = tuple(s[k] for s in state)
                out, final = _one(capture, function, ordered, first, own, has_bias, alive)
                outs.append(_reversed(out, alive) if direction else out)
                finals.append(final)
            x = outs[0] if directions == 1 else torch.cat(outs, -1)
            if dropout and train and layer < layers - 1:
                x = F.dropout(x, dropout)
        stacked = tuple(torch.stack(states) for states in zip(*finals, strict=True))
        if alive is None:
            return (x.transpose(0, 1) if batch_first[0] else x, *stacked)
        lengths = alive.sum((0, 2)).cpu()
        if order is not None:
            x, lengths = x[:, order], lengths[order.cpu()]
            stacked = tuple(s[:, order] for s in stacked)
        data = torch._pack_padded_sequence(x, lengths, False)[0]
        if order is not None:
            capture.follow(data, order)
        return (data, *stacked)

    return rewritten


def _padded(
    capture: Any, data: Tensor, sizes: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor | None]:
    """Padded x (t, n, i), states in batch order, mask of live steps (t, n, 1), packed order."""
    x, _ = torch._pad_packed_sequence(data, sizes, False, 0.0, len(sizes))
    alive = (torch.arange(int(sizes[0])) < sizes.unsqueeze(1)).unsqueeze(2).to(data.device)
    order = capture.order_of(data)
    if order is None:
        return x, state, alive, None
    back = order.argsort()
    return x[:, back], tuple(s[:, back] for s in state), alive[:, back], order


def _reversed(x: Tensor, alive: Tensor | None) -> Tensor:
    """Reverse every sequence in time, within its own length."""
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
    """Run one layer in one direction; its weights are recorded as linear uses over all steps."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if has_bias else (None, None)
    w_hr = weights[-1] if len(weights) in (3, 5) else None
    is_plain = function is torch.lstm and w_hr is None and alive is None and len(x) > 0
    if is_plain and not on_host(x) and w_hh.shape[1] <= FUSED:
        return _fused_lstm(capture, x, state, w_ih, w_hh, b_ih, b_hh)
    detached = [None if w is None else w.detach() for w in (w_ih, w_hh, b_ih, b_hh, w_hr)]
    cell = Cell(function.__name__, *detached, alive=alive)  # type: ignore[arg-type, misc]
    h, c = state if len(state) == 2 else (state[0], None)
    tokens = [
        None if w is None else x.new_zeros(()).expand(*x.shape[:2], len(w)).requires_grad_()
        for w in (w_ih, w_ih, w_hr)
    ]
    out, *rest = _recurrence(cell, *tokens, x, h, c)
    states, (previous, *projected) = tuple(rest[: len(state)]), rest[len(state) :]
    capture.record(function, linear.RULE, {"weight": w_ih, "bias": b_ih}, x, tokens[0])
    capture.record(function, linear.RULE, {"weight": w_hh, "bias": b_hh}, previous, tokens[1])
    if w_hr is not None:
        capture.record(function, linear.RULE, {"weight": w_hr}, projected[0], tokens[2])
    return out, states


def _fused_lstm(
    capture: Any, x: Tensor, state: tuple[Tensor, ...], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one LSTM layer on its gates' sums, whose gradients are the deltas of all steps.

    The fused layer gets the unit matrix for the weights of its input, so that neither direction
    takes calls of its own for each step.
    """
    bias = None if b_ih is None else b_ih.detach() + b_hh.detach()
    sums = F.linear(x, w_ih.detach(), bias)  # (t, n, g)
    sums = sums if sums.requires_grad else sums.requires_grad_()
    weights = [torch.eye(len(w_hh), dtype=x.dtype, device=x.device), w_hh.detach()]
    first = tuple(s.unsqueeze(0) for s in state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
        out, *last = torch.lstm(sums, first, weights, False, 1, 0.0, True, False, False)
    previous = torch.cat([first[0].detach(), out.detach()[:-1]])
    capture.record(torch.lstm, linear.RULE, {"weight": w_ih, "bias": b_ih}, x, sums)
    capture.record(torch.lstm, linear.RULE, {"weight": w_hh, "bias": b_hh}, previous, sums)
    return out, tuple(s.squeeze(0) for s in last)

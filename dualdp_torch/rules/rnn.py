# SPDX-License-Identifier: Apache-2.0
"""nn.LSTM, nn.GRU and nn.RNN as they are: torch's fused forward, then the recursion of the deltas.

`delta[t]` is the gradient of step t's gates before their nonlinearity. With all deltas at hand the
weights are those of linear uses over all steps: (x, delta) and (h of the step before, delta). The
gates are computed again from the fused forward's output, all steps in one product.
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


@dataclass(eq=False)
class _Cell:
    """One layer in one direction; weights are detached, sequences run forward in time.

    Attributes:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        w_ih: (g, i).
        w_hh: (g, p).
        b_ih: (g,) or None.
        b_hh: (g,) or None.
        w_hr: (p, h), the projection, or None.
        alive: (t, n, 1) bool, False behind the end of a sequence; None for equal lengths.
    """

    kind: str
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    alive: Tensor | None

    def fused(self, x: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, ...]:
        """Outputs (t, n, p) and final states (n, p)[, (n, h)], without a graph."""
        every = (self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr)
        weights = [w for w in every if w is not None]
        state: Any = h[None] if c is None else (h[None], c[None])
        rest = (weights, self.b_ih is not None, 1, 0.0, False, False)
        function: Callable[..., Any] = getattr(torch, self.kind)
        if self.alive is None:
            out, *final = function(x, state, *rest, False)
            return (out, *(f[0] for f in final))
        lengths = self.alive.sum((0, 2)).cpu()
        lengths, order = lengths.sort(descending=True)
        back = order.argsort()
        picked = h[None, order] if c is None else (h[None, order], c[None, order])
        data, sizes = torch._pack_padded_sequence(x[:, order], lengths, False)
        out, *final = function(data, sizes, picked, *rest)
        out, _ = torch._pad_packed_sequence(out, sizes, False, 0.0, len(x))
        return (out[:, back], *(f[0, back] for f in final))

    def gates(self, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Both summands of the gates, each (t, n, g), all steps in one product."""
        return _product(x, self.w_ih, self.b_ih), _product(previous, self.w_hh, self.b_hh)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(t, n, i) -> (t, n, o) in the order of memory: a matrix product instead of many."""
    if x.is_contiguous():
        return F.linear(x, weight, bias)
    return F.linear(x.transpose(0, 1), weight, bias).transpose(0, 1)


def _by_example(steps: int, like: Tensor, *extra: int) -> Tensor:
    """(t, n, *extra, d) in memory by example, as the weights' products will read it."""
    shape = (len(like), steps, *extra, like.shape[1])
    return like.new_empty(shape).transpose(0, 1)


def _lstm_states(gates: Tensor, c: Tensor, alive: Tensor | None) -> tuple[Tensor, ...]:
    """Activated gates i, f, g, o and the cell states before and after every step."""
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cells = torch.empty(len(gates) + 1, *c.shape, dtype=c.dtype, device=c.device)
    cells[0] = c
    added = i * g
    for t in range(len(gates)):
        torch.addcmul(added[t], f[t], cells[t], out=cells[t + 1])
        if alive is not None:
            torch.where(alive[t], cells[t + 1], cells[t], out=cells[t + 1])
    return i, f, g, o, cells[:-1], cells[1:]


def _lstm_deltas(
    cell: _Cell, x: Tensor, previous: Tensor, c: Tensor, out_grads: Tensor, dh: Tensor, dc: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Deltas of input and hidden side (the same), of the projection, and of the first states."""
    gates = torch.add(*cell.gates(x, previous))
    i, f, g, o, before, after = _lstm_states(gates, c, cell.alive)
    tanh = after.tanh()
    # What multiplies d(cell) in the deltas of i, f, g, and d(hidden) in that of o and in d(cell).
    by_cell = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 2)
    by_hidden, into_cell = tanh * o * (1 - o), o * (1 - tanh * tanh)
    deltas = _by_example(len(x), c, 4)
    projected = None if cell.w_hr is None else torch.empty_like(out_grads)
    for t in range(len(x) - 1, -1, -1):
        dh_t = dh + out_grads[t]
        hidden = dh_t
        if cell.w_hr is not None and projected is not None:
            projected[t] = dh_t if cell.alive is None else dh_t * cell.alive[t]
            hidden = dh_t @ cell.w_hr
        dc_t = torch.addcmul(dc, hidden, into_cell[t])
        torch.mul(by_cell[t], dc_t.unsqueeze(1), out=deltas[t, :, :3])
        torch.mul(by_hidden[t], hidden, out=deltas[t, :, 3])
        if cell.alive is None:
            dc, dh = dc_t * f[t], deltas[t].flatten(1) @ cell.w_hh
        else:
            deltas[t] *= cell.alive[t].unsqueeze(1)
            dc = torch.where(cell.alive[t], dc_t * f[t], dc)
            dh = torch.where(cell.alive[t], deltas[t].flatten(1) @ cell.w_hh, dh)
    flat = deltas.flatten(2)
    return flat, flat, projected, dh, dc


def _gru_deltas(
    cell: _Cell, x: Tensor, previous: Tensor, out_grads: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, None, Tensor, None]:
    """Deltas of input and hidden side, which differ in the candidate, and of the first state."""
    x_gates, h_gates = cell.gates(x, previous)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x_gates.chunk(3, -1), h_gates.chunk(3, -1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    candidate = (x_n + r * h_n).tanh()
    by_n = (1 - z) * (1 - candidate * candidate)
    by_hidden = torch.stack(
        [by_n * h_n * r * (1 - r), (previous - candidate) * z * (1 - z), by_n * r], 2
    )
    deltas, hidden = _by_example(len(x), dh, 3), torch.empty_like(previous)
    for t in range(len(x) - 1, -1, -1):
        dh_t = dh + out_grads[t]
        torch.mul(by_hidden[t], dh_t.unsqueeze(1), out=deltas[t])
        hidden[t] = dh_t
        before = torch.addmm(dh_t * z[t], deltas[t].flatten(1), cell.w_hh)
        if cell.alive is None:
            dh = before
        else:
            deltas[t] *= cell.alive[t].unsqueeze(1)
            hidden[t] *= cell.alive[t]
            dh = torch.where(cell.alive[t], before, dh)
    x_deltas = torch.cat([deltas[:, :, :2].flatten(2), hidden * by_n], 2)
    return x_deltas, deltas.flatten(2), None, dh, None


def _rnn_deltas(
    cell: _Cell, out: Tensor, out_grads: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, None, Tensor, None]:
    """Deltas of input and hidden side (the same), and of the first state."""
    slopes = (out > 0).to(out.dtype) if cell.kind == "rnn_relu" else 1 - out * out
    deltas = _by_example(len(out), dh)
    for t in range(len(out) - 1, -1, -1):
        torch.mul(slopes[t], dh + out_grads[t], out=deltas[t])
        if cell.alive is None:
            dh = deltas[t] @ cell.w_hh
        else:
            deltas[t] *= cell.alive[t]
            dh = torch.where(cell.alive[t], deltas[t] @ cell.w_hh, dh)
    return deltas, deltas, None, dh, None


class _Recurrence(torch.autograd.Function):
    """Fused forward; backward hands the deltas to the tokens, at whose edges they are caught."""

    @staticmethod
    def forward(ctx: Any, cell: _Cell, *inputs: Any) -> Any:
        """Tokens of x, h, projection; x (t, n, i), h (n, p), c (n, h) -> out (t, n, p), states."""
        *_, x, h, c = inputs
        out, *states = cell.fused(x, h, c)
        previous = _by_example(len(x), h)
        previous[0], previous[1:] = h, out[:-1]  # (t, n, p)
        extra = [previous]
        if cell.w_hr is not None:
            *_, o, _, after = _lstm_states(torch.add(*cell.gates(x, previous)), c, cell.alive)
            extra.append(o * after.tanh())  # what is projected, (t, n, h)
        ctx.cell = cell
        ctx.save_for_backward(x, previous, out if c is None else c)
        ctx.mark_non_differentiable(*extra)
        return (out, *states, *extra)

    @staticmethod
    def backward(ctx: Any, out_grads: Tensor, *state_grads: Tensor) -> Any:
        """The deltas for the tokens, and the gradients of x and the first states."""
        cell: _Cell = ctx.cell
        x, previous, last = ctx.saved_tensors
        if cell.alive is not None:
            out_grads = out_grads * cell.alive
        found: tuple[Tensor | None, ...]
        if cell.kind == "lstm":
            found = _lstm_deltas(cell, x, previous, last, out_grads, *state_grads[:2])
        elif cell.kind == "gru":
            found = _gru_deltas(cell, x, previous, out_grads, state_grads[0])
        else:
            found = _rnn_deltas(cell, last, out_grads, state_grads[0])
        x_deltas, h_deltas, projected, dh, dc = found
        needed = ctx.needs_input_grad[4]
        dx = _product(x_deltas, cell.w_ih.T, None) if needed and x_deltas is not None else None
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
            return (torch._pack_padded_sequence(x, lengths, False)[0], *stacked)
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
    order = capture.order_of(call.data)
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
    cell = _Cell(function.__name__, *plain, alive=alive)  # type: ignore[arg-type, misc]
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

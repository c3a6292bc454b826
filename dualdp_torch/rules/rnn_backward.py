# SPDX-License-Identifier: Apache-2.0
"""Deltas of LSTM, GRU and RNN layers, from the outputs of torch's fused forward.

The gates of all steps are computed again from those outputs in one product, and so is every factor
of the recursion, which leaves one product and a few in-place operations per step.
Letters: t steps, n examples, i inputs, h hidden, p projected; gates g in {1, 3, 4} times h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from dualdp_torch.rules.base import Tensor, on_host

#: Gate values that are processed at once, so that they stay in a CPU's cache.
_CHUNK = 1 << 19


@dataclass(eq=False)
class Cell:
    """One layer in one direction; weights are detached, sequences run forward in time."""

    kind: str  # "lstm", "gru", "rnn_tanh" or "rnn_relu"
    w_ih: Tensor  # (g, i)
    w_hh: Tensor  # (g, p)
    b_ih: Tensor | None  # (g,)
    b_hh: Tensor | None  # (g,)
    w_hr: Tensor | None  # (p, h)
    alive: Tensor | None  # (t, n, 1) bool, False after the end; None for equal lengths

    def forward(
        self, x: Tensor, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Outputs (t, n, p), final states, and the activated gates if oneDNN provides them."""
        every = (self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr)
        weights = [w for w in every if w is not None]
        if c is not None and self.alive is None and self.w_hr is None and len(weights) == 4:
            found = lstm_with_gates(x, h, c, tuple(weights))
            if found is not None:
                out, last_h, last_c, gates = found
                return out, (last_h, last_c), gates
        out, *states = self.fused(x, h, c, weights)
        return out, tuple(states), None

    def fused(
        self, x: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Outputs (t, n, p) and final states (n, p)[, (n, h)] of torch's own function."""
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

    def gate_sums(self, x: Tensor, previous: Tensor) -> Tensor:
        """(t, n, g) gates before their nonlinearity."""
        biases = [b for b in (self.b_ih, self.b_hh) if b is not None]
        bias = torch.stack(biases).sum(0) if biases else None
        gates = F.linear(rows_of(x), self.w_ih, bias)
        return steps_of(gates.add_(F.linear(rows_of(previous), self.w_hh)), x)


def rows_of(x: Tensor) -> Tensor:
    """(t, n, d) -> (n t, d), in memory by example, the order in which weight gradients read it."""
    return x.transpose(0, 1).reshape(-1, x.shape[2])


def steps_of(rows: Tensor, like: Tensor) -> Tensor:
    """(n t, d), (t, n, ...) -> (t, n, d)."""
    return rows.view(like.shape[1], like.shape[0], rows.shape[1]).transpose(0, 1)


def by_example(steps: int, like: Tensor, *extra: int) -> Tensor:
    """Empty (t, n, *extra, d), in memory by example."""
    shape = (len(like), steps, *extra, like.shape[1])
    return like.new_empty(shape).transpose(0, 1)


def tanh(x: Tensor) -> Tensor:
    """Tanh by the logistic function, which takes a tenth of the time on a CPU."""
    return (2 * x).sigmoid_().mul_(2).sub_(1)


def _chunks(gates: Tensor) -> list[slice]:
    """Slices of consecutive steps whose gates, (t, n, g), fit in a cache together."""
    most = max(_CHUNK // max(gates[0].numel(), 1), 1)
    return [slice(a, min(a + most, len(gates))) for a in range(0, len(gates), most)]


def lstm_gates(gates: Tensor, alive: Tensor | None) -> Tensor:
    """Sums (t, n, g) to activated gates i, f, g, o, (t, n, 4, h), in place.

    After the end of a sequence f = 1 and i = 0, so that the cell state does not change.
    """
    chunks, gates = _chunks(gates), gates.unflatten(2, (4, -1))
    for steps in chunks:
        chunk = gates[steps]
        i, f, g, _ = chunk.unbind(2)
        g.mul_(2)
        chunk.sigmoid_()
        g.mul_(2).sub_(1)
        if alive is not None:
            i.masked_fill_(~alive[steps], 0)
            f.masked_fill_(~alive[steps], 1)
    return gates


def lstm_cells(gates: Tensor, c: Tensor) -> Tensor:
    """All cell states (t + 1, n, h), from activated gates (t, n, 4, h) and the first state."""
    cells = by_example(len(gates) + 1, c)
    cells[0] = c
    states = cells.unbind(0)
    for steps in _chunks(gates.flatten(2)):
        i, f, g, _ = gates[steps].unbind(2)
        for t, into, kept in zip(range(len(gates))[steps], i * g, f, strict=True):
            torch.addcmul(into, kept, states[t], out=states[t + 1])
    return cells


def _lstm_gates_and_cells(
    cell: Cell, x: Tensor, previous: Tensor, c: Tensor, known: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Activated gates (t, n, 4, h) and cell states (t + 1, n, h).

    `known` holds gates and last cell state from the fused forward, or is None.
    """
    if known is not None:
        gates, last_c = known
        cells = lstm_cells(gates, c)
        if are_gates(gates, cells, last_c, cell.gate_sums(x[-1:], previous[-1:])[0]):
            return gates, cells
    gates = lstm_gates(cell.gate_sums(x, previous), cell.alive)
    return gates, lstm_cells(gates, c)


def _lstm_factors(gates: Tensor, cells: Tensor, alive: Tensor | None) -> tuple[Tensor, Tensor]:
    """Factors (t, n, 4, h) of d(cell) for the deltas of i, f, g and of d(hidden) for o's delta.

    Also the factor (t, n, h) of d(hidden) in d(cell); all are 0 after the end of a sequence.
    """
    i, _, g, o = gates.unbind(2)
    squashed = tanh(cells[1:])
    factors = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    torch.addcmul(gates, gates, gates, value=-1, out=factors)  # s (1 - s), the logistic slope
    factors[:, :, 0] *= g
    factors[:, :, 1] *= cells[:-1]
    torch.addcmul(i, i, g * g, value=-1, out=factors[:, :, 2])
    factors[:, :, 3] *= squashed
    into_cell = torch.addcmul(o, o, squashed.square_(), value=-1)
    if alive is not None:
        factors *= alive.unsqueeze(2)
        into_cell *= alive
    return factors, into_cell


def lstm_deltas(
    cell: Cell,
    x: Tensor,
    previous: Tensor,
    c: Tensor,
    known: tuple[Tensor, Tensor] | None,
    out_grads: Tensor,
    dh: Tensor,
    dc: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Deltas of input and hidden side (the same), of the projection, and of the first states.

    Factors that need no delta are computed for many steps at once; the deltas overwrite the gates,
    except `known` gates, which may be needed again.
    """
    gates, cells = _lstm_gates_and_cells(cell, x, previous, c, known)
    projected = None if cell.w_hr is None else by_example(len(x), dh)
    deltas, dc = gates.flatten(2), dc.clone()
    if known is not None:
        deltas = by_example(len(x), deltas[0])
    before, dh = _before(cell, out_grads), dh + out_grads[-1]
    for steps in reversed(_chunks(deltas)):
        alive = None if cell.alive is None else cell.alive[steps]
        chunk = gates[steps]
        factors, into_cell = _lstm_factors(chunk, cells[steps.start : steps.stop + 1], alive)
        kept, into, found = chunk[:, :, 1].unbind(0), into_cell.unbind(0), factors.flatten(2)
        by_cell, by_hidden = factors[:, :, :3].unbind(0), factors[:, :, 3].unbind(0)
        for t in range(len(chunk) - 1, -1, -1):
            hidden, now = dh, steps.start + t
            if cell.w_hr is not None and projected is not None:
                projected[now] = dh
                hidden = dh @ cell.w_hr
            dc.addcmul_(hidden, into[t])
            by_cell[t].mul_(dc.unsqueeze(1))
            by_hidden[t].mul_(hidden)
            dc.mul_(kept[t])
            dh = before(now, found[t], dh)
        deltas[steps].copy_(found)
    if projected is not None and cell.alive is not None:
        projected *= cell.alive
    return deltas, deltas, projected, dh, dc


def _before(cell: Cell, out_grads: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Gradient (n, p) of the hidden state before step t, from (t, deltas (n, g), dh (n, p)).

    After the end of a sequence `dh` is passed on unchanged.
    """
    above = out_grads.unbind(0)
    by_columns = cell.w_hh.T.contiguous().T
    dead = None if cell.alive is None else (~cell.alive).to(out_grads.dtype).unbind(0)

    def before(t: int, delta: Tensor, dh: Tensor) -> Tensor:
        found = torch.addmm(above[t - 1] if t else torch.zeros_like(dh), delta, by_columns)
        return found if dead is None else found.addcmul_(dead[t], dh)

    return before


def gru_deltas(
    cell: Cell, x: Tensor, previous: Tensor, out_grads: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, None, Tensor, None]:
    """Deltas of input and hidden side, which differ in the candidate, and of the first state."""
    x_gates = steps_of(F.linear(rows_of(x), cell.w_ih, cell.b_ih), x)
    h_gates = steps_of(F.linear(rows_of(previous), cell.w_hh, cell.b_hh), x)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x_gates.chunk(3, -1), h_gates.chunk(3, -1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    candidate = tanh(x_n + r * h_n)
    by_n = (1 - z) * (1 - candidate * candidate)
    factors = [by_n * h_n * r * (1 - r), (previous - candidate) * z * (1 - z), by_n * r]
    if cell.alive is not None:  # z = 1 keeps the state of a sequence that has ended
        z, by_n = z.masked_fill(~cell.alive, 1), by_n * cell.alive
        factors = [factor * cell.alive for factor in factors]
    gates = torch.stack([factor.transpose(0, 1) for factor in factors], 2).transpose(0, 1)
    deltas, hidden = gates.flatten(2), by_example(len(x), dh)
    by_columns = cell.w_hh.T.contiguous().T
    for t in range(len(x) - 1, -1, -1):
        torch.add(dh, out_grads[t], out=hidden[t])
        gates[t].mul_(hidden[t].unsqueeze(1))
        dh = torch.addmm(hidden[t] * z[t], deltas[t], by_columns)
    x_deltas = torch.cat([deltas[:, :, : 2 * dh.shape[1]], hidden * by_n], 2)
    return x_deltas, deltas, None, dh, None


def rnn_deltas(
    cell: Cell, out: Tensor, out_grads: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, None, Tensor, None]:
    """Deltas of input and hidden side (the same), and of the first state."""
    deltas = by_example(len(out), dh)
    deltas.copy_(out > 0 if cell.kind == "rnn_relu" else 1 - out * out)
    if cell.alive is not None:
        deltas *= cell.alive
    before, dh = _before(cell, out_grads), dh + out_grads[-1]
    for t in range(len(out) - 1, -1, -1):
        deltas[t].mul_(dh)
        dh = before(t, deltas[t], dh)
    return deltas, deltas, None, dh, None


# ---------------------------------------------------------------------- oneDNN


def by_onednn(*operands: Tensor) -> bool:
    """True if oneDNN can take the operands: float32 on a CPU, not recorded by autograd."""
    has_graph = torch.is_grad_enabled()
    for x in operands:
        if not on_host(x) or x.dtype != torch.float32 or (has_graph and x.requires_grad):
            return False
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


# oneDNN leaves the gates of every step at the start of its training forward's workspace, whose
# layout is not documented. They are used only after `are_gates` has checked them against the last
# cell state that the layer returned and the last step's input; else they are computed again.

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
    None if oneDNN cannot run the layer or returns no such workspace.
    """
    if _layer is None or torch.is_autocast_enabled("cpu") or not x.numel():
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

# SPDX-License-Identifier: Apache-2.0
"""Table of the functions whose parameters have a rule, that is, a fast per-sample gradient.

Functions without a rule take `torch.func.vmap`, which is exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from dualdp import _validate
from dualdp_torch.rules import (
    attention,
    bilinear_prelu_cells,
    broadcast,
    conv,
    embedding,
    linear,
    norm,
    rnn,
)
from dualdp_torch.rules.base import Rule as Rule
from dualdp_torch.rules.base import Tensor

RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear.RULE,
    F.conv1d: conv.rule(1),
    F.conv2d: conv.rule(2),
    F.conv3d: conv.rule(3),
    F.conv_transpose1d: conv.rule(1, transposed=True),
    F.conv_transpose2d: conv.rule(2, transposed=True),
    F.conv_transpose3d: conv.rule(3, transposed=True),
    F.embedding: embedding.RULE,
    F.layer_norm: norm.LAYER,
    F.rms_norm: norm.RMS,
    F.group_norm: norm.GROUP,
    F.instance_norm: norm.INSTANCE,
}
# The same functions and operators under torch's own names, with the same order of arguments.
RULES |= {
    torch.addmm: linear.ADDMM,
    torch.matmul: linear.MATMUL,
    torch.mm: linear.MATMUL,
    Tensor.matmul: linear.MATMUL,
    Tensor.mm: linear.MATMUL,
    torch.add: broadcast.ADD,
    Tensor.add: broadcast.ADD,
    torch.sub: broadcast.SUB,
    Tensor.sub: broadcast.SUB,
    torch.mul: broadcast.MUL,
    Tensor.mul: broadcast.MUL,
    Tensor.expand: broadcast.EXPAND,
    Tensor.add_: broadcast.ADD_IN_PLACE,
    Tensor.sub_: broadcast.SUB_IN_PLACE,
    torch.layer_norm: norm.LAYER,
    torch.rms_norm: norm.RMS,
    torch.group_norm: norm.GROUP,
    torch.prelu: bilinear_prelu_cells.PRELU,
    F.bilinear: bilinear_prelu_cells.BILINEAR,
}


class Rewrite(NamedTuple):
    """Function that is replaced by calls of functions that have rules.

    Attributes:
        function: callable that takes the capture, then the arguments of the original.
        covers: predicate of (args, kwargs), True if this call can be rewritten.
        parameter: position and name of the argument that has to be a parameter; None for any.
        writes: True if it changes its first argument; calls that change a parameter are left.
    """

    function: Callable[..., Any]
    covers: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: True
    parameter: tuple[int, str] | None = None
    writes: bool = False


REWRITES: dict[Callable[..., Any], Rewrite] = {
    F.multi_head_attention_forward: Rewrite(
        attention.multi_head_attention, attention.covers_attention
    ),
    F.scaled_dot_product_attention: Rewrite(
        attention.with_mask_of_each, attention.shares_mask, (3, "attn_mask")
    ),
    F.embedding_bag: Rewrite(bilinear_prelu_cells.embedding_bag, bilinear_prelu_cells.covers_bag),
    **{
        function: Rewrite(rnn.recurrent(function))
        for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
    torch.lstm_cell: Rewrite(bilinear_prelu_cells.lstm_cell),
    torch.gru_cell: Rewrite(bilinear_prelu_cells.gru_cell),
    torch.rnn_tanh_cell: Rewrite(bilinear_prelu_cells.rnn_cell(torch.tanh)),
    torch.rnn_relu_cell: Rewrite(bilinear_prelu_cells.rnn_cell(torch.relu)),
    Tensor.expand: Rewrite(broadcast.expand_later, broadcast.expands_later),
    Tensor.repeat: Rewrite(broadcast.repeat, broadcast.repeats_ones),
    torch.where: Rewrite(broadcast.where, broadcast.chooses_smaller),
    Tensor.__setitem__: Rewrite(broadcast.fill_rows, broadcast.fills_rows, writes=True),
    **{
        function: Rewrite(broadcast.spread_first(function), broadcast.spreads_later)
        for name in ("add", "sub", "mul")
        for function in (getattr(torch, name), getattr(Tensor, name))
    },
}


def register_rule(target: Callable[..., Any], rule: Rule, *, overwrite: bool = False) -> None:
    """Add the rule of a function of the user's own.

    Args:
        target: function as torch dispatches it (`torch.overrides.wrap_torch_function`, or a
            function of torch).
        rule: `Rule` for the function's parameters.
        overwrite: bool, True to replace a rule that the function has already.

    Raises:
        TypeError: `target` is no function, or `rule` is no `Rule`.
        ValueError: the function has a rule already.
    """
    if not callable(target):
        raise TypeError(f"target={target!r} is not callable. Expected a function.")
    if not isinstance(rule, Rule):
        raise TypeError(f"rule={rule!r} is {_validate.kind(rule)}. Expected a dualdp_torch.Rule.")
    if target in RULES and not overwrite:
        raise ValueError(
            f"{getattr(target, '__name__', target)} has a rule already. Pass overwrite=True."
        )
    RULES[target] = rule

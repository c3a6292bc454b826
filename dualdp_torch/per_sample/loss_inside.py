# SPDX-License-Identifier: Apache-2.0
"""Loss that a model computes in its own forward, as `model(**batch).loss` of Hugging Face.

The functions that lead from the model's outputs to the loss are called again on the outputs that
the loop receives. The loss is then one of the loop, checked like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.checks.replay import repeated
from dualdp_torch.per_sample.checks.tape import Call, Slot, Tape, is_in_place, slots_of
from dualdp_torch.rules.base import Tensor


def again_from_outputs(
    tape: Tape, outputs: Sequence[Tensor], handed_out: Sequence[Tensor], loss: Tensor
) -> Tensor | None:
    """Return the loss computed again from the outputs, or None if they do not determine it.

    The closed `tape` is that of the forward, `handed_out` has the values of its outputs in their
    order, and `loss` () is the number that it computed.
    """
    made = {id(slot.ref()): slot.index for slot in tape.slots}
    now = {
        made[id(old)]: new for old, new in zip(outputs, handed_out, strict=True) if id(old) in made
    }
    if id(loss) not in made:
        return None
    live = _leading_to(tape.slots[made[id(loss)]], tape, set(now))
    if live is None:
        return None

    def value(slot: Slot) -> Any:
        return now[slot.index] if slot.index in now else slot.value

    for call in live:
        out = repeated(call, value)
        made_now = [out] if type(call.out) is Slot else out
        now |= {slot.index: new for slot, new in zip(slots_of(call.out), made_now, strict=False)}
    return now[made[id(loss)]]


def _leading_to(end: Slot, tape: Tape, given: set[int]) -> list[Call] | None:
    """Return the calls from given tensors to the last one, None if others with gradients enter."""
    wanted, live = {end.index}, list[Call]()
    for call in reversed(tape.calls):
        acts = is_in_place(call.function) and any(s.index in wanted for s in call.taken[:1])
        if acts or any(slot.index in wanted - given for slot in call.made):
            wanted |= {slot.index for slot in call.taken}
            live.append(call)
    sources = [tape.slots[index] for index in wanted - given if tape.slots[index].value is not None]
    is_determined = not any(slot.requires_grad for slot in sources) and bool(wanted & given)
    return live[::-1] if is_determined else None


class _Refused(torch.autograd.Function):
    """Identity of a number that the model returned, whose backward is refused."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, number: Tensor, reason: str) -> Tensor:
        """Return the same value."""
        ctx.reason = reason
        return number.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Refuse the gradient."""
        raise UnsupportedLayerError(
            f"The loss uses a number that the model computed inside its forward, {ctx.reason}, so "
            "it can't be told whether it is the mean of the examples' own losses. Compute the loss "
            "in the loop, from outputs with the examples on axis 0 (for models of Hugging Face, "
            "per_example_loss(model, outputs, labels).mean() of dualdp_torch.trainer); or use "
            "clipped_grad_sum."
        )


def refused(leaf: Tensor, number: Tensor, *, by_vmap: bool) -> Tensor:
    """Return a number whose value may be read, and whose backward is refused."""
    reason = "from more than the outputs that it returns"
    if by_vmap:
        reason = "which goes through vmap and makes no graph"
    return _Refused.apply(leaf, number, reason)  # type: ignore[no-any-return]

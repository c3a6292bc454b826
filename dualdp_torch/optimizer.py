# SPDX-License-Identifier: Apache-2.0
"""Makes the user's own optimizer step on the noisy mean of clipped gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualdp.ledger import Ledger

from .clip import clip_and_sum, clipping_bounds
from .data import Draw
from .noise import noisy_mean
from .recorder import Recorder
from .rules.base import Tensor


@dataclass
class Stages:
    """The gradients of the last step on their way to the optimizer, for inspection only.

    Attributes:
        unprotected_norms: (n,) norms of the examples' gradients, not private.
        unprotected_sum: name -> clipped sum, not private.
        noisy_mean: name -> what the optimizer got.
    """

    unprotected_norms: Tensor
    unprotected_sum: dict[str, Tensor]
    noisy_mean: dict[str, Tensor]


def check_holds(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that updates other parameters than those that are clipped.

    Raises:
        ValueError: a trainable parameter it lacks, or one that is no trainable one of the model.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in parameters.values()}
    missing = [n for n, p in parameters.items() if all(p is not h for h in held)]
    if missing:
        raise ValueError(
            f"The optimizer does not hold the trainable parameters {missing}. Freeze them "
            "(requires_grad_(False)) or give the optimizer all of model.parameters()."
        )
    strange = [tuple(p.shape) for p in held if id(p) not in known and p.requires_grad]
    if strange:
        raise ValueError(
            f"The optimizer holds parameters of shapes {strange} that are not trainable parameters "
            "of the model. Give them an optimizer of their own."
        )


class PrivateStep:
    """Runs before every `optimizer.step()`: clips, adds up, records, adds noise.

    Args:
        recorder: listens to the model.
        optimizer: the user's.
        plan: `PrivacyPlan`.
        ledger: records each release before the update.
        loss_reduction: "mean" or "sum".
        keep: as in `Captured`.
    """

    def __init__(
        self,
        recorder: Recorder,
        optimizer: torch.optim.Optimizer,
        plan: Any,
        ledger: Ledger,
        loss_reduction: str,
        keep: str,
    ) -> None:
        self._recorder, self._optimizer = recorder, optimizer
        self._plan, self.ledger = plan, ledger
        self._reduction, self._keep = loss_reduction, keep
        self._draw: Draw | None = None
        self._sums: dict[str, Tensor] | None = None
        self._norms: list[Tensor] = []
        self.stages: Stages | None = None
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def detach(self) -> None:
        """Leave the optimizer as it was."""
        self._handle.remove()

    def is_waiting(self) -> bool:
        """Whether a batch was handed out and not stepped on."""
        return self._draw is not None

    def begin(self) -> None:
        """A pass over the loader begins: what an abandoned pass left behind is dropped."""
        self._draw, self._sums, self._norms = None, None, []
        self._recorder.clear()

    def announce(self, draw: Draw) -> None:
        """The loader hands out a batch.

        Raises:
            RuntimeError: the batch before was not stepped on.
        """
        if self._draw is not None:
            raise RuntimeError(
                f"The batch of step {self._draw.step} got no optimizer.step(). Expected one for "
                "every batch of the loader: which batches count must not depend on the data."
            )
        self._draw = draw

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Replace the gradients by the noisy mean, or by nothing inside a logical batch."""
        if any(arg is not None for arg in (*args[1:], *kwargs.values())):
            raise RuntimeError(
                "optimizer.step(closure) would evaluate the loss several times for one release. "
                "Call backward yourself and optimizer.step() without a closure."
            )
        draw = self._draw
        if draw is None:
            raise RuntimeError(
                "optimizer.step() came without a batch of the loader that make_private returned. "
                "Train on its batches only, one step for each."
            )
        check_holds(self._optimizer, self._recorder.parameters)
        self._add(draw)
        self._recorder.clear()
        self._draw = None
        if draw.is_last:
            self._release(draw.step)
        else:
            self._set_gradients({})

    def _add(self, draw: Draw) -> None:
        """Add the clipped gradients of one physical batch to the logical batch's sum."""
        recorder = self._recorder
        if recorder.n is not None and recorder.n != len(draw.mask):
            raise RuntimeError(
                f"The model saw {recorder.n} examples but the loader gave {len(draw.mask)}. "
                "Expected the whole batch, once."
            )
        scale = float(len(draw.mask)) if self._reduction == "mean" else 1.0
        gradients = recorder.gradients(scale, self._keep)
        bound = self._plan.max_grad_norm_at(draw.step)
        bounds = clipping_bounds(recorder.parameters, self._plan.clipping, bound)
        with torch.no_grad():
            sums, norms = clip_and_sum(
                gradients,
                len(draw.mask),
                bounds,
                self._plan.clipping,
                draw.mask,
                recorder.second_pass(scale),
            )
            for name, total in (self._sums or {}).items():
                sums[name] = sums[name] + total
        self._sums = sums
        self._norms.append(norms[draw.mask.to(norms.device)])

    def _release(self, step: int) -> None:
        """Record the step, then hand the optimizer the noisy mean."""
        sums, self._sums = self._sums or {}, None
        norms, self._norms = torch.cat(self._norms), []
        self.ledger.record(step)
        with torch.no_grad():
            mean = noisy_mean(sums, self._plan, step)
        self.stages = Stages(norms, sums, mean)
        self._set_gradients(mean)

    def _set_gradients(self, mean: Mapping[str, Tensor]) -> None:
        """What the optimizer will see; None makes it skip a parameter."""
        for name, p in self._recorder.parameters.items():
            p.grad = mean[name].to(p.dtype).view_as(p) if name in mean else None

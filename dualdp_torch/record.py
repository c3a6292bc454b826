# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of a loop that the user owns: the ambient form."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from dualdp import _validate
from dualdp.exactness import CHECKS

from .call import METHODS
from .clip import clip_and_sum, clipping_bounds, norms_of, refuse_two_pass
from .criterion_check import REDUCTIONS, CriterionCheck
from .gradients import Gradients, Limits
from .recorder import RECORDED, Recorder
from .rules.base import Tensor
from .tape import Tape

_checked: weakref.WeakKeyDictionary[nn.Module, dict[str, CriterionCheck]] = (
    weakref.WeakKeyDictionary()
)


class Record:
    """The gradients of one recorded forward and backward."""

    def __init__(self, recorder: Recorder, loss_reduction: str, keep: str, check: str) -> None:
        self._recorder, self._reduction, self._keep = recorder, loss_reduction, keep
        self._check = check
        self._gradients: Gradients | None = None

    def check(self) -> None:
        """Refuse a loss that is not what was declared; once a backward was recorded.

        Raises:
            ValueError: it mixes examples, or is reduced otherwise.
        """
        recorder, tape = self._recorder, self._recorder.tape
        if not tape.backwards or not recorder.has_gradients:
            return
        tape.end()
        own = _checked.setdefault(recorder.model, {})
        criterion = own.setdefault(self._reduction, CriterionCheck(self._reduction))
        if (tape.n or 0) < 2 or (self._check == "first" and criterion.knows(tape)):
            tape.clear()
            return
        sizes = sum_of_squares(recorder.cotangents, tape.n or 0)
        rows = {int(np.argmax(sizes)), int(np.random.default_rng(tape.n).integers(len(sizes)))}
        finding = criterion.check(tape, recorder.cotangents, sorted(rows), recorder.model)
        if finding is not None:
            raise ValueError(finding.text)
        tape.clear()

    def _read(self) -> Gradients:
        """The gradients, taken from the recorder once."""
        if self._gradients is None:
            self._recorder.require_backward()
            self.check()
            self._gradients = self._recorder.gradients(self._scale, self._keep)
        return self._gradients

    @property
    def _scale(self) -> float:
        """What undoes the loss's reduction."""
        return float(self._recorder.n or 0) if self._reduction == "mean" else 1.0

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape), the gradient of each example's own loss; a copy for the caller."""
        found, parameters = dict(self._read().grads()), self._recorder.parameters
        dense = torch.contiguous_format
        # Popped: what was formed only for this call is freed as soon as it is copied.
        return {
            name: found.pop(name).to(parameters[name].dtype, copy=True, memory_format=dense)
            for name in list(found)
        }

    def norms(self, *, per_parameter: bool = False) -> Any:
        """(n,) norms of whole gradients, or name -> (n,)."""
        squares, norms = norms_of(self._read(), Limits(), self._recorder.n or 0)
        if per_parameter:
            return {name: s.sqrt().to(norms.dtype) for name, s in squares.items()}
        return norms

    def clipped_sum(
        self, *, max_grad_norm: Any, clipping: str = "flat", mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Name -> sum over examples of clipped gradients; arguments as in `clipped_grad_sum`."""
        bounds = clipping_bounds(self._recorder.parameters, clipping, max_grad_norm)
        refuse_two_pass(self._recorder.method, clipping)
        n, second_pass = self._recorder.n or 0, self._recorder.second_pass(self._scale)
        return clip_and_sum(self._read(), n, bounds, clipping, mask, second_pass)[0]


@contextlib.contextmanager
def record_per_sample(
    model: nn.Module, *, loss_reduction: str, method: str = "auto", check: str = "first"
) -> Iterator[Record]:
    """Record one forward and one backward of a loop that the user owns.

    Args:
        model: the module.
        loss_reduction: "mean" or "sum": what turns the examples' losses into the loss.
        method: one of `RECORDED`.
        check: "first" checks code that is new, "always" every block, "off" none.

    Yields:
        A `Record`, readable after backward and after the block.

    Raises:
        ValueError: an unknown word, or a loss that mixes examples or contradicts `loss_reduction`.
        UnsupportedLayerError: the model mixes examples, or a trainable parameter reaches the loss
            outside its forward.
    """
    _validate.choice("loss_reduction", loss_reduction, REDUCTIONS)
    _validate.choice("method", method, RECORDED)

    _validate.choice("check", check, CHECKS)
    tape = Tape()
    recorder = Recorder(model, method=method, when=lambda: True, tape=tape)
    record = Record(recorder, loss_reduction, METHODS[method] or "all", check)
    try:
        if check != "off":
            tape.begin()
        yield record
        record.check()
    finally:
        tape.end()
        recorder.detach()


def sum_of_squares(cotangents: list[Tensor | None], n: int) -> np.ndarray[Any, Any]:
    """(n,) squared norms of what the outputs of each example received; 0 where not finite."""
    total = np.zeros(n)
    for grad in cotangents:
        if grad is not None and grad.dim() and len(grad) == n:
            squares = grad.detach().double().reshape(n, -1).square().sum(1)
            total += torch.nan_to_num(squares, 0, 0, 0).cpu().numpy()
    return total

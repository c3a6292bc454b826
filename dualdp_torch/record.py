# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of a loop that the user owns: the ambient form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dualdp import _validate

from .call import METHODS
from .clip import clip_and_sum, clipping_bounds, norms_of, refuse_two_pass
from .gradients import Gradients, Limits
from .recorder import RECORDED, Recorder
from .reduction import REDUCTIONS, check_reduction
from .rules.base import Tensor


class _SeeBackward(TorchFunctionMode):
    """Sees which loss `backward` is called on."""

    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward:
            self._check(args[0])
        return func(*args, **(kwargs or {}))


class Record:
    """The gradients of one recorded forward and backward."""

    def __init__(self, recorder: Recorder, loss_reduction: str, keep: str) -> None:
        self._recorder, self._reduction, self._keep = recorder, loss_reduction, keep
        self._gradients: Gradients | None = None

    def _read(self) -> Gradients:
        """The gradients, taken from the recorder once."""
        if self._gradients is None:
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
    model: nn.Module, *, loss_reduction: str, method: str = "auto"
) -> Iterator[Record]:
    """Record one forward and one backward of a loop that the user owns.

    Args:
        model: the module.
        loss_reduction: "mean" or "sum": what turns the examples' losses into the loss.
        method: one of `RECORDED`.

    Yields:
        A `Record`, readable after backward and after the block.

    Raises:
        ValueError: an unknown word, or a loss whose graph contradicts `loss_reduction`.
        UnsupportedLayerError: the model mixes examples, or a trainable parameter reaches the loss
            outside its forward.
    """
    _validate.choice("loss_reduction", loss_reduction, REDUCTIONS)
    _validate.choice("method", method, RECORDED)

    def check(loss: Tensor) -> None:
        check_reduction(loss, loss_reduction)

    recorder = Recorder(model, method=method, when=lambda: True, check=check)
    try:
        with _SeeBackward(check):
            yield Record(recorder, loss_reduction, METHODS[method] or "all")
    finally:
        recorder.detach()

# SPDX-License-Identifier: Apache-2.0
"""`record_per_sample`: per-sample gradients of one forward and backward in the user's own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from dualdp import _validate
from dualdp.exactness import CHECKS
from dualdp_torch.parallel.fsdp import refuse_tensor_parallel
from dualdp_torch.per_sample.analysis_cache import AnalysisCache
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.per_sample.checks.twin import REDUCTIONS, Twins
from dualdp_torch.per_sample.clip import (
    Terms,
    clip_factors,
    clipped_sums,
    clipping_bounds,
    norms_of,
    refuse_two_pass,
)
from dualdp_torch.per_sample.gradients import Captured, Limits
from dualdp_torch.per_sample.model_checks import require_module
from dualdp_torch.per_sample.numbers import numbers_of
from dualdp_torch.per_sample.recorder import Recorder
from dualdp_torch.rules.base import Tensor

_ROWS = 4  # examples that are led through a block alone


class Record:
    """Per-sample gradients of one recorded forward and backward."""

    def __init__(self, recorder: Recorder, loss_reduction: str, keep: str, check: str) -> None:
        self._recorder, self._reduction, self._keep = recorder, loss_reduction, keep
        self._check, self._is_checked = check, check == "off"
        self._gradients: Captured | None = None

    def check(self) -> None:
        """Check the loss and the gradients, once a backward was recorded and if a check is due.

        Raises:
            ExactnessError: gradients are not those of each example's loss alone.
            ValueError: the loss mixes examples, or is reduced otherwise than declared.
        """
        recorder = self._recorder
        if self._is_checked or not recorder.has_gradients:
            return
        self._is_checked = True
        recorder.drop_unused()
        n = recorder.n or 0
        if recorder.twins.is_on:
            problem = recorder.twins.verdict(recorder.cotangents, self._reduction)
            if problem is not None:
                raise problem.raised(was_right=False)
        if n:
            gradients, start = self._read(), recorder.start
            if start is not None and start.sums is not None and recorder.parameters:
                terms = Terms(self._scale, {}, "flat", None)
                options: dict[str, Any] = {"is_first": not recorder.was_checked(self.purpose)}
                options |= {"seed": recorder.analyses.next_seed(), "what": "the gradient"}
                numbers = numbers_of(gradients, recorder.losses(self._scale), terms)
                found, _ = recorder.checked(numbers, terms, self.purpose, **options)
                self._gradients = gradients if found is numbers else found.gradients
        recorder.twins.clear()

    @property
    def purpose(self) -> tuple[str, ...]:
        """Key of a first call's check in the analysis cache."""
        return "record_per_sample", self._recorder.method

    def is_due(self, cache: AnalysisCache, several: bool = False) -> bool:
        """True if the gradients of the forward that begins are to be checked."""
        purpose = (*self.purpose, "several") if several else self.purpose
        is_new = purpose not in cache.checked or cache.by_data
        return self._check == "always" or (self._check == "first" and is_new)

    def _read(self) -> Captured:
        """Return the gradients, taken from the recorder once."""
        if self._gradients is None:
            self._recorder.require_backward()
            self._gradients = self._recorder.gradients(self._scale, self._keep)
            self.check()
        return self._gradients

    @property
    def _scale(self) -> float:
        """Factor that undoes the loss reduction: n for a mean, 1 for a sum."""
        return float(self._recorder.n or 0) if self._reduction == "mean" else 1.0

    def grads(self) -> dict[str, Tensor]:
        """Return name -> (n, *shape), a copy of the gradient of each example's own loss."""
        found, parameters = dict(self._read().grads()), self._recorder.parameters
        dense = torch.contiguous_format
        # Popped: a gradient formed only for this call is freed as soon as it is copied.
        return {
            name: found.pop(name).to(parameters[name].dtype, copy=True, memory_format=dense)
            for name in list(found)
        }

    def norms(self, *, per_parameter: bool = False) -> Any:
        """Return (n,) norms of whole gradients, or name -> (n,) norms per parameter."""
        squares, norms = norms_of(self._read(), Limits(), self._recorder.n or 0)
        if per_parameter:
            return {name: s.sqrt().to(norms.dtype) for name, s in squares.of.items()}
        return norms

    def clipped_sum(
        self, *, max_grad_norm: Any, clipping: str = "flat", mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return name -> sum of clipped gradients; arguments as in `clipped_grad_sum`."""
        bounds = clipping_bounds(self._recorder.parameters, clipping, max_grad_norm)
        refuse_two_pass(self._recorder.method, clipping)
        n, second_pass = self._recorder.n or 0, self._recorder.second_pass(self._scale, frees=False)
        gradients = self._read()
        factors = clip_factors(gradients, n, bounds, clipping, mask)
        return clipped_sums(gradients, factors, second_pass)


@contextlib.contextmanager
def record_per_sample(
    model: nn.Module, *, loss_reduction: str, method: str = "auto", check: str = "first"
) -> Iterator[Record]:
    """Record one forward and one backward of a loop that the user owns.

    Args:
        model: module to record.
        loss_reduction: str, "mean" or "sum", the reduction of the examples' losses.
        method: str, one of `METHODS`.
        check: str: "first" checks new code, "always" every block, "off" none.

    Yields:
        A `Record`, readable after backward and after the block.

    Raises:
        ExactnessError: a check failed.
        ValueError: an unknown word, or a loss that mixes examples or contradicts `loss_reduction`.
        UnsupportedLayerError: the model mixes examples, or a trainable parameter reaches the loss
            outside its forward.
    """
    require_module("model", model)
    refuse_tensor_parallel(
        model, "record_per_sample", "use make_private, or clipped_grad_sum on the same batch"
    )
    _validate.choice("loss_reduction", loss_reduction, REDUCTIONS)
    _validate.choice("method", method, METHODS)
    _validate.choice("check", check, CHECKS)
    twins = Twins()
    recorder = Recorder(model, method=method, twins=twins)
    record = Record(recorder, loss_reduction, METHODS[method] or "all", check)
    recorder.is_due = record.is_due
    try:
        if check != "off":
            twins.rows_of = lambda count: (
                np.random.default_rng(count).permutation(count)[:_ROWS].tolist()
            )
        yield record
        record.check()
    finally:
        twins.clear()
        recorder.detach()

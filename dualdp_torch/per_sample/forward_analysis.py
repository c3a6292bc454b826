# SPDX-License-Identifier: Apache-2.0
"""Analysis of a model before and after a recorded forward, the same on all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.per_sample.analysis_cache import AnalysisCache, cached_analyses
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.batch_axis import BatchAxis, of_single
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.examination import ELSEWHERE, examine
from dualdp_torch.per_sample.outputs import projected
from dualdp_torch.per_sample.parameter_use import USE_LOOP
from dualdp_torch.per_sample.vmap_and_loop import gradients_set_aside

_SAMPLE = 8  # examples that one process shares for the analysis by all


class ForwardAnalysis:
    """Finds the batch axes of the parameter uses of a recorded model.

    A sharded model gathers its parameters in a forward of all processes together. So all processes
    analyse it on the same few examples as soon as one process needs the analysis.

    `inside` has the parameters as the forward sees them; in the context that `pause` returns, the
    model's calls are not recorded. An example is a unit of `rows_per_unit` rows. The uses at the
    positions `skip` hold no examples, and `cache` has the analyses of the model on batches like the
    last one.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: Mapping[str, nn.Parameter],
        shards: Shards | None,
        pause: Callable[[], AbstractContextManager[None]],
        rows_per_unit: int,
    ) -> None:
        self._model, self._inside, self._shards, self._pause = model, inside, shards, pause
        self._loss = partial(projected, rows_per_unit=rows_per_unit)
        self._batch: Batch
        self.cache = AnalysisCache([])
        self.skip: frozenset[int] = frozenset()

    def begin(self, batch: Batch) -> str | None:
        """Analyse a new model; return the reason why captured uses can't be trusted, or None."""
        self._batch, self.cache = batch, cached_analyses(self._model, self._loss, batch)
        self._examine_if(lambda: not self.cache.is_known)
        problem = self.cache.problem
        if problem and self._shards is not None:
            raise UnsupportedLayerError(
                f"{problem}, so its gradients need vmap, which can't gather the parameters of a "
                "model under fully_shard. Expected layers that a rule covers; change that layer, "
                "or train without fully_shard."
            )
        # A batch of one shows nothing, but must skip the same uses as the other processes.
        before = self.skip if self._shards is not None else frozenset()
        self.skip = before if self.cache.skip is None else self.cache.skip
        return problem

    def batch_axes(self, capture: Capture) -> tuple[BatchAxis | None, ...]:
        """Return the batch axis of each use of the forward that has ended, None if not known."""
        cache, signatures = self.cache, tuple([use.signature for use in capture.uses])
        self._examine_if(lambda: signatures not in cache.axes)
        n, k = self._batch.n, self._batch.rows_per_unit
        if capture.hooked:
            raise UnsupportedLayerError(
                f"The forward registers a gradient hook on the output of {capture.hooked}, whose "
                f"gradient is captured before the hook. {USE_LOOP}"
            )
        if n == 1:
            return tuple(
                of_single(use.out_shape, use.possible_axes, use.rule.rows_are_free, k)
                for use in capture.uses
            )
        if signatures not in cache.axes:
            reason = cache.problem or "fewer than two of its outputs are finite"
            raise UnsupportedLayerError(
                f"The model could not be examined on this batch: {reason}, or chance (layerdrop) "
                f"or the other examples decide which layers run. {USE_LOOP}"
            )
        misfit = cache.axes[signatures].misfit(capture.uses, n)
        if misfit is not None:
            cache.add(ELSEWHERE.format(misfit))
            raise UnsupportedLayerError(f"{ELSEWHERE.format(misfit)} {USE_LOOP}")
        return cache.axes[signatures].batch_axes

    def _examine_if(self, is_missing: Callable[[], bool]) -> None:
        """Examine the model if `is_missing`, on the examples of each such process in turn."""
        missing = self._batch.n > 1 and is_missing()
        if self._shards is None:
            if missing:
                self._examine(self._batch)
            return
        while (rank := self._shards.first_that(missing)) is not None:
            few = self._batch.rows(slice(0, _SAMPLE)).arguments()
            device = self._batch.tensors()[0].device
            sample = self._shards.sample_of(rank, few, device)
            k = self._batch.rows_per_unit
            self._examine(Batch(sample, shares=True, rows_per_unit=k))
            missing = missing and rank != self._shards.group.rank and is_missing()

    def _examine(self, batch: Batch) -> None:
        """Examine the model on a batch, and cache the result if it may be reused."""
        with self._pause(), gradients_set_aside(self._inside), torch.enable_grad():
            found = examine(self._model, self._loss, batch, self._inside)
        theirs, ours = batch.signature(), self._batch.signature()
        if theirs == ours or (self._batch.n == 1 and theirs[:2] == ours[:2]):
            self.cache.add(found)

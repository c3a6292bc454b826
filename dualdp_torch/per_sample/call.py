# SPDX-License-Identifier: Apache-2.0
"""One call of a public function: checked arguments, chunks, the chosen method, the gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import CHECKS
from dualdp_torch.parallel.fsdp import check_sharded, sharded_parameters
from dualdp_torch.per_sample.analysis_cache import AnalysisCache, cached_analyses
from dualdp_torch.per_sample.batch import Batch, check_losses, split_aux
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.examination import ELSEWHERE, WITHOUT_RULE, Axes, examine
from dualdp_torch.per_sample.gradients import Captured
from dualdp_torch.per_sample.model_checks import refuse_mixing_modules, require_module
from dualdp_torch.per_sample.parameter_use import (
    USE_LOOP,
    ChangedInPlaceError,
    SecondOrderError,
    eagerly,
    trainable_parameters,
)
from dualdp_torch.per_sample.random_state import Start, on_copies, untouched_generators
from dualdp_torch.per_sample.units import of_units
from dualdp_torch.per_sample.vmap_and_loop import by_loop, by_vmap, gradients_set_aside
from dualdp_torch.rules.base import PART, SURELY_FREE, Tensor, free_memory
from dualdp_torch.rules.linear import join

#: Method -> the per-sample gradients it keeps, see `Captured`; None for methods without capture.
METHODS = {
    "auto": "cheap",
    "book_keeping": "small",
    "two_pass": "small",
    "materialize": "all",
    "vmap": None,
    "loop": None,
}
LossFn = Callable[..., Any]
#: Gradients, losses (n,), and aux.
Found = tuple[Captured, Tensor, Any]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context for further forwards: eager, and generators and buffers are restored after it."""
    with eagerly(), torch.enable_grad(), untouched_generators(model), on_copies(model):
        yield


@dataclass(frozen=True)
class Options:
    """Keywords that the three calls share.

    Attributes:
        method: str, one of `METHODS`; all are exact.
        physical_batch_size: int, number of examples processed at once.
        max_memory: int, bytes that one chunk of the batch may keep; None: half of the free memory.
        has_aux: bool, True if `loss_fn` returns `(losses, aux)`.
        check: str, when the numbers are compared with plain autograd of the examples' own losses:
            "first" (the first call with a model, loss, shapes without n, dtypes, training flags and
            method), "always" or "off".
        rows_per_unit: int K; the batch of U K rows is U units of K consecutive rows, and `n`,
            `mask` and `physical_batch_size` count units. A unit's loss is the mean of its rows'
            losses, or, if `loss_fn` couples the rows of a unit (pairs), what it returns for the
            unit: (U,) losses.
        row_weights: (U K,) finite floating-point tensor or None; a unit's loss is then the sum of
            its rows' losses times these weights, of any size and sign; 0 is padding, whose inputs
            may be nan. A unit's weights must come from its own rows or from public facts.
    """

    method: str = "auto"
    physical_batch_size: int | None = None
    max_memory: int | None = None
    has_aux: bool = False
    check: str = "first"
    rows_per_unit: int | None = None
    row_weights: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the words and numbers."""
        _validate.choice("method", self.method, METHODS)
        _validate.choice("check", self.check, CHECKS)
        for name in ("physical_batch_size", "max_memory"):
            if getattr(self, name) is not None:
                _validate.integer(name, getattr(self, name), minimum=1)


class _NoCapture(Exception):
    """The captured uses cannot be trusted for this call; the message gives the reason."""


@dataclass
class Call:
    """One call of a public function, for the whole batch or one chunk of it.

    Attributes:
        purpose: name and variant of the called function; the first call of each is checked.
        mask: (n,) bool, False for padding, or None.
        cache: analyses of earlier calls, looked up once for all chunks.
        is_checked: True if the numbers of this chunk are to be compared with plain autograd.
        start: state before the forward that the gradients come from, or None if it was not kept.
    """

    loss_fn: LossFn
    model: nn.Module
    batch: Batch
    options: Options
    purpose: tuple[str, ...]
    mask: Tensor | None
    parameters: dict[str, nn.Parameter]
    cache: AnalysisCache
    is_checked: bool = False
    start: Start | None = None

    @classmethod
    def of(
        cls,
        loss_fn: LossFn,
        model: Any,
        batch: tuple[Any, ...] | Batch,
        options: Options,
        purpose: tuple[str, ...] = (),
        mask: Tensor | None = None,
    ) -> Call:
        """Check every argument before anything runs, and return the call."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "A per-sample gradient was asked for inside torch.inference_mode(), where nothing "
                "has a gradient. Expected the call outside of it."
            )
        require_module("The model", model)
        if not isinstance(batch, Batch):
            _validate.takes("loss_fn", loss_fn, "(model, *batch)", model, *batch)
            given = options.rows_per_unit, options.row_weights, options.has_aux
            loss_fn, batch = of_units(loss_fn, batch, *given)
        if mask is not None and (
            not torch.is_tensor(mask) or mask.dtype != torch.bool or mask.shape != (batch.n,)
        ):
            came = (tuple(mask.shape), mask.dtype) if torch.is_tensor(mask) else type(mask)
            raise ValueError(f"mask is {came}. Expected a bool tensor of shape ({batch.n},).")
        check_sharded(model, options.method)
        if sharded_parameters(model):
            raise TypeError(
                "A model under fully_shard came to a per-sample call, but no process holds it "
                "whole. Expected the whole model on every process; make_private takes sharded ones."
            )
        purpose = (options.method, *purpose, *(("alone",) if batch.n == 1 else ()))
        parameters, cache = trainable_parameters(model), cached_analyses(model, loss_fn, batch)
        return cls(loss_fn, model, batch, options, purpose, mask, parameters, cache)

    def on(self, model: nn.Module, batch: Batch, parameters: Any, mask: Tensor | None) -> Call:
        """Return this call with another model and batch, for a spot check."""
        cache = cached_analyses(model, self.loss_fn, batch)
        given = self.loss_fn, model, batch, self.options, self.purpose, mask
        return Call(*given, dict(parameters), cache, is_checked=True)

    @property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.parameters.items()}

    @property
    def is_due(self) -> bool:
        """True if the numbers of this call are to be compared with their definition."""
        is_new = self.purpose not in self.cache.checked or self.cache.by_data
        check = self.options.check
        return bool(self.parameters) and (check == "always" or (check == "first" and is_new))

    def chunks(self) -> Iterator[Call]:
        """Yield a call for every chunk of the batch."""
        for rows, batch in self.batch.chunks(self.chunk_size()):
            yield replace(self, batch=batch, mask=None if self.mask is None else self.mask[rows])

    def chunk_size(self) -> int | None:
        """Return a number of examples that keep at most `max_memory` bytes; None: all at once.

        Without `max_memory` a chunk may keep half of the device's free memory. The bytes per
        example are measured once per model, loss and shapes.
        """
        size, most = self.options.physical_batch_size, self.options.max_memory
        if self.batch.n < 2 or not self.parameters:
            return size
        if not self.cache.is_known:
            self.examine()
        keep = "all" if self.cache.problem else METHODS[self.options.method] or "all"
        if keep not in self.cache.bytes_each:
            self.cache.bytes_each[keep] = max(self._bytes_per_example(keep), 1)
        each = self.cache.bytes_each[keep]
        if most is None:
            if each * self.batch.n < SURELY_FREE:
                return size
            most = int(PART * free_memory(self.batch.tensors()[0].device))
        fits = max(1, most // each)
        return fits if size is None else min(size, fits)

    def _bytes_per_example(self, keep: str) -> int:
        """Return the bytes that one example keeps: activations, output gradients, formed gradients.

        With keep="cheap", weights of three or more axes (convolutions) are counted as formed, and
        those that linear layers keep.
        """
        kept = 0
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            if tensor.untyped_storage().data_ptr() not in own:
                kept += tensor.numel() * tensor.element_size()
            return tensor

        few = self.batch.rows(slice(0, 2))
        with (
            unchanged(self.model),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
            Capture(self._names) as capture,
            contextlib.suppress(RuntimeError, SecondOrderError),  # the forward differentiates
        ):
            self.loss_fn(self.model, *few.arguments())
        kept += sum(4 * use.out_shape.numel() for use in capture.uses)
        least = {"all": 0, "cheap": 3, "small": 99}[keep]  # fewest axes of a formed weight
        formed = {name for name, p in self.parameters.items() if p.dim() >= least}
        for use in capture.uses if keep == "cheap" else ():
            if use.rule.join is join and use.acts is not None:
                given = use.acts, use.acts.new_zeros(1).expand(use.out_shape)
                for slot in use.held.keys() & use.rule.sq_norms.keys():
                    if use.rule.sq_norms[slot](*given, can_keep=True) is None:
                        formed.add(use.held[slot])
        numbers = [self.parameters[name] for name in formed & self.parameters.keys()]
        return kept // 2 + sum(p.numel() * p.element_size() for p in numbers)

    @property
    def is_definition(self) -> bool:
        """True if each example runs alone, which is the definition."""
        return self.options.method == "loop" or self.batch.n == 1

    def gradients(self) -> Found:
        """Return the gradients, the losses (n,), and aux, by the method or another exact one."""
        with eagerly(), torch.enable_grad(), gradients_set_aside(self.parameters):
            is_auto = self.options.method == "auto"
            if self.is_definition:
                refuse_mixing_modules(self.model)
            elif not self.cache.is_known:
                self.examine()
            alone = self.is_definition or (is_auto and self.cache.needs_loop)
            if not alone and METHODS[self.options.method] is not None:
                with contextlib.suppress(_NoCapture, ChangedInPlaceError, SecondOrderError):
                    found = self.captured()
                    if found is not None:
                        return self._whole(found)
                    alone = True
            given = self.model, self.loss_fn, self.batch, self.parameters, self.options.has_aux
            if not alone:
                try:
                    self._begin_forward()
                    return by_vmap(*given)
                except UnsupportedLayerError as error:
                    if not is_auto:
                        raise
                    self.cache.give_up_vmap(self.model, str(error))
            self._begin_forward()
            return by_loop(*given)

    def _whole(self, found: Found) -> Found:
        """Refuse gradients that a function wrote by itself, so that they lack in what is found."""
        written = [name for name, p in self.parameters.items() if p.grad is not None]
        if written:
            raise UnsupportedLayerError(
                f"A function of the model differentiates by itself and wrote the gradient of "
                f"{written[0]!r} in its backward, as reversible blocks do, so no layer's input and "
                f"output show it. {USE_LOOP}"
            )
        return found

    def falls_back(self, error: Exception) -> bool:
        """True if "auto" goes on by another way, since its numbers failed their first check."""
        cache, is_auto = self.cache, self.options.method == "auto" and not self.is_definition
        if not is_auto or self.purpose in cache.checked or cache.needs_loop:
            return False
        give_up = cache.give_up_uses if cache.problem is None else cache.give_up_vmap
        give_up(self.model, str(error))
        return True

    def _begin_forward(self) -> None:
        """Save the state before the forward (`start`), if the forward may be run again."""
        if self.is_checked or self.options.method == "two_pass":
            self.start = Start.of(self.model, is_checked=self.is_checked)

    def examine(self) -> Axes | str | None:
        """Find the batch axes on this batch, and cache them."""
        given = self.model, self.loss_fn, self.batch, self.parameters, self.mask
        with gradients_set_aside(self.parameters):
            found = examine(*given, self.options.has_aux)
        self.cache.add(found)
        return found

    def captured(self) -> tuple[Captured, Tensor, Any] | None:
        """Gradients from captured uses whose axes are known; None for too few examples."""
        if not self.cache.is_known and self.examine() is None:
            return None
        if self.cache.problem:
            raise _NoCapture(self.cache.problem)
        self._begin_forward()
        arguments = self.batch.arguments()  # outside of the capture, which would hear it
        skip = self.cache.skip or frozenset()
        with Capture(self._names, skip=skip) as capture:
            out = self.loss_fn(self.model, *arguments)
            losses, aux = split_aux(out, self.options.has_aux)
        losses = check_losses(losses, self.batch.n)
        total = losses if self.mask is None else losses.masked_fill(~self.mask, 0)
        axes = self._axes_of(capture)
        leftover = capture.backward(total.sum(), self.parameters)
        if leftover:
            raise _NoCapture(WITHOUT_RULE.format(leftover[0]))
        found = Captured(
            dict(zip(capture.uses, axes.batch_axes, strict=True)),
            self.parameters,
            capture.derived,
            n=self.batch.n,
            keep=str(METHODS[self.options.method]),
        )
        return found, losses.detach(), aux

    def _axes_of(self, capture: Capture) -> Axes:
        """Return the batch axes of captured uses; refuse those that were not examined."""
        signatures = tuple([use.signature for use in capture.uses])
        found = self.cache.axes.get(signatures) or self.examine()
        if isinstance(found, str):
            raise _NoCapture(found)
        if found is None or found.signatures != signatures or capture.hooked:
            raise _NoCapture("the uses of parameters differ from those that were examined")
        misfit = found.misfit(capture.uses, self.batch.n)
        if misfit is not None:
            self.cache.add(ELSEWHERE.format(misfit))
            raise _NoCapture(ELSEWHERE.format(misfit))
        return found

# SPDX-License-Identifier: Apache-2.0
"""One call of a public function: checked arguments, chunks, the chosen method, the gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import nn

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import CHECKS
from dualdp_torch.parallel.fsdp import check_sharded, local_of
from dualdp_torch.per_sample.analysis_cache import AnalysisCache, cached_analyses
from dualdp_torch.per_sample.batch import Batch, check_losses, split_aux
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.examination import ELSEWHERE, Axes, examine
from dualdp_torch.per_sample.gradients import Captured, Gradients
from dualdp_torch.per_sample.model_checks import refuse_mixing_modules, require_module
from dualdp_torch.per_sample.parameter_use import (
    USE_LOOP,
    ChangedInPlaceError,
    SecondOrderError,
    Use,
    eagerly,
    trainable_parameters,
)
from dualdp_torch.per_sample.random_state import Start, on_copies, untouched_generators
from dualdp_torch.per_sample.units import of_units
from dualdp_torch.per_sample.vmap_and_loop import by_loop, by_vmap, gradients_set_aside
from dualdp_torch.rules.base import Tensor
from dualdp_torch.rules.linear import join
from dualdp_torch.rules.memory import PART, SURELY_FREE, free_memory

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


def _kept(uses: Iterable[Use]) -> set[str]:
    """Names of the weights whose per-sample gradients linear layers keep."""
    return {
        name
        for use in uses
        for slot, name in use.held.items()
        if use.rule.join is join and slot not in use.rule.light and use.acts is not None
        if use.rule.keeps and use.rule.keeps(use.acts, use.acts.new_empty(1).expand(use.out_shape))
    }


class Options(TypedDict, total=False):
    """Keywords that the three calls share.

    Attributes:
        method: str, one of `METHODS`; all are exact. Default "auto".
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

    method: str
    physical_batch_size: int | None
    max_memory: int | None
    has_aux: bool
    check: str
    rows_per_unit: int | None
    row_weights: Tensor | None


class _NoCapture(Exception):
    """The captured uses cannot be trusted for this call; the message gives the reason."""


@dataclass
class Call:
    """Checked arguments of one call of a public function, for the whole batch or one chunk of it.

    Attributes:
        cache: analyses of earlier calls, looked up once for all chunks.
        purpose: name and variant of the called function; the first call of each is checked.
        is_checked: True if the numbers of this chunk are to be compared with plain autograd.
        was_compared: True once they were compared.
        drawn: seed of what is compared, or None for the next one of the cache.
        start: state before the forward that the gradients come from, or None if it was not kept.
    """

    loss_fn: LossFn
    model: nn.Module
    batch: Batch
    parameters: dict[str, nn.Parameter]
    method: str
    has_aux: bool
    chunk: int | None
    mask: Tensor | None
    max_memory: int | None
    cache: AnalysisCache
    check: str = "off"
    purpose: tuple[str, ...] = ()
    is_checked: bool = False
    was_compared: bool = False
    drawn: int | None = None
    start: Start | None = None

    @classmethod
    def checked(
        cls,
        loss_fn: LossFn,
        model: Any,
        batch: tuple[Any, ...] | Batch,
        purpose: tuple[str, ...] = (),
        *,
        mask: Tensor | None = None,
        method: str = "auto",
        physical_batch_size: int | None = None,
        max_memory: int | None = None,
        has_aux: bool = False,
        check: str = "first",
        rows_per_unit: int | None = None,
        row_weights: Tensor | None = None,
    ) -> Call:
        """Check every argument before anything runs, and return the call."""
        _validate.choice("method", method, METHODS)
        _validate.choice("check", check, CHECKS)
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "A per-sample gradient was asked for inside torch.inference_mode(), where nothing "
                "has a gradient. Expected the call outside of it."
            )
        require_module("The model", model)
        if not isinstance(batch, Batch):
            _validate.takes("loss_fn", loss_fn, "(model, *batch)", model, *batch)
        if isinstance(batch, Batch):
            examples = batch
        else:
            loss_fn, examples = of_units(loss_fn, batch, rows_per_unit, row_weights, has_aux)
        if physical_batch_size is not None:
            physical_batch_size = _validate.integer(
                "physical_batch_size", physical_batch_size, minimum=1
            )
        if mask is not None and (
            not torch.is_tensor(mask) or mask.dtype != torch.bool or mask.shape != (examples.n,)
        ):
            came = (tuple(mask.shape), mask.dtype) if torch.is_tensor(mask) else type(mask)
            raise ValueError(f"mask is {came}. Expected a bool tensor of shape ({examples.n},).")
        check_sharded(model, method)
        parameters = trainable_parameters(model)
        if max_memory is not None:
            max_memory = _validate.integer("max_memory", max_memory, minimum=1)
        return cls(
            loss_fn,
            model,
            examples,
            parameters,
            method,
            has_aux,
            physical_batch_size,
            mask,
            max_memory,
            cached_analyses(model, loss_fn, examples),
            check,
            (method, *purpose),
        )

    def chunks(self) -> Iterator[Call]:
        """Yield a call for every chunk of the batch."""
        self.choose_chunk_size()
        if self.batch.n == 1:
            self.purpose = (*self.purpose, "alone")
        is_due = self.check == "always" or self.purpose not in self.cache.checked
        is_due = is_due or self.cache.by_data
        is_due = is_due and self.check != "off" and bool(self.parameters)
        for rows, batch in self.batch.chunks(self.chunk):
            mask = None if self.mask is None else self.mask[rows]
            whole = batch is self.batch
            chunk = self if whole else replace(self, batch=batch, mask=mask, chunk=None)
            chunk.is_checked = is_due and (mask is None or bool(mask.any()))
            yield chunk
            is_due = is_due and not chunk.was_compared

    def choose_chunk_size(self) -> None:
        """Choose a chunk size for which one chunk keeps at most `max_memory` bytes.

        Without `max_memory` a chunk may keep half of the device's free memory. The bytes per
        example are measured once per model, loss and shapes.
        """
        if self.batch.n < 2 or not self.parameters:
            return
        if not self.cache.is_known:
            self.examine()
        keep = "all" if self.cache.problem else METHODS[self.method] or "all"
        if keep not in self.cache.bytes_each:
            self.cache.bytes_each[keep] = max(self._bytes_per_example(keep), 1)
        each, most = self.cache.bytes_each[keep], self.max_memory
        if most is None:
            if each * self.batch.n < SURELY_FREE:
                return
            most = int(PART * free_memory(self.batch.tensors()[0].device))
        size = max(1, most // each)
        self.chunk = size if self.chunk is None else min(size, self.chunk)

    def _bytes_per_example(self, keep: str) -> int:
        """Return the bytes that one example keeps: activations, output gradients, formed gradients.

        With keep="cheap", weights of three or more axes (convolutions) are counted as formed, and
        those that linear layers keep.
        """
        kept: int = 0
        own = {local_of(p).untyped_storage().data_ptr() for p in self.model.parameters()}

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            held = local_of(tensor)
            if held.untyped_storage().data_ptr() not in own:
                kept += held.numel() * held.element_size()
            return tensor

        few = self.batch.rows(slice(0, 2))
        names = {id(p): name for name, p in self.parameters.items()}
        with (
            eagerly(),
            untouched_generators(self.model),
            on_copies(self.model),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
            Capture(names, model=self.model) as capture,
            contextlib.suppress(RuntimeError, SecondOrderError),  # the forward differentiates
        ):
            self.loss_fn(self.model, *few.arguments())
        outputs = 4 * sum(use.out_shape.numel() for use in capture.uses)
        least = {"all": 0, "cheap": 3, "small": 99}[keep]  # fewest axes of a formed weight
        linear = _kept(capture.uses) if keep == "cheap" else set()
        formed = [p for name, p in self.parameters.items() if p.dim() >= least or name in linear]
        return int(kept + outputs) // 2 + sum(p.numel() * p.element_size() for p in formed)

    def on(self, model: nn.Module, batch: Batch, parameters: dict[str, Any]) -> Call:
        """Return this call with another model, batch and parameters, for a spot check."""
        cache = cached_analyses(model, self.loss_fn, batch)
        return replace(
            self,
            model=model,
            batch=batch,
            parameters=parameters,
            cache=cache,
            is_checked=True,
        )

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context for further forwards: eager, and generators and buffers are restored after it."""
        with (
            eagerly(),
            torch.enable_grad(),
            untouched_generators(self.model),
            on_copies(self.model),
        ):
            yield

    @property
    def is_definition(self) -> bool:
        """True if each example runs alone, which is the definition."""
        return self.method == "loop" or self.batch.n == 1

    def gradients(self) -> tuple[Gradients, Tensor, Any]:
        """Return the gradients, the losses (n,), and aux."""
        with eagerly(), torch.enable_grad(), gradients_set_aside(self.parameters):
            return self._by_method()

    def _by_method(self) -> tuple[Gradients, Tensor, Any]:
        """Return gradients, losses and aux by the call's method, or by another exact one."""
        if self.is_definition:
            refuse_mixing_modules(self.model)
        elif not self.cache.is_known:
            self.examine()
        if self.is_definition or (self.method == "auto" and self.cache.needs_loop):
            return self._by_loop()
        if METHODS[self.method] is None:
            return self._by_vmap()
        try:
            found = self.captured()
        except (_NoCapture, ChangedInPlaceError, SecondOrderError):
            return self._by_vmap()
        written = [name for name, p in self.parameters.items() if p.grad is not None]
        if written:
            raise UnsupportedLayerError(
                f"A function of the model differentiates by itself and wrote the gradient of "
                f"{written[0]!r} in its backward, as reversible blocks do, so no layer's input and "
                f"output show it. {USE_LOOP}"
            )
        return found or self._by_loop()

    def _by_loop(self) -> tuple[Gradients, Tensor, Any]:
        self._begin_forward()
        return by_loop(self.model, self.loss_fn, self.batch, self.parameters, self.has_aux)

    def _by_vmap(self) -> tuple[Gradients, Tensor, Any]:
        """Return gradients by `vmap`; by the loop under "auto" where vmap can't run the model."""
        self._begin_forward()
        try:
            return by_vmap(self.model, self.loss_fn, self.batch, self.parameters, self.has_aux)
        except UnsupportedLayerError as error:
            if self.method != "auto":
                raise
            self.cache.give_up_vmap(self.model, str(error))
        return self._by_loop()

    def falls_back(self, error: Exception) -> bool:
        """True if "auto" goes on by another way, since its numbers failed their first check."""
        if self.method != "auto" or self.purpose in self.cache.checked or self.cache.needs_loop:
            return False
        if self.is_definition:
            return False
        if self.cache.problem is None:
            self.cache.give_up_uses(self.model, str(error))
        else:
            self.cache.give_up_vmap(self.model, str(error))
        return True

    def _begin_forward(self) -> None:
        """Save the state before the forward (`start`), if the forward may be run again."""
        if self.is_checked or self.method == "two_pass":
            self.start = Start.of(self.model, is_checked=self.is_checked)

    def examine(self) -> Axes | str | None:
        """Find the batch axes on this batch, and cache them."""
        arguments = self.model, self.loss_fn, self.batch, self.parameters, self.mask, self.has_aux
        with gradients_set_aside(self.parameters):
            found = examine(*arguments)
        self.cache.add(found)
        return found

    def captured(self) -> tuple[Captured, Tensor, Any] | None:
        """Gradients from captured uses whose axes are known; None for too few examples."""
        if not self.cache.is_known and self.examine() is None:
            return None
        if self.cache.problem:
            raise _NoCapture(self.cache.problem)
        self._begin_forward()
        names = {id(p): name for name, p in self.parameters.items()}
        arguments = self.batch.arguments()  # outside of the capture, which would hear it
        with Capture(names, skip=self.cache.skip or frozenset(), model=self.model) as capture:
            out = self.loss_fn(self.model, *arguments)
            losses, aux = split_aux(out, self.has_aux)
        if capture.stand_ins:  # freed by now, so that plain autograd would miss them
            self.is_checked = False
        losses = check_losses(losses, self.batch.n)
        total = losses if self.mask is None else losses.masked_fill(~self.mask, 0)
        axes = self._axes_of(capture)
        leftover = capture.backward(total.sum(), self.parameters)
        if leftover:
            raise _NoCapture(f"parameter {leftover[0]!r} is used by a function without a rule")
        found = Captured(
            dict(zip(capture.uses, axes.batch_axes, strict=True)),
            {n: local_of(p) for n, p in {**self.parameters, **capture.stand_ins}.items()},
            capture.derived,
            n=self.batch.n,
            keep=str(METHODS[self.method]),
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

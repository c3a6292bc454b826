# SPDX-License-Identifier: Apache-2.0
"""One call of a public function: its arguments checked, its method chosen, its gradients found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualdp import _validate

from .batch import Batch, check_losses
from .capture import Capture
from .fallback import by_loop, by_vmap
from .gradients import Captured, Gradients
from .memory import PART, SURELY_FREE, free_memory
from .proof import Proof, prove, untouched_generators
from .remembered import Remembered, known
from .rows import MOVED, moved_use
from .rules.base import Tensor
from .uses import ChangedInPlaceError, SecondOrderError, eagerly, trainable_parameters
from .validate import refuse_mixing_modules

#: Every method, and which per-sample gradients it keeps.
METHODS = {
    "auto": "cheap",
    "book_keeping": "small",
    "two_pass": "small",
    "materialize": "all",
    "vmap": None,
    "loop": None,
}
LossFn = Callable[..., Any]


class _NoCapture(Exception):
    """The captured uses cannot be trusted for this call; the message says why."""


@dataclass
class Call:
    """One call of a public function, its arguments checked."""

    loss_fn: LossFn
    model: nn.Module
    batch: Batch
    parameters: dict[str, nn.Parameter]
    method: str
    has_aux: bool
    chunk: int | None
    mask: Tensor | None = None
    max_memory: int | None = None
    found: Remembered | None = None

    @classmethod
    def checked(
        cls,
        loss_fn: LossFn,
        model: Any,
        batch: tuple[Any, ...],
        method: str,
        has_aux: bool,
        physical_batch_size: int | None,
        max_memory: int | None,
        mask: Tensor | None = None,
    ) -> Call:
        """Check everything before anything runs."""
        _validate.choice("method", method, METHODS)
        if not isinstance(model, nn.Module):
            raise TypeError(f"The model is a {type(model).__name__}. Expected a torch.nn.Module.")
        if not callable(loss_fn):
            raise TypeError(
                f"loss_fn is a {type(loss_fn).__name__}. Expected a function of (model, *batch)."
            )
        taken = Batch(batch)
        if physical_batch_size is not None:
            physical_batch_size = _validate.integer(
                "physical_batch_size", physical_batch_size, minimum=1
            )
        if mask is not None and (
            not torch.is_tensor(mask) or mask.dtype != torch.bool or mask.shape != (taken.n,)
        ):
            came = (tuple(mask.shape), mask.dtype) if torch.is_tensor(mask) else type(mask)
            raise ValueError(f"mask is {came}. Expected a bool tensor of shape ({taken.n},).")
        parameters = trainable_parameters(model)
        call = cls(loss_fn, model, taken, parameters, method, has_aux, physical_batch_size, mask)
        if max_memory is not None:
            call.max_memory = _validate.integer("max_memory", max_memory, minimum=1)
        return call

    def _fit(self) -> None:
        """Choose pieces of the batch so that what a piece keeps stays within `max_memory` bytes.

        Without a number it may keep a part of what the device has free. A model is examined once.
        """
        if self.batch.n < 2 or not self.parameters:
            return
        found = self._found()
        if not found:
            self._prove(found)
        keep = "all" if "problem" in found else METHODS[self.method] or "all"
        if keep not in found.bytes_each:
            found.bytes_each[keep] = max(self._bytes_per_example(keep), 1)
        each, most = found.bytes_each[keep], self.max_memory
        if most is None:
            if each * self.batch.n < SURELY_FREE:
                return
            most = int(PART * free_memory(self.batch.tensors()[0].device))
        size = max(1, most // each)
        self.chunk = size if self.chunk is None else min(size, self.chunk)

    def _bytes_per_example(self, keep: str) -> int:
        """Bytes that one example makes the call keep: activations, output gradients, gradients.

        Of the gradients that the cost model keeps, those of convolutions are the large ones.
        """
        kept: int = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        few = self.batch.rows(slice(0, 2))
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        with (
            eagerly(),
            untouched_generators(few.tensors()[0].device),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: t if t.untyped_storage().data_ptr() in own else pack(t), lambda t: t
            ),
            Capture(self._names, model=self.model) as capture,
            contextlib.suppress(RuntimeError, SecondOrderError),  # models that differentiate
        ):
            self.loss_fn(self.model, *few.arguments())
        outputs = 4 * sum(use.out_shape.numel() for use in capture.uses)
        least = {"all": 0, "cheap": 3, "small": 99}[keep]  # axes of the weights that are formed
        formed = [p for p in self.parameters.values() if p.dim() >= least]
        return int(kept + outputs) // 2 + sum(p.numel() * p.element_size() for p in formed)

    def pieces(self) -> Iterator[tuple[slice, Call]]:
        """(rows, call) for every piece of the batch that is worked on at once."""
        self._fit()
        for rows, batch in self.batch.chunks(self.chunk):
            yield (
                rows,
                Call(
                    self.loss_fn,
                    self.model,
                    batch,
                    self.parameters,
                    self.method,
                    self.has_aux,
                    None,
                    None if self.mask is None else self.mask[rows],
                    found=self.found,
                ),
            )

    def gradients(self) -> tuple[Gradients, Tensor, Any]:
        """The gradients, the losses (n,), and aux."""
        with eagerly():
            if self.method == "loop" or self.batch.n == 1:
                self._prove_separate()
                return by_loop(*self._arguments)
            if self.method == "vmap":
                self._prove_separate()
                return by_vmap(*self._arguments)
            try:
                return self._captured()
            except (_NoCapture, ChangedInPlaceError, SecondOrderError):
                return by_vmap(*self._arguments)

    def _found(self) -> Remembered:
        """What is known from earlier calls; looked up once, for all pieces of a batch."""
        if self.found is None:
            self.found = known(self.model, self.loss_fn, self.batch)
        return self.found

    @property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.parameters.items()}

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.model, self.loss_fn, self.batch, self.parameters, self.has_aux

    def _prove_separate(self) -> None:
        """Refuse losses that depend on other examples, on the first call."""
        if self.batch.n == 1:
            refuse_mixing_modules(self.model)
            return
        proofs = self._found()
        if not proofs:
            self._prove(proofs)

    def _prove(self, proofs: dict[Any, Proof]) -> Proof | None:
        """Make a proof and remember it if it is complete."""
        proof = prove(
            self.model, self.loss_fn, self.batch, self.parameters, self.mask, self.has_aux
        )
        if proof is not None and proof.complete:
            proofs["problem" if proof.problem else proof.signatures] = proof
        return proof

    def _captured(self) -> tuple[Gradients, Tensor, Any]:
        """Gradients from captured uses, as far as they are proved."""
        proofs = self._found()
        fresh = None if proofs else self._prove(proofs)
        if "problem" in proofs:
            raise _NoCapture(proofs["problem"].problem)
        skip = next((p.skip for p in (*proofs.values(), fresh) if p), frozenset())
        with torch.enable_grad(), Capture(self._names, skip=skip, model=self.model) as capture:
            out = self.loss_fn(self.model, *self.batch.arguments())
            losses, aux = out if self.has_aux else (out, None)
        losses = check_losses(losses, self.batch.n)
        total = losses if self.mask is None else losses.masked_fill(~self.mask, 0)
        signatures = tuple(use.signature for use in capture.uses)
        proof = proofs.get(signatures) or fresh or self._prove(proofs)
        if proof is None:  # one example, or none, with a finite loss: too few to be told apart
            return by_loop(*self._arguments)
        if proof.problem or proof.signatures != signatures:
            raise _NoCapture("the uses of parameters differ from those that were examined")
        if capture.moves.matter(self.batch.n):
            moved = moved_use(capture, losses, proof.layouts, self.parameters)
            if moved is not None:
                proofs["problem"] = Proof((), (), MOVED.format(moved))
                raise _NoCapture(proofs["problem"].problem)
        leftover = capture.backward(total.sum(), self.parameters)
        if leftover:
            raise _NoCapture(f"parameter {leftover[0]!r} is used by a function without a rule")
        for use, layout in zip(capture.uses, proof.layouts, strict=True):
            if use.grads_out is None:
                continue
            use.check_unchanged()
            if layout is None and bool(use.grads_out.any()):
                proofs.pop(signatures, None)  # the next batch may show where they lie
                raise _NoCapture(f"the examples that were examined give {use} no gradient")
        keep = METHODS[self.method]
        found = Captured(
            capture.uses,
            proof.layouts,
            self.parameters | capture.stand_ins,
            capture.derived,
            n=self.batch.n,
            keep=str(keep),
        )
        return found, losses.detach(), aux

# SPDX-License-Identifier: Apache-2.0
"""One call of a public function: its arguments checked, its method chosen, its gradients found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dualdp import UnsupportedLayerError, _validate
from dualdp.exactness import CHECKS

from .batch import Batch, check_losses
from .capture import Capture
from .fallback import by_loop, by_vmap, gradients_set_aside
from .gradients import Captured, Gradients
from .memory import PART, SURELY_FREE, free_memory
from .proof import Proof, prove
from .random_state import untouched_generators
from .remembered import Remembered, known
from .rows import MOVED, moved_use
from .rules.base import Tensor
from .state import Start, State, refuse_written, restored
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
    """One call of a public function, its arguments checked.

    Attributes:
        check: "first", "always" or "off": when its numbers are compared with the definition.
        purpose: what was called, and how: a first call of each is checked.
        is_checked: they are compared, for this piece of the batch.
        was_compared: they were.
        start: what the forward began from that the gradients come from, if kept.
    """

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
    check: str = "off"
    purpose: tuple[str, ...] = ()
    is_checked: bool = False
    was_compared: bool = False
    start: Start | None = None

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
        check: str = "off",
        purpose: tuple[str, ...] = (),
    ) -> Call:
        """Check everything before anything runs."""
        _validate.choice("method", method, METHODS)
        _validate.choice("check", check, CHECKS)
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "A per-sample gradient was asked for inside torch.inference_mode(), where nothing "
                "has a gradient. Expected the call outside of it."
            )
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
        call.check, call.purpose = check, (method, *purpose)
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
            untouched_generators(self.model),
            restored(self.model, self._found().writes),
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
        due = self._is_due()
        for rows, batch in self.batch.chunks(self.chunk):
            mask = None if self.mask is None else self.mask[rows]
            piece = replace(self, batch=batch, mask=mask, chunk=None)
            piece.is_checked = due and batch.n > 1 and (mask is None or bool(mask.any()))
            yield rows, piece
            due = due and not piece.was_compared

    def _is_due(self) -> bool:
        """Whether numbers of this call are to be compared with the definition."""
        if self.check == "off" or self.method == "loop" or self.batch.n < 2 or not self.parameters:
            return False
        return self.check == "always" or self.purpose not in self._found().checked

    def on(self, model: nn.Module, batch: Batch, parameters: dict[str, Any]) -> Call:
        """The same call on another model and batch, whose numbers a check asks for."""
        return replace(
            self, model=model, batch=batch, parameters=parameters, found=None, is_checked=True
        )

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context in which forwards leave generators, buffers and gradients as they were."""
        with (
            eagerly(),
            torch.enable_grad(),
            untouched_generators(self.model),
            restored(self.model, self._found().writes),
        ):
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context in which a forward draws what the one did that the gradients come from."""
        with self.unchanged():
            with nullcontext() if self.start is None else self.start.replayed(self.model):
                yield

    @property
    def problem(self) -> str | None:
        """The reason why captured uses can't be trusted, if the model was examined with one."""
        proof = self._found().get("problem")
        return None if proof is None else proof.problem

    def compared(self) -> None:
        """The numbers of this piece were compared with the definition, and agree."""
        self.was_compared = True
        self._found().checked.add(self.purpose)

    def gradients(self) -> tuple[Gradients, Tensor, Any]:
        """The gradients, the losses (n,), and aux.

        Raises:
            UnsupportedLayerError: the losses depend on other examples, a forward writes what it
                saw, or a function of the model differentiates by itself.
        """
        with eagerly(), torch.enable_grad(), gradients_set_aside(self.parameters):
            before = State(self.model)
            found = self._by_method()
            self._refuse_written(before.written())
        return found

    def _refuse_written(self, names: list[str]) -> None:
        """Refuse buffers that a forward has written, unless it writes the same on every batch."""
        if not names:
            return
        allowed = self._found().writes
        if not allowed.issuperset(names):
            run = lambda batch: self.loss_fn(self.model, *batch.arguments())  # noqa: E731
            refuse_written(self.model, run, self.batch, names)
            allowed.update(names)

    def _by_method(self) -> tuple[Gradients, Tensor, Any]:
        """The gradients by the call's method, or by the next one that is exact."""
        if self.method == "loop" or self.batch.n == 1:
            self._prove_separate()
            self._begin_forward()
            return by_loop(*self._arguments)
        if self.method == "vmap":
            self._prove_separate()
            self._begin_forward()
            return by_vmap(*self._arguments)
        try:
            found = self._captured()
        except (_NoCapture, ChangedInPlaceError, SecondOrderError):
            self._begin_forward()
            return by_vmap(*self._arguments)
        self._refuse_own_gradients()
        return found or by_loop(*self._arguments)

    def _begin_forward(self) -> None:
        """Keep the generators' states, if this forward may be run again."""
        if self.is_checked or self.method == "two_pass":
            self.start = Start.of(self.model, self._found().writes)

    def _refuse_own_gradients(self) -> None:
        """Refuse functions that write `p.grad` in their backward, which no capture sees.

        Raises:
            UnsupportedLayerError: one did.
        """
        written = [name for name, p in self.parameters.items() if p.grad is not None]
        if written:
            raise UnsupportedLayerError(
                f"A function of the model differentiates by itself and wrote the gradient of "
                f"{written[0]!r} in its backward, as reversible blocks do, so no layer's input and "
                'output show it. Use method="loop", which is exact for every model.'
            )

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
        with gradients_set_aside(self.parameters):
            proof = prove(
                self.model,
                self.loss_fn,
                self.batch,
                self.parameters,
                self.mask,
                self.has_aux,
                self._found().writes,
            )
        if proof is not None and proof.complete:
            proofs["problem" if proof.problem else proof.signatures] = proof
        return proof

    def _captured(self) -> tuple[Gradients, Tensor, Any] | None:
        """Gradients from captured uses, as far as they are proved; None of too few examples."""
        proofs = self._found()
        fresh = None if proofs else self._prove(proofs)
        if "problem" in proofs:
            raise _NoCapture(proofs["problem"].problem)
        skip = next((p.skip for p in (*proofs.values(), fresh) if p), frozenset())
        self._begin_forward()
        with Capture(self._names, skip=skip, model=self.model) as capture:
            out = self.loss_fn(self.model, *self.batch.arguments())
            losses, aux = out if self.has_aux else (out, None)
        if capture.stand_ins:  # plain autograd would miss them, as they are gone by now
            self.is_checked = False
        losses = check_losses(losses, self.batch.n)
        total = losses if self.mask is None else losses.masked_fill(~self.mask, 0)
        signatures = tuple(use.signature for use in capture.uses)
        proof = proofs.get(signatures) or fresh or self._prove(proofs)
        if proof is None:  # one example, or none, with a finite loss: too few to be told apart
            return None
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

# SPDX-License-Identifier: Apache-2.0
"""Recorder of one forward and backward in a loop that the user owns.

Module hooks mark where the model's forward begins and ends; in between, the same capture as in
`clipped_grad_sum` is active. Hooks on the outputs of captured calls receive the gradients.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.fsdp import Shards, check_sharded
from dualdp_torch.per_sample.analysis_cache import AnalysisCache
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.checks.spot_check import ReferenceLosses
from dualdp_torch.per_sample.checks.tape import Tape, remove_mode
from dualdp_torch.per_sample.clip import SecondPass, Terms
from dualdp_torch.per_sample.clip_by_layer import Layered
from dualdp_torch.per_sample.forward_analysis import ForwardAnalysis
from dualdp_torch.per_sample.gradients import Captured, Gradients
from dualdp_torch.per_sample.model_checks import refuse_mixing_modules
from dualdp_torch.per_sample.model_state import (
    Start,
    State,
    attributes_kept,
    refuse_written,
    restored,
)
from dualdp_torch.per_sample.one_by_one import each_alone, gradients_alone, joined
from dualdp_torch.per_sample.outputs import (
    Silent,
    WholeStep,
    combined,
    float_leaves,
    hand_out,
    projected,
)
from dualdp_torch.per_sample.parameter_use import (
    USE_LOOP,
    Derived,
    Use,
    eagerly,
    trainable_parameters,
)
from dualdp_torch.per_sample.random_state import untouched_generators
from dualdp_torch.per_sample.use_gradients import complete
from dualdp_torch.per_sample.vmap_and_loop import (
    again_by_vmap,
    are_set_aside,
    gradients_set_aside,
    is_same_forward,
    reweighted,
)
from dualdp_torch.rules.base import Tensor, is_narrow

_CALL = "_compiled_call_impl"  # a module attribute, called instead of its forward and hooks
#: Methods that need the recorded forward and backward only.
RECORDED = ("auto", "book_keeping", "two_pass", "materialize", "vmap", "loop")


class Recorder:
    """Records one forward and one backward of a model, and returns the gradients.

    `tape` records the loop outside of the model; it need not be open. `detach` removes every hook.

    Attributes:
        is_active: True if a forward that begins now is to be recorded.
        terms: clipping settings of the batch, or None; with them a sharded model under per-layer
            clipping is clipped layer by layer during the backward, into `layered`.
        is_due: predicate of the cached analysis, True if the forward that begins may be run again.
        start: state before the recorded forward, or None if it is not run again.
        computes_loss: True if the model's forward computes the loss, too, so that only parameter
            uses are captured.
        has_drawn: True if the forward drew random numbers; known only with `start`.
        outputs: floating-point tensors that the recorded forward returned.
    """

    def __init__(self, model: nn.Module, *, method: str, tape: Tape) -> None:
        refuse_mixing_modules(model)
        check_sharded(model, method)
        self.model, self.method, self.tape = model, method, tape
        self.is_active, self.shards = True, Shards.of(model)
        self.terms: Terms | None = None
        self.is_due: Callable[[AnalysisCache], bool] = lambda cache: False
        self.computes_loss = isinstance(model, WholeStep)
        self.parameters = trainable_parameters(model)
        self._inside = self.shards.plain if self.shards else self.parameters
        tables = (self.parameters, self._inside)
        self._names = {id(p): name for table in tables for name, p in table.items()}
        # These nodes run when a gradient is accumulated, not for `torch.autograd.grad`.
        leaves = {id(p): (name, p) for table in tables for name, p in table.items()}.values()
        nodes = [(name, get_gradient_edge(p).node) for name, p in leaves]
        self._accumulators = nodes  # kept, as hooks die with their node
        self._mode: Any = None
        self._capture: Any = None
        self._analysis = ForwardAnalysis(model, self._inside, self.shards, self._pause)
        self._paused, self._is_inside, self._eager = False, False, contextlib.ExitStack()
        self.clear()
        self._handles: list[Any] = [
            # Before FSDP's own hook: ours may run other forwards first.
            model.register_forward_pre_hook(
                self._enter, with_kwargs=True, prepend=self.shards is not None
            ),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            *(node.register_prehook(partial(self._escaped, name)) for name, node in nodes),
        ]
        self.guard()

    def __reduce__(self) -> Any:
        return Silent, ()

    def clear(self) -> None:
        """Forget the recorded forward."""
        self.n: int | None = None
        self.has_gradients = False
        self._uses: dict[Use, BatchAxis | None] = {}
        self._derived: dict[str, Derived] = {}
        self.outputs: list[Tensor] = []
        self._differentiable: list[int] = []
        self._by_vmap = False
        self._alone: list[Any] | None = None
        self.start: Start | None = None
        self.has_drawn = False
        self._written: list[str] = []
        self._cotangents: dict[int, Tensor] = {}
        self._without_graph = self._in_backward = False
        self.layered: Layered | None = None
        self._reached: set[Use] = set()

    def guard(self) -> None:
        """Take the place of the model's call, also if that was compiled since the last time."""
        found = vars(self.model).get(_CALL)
        if not isinstance(found, _Guarded):
            self._compiled = found
            vars(self.model)[_CALL] = _Guarded(self, found or self.model._call_impl)

    def detach(self) -> None:
        """Remove every hook, and restore the model's compiled call."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if isinstance(vars(self.model).get(_CALL), _Guarded):
            vars(self.model).pop(_CALL)
            if self._compiled is not None:
                vars(self.model)[_CALL] = self._compiled

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Context in which calls of the model are not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook: begin to record, unless paused, without gradients, or not active."""
        if not self._records():
            return
        batch, problem = self._begin(args, kwargs)
        if problem and problem.endswith(USE_LOOP):  # the model differentiates in its forward
            raise UnsupportedLayerError(problem)
        if self.method == "two_pass" or self.is_due(self.analyses):
            self.start = Start.of(model, self.analyses.writes)
        self._state = State(model)
        if self.method == "vmap" or problem:
            self._without_graph = self._by_vmap = True
            torch.set_grad_enabled(False)
        skip = self._analysis.skip
        self._mode = self._capture = Capture(self._names, self._keep_grads_out, skip, self.model)
        self._eager.enter_context(eagerly())
        self._mode.__enter__()
        self.n = batch.n

    def _records(self) -> bool:
        """True if a call of the model that begins now is to be recorded."""
        return not self._paused and torch.is_grad_enabled() and self.is_active

    def _begin(self, args: Any, kwargs: Any) -> tuple[Batch, str | None]:
        """Begin a recorded forward; return its batch, and why captured uses can't be trusted."""
        with self.tape.suspended():
            self._require_one_forward()
            self._batch = batch = Batch((args, kwargs), shares=True)
            self._is_inside = True
            self.tape.enter_model(args, kwargs, batch.n)
        return batch, self._analysis.begin(batch)

    @torch._disable_dynamo  # a loop that torch.compile traces calls the model as it is
    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call`, which is the model's; if it is recorded, eagerly, or each example alone."""
        if not self._records():
            return call(*args, **kwargs)
        call = self.model._call_impl
        if self.method != "loop":
            return call(*args, **kwargs)
        batch, _ = self._begin(args, kwargs)
        state = State(self.model)
        with self._pause(), eagerly():
            self._alone = each_alone(self.model, call, batch, self.analyses.writes)
            outputs = joined(self._alone)
        self.n, self._written = batch.n, state.written()
        return self._hand_out(outputs)

    def _require_one_forward(self) -> None:
        """Refuse a second forward for one batch, and parameters changed since set-up."""
        if self._in_backward and not self.has_gradients:  # the backward failed
            self.begin_again()
        if self._mode is not None or self.n is not None:
            raise RuntimeError(
                "The model was called twice for one batch. Expected one recorded forward per "
                "backward; put further calls under torch.no_grad()."
            )
        current = trainable_parameters(self.model)
        if {self._names.get(id(p)) for p in current.values()} != set(self.parameters):
            changed = sorted(set(current) ^ set(self.parameters)) or sorted(current)
            raise RuntimeError(
                f"The parameters {changed} were frozen, unfrozen or replaced after set-up. Set "
                "up again, so that what is clipped is what is trained."
            )

    def _leave(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Forward hook: end the capture, after a return or an exception."""
        if self._mode is None or self._paused:
            return None
        if outputs is None:  # an exception, which torch is handling
            if self.shards is not None:
                self.shards.explain(sys.exc_info()[1])
            self.abandon()
            return None
        mode, self._written = self._mode, self._state.written()
        self.has_drawn = self.start is not None and self.start.has_drawn(self.model)
        self._leave_forward()
        if not self._by_vmap:
            axes = self._analysis.batch_axes(mode, outputs)
            self._uses, self._derived = dict(zip(mode.uses, axes, strict=True)), mode.derived
            self._begin_layers()
            if self.shards is not None and (self.layered or self.method == "two_pass"):
                self.shards.require_same_layers(use.held.values() for use in self._uses)
        if self.computes_loss:
            self._is_inside = False
            return outputs
        return self._hand_out(outputs)

    def _hand_out(self, outputs: Any) -> Any:
        """Return the outputs of the recorded forward, which ends, for the loop."""
        leaves, spec = pytree.tree_flatten(outputs)
        leaves = [self._handed_out(leaf) for leaf in leaves]
        self.tape.leave_model(leaves)
        self._is_inside = False
        return pytree.tree_unflatten(leaves, spec)

    def _leave_forward(self) -> None:
        """Restore function modes and grad mode to their state before the forward."""
        mode, self._mode = self._mode, None
        if mode is not None:
            remove_mode(mode)
        self._eager.close()
        if self._without_graph:
            self._without_graph = False
            torch.set_grad_enabled(True)

    def abandon(self) -> None:
        """Discard a forward that did not end."""
        if self._is_inside and not self._paused:
            self._is_inside = False
            self._leave_forward()
            self.begin_again()

    def begin_again(self) -> None:
        """Forget the recorded forward, and the loop's operations since then."""
        self.clear()
        self.tape.rewind()

    def _begin_layers(self) -> None:
        """Clip layer by layer during the backward, if the model is sharded and clips per layer."""
        terms = self.terms
        if self.shards is None or terms is None or self.n is None or terms.clipping != "per_layer":
            return
        if terms.mask is not None and len(terms.mask) != self.n:
            return  # the step raises the error
        self.layered = Layered(
            self._uses, self._derived, self._inside, terms, n=self.n, shards=self.shards
        )

    def _keep_grads_out(self, use: Use, out: Tensor) -> None:
        """Hook that keeps the gradient of one captured call's output."""

        def arrived(grad: Tensor) -> None:
            if self._paused or use not in self._uses:
                return
            self._note_backward(came_before=use in self._reached)
            self._reached.add(use)
            use.grads_out = grad.detach()
            if self.layered is not None:
                self.layered.arrived(use)

        out.register_hook(arrived)

    def _note_backward(self, *, came_before: bool) -> None:
        """Note that a gradient arrived; refuse a second backward over one recorded forward."""
        if came_before:
            raise RuntimeError(
                "backward ran twice over one recorded forward. Expected one backward per step; "
                "add the losses before calling backward."
            )
        begins = not self._in_backward
        self._in_backward, self.has_gradients = True, False
        self.tape.reached()
        if begins:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:  # not called after a failure
        self._in_backward, self.has_gradients = False, True

    def _handed_out(self, leaf: Any) -> Any:
        """Return one output with a hook for the gradient that the loop sends."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if self._by_vmap:  # computed without a graph
            leaf = leaf.detach().requires_grad_()
        # The values are needed only to run the model again; otherwise an empty tensor will do.
        self.outputs.append(leaf.detach() if self._needs_values else leaf.new_empty(0))
        if not leaf.requires_grad:
            return leaf
        self._differentiable.append(len(self.outputs) - 1)
        return hand_out(partial(self._keep_cotangent, len(self.outputs) - 1), leaf)

    @property
    def _needs_values(self) -> bool:
        """True if the gradients are computed from the outputs' values and their gradients."""
        return self.start is not None or self._by_vmap or self._alone is not None

    def _keep_cotangent(self, position: int, grad: Tensor) -> None:
        """Keep the gradient of one output."""
        if self._paused or position >= len(self.outputs):
            return
        self._note_backward(came_before=position in self._cotangents)
        self._cotangents[position] = grad.detach()

    @property
    def cotangents(self) -> list[Tensor | None]:
        """Gradient of each differentiable output, None where none arrived."""
        return [self._cotangents.get(i) for i in self._differentiable]

    def free_outputs(self) -> None:
        """Free the outputs and their gradients, unless the model is run again."""
        if not self._needs_values:
            self._cotangents = {i: g.new_empty(0) for i, g in self._cotangents.items()}
            self.tape.free_outputs()

    def _escaped(self, name: str, grads: Any) -> None:
        """Refuse a gradient that reached a parameter outside of all captured calls."""
        if self._paused or are_set_aside():
            return
        if not self.is_active:
            raise RuntimeError(
                "A backward ran without a batch of the loader that make_private returned. Train on "
                "the batches of that loader only."
            )
        for p in self.parameters.values():  # gradients that arrived before are not clipped
            p.grad = None
        raise UnsupportedLayerError(
            f"Parameter {name!r} reached the loss outside the recorded forward of the model, where "
            "its gradient can't be clipped per example. Use it inside the model's forward, or call "
            "clipped_grad_sum with a loss function that does all of it."
        )

    def gradients(self, scale: float, keep: str) -> Gradients:
        """Return the gradients of each example's own loss; `scale` undoes the loss reduction."""
        n = self.require_backward()
        self.refuse_written()
        if self._alone is not None:
            with self._pause():
                return gradients_alone(self._alone, self._scaled_cotangents(scale), self.parameters)
        if self._by_vmap:
            batch = self._with_cotangents(scale)
            with self._pause(), gradients_set_aside(self.parameters):
                return again_by_vmap(self.model, projected, batch, self.parameters)
        for use, batch_axis in self._uses.items():
            complete(use, batch_axis, scale)
        return Captured(
            self._uses,
            self._uses.values(),
            {**self._inside, **self._capture.stand_ins},
            self._derived,
            n=n,
            keep=keep if self.shards is None else "small",
            gathered=self.shards.gathered if self.shards else None,
        )

    @property
    def analyses(self) -> AnalysisCache:
        """Analyses of the model on batches like the recorded one."""
        return self._analysis.cache

    def refuse_written(self) -> None:
        """Refuse buffers written by the forward, unless every batch writes the same values."""
        names, allowed = self._written, self.analyses.writes
        if allowed.issuperset(names):
            return
        if self.shards is not None:
            raise UnsupportedLayerError(
                f"The buffers {names} of a model under fully_shard changed in forward. Freeze them."
            )
        with self._pause():
            refuse_written(self.model, self._call, self._batch, names)
        allowed.update(names)

    def _call(self, batch: Batch) -> Any:
        args, kwargs = batch.arguments()
        return self.model(*args, **kwargs)

    def require_backward(self) -> int:
        """Return the number of examples; refuse if no forward or no backward was recorded."""
        if self.n is None:
            raise RuntimeError(
                "No forward was recorded. Call the model on the batch, with gradients on, and "
                "then loss.backward()."
            )
        if not self.has_gradients:
            raise RuntimeError(
                "No backward was recorded. Call loss.backward() before reading gradients."
            )
        return self.n

    def _scaled_cotangents(self, scale: float) -> list[Tensor]:
        """Scaled gradient of each output, zeros where none arrived."""
        return [
            self._cotangents[i] * scale if i in self._cotangents else torch.zeros_like(out)
            for i, out in enumerate(self.outputs)
        ]

    def _with_cotangents(self, scale: float) -> Batch:
        """Return the batch with the scaled gradient of each output as a further argument."""
        return Batch((*self._batch.arguments(), self._scaled_cotangents(scale)), shares=True)

    def second_pass(
        self, scale: float, free: Callable[[], None] = lambda: None
    ) -> SecondPass | None:
        """Return a function from factors (n,) to clipped sums by a second pass, or None.

        The function returns None if the second forward is another function of the data. It calls
        `free` first, to free the memory that the first pass holds.
        """
        start = self.start
        if self.method != "two_pass" or self._by_vmap or is_narrow(self.outputs):
            return None
        if start is None or self.analyses.passes_differ:
            return None
        cotangents = self._scaled_cotangents(scale)

        def again() -> Tensor:
            outputs = self._repeated()
            if outputs is None:
                raise UnsupportedLayerError(
                    "The second forward of method two_pass gives other outputs than the first: "
                    "the model draws random numbers that can't be drawn again, or changes. Use "
                    'grad_sample_mode="auto".'
                )
            return combined(outputs, cotangents)

        def run(factors: Tensor) -> dict[str, Tensor] | None:
            if self._passes_differ():
                return None
            free()
            with self._pause(), start.replayed(self.model):
                if self.shards is not None:
                    return self.shards.reweighted(again, factors)
                return reweighted(again, self.parameters, factors)

        return run

    def _repeated(self) -> list[Tensor] | None:
        """Return the outputs of a second forward, or None if they differ from the recorded ones."""
        outputs = float_leaves(self._call(self._batch))
        pairs = list(zip(outputs, self.outputs, strict=True))
        is_same = all(ours.shape == theirs.shape for ours, theirs in pairs)
        is_same = is_same and all(is_same_forward(o.detach(), t) for o, t in pairs)
        return outputs if is_same else None

    def _passes_differ(self) -> bool:
        """True if a second forward gives other outputs; tested once per cached analysis."""
        cache, purpose = self.analyses, ("second pass",)
        if purpose not in cache.checked and self.shards is None and self.start is not None:
            with self.unchanged(), self.start.replayed(self.model), torch.no_grad():
                cache.passes_differ = self._repeated() is None
            cache.checked.add(purpose)
        return cache.passes_differ

    def losses(self, scale: float) -> Tensor:
        """Return (n,) products of outputs and cotangents, or zeros if `computes_loss`."""
        if self.computes_loss:
            return torch.zeros(self.n or 0)
        return combined(self.outputs, self._scaled_cotangents(scale))

    def subject(self, scale: float, mask: Tensor | None = None) -> ReferenceLosses:
        """Return the reference for the recorded gradients: those of each row of `losses`, alone."""
        assert self.start is not None
        batch = self._batch
        if not self.computes_loss:
            batch = self._with_cotangents(scale)
        return ReferenceLosses(projected, self.model, batch, self.parameters, self.start, mask=mask)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which the model may be run; its state and generators are restored after."""
        with (
            self._pause(),
            self.tape.suspended(),
            eagerly(),
            torch.enable_grad(),
            untouched_generators(self.model),
            restored(self.model, self.analyses.writes),
            attributes_kept(self.model),
        ):
            yield


class _Guarded:
    """Wrapper of a module's call that abandons the recording on any exception."""

    def __init__(self, recorder: Recorder, call: Callable[..., Any]) -> None:
        self._recorder, self._call = recorder, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._recorder.run(self._call, args, kwargs)
        except BaseException:  # also KeyboardInterrupt, for which torch runs no hook
            self._recorder.abandon()
            raise

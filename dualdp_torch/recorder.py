# SPDX-License-Identifier: Apache-2.0
"""Listens to one model in a loop that the user owns: `model(x)`, then `loss.backward()`.

Module hooks only tell that the model is entered and left; in between, the same capture as in
`clipped_grad_sum` is active. Gradients arrive through hooks on the outputs of the captured calls.
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

from dualdp import UnsupportedLayerError

from .batch import Batch
from .capture import Capture
from .clip import SecondPass
from .examination import Examination
from .fallback import (
    again_by_vmap,
    are_set_aside,
    gradients_set_aside,
    is_same_forward,
    reweighted,
)
from .gradients import Captured, Gradients
from .layered import Layered
from .layout import Layout
from .outputs import Silent, WholeStep, combined, float_leaves, hand_out, projected
from .parts import complete, is_narrow
from .random_state import untouched_generators
from .remembered import Remembered
from .rules.base import Tensor
from .sharded import Shards, Terms, check_sharded
from .spot_check import Subject
from .state import Start, State, attributes_kept, refuse_written, restored
from .tape import Tape, lift
from .uses import Derived, Use, eagerly, trainable_parameters
from .validate import refuse_mixing_modules

_CALL = "_compiled_call_impl"  # of a module: what is called in the place of its forward and hooks
#: Methods that need the recorded forward and backward only.
RECORDED = ("auto", "book_keeping", "two_pass", "materialize", "vmap")


class Recorder:
    """Listens to one model: one forward, one backward, then the gradients.

    Args:
        model: the module, which is left as it is; `detach` removes every hook.
        method: one of `RECORDED`.
        when: () -> whether a forward that begins now is to be recorded.
        tape: a record of what the loop does outside of the model; it need not be open.
        terms: () -> what the batch is clipped with; with them the layers of a model in pieces are
            clipped while the backward runs, where they are clipped one by one.
        is_due: what is known of the model -> whether the forward that begins may be run again.

    Attributes:
        start: what the recorded forward began from, if it may be run again.
        computes_loss: the model's forward does, so that only uses of parameters are heard.
        has_drawn: whether it drew random numbers; known where it may be run again.
        shards: of a model under `fully_shard`, else None; then all processes record together.
        layered: the clipped sums of the recorded batch, where the backward forms them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        method: str,
        when: Callable[[], bool],
        tape: Tape,
        terms: Callable[[], Terms] | None = None,
        is_due: Callable[[Remembered], bool] = lambda known: False,
    ) -> None:
        refuse_mixing_modules(model)
        check_sharded(model, method)
        self.model, self.method, self._when, self.tape = model, method, when, tape
        self.computes_loss = isinstance(model, WholeStep)
        self.shards, self._terms, self._is_due = Shards.of(model), terms, is_due
        self.parameters = trainable_parameters(model)
        self._inside = self.shards.plain if self.shards else self.parameters
        tables = (self.parameters, self._inside)
        self._names = {id(p): name for table in tables for name, p in table.items()}
        # Run when a gradient is accumulated, not when one is asked for as `pull_back` does.
        leaves = {id(p): (name, p) for table in tables for name, p in table.items()}.values()
        nodes = [(name, get_gradient_edge(p).node) for name, p in leaves]
        self._accumulators = nodes  # their hooks live as long as they do
        self._mode: Any = None
        self._capture: Any = None
        self._examination = Examination(model, self._inside, self.shards, self._pause)
        self._paused, self._is_inside, self._eager = False, False, contextlib.ExitStack()
        self.clear()
        self._handles: list[Any] = [
            # Before FSDP's own hook, which begins a forward that ours may precede by others.
            model.register_forward_pre_hook(
                self._enter, with_kwargs=True, prepend=self.shards is not None
            ),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            *(node.register_prehook(partial(self._escaped, name)) for name, node in nodes),
        ]
        self._compiled = vars(model).get(_CALL)
        vars(model)[_CALL] = _Guarded(self, self._compiled or model._call_impl)

    def __reduce__(self) -> Any:
        return Silent, ()

    def clear(self) -> None:
        """Forget the forward that was recorded."""
        self.n: int | None = None
        self.has_gradients = False
        self._uses: list[Use] = []
        self._derived: dict[str, Derived] = {}
        self._layouts: tuple[Layout | None, ...] = ()
        self._outputs: list[Tensor] = []
        self._hearing: list[int] = []
        self._by_vmap = False
        self.start: Start | None = None
        self.has_drawn = False
        self._written: list[str] = []
        self._cotangents: dict[int, Tensor] = {}
        self._without_graph = self._in_backward = False
        self.layered: Layered | None = None
        self._heard: set[Use] = set()

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if isinstance(vars(self.model).get(_CALL), _Guarded):
            vars(self.model).pop(_CALL)
            if self._compiled is not None:
                vars(self.model)[_CALL] = self._compiled

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """The model may be called without being recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ------------------------------------------------------------------ forward

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is entered."""
        if self._paused or not torch.is_grad_enabled() or not self._when():
            return
        with self.tape.aside():
            self._require_one_forward()
            self._batch = batch = Batch((args, kwargs))
            self._is_inside = True
            self.tape.enter_model(args, kwargs, batch.n)
        problem = self._examination.begin(batch)
        if self.method == "two_pass" or self._is_due(self.known):
            self.start = Start.of(model, self._examination.writes)
        self._state = State(model)
        if self.method == "vmap" or problem:
            self._without_graph = self._by_vmap = True
            torch.set_grad_enabled(False)
        skip = self._examination.skip
        self._mode = self._capture = Capture(self._names, self._listen, skip, self.model)
        self._eager.enter_context(eagerly())
        self._mode.__enter__()
        self.n = batch.n

    def _require_one_forward(self) -> None:
        """Refuse a second forward for one batch, and parameters that are others than before."""
        if self._in_backward and not self.has_gradients:  # which failed
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
        """The model is left, by return or by exception."""
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
            if mode.checkpointed:
                raise UnsupportedLayerError(
                    "The model checkpoints activations, which runs parts of it again in a backward "
                    "that is not ours. Use clipped_grad_sum, or train without checkpointing."
                )
            self._uses, self._derived = mode.uses, mode.derived
            self._layouts = self._examination.layouts(mode, outputs)
            self._begin_layers()
            if self.shards is not None and (self.layered or self.method == "two_pass"):
                self.shards.require_same_way(use.held.values() for use in self._uses)
        if self.computes_loss:
            self._is_inside = False
            return outputs
        leaves, spec = pytree.tree_flatten(outputs)
        leaves = [self._handed_out(leaf) for leaf in leaves]
        self.tape.leave_model(leaves)
        self._is_inside = False
        return pytree.tree_unflatten(leaves, spec)

    def _leave_forward(self) -> None:
        """Function modes and gradients are what they were before the forward."""
        mode, self._mode = self._mode, None
        if mode is not None:
            lift(mode)
        self._eager.close()
        if self._without_graph:
            self._without_graph = False
            torch.set_grad_enabled(True)

    def abandon(self) -> None:
        """The forward did not end: nothing of it is left."""
        if self._is_inside and not self._paused:
            self._is_inside = False
            self._leave_forward()
            self.begin_again()

    def begin_again(self) -> None:
        """Forget the forward that was recorded, and all that the loop did since."""
        self.clear()
        self.tape.rewind()

    def _begin_layers(self) -> None:
        """Have the backward of a model in pieces clip layer by layer, if that is the clipping."""
        if self.shards is None or self._terms is None or self.n is None:
            return
        terms = self._terms()
        if terms.clipping != "per_layer":
            return
        if terms.mask is not None and len(terms.mask) != self.n:
            return  # which is an error at the step
        self.layered = Layered(
            dict(zip(self._uses, self._layouts, strict=True)),
            self._derived,
            self._inside,
            terms,
            n=self.n,
            shards=self.shards,
        )

    def _listen(self, use: Use, out: Tensor) -> None:
        """Keep the gradient of one captured call's output."""

        def arrived(grad: Tensor) -> None:
            if self._paused or use not in self._uses:
                return
            self._arrived(use in self._heard)
            self._heard.add(use)
            use.grads_out = grad.detach()
            if self.layered is not None:
                self.layered.arrived(use)

        out.register_hook(arrived)

    def _arrived(self, came_before: bool) -> None:
        """A gradient came to the recorded forward.

        Raises:
            RuntimeError: by a second backward, or by one that nobody can see.
        """
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

    def _backward_ended(self) -> None:
        """The backward came to its end; one that fails never does."""
        self._in_backward, self.has_gradients = False, True

    def _handed_out(self, leaf: Any) -> Any:
        """One output, made to hear the gradients of the loop."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if self._by_vmap:  # computed without a graph
            leaf = leaf.detach().requires_grad_()
        # The numbers are needed only where the model is run again.
        needed = self.start is not None or self._by_vmap
        self._outputs.append(leaf.detach() if needed else leaf.new_empty(0))
        if not leaf.requires_grad:
            return leaf
        self._hearing.append(len(self._outputs) - 1)
        return hand_out(partial(self._hear, len(self._outputs) - 1), leaf)

    def _hear(self, position: int, grad: Tensor) -> None:
        """The gradient of one output arrived."""
        if self._paused or position >= len(self._outputs):
            return
        self._arrived(position in self._cotangents)
        self._cotangents[position] = grad.detach()

    @property
    def outputs(self) -> list[Tensor]:
        """What the recorded forward returned, in floating-point tensors."""
        return self._outputs

    @property
    def cotangents(self) -> list[Tensor | None]:
        """What each output with a gradient received from the loop, None where nothing came."""
        return [self._cotangents.get(i) for i in self._hearing]

    def free_outputs(self) -> None:
        """Outputs and their gradients are not needed further, unless the model is run again."""
        if self.start is None and not self._by_vmap:
            self._cotangents = {i: g.new_empty(0) for i, g in self._cotangents.items()}
            self.tape.free_outputs()

    def _escaped(self, name: str, grads: Any) -> None:
        """A gradient reached a parameter without passing through a captured call."""
        if self._paused or are_set_aside():
            return
        if not self._when():
            raise RuntimeError(
                "A backward ran without a batch of the loader that make_private returned. Train on "
                "the batches of that loader only."
            )
        for p in self.parameters.values():  # what other parameters got before is raw
            p.grad = None
        raise UnsupportedLayerError(
            f"Parameter {name!r} reached the loss outside the recorded forward of the model, where "
            "its gradient can't be clipped per example. Use it inside the model's forward, or call "
            "clipped_grad_sum with a loss function that does all of it."
        )

    # ------------------------------------------------------------------ gradients

    def gradients(self, scale: float, keep: str) -> Gradients:
        """The gradients of each example's own loss.

        Args:
            scale: what undoes the loss's reduction: n for a mean, 1 for a sum.
            keep: as in `Captured`.

        Raises:
            RuntimeError: no forward or no backward was recorded.
        """
        n = self.require_backward()
        self.refuse_written()
        if self._by_vmap:
            return self._vmapped(scale)
        for use, layout in zip(self._uses, self._layouts, strict=True):
            complete(use, layout, scale)
        return Captured(
            self._uses,
            self._layouts,
            {**self._inside, **self._capture.stand_ins},
            self._derived,
            n=n,
            keep=keep if self.shards is None else "small",
            gathered=self.shards.gathered if self.shards else None,
        )

    @property
    def known(self) -> Remembered:
        """What is remembered of the model on batches like the recorded one."""
        return self._examination.known

    def refuse_written(self) -> None:
        """Refuse buffers that the forward has written, unless it writes the same on every batch.

        Raises:
            UnsupportedLayerError: it does not, or, of a model in pieces, nobody has tried.
        """
        names, allowed = self._written, self.known.writes
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
        """A forward of the model on other arguments."""
        args, kwargs = batch.arguments()
        return self.model(*args, **kwargs)

    def require_backward(self) -> int:
        """The number of examples of the recorded forward and backward.

        Raises:
            RuntimeError: one is missing.
        """
        if self.n is None:
            raise RuntimeError(
                "No forward was recorded. Call the model inside, with gradients on, before this."
            )
        if not self.has_gradients:
            raise RuntimeError(
                "No backward was recorded. Call loss.backward() before reading gradients."
            )
        return self.n

    def _scaled_cotangents(self, scale: float) -> list[Tensor]:
        """The gradient of each output, zeros where none arrived."""
        return [
            self._cotangents[i] * scale if i in self._cotangents else torch.zeros_like(out)
            for i, out in enumerate(self._outputs)
        ]

    def second_pass(
        self, scale: float, free: Callable[[], None] = lambda: None
    ) -> SecondPass | None:
        """Factors (n,) -> clipped sum by a second forward and backward, for method="two_pass".

        Args:
            scale: as in `gradients`.
            free: called first, to give back the memory of what the first pass left.
        """
        start = self.start
        if self.method != "two_pass" or self._by_vmap or is_narrow(self._outputs):
            return None
        if start is None or self.known.passes_differ:
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
        """The outputs of a second forward, if they are those of the recorded one."""
        outputs = float_leaves(self._call(self._batch))
        pairs = list(zip(outputs, self._outputs, strict=True))
        is_same = all(ours.shape == theirs.shape for ours, theirs in pairs)
        is_same = is_same and all(is_same_forward(o.detach(), t) for o, t in pairs)
        return outputs if is_same else None

    def _passes_differ(self) -> bool:
        """Whether a second forward is another function of the data, tried once for each model."""
        known, purpose = self.known, ("second pass",)
        if purpose not in known.checked and self.shards is None and self.start is not None:
            with self.unchanged(), self.start.replayed(self.model), torch.no_grad():
                known.passes_differ = self._repeated() is None
            known.checked.add(purpose)
        return known.passes_differ

    # ------------------------------------------------------------------ checks

    def losses(self, scale: float) -> Tensor:
        """(n,) the products of each example's outputs with what they received."""
        if self.computes_loss:
            return torch.zeros(self.n or 0)
        return combined(self._outputs, self._scaled_cotangents(scale))

    def subject(self, scale: float, mask: Tensor | None = None) -> Subject:
        """The definition of the recorded gradients: those of each row of `losses`, alone.

        Args:
            scale: what undoes the loss's reduction.
            mask: (n,) bool, False for padding, or None.
        """
        assert self.start is not None
        if self.computes_loss:
            return Subject(
                projected, self.model, self._batch, self.parameters, self.start, mask=mask
            )
        batch = Batch((*self._batch.arguments(), self._scaled_cotangents(scale)))
        return Subject(projected, self.model, batch, self.parameters, self.start, mask=mask)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context in which the model may be run, and is afterwards as it was."""
        with (
            self._pause(),
            self.tape.aside(),
            eagerly(),
            torch.enable_grad(),
            untouched_generators(self.model),
            restored(self.model, self.known.writes),
            attributes_kept(self.model),
        ):
            yield

    def _vmapped(self, scale: float) -> Gradients:
        """The gradients through `vmap` over the model, from the gradients of its outputs."""
        batch = Batch((*self._batch.arguments(), self._scaled_cotangents(scale)))
        with self._pause(), gradients_set_aside(self.parameters):
            return again_by_vmap(self.model, projected, batch, self.parameters)


class _Guarded:
    """A module's call that leaves nothing behind, whatever ends it."""

    def __init__(self, recorder: Recorder, call: Callable[..., Any]) -> None:
        self._recorder, self._call = recorder, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except BaseException:  # Ctrl-C too, for which torch runs no hook
            self._recorder.abandon()
            raise

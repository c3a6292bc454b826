# SPDX-License-Identifier: Apache-2.0
"""Recorder of the forwards and backwards of one batch in a loop that the user owns.

Module hooks mark where the model's forward begins and ends; in between, the same capture as in
`clipped_grad_sum` is active. Hooks on the outputs of captured calls receive the gradients. A second
forward of the same examples adds further uses of each parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import ExactnessError
from dualdp_torch.parallel.fsdp import Shards, check_sharded
from dualdp_torch.per_sample.analysis_cache import AnalysisCache, ForwardAnalysis
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.call import Call, Options, unchanged
from dualdp_torch.per_sample.capture import Capture, checkpoint_frame
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.per_sample.checks.identity import Numbers, Reference
from dualdp_torch.per_sample.checks.twin import Forwarded, Twins, held_tensors
from dualdp_torch.per_sample.clip import SecondPass, Terms
from dualdp_torch.per_sample.gradients import Captured, Formed
from dualdp_torch.per_sample.model_checks import OF_ONE_SIZE, refuse_mixing_modules
from dualdp_torch.per_sample.modes import autocast_as, autocast_dtypes
from dualdp_torch.per_sample.numbers import numbers_of
from dualdp_torch.per_sample.one_forward import Forward, each_alone, gradients_alone, joined
from dualdp_torch.per_sample.outputs import (
    WholeStep,
    combined,
    float_leaves,
    forwards_of,
    from_outputs,
    hand_out,
    projected_outputs,
    split_numbers,
)
from dualdp_torch.per_sample.parameter_use import (
    USE_LOOP,
    ChangedInPlaceError,
    Derived,
    Use,
    eagerly,
    graph_nodes,
    trainable_parameters,
)
from dualdp_torch.per_sample.random_state import Start, buffers_of, changed_buffers, on_copies
from dualdp_torch.per_sample.vmap_and_loop import (
    CHANGED,
    again_by_loop,
    again_by_vmap,
    are_set_aside,
    gradients_set_aside,
)
from dualdp_torch.rules.base import Tensor, is_narrow

_CALL = "_compiled_call_impl"  # a module attribute, called instead of its forward and hooks
_CLOSED = (
    "A backward reached a forward whose gradients were used by optimizer.step(), or dropped by "
    "zero_grad(). Call the model again, or add the losses before one backward."
)


class Recorder:
    """Records the forwards and backwards of a model on one batch, and returns the gradients.

    An example's gradient is the sum over all recorded forwards, whose rows are the same examples in
    the same order.

    `twins` are led through the loop outside of the model, if there are any. `detach` restores the
    model. An example is a unit of `rows_per_unit` consecutive rows of the model's arguments and
    outputs.

    Attributes:
        is_active: True if a forward that begins now is to be recorded.
        is_inside: True while a forward is being recorded.
        terms: clipping settings of the batch, or None.
        row_factors: (rows,) factors of the gradients of the outputs, by which the rows of a unit
            are weighted against their mean; None for 1.
        is_due: predicate of the cached analysis, True if the forward that begins may be run again;
            with True as second argument, as one of several of a batch.
        require_inputs: function that refuses tensors which a forward may not get.
        forwards: recorded forwards, in order.
        by_loop: True if each example runs alone, by the method or since nothing else was right.
        usual_size: examples in the loader's batches; a model that takes no others is refused.
        computes_loss: True if the model's forward computes the loss, too, so that only parameter
            uses are captured.
        shards: shards of a model under `fully_shard`, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        method: str,
        twins: Twins | None = None,
        rows_per_unit: int = 1,
    ) -> None:
        refuse_mixing_modules(model)
        check_sharded(model, method)
        self.model, self.method, self.twins = model, method, twins or Twins()
        self.rows_per_unit, self.by_loop = rows_per_unit, method == "loop"
        self.is_active, self.is_inside, self.shards = True, False, Shards.of(model)
        self.usual_size: int | None = None
        self.terms: Terms | None = None
        self.row_factors: Tensor | None = None
        self.is_due: Callable[..., bool] = lambda cache, several=False: False
        self.require_inputs: Callable[[list[Tensor]], None] = lambda tensors: None
        self.computes_loss = isinstance(model, WholeStep)
        self.parameters = trainable_parameters(model)
        self._inside = self.shards.plain if self.shards else self.parameters
        named = [*self.parameters.items(), *self._inside.items()]
        leaves = {id(p): (name, p) for name, p in named}
        self._names = {key: name for key, (name, _) in leaves.items()}
        # These nodes run when a gradient is accumulated, not for `torch.autograd.grad`.
        nodes = [(name, get_gradient_edge(p).node) for name, p in leaves.values()]
        self._accumulators = nodes  # kept, as hooks die with their node
        self._analysis = ForwardAnalysis(
            model, self._inside, self.shards, self.pause, rows_per_unit
        )
        self._paused = self._repeats = False  # _repeats: True once a batch had several forwards
        self._autocast: tuple[tuple[str, torch.dtype], ...] = ()  # at the last forward's begin
        self._leaf = torch.zeros((), requires_grad=True)
        self._numbers = itertools.count()  # of forwards, alike on all processes
        self.forwards: list[Forward] = []
        self.clear()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_no_short_cut),
            *(node.register_prehook(partial(self._escaped, name)) for name, node in nodes),
        ]
        self._replaced = dict[str, Any]()  # attributes of the model before
        self._set("zero_grad", Zeroing(self.zeroed, model.zero_grad))
        self.guard()

    def clear(self) -> None:
        """Forget the recorded forwards."""
        for forward in self.forwards:
            forward.close()
        self.forwards = []
        self.has_gradients = self._in_backward = False
        self._not_accumulating = -1

    @property
    def n(self) -> int | None:
        """Number of examples; None before a forward."""
        return self.forwards[0].batch.n if self.forwards else None

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute of the model, until `detach`."""
        self._replaced[name] = vars(self.model).get(name), value
        vars(self.model)[name] = value

    def guard(self) -> None:
        """Take the place of the model's call, also if that was compiled since the last time."""
        found = vars(self.model).get(_CALL)
        if found is None or found is not self._replaced.get(_CALL, (None, None))[1]:
            self._set(_CALL, _Recorded(self.run, found or self.model._call_impl))

    def detach(self) -> None:
        """Remove every hook, and restore the model's attributes."""
        while self._handles:
            self._handles.pop().remove()
        own = vars(self.model)
        for name, (before, ours) in self._replaced.items():
            if own.get(name) is ours:
                del own[name]
                if before is not None:
                    own[name] = before

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which nothing is recorded, and the model's call is its own."""
        guard = vars(self.model).pop(_CALL)
        try:
            with self.pause(), self.twins.suspended():
                yield
        finally:
            vars(self.model)[_CALL] = guard

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which forwards and backwards of the model are not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @torch._disable_dynamo  # a loop that torch.compile traces calls the model as it is
    def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `call`, which is the model's, and record it: eagerly, or each example alone.

        Nothing is recorded while paused, without gradients, or where no batch is active.
        """
        if self._paused or not self.is_active or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        try:
            with self.twins.unheard():
                forward = self._begin(args, kwargs)
                with eagerly():
                    run = self._run_alone if self.by_loop else self._run_captured
                    outputs = run(forward, args, kwargs)
                if not self.computes_loss:
                    outputs = self._hand_out(forward, outputs)
            self.is_inside = False
            return outputs
        except BaseException as error:  # also KeyboardInterrupt, for which torch runs no hook
            if self.is_inside:
                self.is_inside = False
                self.forwards.pop().close()
                self.twins.rewind(len(self.forwards))
            if _is_of_torch(error) and self._is_of_one_size(args, kwargs):
                raise UnsupportedLayerError(OF_ONE_SIZE.format(error=error)) from error
            raise

    def _is_of_one_size(self, args: Any, kwargs: Any) -> bool:
        """True if the model takes as many rows as the loader's batches have, where it failed."""
        if self.usual_size is None:
            return False
        batch = Batch((args, kwargs), shares=True, rows_per_unit=self.rows_per_unit)
        usual = batch.rows(torch.arange(self.usual_size) % max(batch.n, 1))
        given, options = usual.arguments()
        try:
            with self.pause(), self.twins.suspended(), on_copies(self.model), torch.no_grad():
                self.model(*given, **options)
        except RuntimeError:
            return False
        return True

    def _begin(self, args: Any, kwargs: Any) -> Forward:
        """Begin a recorded forward, whose arguments are checked, and find its analysis."""
        with self.twins.suspended():
            self._refuse_unrecordable()
            batch = Batch((args, kwargs), shares=True, rows_per_unit=self.rows_per_unit)
            forward = Forward(batch, self.row_factors)
            self._refuse_other_examples(forward)
            self.require_inputs(forward.inputs())
            self.forwards.append(forward)
            self.is_inside = True
            self.twins.enter_model(args, kwargs, batch.num_rows, self.model)
        self._autocast = autocast_dtypes()
        problem = self._analysis.begin(batch)
        forward.cache = self._analysis.cache
        if not self.by_loop:
            if problem and problem.endswith(USE_LOOP):  # the model differentiates in its forward
                raise UnsupportedLayerError(problem)
            forward.by_vmap = self.method == "vmap" or problem is not None
        if self.by_loop or forward.by_vmap:
            _refuse_gradients_of_inputs(forward)
        is_due = self.is_due(forward.cache) or (self._repeats and self.is_due(forward.cache, True))
        is_led = self.twins.is_on and self.shards is None  # all processes gather in a forward
        if self.method == "two_pass" or is_due or is_led:
            forward.start = Start.of(self.model, is_checked=is_due)
        return forward

    def _run_alone(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run each example alone, and return the outputs of the batch."""
        with self.pause():
            forward.alone = each_alone(self.model, self.model._call_impl, forward.batch)
            return joined(forward.alone, self.rows_per_unit)

    def _run_captured(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the forward while its parameter uses are captured, or without a graph for `vmap`."""
        shards, by_vmap = self.shards, forward.by_vmap
        buffers = {} if shards is None else buffers_of(self.model)
        keep = partial(self._keep_grads_out, forward)
        capture = Capture(self._names, keep, self._analysis.skip)
        with torch.set_grad_enabled(not by_vmap), capture:
            outputs = self.model._call_impl(*args, **kwargs)
        forward.has_drawn = forward.start is not None and forward.start.random.has_drawn()
        if shards is not None:
            self._refuse_in_pieces(capture, changed_buffers(buffers, buffers_of(self.model)))
        if by_vmap:
            forward.end_by_vmap(self.model, self.parameters.values())
            return outputs
        forward.hear(capture, self._analysis.batch_axes(capture), next(self._numbers))
        by_layer = self.terms is not None and self.terms.clipping == "per_layer"
        if shards is not None and (by_layer or self.method == "two_pass"):
            shards.require_same_layers(use.held.values() for use in forward.uses)
        return outputs

    def _refuse_unrecordable(self) -> None:
        """Refuse a forward that cannot be recorded now."""
        if self.is_inside:
            raise RuntimeError(
                "The model calls itself inside its forward, and one recorded forward can't hold "
                "another. Call a method or a submodule there."
            )
        if checkpoint_frame() is not None:
            raise UnsupportedLayerError(
                "The whole private model was called inside an activation checkpoint, so that its "
                "forward would be recorded twice. Expected checkpoints inside of its forward, "
                "around its parts: checkpoint(self.block, x, use_reentrant=False)."
            )
        if self._in_backward and not self.has_gradients:  # the backward failed
            if len(self.forwards) > 1:
                raise RuntimeError(
                    "A backward of this batch failed after other forwards of it were recorded. "
                    "Call optimizer.zero_grad() and repeat all forwards of the batch."
                )
            self.begin_again()
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Refuse a model that was cut, or whose parameters changed, since set-up."""
        current = trainable_parameters(self.model)
        if {self._names.get(id(p)) for p in current.values()} != set(self.parameters):
            strange = {name for name, p in current.items() if id(p) not in self._names}
            changed = sorted(strange | (set(self.parameters) - set(current)))
            raise RuntimeError(
                f"The parameters {changed} were frozen, unfrozen or replaced after set-up. Set "
                "up again, so that what is clipped is what is trained; a functional_call with "
                "other parameters belongs under engine.pause(), and is not private."
            )

    def _refuse_other_examples(self, forward: Forward) -> None:
        """Refuse a forward that can't be charged to the batch's examples, row by row."""
        rows, factors = forward.batch.num_rows, self.row_factors
        if factors is not None and rows != len(factors):
            raise RuntimeError(
                f"The model was called on {rows} rows but the loader gave {len(factors)}, some of "
                "them padding. Expected the whole batch, in its order; put other calls under "
                "torch.no_grad() or engine.pause()."
            )
        if self.terms is not None:  # training: what lies before the model would be trained, too
            _refuse_parameters_before(forward, self._names)
        if not self.forwards:
            return
        self._repeats = True
        if self.computes_loss or self.shards is not None:
            raise RuntimeError(
                "The model was called twice for one batch, and its forward computes the loss or it "
                "lies in pieces (fully_shard). Expected one recorded forward per step; put further "
                "calls under torch.no_grad()."
            )
        if forward.batch.n != self.n:
            raise RuntimeError(
                f"The model was called on {self.n} examples, then on {forward.batch.n}, for one "
                "batch. Expected the same examples in the same order in every recorded forward. "
                "Put other calls under torch.no_grad() or engine.pause(); for parts of a batch, "
                "use max_physical_batch_size."
            )

    def _refuse_in_pieces(self, capture: Capture, changed: list[str]) -> None:
        """Refuse what can't be right under `fully_shard`, where no check runs a forward again."""
        if changed:
            raise UnsupportedLayerError(
                f"The buffers {changed} of a model under fully_shard changed in forward. Freeze "
                "them."
            )
        if capture.has_checkpoints:
            raise UnsupportedLayerError(
                "The model checkpoints activations under fully_shard, which gathers parameters "
                "once more in the backward. Use one of the two."
            )

    def _hand_out(self, forward: Forward, outputs: Any) -> Any:
        """Return the outputs of the recorded forward, which ends, for the loop."""
        leaves, spec = pytree.tree_flatten(outputs)
        floats = float_leaves(leaves)
        handed_out = {id(leaf): self._handed_out(forward, leaf) for leaf in floats}
        tensors, numbers = split_numbers(leaves)
        for number in numbers:
            made = [leaf for leaf in floats if handed_out[id(leaf)].requires_grad]
            own = [handed_out[id(leaf)] for leaf in made]
            handed_out[id(number)] = from_outputs(self.pause, number, made, *own)
        self.twins.leave_model(
            [(leaf, handed_out.get(id(leaf), leaf)) for leaf in tensors],
            [(number, handed_out[id(number)]) for number in numbers],
            partial(self._forwarded, forward),
        )
        return pytree.tree_unflatten([handed_out.get(id(leaf), leaf) for leaf in leaves], spec)

    def _forwarded(self, forward: Forward, units: Tensor) -> Forwarded:
        """Return what the model gives for some units, from the state before a forward."""
        if forward.start is None:
            raise RuntimeError("The forward can't be run again.")
        with self.unchanged(), forward.start.replayed(self.model):
            args, kwargs = forward.batch.rows(units).arguments()
            leaves = pytree.tree_leaves(self.model(*args, **kwargs))
            return Forwarded(*split_numbers(leaves), held_tensors(self.model))

    def begin_again(self) -> None:
        """Forget the recorded forwards, and the loop's operations since then."""
        self.clear()
        self.twins.rewind()

    def zeroed(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a `zero_grad`, and forget the forwards whose gradients arrived."""
        if not self._paused and (self.has_gradients or self._in_backward):
            self._keep_forwards(lambda forward: not forward.has_gradient())
            self.has_gradients = self._in_backward = False
        with self.twins.suspended():
            return call(*args, **kwargs)

    def drop_unused(self) -> None:
        """Forget the forwards that no backward reached: they add nothing to any gradient."""
        self._keep_forwards(Forward.has_gradient)

    def _keep_forwards(self, is_kept: Callable[[Forward], bool]) -> None:
        for index, forward in reversed(list(enumerate(self.forwards))):
            if not is_kept(forward):
                self.forwards.pop(index).close()
                self.twins.drop(index)

    def _keep_grads_out(self, forward: Forward, use: Use, out: Tensor) -> None:
        """Hook that keeps the gradient of one captured call's output.

        Weak references: the graph would hold the recorder and the forward, which hold the graph.
        """
        of_recorder, of_forward, of_use = weakref.ref(self), weakref.ref(forward), weakref.ref(use)

        def arrived(grad: Tensor) -> None:
            recorder, forward, use = of_recorder(), of_forward(), of_use()
            if recorder is None:
                raise RuntimeError(_CLOSED)
            if recorder._paused or torch._C._current_graph_task_id() == recorder._not_accumulating:
                return
            if forward is None:
                raise RuntimeError(_CLOSED)
            recorder._note_backward(forward, came_before=use in forward.reached)
            if use is None:  # its capture was given up
                return
            forward.reached.add(use)
            use.grads_out = grad.detach()

        out.register_hook(arrived)

    def _note_backward(self, forward: Forward, *, came_before: bool) -> None:
        """Note that a gradient arrived; refuse what is no first-order gradient of this batch."""
        if torch.is_grad_enabled():
            raise UnsupportedLayerError(
                "A gradient through the model was asked for with create_graph=True, as a gradient "
                "penalty does: its own gradient has a part that no layer's input and output show. "
                'Write the loss as a function and call clipped_grad_sum(..., method="loop").'
            )
        if not forward.is_open:
            raise RuntimeError(_CLOSED)
        if came_before:
            raise RuntimeError(
                "backward ran twice over one recorded forward. Expected one backward per forward; "
                "add the losses before calling backward."
            )
        if not self._in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self._in_backward, self.has_gradients = True, False

    def _backward_ended(self) -> None:  # not called after a failure
        self._in_backward, self.has_gradients = False, True

    def _handed_out(self, forward: Forward, leaf: Tensor) -> Tensor:
        """Return one output with a hook for the gradient that the loop sends."""
        # The values are needed only to run the model again; otherwise an empty tensor will do.
        position = len(forward.outputs)
        forward.outputs.append(leaf.detach() if forward.needs_values else leaf.new_empty(0))
        if forward.by_vmap:  # computed without a graph; the loop may write to what it gets
            leaf = leaf.detach().clone().requires_grad_()
        if not leaf.requires_grad:
            return leaf
        forward.differentiable.append(position)
        return hand_out(partial(self._keep_cotangent, forward, position), self._leaf, leaf)

    def _keep_cotangent(
        self, forward: Forward, position: int, grad: Tensor, accumulates: bool
    ) -> Tensor:
        """Keep the gradient of one output and return it weighted, as the model gets it.

        A backward of `torch.autograd.grad` for another tensor adds to no `p.grad`, and gets it as
        it came.
        """
        if self._paused:
            return grad
        if not accumulates and not torch.is_grad_enabled():
            self._not_accumulating = torch._C._current_graph_task_id()
            return grad
        self._note_backward(forward, came_before=position in forward.cotangents)
        forward.cotangents[position] = grad.detach()
        return forward.weighted(grad)

    @property
    def cotangents(self) -> list[Tensor | None]:
        """Gradient of each differentiable output, None where none arrived."""
        return [f.cotangents.get(i) for f in self.forwards for i in f.differentiable]

    @property
    def outputs(self) -> list[Tensor]:
        """Floating-point tensors that the recorded forwards returned."""
        return [output for forward in self.forwards for output in forward.outputs]

    def free_outputs(self) -> None:
        """Free the outputs and their gradients, unless the model is run again."""
        if not any(forward.needs_values for forward in self.forwards):
            for forward in self.forwards:
                for position, grad in forward.cotangents.items():
                    forward.cotangents[position] = grad.new_empty(0)

    def _escaped(self, name: str, grads: Any) -> None:
        """Refuse a gradient that reached a parameter outside of all captured calls."""
        if self._paused or are_set_aside():
            return
        if not self.is_active:
            raise RuntimeError(
                "A backward ran without a batch of the loader that make_private returned, or after "
                "its optimizer.step(). Train on the batches of that loader only; put a step of "
                "another model through this one, such as a generator's, under engine.pause()."
            )
        for p in self.parameters.values():  # gradients that arrived before are not clipped
            p.grad = None
        raise UnsupportedLayerError(
            f"Parameter {name!r} reached the loss outside the recorded forward of the model, where "
            "its gradient can't be clipped per example. A term without data (L2) belongs into the "
            "optimizer's weight_decay, or is added to p.grad by optimizer.register_step_pre_hook "
            "after make_private. Else use the parameter inside the model's forward, or call "
            "clipped_grad_sum with a loss function that does all of it."
        )

    def require_backward(self) -> int:
        """Return the number of examples; refuse if no forward or no backward was recorded."""
        if self.n is None:
            raise RuntimeError(
                "No forward was recorded. Call the model on the batch, with gradients on, and "
                "then loss.backward()."
            )
        if not self.has_gradients:
            raise RuntimeError("No backward was recorded. Call loss.backward() before.")
        return self.n

    def gradients(self, scale: float, keep: str) -> Captured:
        """Return the gradients of each example's own loss; `scale` undoes the loss reduction."""
        n = self.require_backward()
        uses, formed = dict[Use, BatchAxis | None](), list[dict[str, Tensor]]()
        derived = dict[str, Derived]()
        for forward in self.forwards:
            if not forward.is_formed:
                uses |= forward.uses
                derived |= forward.derived
            elif forward.has_gradient():
                formed.append(self._formed(forward, scale).grads())
        found = Captured(
            uses,
            self._inside,
            derived,
            n=n,
            scale=scale,
            keep=keep if self.shards is None else "small",
            gathered=self.shards.gathered if self.shards else None,
        )
        if not formed:
            return found
        each = [found.grads(), *formed] if uses else formed
        return Formed({name: reduce(torch.add, [g[name] for g in each]) for name in formed[0]})

    def _formed(self, forward: Forward, scale: float) -> Formed:
        """Return the gradients of a forward that was computed without a graph, or row by row."""
        cotangents, k = forward.scaled_cotangents(scale), self.rows_per_unit
        with self.pause():
            if forward.alone is not None:
                return gradients_alone(forward.alone, cotangents, self.parameters, k)
            if any(t._version != version for t, version in forward.versions):
                raise ChangedInPlaceError(CHANGED)
            arguments = (*forward.batch.arguments(), cotangents)
            again = (
                self.model,
                partial(projected_outputs, rows_per_unit=k),
                Batch(arguments, shares=True, rows_per_unit=k),
                self.parameters,
                forward.outputs,
            )
            with gradients_set_aside(self.parameters):
                try:
                    return again_by_vmap(*again)
                except UnsupportedLayerError as error:
                    found = again_by_loop(*again) if self.method == "auto" else None
                    if found is None:
                        raise
                    forward.cache.give_up_vmap(self.model, str(error))
                    self.by_loop = True
                    return found

    @property
    def start(self) -> Start | None:
        """State before the first forward, or None if some forward is not run again."""
        for forward in self.forwards:
            if forward.start is None:
                return None
        return self.forwards[0].start if self.forwards else None

    @property
    def analyses(self) -> AnalysisCache:
        """Analyses of the model on batches like that of the first forward."""
        return self.forwards[0].cache if self.forwards else self._analysis.cache

    def was_checked(self, purpose: tuple[Any, ...]) -> bool:
        """True if this purpose was checked on batches like those of all forwards, so many."""
        own = (*purpose, "several") if len(self.forwards) > 1 else purpose
        return all(own in forward.cache.checked for forward in self.forwards)

    def second_pass(self, scale: float, *, frees: bool = True) -> SecondPass | None:
        """Return the second pass of "two_pass", which `frees` the first one's memory, or None."""
        if self.method != "two_pass" or any(f.is_formed for f in self.forwards):
            return None
        start = self.start
        if start is None or is_narrow(self.outputs):
            return None
        cotangents = self._scaled_cotangents(scale)

        def losses() -> Tensor:
            outputs = list[Tensor]()
            for forward in self.forwards:
                args, kwargs = forward.batch.arguments()
                assert forward.start is not None
                with forward.start.replayed(self.model):
                    outputs += float_leaves(self.model(*args, **kwargs))
            return combined(outputs, cotangents, rows_per_unit=self.rows_per_unit)

        contexts = self.pause, partial(start.replayed, self.model)
        given = losses, self.losses(scale), self.parameters, contexts, self.shards
        return SecondPass(*given, frees=frees)

    def losses(self, scale: float) -> Tensor:
        """Return (n,) products of outputs and cotangents, or zeros if `computes_loss`."""
        if self.computes_loss:
            return torch.zeros(self.n or 0)
        cotangents = self._scaled_cotangents(scale)
        return combined(self.outputs, cotangents, rows_per_unit=self.rows_per_unit)

    def _scaled_cotangents(self, scale: float) -> list[Tensor]:
        return [g for forward in self.forwards for g in forward.scaled_cotangents(scale)]

    def reference(self, terms: Terms) -> Reference:
        """Return the definition of the recorded gradients, for a check."""
        k = self.rows_per_unit
        starts = [forward.start for forward in self.forwards if forward.start is not None]
        given = self.parameters, starts, terms.mask
        if self.computes_loss:
            batch = self.forwards[0].batch
            return Reference(
                lambda *of: [partial(_losses_of_none, *of)], self.model, batch, *given, _loss_alone
            )
        each = [(*f.batch.arguments(), f.scaled_cotangents(terms.scale)) for f in self.forwards]
        batch = Batch(tuple(each), shares=True, rows_per_unit=k)
        return Reference(partial(forwards_of, k), self.model, batch, *given)

    def checked(
        self, numbers: Numbers, terms: Terms, purpose: tuple[Any, ...], **options: Any
    ) -> tuple[Numbers, bool]:
        """Return numbers that were compared with their definition, and if any could be.

        On a first batch of "auto" they may be those of another way: captured uses are tried first,
        then `vmap`, then the loop. A forward that draws random numbers has only the first way, as
        the others would draw other ones. `options` are those of `identity.check`.
        """
        # No bound method, so that no reference cycle keeps the recorder's tensors alive.
        run = _recorded if self.computes_loss else _called
        again = partial(run, self.method, terms)
        failure: ExactnessError | UnsupportedLayerError | None = None
        is_tried = self.method == "auto" and options["is_first"] and not self.computes_loss
        tries = is_tried and not self._drew()
        with self.unchanged():
            for way in (None, "vmap", "loop"):
                try:
                    if way is not None:
                        numbers = run(way, terms, self.reference(terms))
                    compared = identity.check(self.reference(terms), numbers, again, **options)
                    break
                except (ExactnessError, UnsupportedLayerError) as error:
                    failure = failure or error
                    if isinstance(failure, UnsupportedLayerError) or not tries:
                        raise
                    if way is None:  # the cotangents as they came: a backward may not be linear
                        projected = again(self.reference(terms._replace(scale=1.0)))
                        _require_outputs([*self.parameters], numbers, projected, terms.scale)
                    if way == "loop":
                        raise failure from None
        for forward in self.forwards if failure else ():
            forward.cache.give_up_uses(self.model, str(failure))
            if way == "loop":
                forward.cache.give_up_vmap(self.model, str(failure))
        self.by_loop |= failure is not None and way == "loop"
        several = {(*purpose, "several")} if len(self.forwards) > 1 else set()
        for forward in self.forwards if compared else ():
            forward.cache.checked |= {purpose} | several
        return numbers, compared

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which the model may be run; its state and generators are restored after."""
        # The host's, around its step; and masks of dropout differ with the precision of a forward.
        is_same = self.computes_loss or self._drew()
        around = autocast_as(self._autocast) if is_same else contextlib.nullcontext()
        with self.pause(), self.twins.suspended(), unchanged(self.model), around:
            yield

    def _drew(self) -> bool:
        """True if a recorded forward drew random numbers."""
        return any(f.start is not None and f.has_drawn for f in self.forwards)


class _Recorded(partial[Any]):
    """Call of a module that is recorded; of a class of its own, as analyses are kept by types."""


class Zeroing(partial[Any]):
    """Call of `Recorder.zeroed` in the place of a module's or an optimizer's `zero_grad`.

    A copy of the module has its own `zero_grad` there, as it is not recorded.
    """

    def __reduce__(self) -> Any:
        return partial, self.args


def _no_short_cut(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: Dynamo takes a module without hooks by its `forward`, past `run`."""


def _refuse_gradients_of_inputs(forward: Forward) -> None:
    """Refuse inputs with a gradient where the forward is computed without a graph."""
    if any(tensor.requires_grad for tensor in forward.inputs()):
        raise UnsupportedLayerError(
            "An input of the model requires a gradient, which vmap and loop do not compute. "
            "Detach the input, or call the model under engine.pause()."
        )


def _refuse_parameters_before(forward: Forward, names: Mapping[int, str]) -> None:
    """Refuse inputs whose gradient leads to parameters outside of the model."""
    for tensor in forward.inputs():
        if not tensor.requires_grad:
            continue
        leaves = [getattr(node, "variable", None) for node in graph_nodes([tensor.grad_fn])]
        for p in [tensor] if tensor.is_leaf else leaves:
            if p is None or id(p) in names:
                continue
            if len(tensor) == forward.batch.num_rows and not isinstance(p, nn.Parameter):
                continue  # rows whose gradient is asked for
            raise UnsupportedLayerError(
                f"The gradient of an input of the model leads to a parameter of shape "
                f"{tuple(p.shape)} outside of it, which would be trained without clipping and "
                "noise. Detach the input, or put both into one module; a generator's step belongs "
                "under engine.pause()."
            )


def _is_of_torch(error: BaseException) -> bool:
    """True for a plain error that was not raised by dualdp."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return type(error) is RuntimeError and not where.startswith("dualdp")


def _projected(rows_per_unit: int, model: nn.Module, *calls: Any) -> Tensor:
    """Return (n,) products of outputs and cotangents of several forwards."""
    each = [projected_outputs(model, *call, rows_per_unit=rows_per_unit)[0] for call in calls]
    return reduce(torch.add, each)


def _called(method: str, terms: Terms, reference: Reference) -> Numbers:
    """Return the numbers of another reference, by the same method."""
    model, batch, mask = reference.model, reference.batch, reference.mask
    loss = partial(_projected, batch.rows_per_unit)
    call = Call.of(loss, model, batch, Options(method=method, check="off"), mask=mask)
    call = call.on(model, batch, reference.parameters, mask)
    with reference.starts[0].replayed(model):
        gradients, found, _ = call.gradients()
        terms = terms._replace(mask=mask)
        return numbers_of(gradients, found, terms, is_definition=call.is_definition)


def _require_outputs(names: list[str], recorded: Numbers, projected: Numbers, scale: float) -> None:
    """Raise if gradients came by another way than the outputs: "auto" would leave them out.

    `projected` are the numbers of the outputs times their cotangents, by the same method; times
    `scale` they are those that were recorded.
    """
    ones = torch.ones_like(recorded.norms)
    found, by_outputs = recorded.sum_of(names, ones), projected.sum_of(names, ones * scale)
    pairs = [(found[name], by_outputs[name]) for name in found]
    if any((a - b).norm() > torch.finfo(a.dtype).eps ** 0.5 * a.norm() for a, b in pairs):
        raise ExactnessError(
            "The loss has a term that does not come from what the model returned, such as one that "
            "forward keeps on the module. Nothing was released for this batch. Return it from "
            "forward, with one value per example, and take their mean into the loss."
        )


def _recorded(method: str, terms: Terms, reference: Reference) -> Numbers:
    """Record a forward that computes its loss, and return its numbers."""
    n, k = reference.batch.n, reference.batch.rows_per_unit
    recorder = Recorder(reference.model, method=method, rows_per_unit=k)
    try:
        with reference.starts[0].replayed(reference.model), torch.enable_grad():
            _loss_alone(reference.model, reference.batch).backward()
        gradients = recorder.gradients(1.0 if terms.scale == 1 else float(n), "small")
        return numbers_of(gradients, torch.zeros(n), terms._replace(mask=reference.mask))
    finally:
        recorder.detach()


def _loss_alone(model: nn.Module, batch: Batch) -> Tensor:
    """Return the scalar loss of a forward that computes it, too."""
    args, kwargs = batch.arguments()
    found: Tensor = model.loss(*args, **kwargs)  # type: ignore[operator]
    return found


def _losses_of_none(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Run a forward that computes the loss; no row has a loss or an output of its own."""
    _loss_alone(model, batch)
    return torch.zeros(batch.n), []

# SPDX-License-Identifier: Apache-2.0
"""Capture of (activations, output gradient) for each parameter use, without parameter gradients.

A function in `RULES` that receives a trainable parameter is run on the detached parameter instead,
so that autograd computes the gradients of the outputs only (Bu et al. 2023, "book-keeping"). Each
call is a `Use`: the saved input, and the graph edge at which the output's gradient arrives. Unlike
module hooks, edges survive in-place changes of the output. Tied and shared weights have several
uses.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.parameter_use import (
    REENTRANT,
    SECOND_ORDER,
    Derived,
    SecondOrderError,
    Use,
    comes_from,
    graph_nodes,
    name_of,
    own_node,
    refuse_hook,
    refuse_transforms,
)
from dualdp_torch.rules import REWRITES, RULES, Rewrite
from dualdp_torch.rules.base import Rule, Tensor

#: Functions of autograd and their arguments: they would miss the detached parameters.
_DIFFERENTIATE = {
    torch.autograd.grad: ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
    torch.autograd.backward: ("tensors", "grad_tensors", "retain_graph", "create_graph"),
    Tensor.backward: ("self", "gradient", "retain_graph", "create_graph", "inputs"),
}
#: Tensor with a gradient, which makes outputs of the first layers part of the graph.
_LEAF = torch.zeros((), requires_grad=True)
#: Functions without a rule that change what uses show.
_HEARD = {*_DIFFERENTIATE, Tensor.register_hook, F.batch_norm}
#: Functions by which sequences are sorted and packed.
_PACKING = {Tensor.index_select, torch._pack_padded_sequence}
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training")


class Capture(TorchFunctionMode):
    """Function mode that records every use of the given parameters.

    A tensor computed from parameters alone (a slice, a transpose, a normalised weight) counts as a
    parameter, under a name of its own in `derived`; its gradients are pulled back to the parameters
    at the end. So do the outputs of uses at the positions `skip`, which hold no examples, such as
    position embeddings. `names` maps ids of parameters to their names, and `on_use` is called with
    each `Use` and its output.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        on_use: Callable[[Use, Tensor], None] | None = None,
        skip: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.derived: dict[str, Derived] = {}
        self._names = dict(names)
        self._orders: dict[int, tuple[Tensor, Tensor]] = {}  # by id; kept alive likewise
        self._from_parameters: dict[int, Tensor] = {}  # by id; kept alive so that ids stay unique
        self._on_use, self._skip, self._seen = on_use, skip, 0
        self._skipped: set[tuple[Any, ...]] = set()
        self._frames: weakref.WeakKeyDictionary[Any, list[Use]] = weakref.WeakKeyDictionary()
        self._recomputing = False
        self.hooked: Use | None = None  # a hook changes the gradient that is captured before it

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rewrite = REWRITES.get(func)
        if rewrite and torch.is_grad_enabled() and self._rewrites(rewrite, args, kwargs):
            refuse_transforms(func)
            with self:
                return rewrite.function(self, *args, **kwargs)
        rule = RULES.get(func)
        if rule is None:
            if func in _HEARD:
                self._hear(func, args, kwargs)
            return self._plain(func, args, kwargs)
        call = dict(zip(rule.arguments, args, strict=False)) | kwargs
        held: dict[str, Tensor] = {}
        for slot, value in call.items():
            if id(value) in self._names or id(value) in self._from_parameters:
                held[slot] = value
        reason = rule.refuse(call) if rule.refuse else None
        if reason:
            names = ", ".join(repr(self._name(p)) for p in held.values())
            raise UnsupportedLayerError(
                f"{name_of(func)}{f' (parameter {names})' if names else ''}: {reason}."
            )
        if self._takes(func, rule, call, held):
            return self._use(func, rule, args, kwargs, call, held)
        return self._plain(func, args, kwargs)

    def _rewrites(self, rewrite: Rewrite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call takes a parameter where the rewrite needs one, and is covered by it."""
        given = [*args, *kwargs.values()]
        given += [v for a in given if type(a) is list for v in a]
        if rewrite.parameter is not None:
            at, name = rewrite.parameter
            given = [args[at] if len(args) > at else kwargs.get(name)]
        if not any(map(self._is_parameter, given)):
            return False
        return not (rewrite.writes and self._is_parameter(args[0])) and rewrite.covers(args, kwargs)

    def _hear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse, or note, a function without a rule that changes what uses show."""
        if func in _DIFFERENTIATE:
            self._refuse_second_order(func, args, kwargs)
        elif func is Tensor.register_hook:
            self._hear_hook(*args, **kwargs)
        else:
            call = dict(zip(_BATCH_NORM, args, strict=False)) | kwargs
            of_batch = call.get("training") or call.get("running_mean") is None
            if of_batch and not self._is_parameter(call["input"]):  # weights hold no examples
                raise UnsupportedLayerError(
                    "batch_norm was called with batch statistics: it mixes examples, so no "
                    "per-sample gradient exists. Replace BatchNorm by GroupNorm, or call the "
                    "module's eval()."
                )

    def _takes(
        self, func: Any, rule: Rule, call: Mapping[str, Any], held: Mapping[str, Tensor]
    ) -> bool:
        """True if the rule applies to this call, and it holds examples.

        Calls that run again are matched by their parameters.
        """
        if not held or not torch.is_grad_enabled() or not held.keys() <= rule.grads.keys():
            return False
        number = 0
        for value in call.values():
            if isinstance(value, Tensor):
                number += 1
                if value.is_complex():
                    return False
        if len(held) == number and not rule.alone:
            return False
        if len(held) < number and rule.applies is not None and not rule.applies(call):
            return False
        key = func, *map(id, held.values())
        if self._recomputing:
            return key not in self._skipped
        self._seen += 1
        if self._seen - 1 in self._skip:
            self._skipped.add(key)
            return False
        return True

    def _is_parameter(self, value: Any) -> bool:
        """True if a value is a trainable parameter, or computed from parameters alone."""
        return id(value) in self._names or id(value) in self._from_parameters

    def _name(self, value: Tensor) -> str:
        if id(value) not in self._names:
            name = f"#{len(self.derived)}"
            self._names[id(value)], self.derived[name] = name, Derived(value, value._version)
        return self._names[id(value)]

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function unchanged, and note outputs computed from parameters alone."""
        out = func(*args, **kwargs)
        if func in _PACKING:
            self._note_order(func, args, out)
        takes = False  # parameters, or what was computed from them, and no other graph
        for argument in (*args, *kwargs.values()):
            for value in argument if type(argument) is list else (argument,):
                if isinstance(value, Tensor) and value.requires_grad:
                    if id(value) not in self._names and id(value) not in self._from_parameters:
                        return out
                    takes = True
        if not takes:
            return out
        for made in out if type(out) in (tuple, list) else (out,):
            if isinstance(made, Tensor) and made.requires_grad and id(made) not in self._names:
                self._from_parameters[id(made)] = made
        return out

    def _note_order(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note the order in which a packed sequence holds the examples."""
        if func is Tensor.index_select and len(args) == 3 and args[2].dim() == 1:
            self.follow(out, args[2])
        elif func is torch._pack_padded_sequence and id(args[0]) in self._orders:
            self.follow(out[0], self._orders[id(args[0])][1])

    def order_of(self, data: Tensor) -> Tensor | None:
        """Return the order of the examples in packed data, if they were sorted, or None."""
        return self._orders[id(data)][1] if id(data) in self._orders else None

    def follow(self, data: Tensor, order: Tensor) -> None:
        """Note that packed data hold the examples in this order."""
        self._orders[id(data)] = data, order

    def _hear_hook(self, tensor: Tensor, hook: Any) -> None:
        """Note a hook on the output of a use; refuse one on a parameter, as at the call's begin.

        Hooks of torch itself, as those of `fully_shard`, and the recorder's change no gradient.
        """
        if comes_from(hook, "torch.", "dualdp_torch."):
            return
        if isinstance(tensor, nn.Parameter) and self._is_parameter(tensor):
            refuse_hook(self._name(tensor))
        edge = tensor.grad_fn, tensor.output_nr
        made_by = (use for use in self.uses if use.edge[:2] == edge)
        self.hooked = self.hooked or next(made_by, None)

    def _refuse_second_order(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a gradient that is part of the loss, or that of a parameter."""
        named = dict(zip(_DIFFERENTIATE[func], args, strict=False)) | dict(kwargs)
        inputs = named.get("inputs")
        inputs = inputs if isinstance(inputs, list | tuple) else (inputs,)
        if self.uses and (named.get("create_graph") or any(map(self._is_parameter, inputs))):
            raise SecondOrderError(SECOND_ORDER.format(f"calls {name_of(func)}"))

    def _use(
        self,
        func: Callable[..., Any],
        rule: Rule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: dict[str, Any],
        held: dict[str, Tensor],
    ) -> Tensor:
        """Run the function on detached parameters, and record the use."""
        refuse_transforms(func)
        detached = {}
        for p in held.values():
            detached[id(p)] = p.detach()
        given, named = [*args], dict(kwargs)
        for i, a in enumerate(given):
            given[i] = detached.get(id(a), a)
        for name, a in named.items():
            named[name] = detached.get(id(a), a)
        out: Tensor = func(*given, **named)
        acts = None
        if not held.keys() <= rule.light:
            wanted = rule.acts
            if callable(wanted):
                wanted = wanted({slot: self._name(p) for slot, p in held.items()})
            acts = call[wanted] if isinstance(wanted, str) else tuple(call[w] for w in wanted)
        if not out.requires_grad or out._is_view():  # as of a linear layer with position axes
            out = own_node(out, _LEAF)
        options = {}
        for name, value in call.items():
            if not isinstance(value, Tensor):
                options[name] = value
        self._append(func, rule, held, acts, options, out)
        return out

    def record(
        self,
        func: Callable[..., Any],
        rule: Rule,
        parameters: Mapping[str, Any],
        acts: Tensor,
        out: Tensor,
    ) -> None:
        """Add a use for a rewritten function, which has run the call itself.

        Values among `parameters` that are none are ignored; `out` is a tensor of the output's
        shape, whose edge receives the output's gradient.
        """
        held = {slot: p for slot, p in parameters.items() if self._is_parameter(p)}
        self._seen += not self._recomputing
        if held:
            kept = None if held.keys() <= rule.light else acts
            self._append(func, rule, held, kept, {}, out, can_skip=False)

    def _append(
        self,
        func: Callable[..., Any],
        rule: Rule,
        parameters: Mapping[str, Tensor],
        acts: Any,
        options: dict[str, Any],
        out: Tensor,
        can_skip: bool = True,
    ) -> None:
        """Append a use; inside an activation checkpoint its inputs are left to the second run."""
        frame = checkpoint_frame()
        saved = acts if isinstance(acts, tuple) else () if acts is None else (acts,)
        # A function with an input in the graph saves tensors for its backward, so it runs again.
        is_left = frame is not None and any(tensor.requires_grad for tensor in saved)
        detached: tuple[Tensor, ...] = ()
        versions: list[tuple[Tensor, int]] = []
        for tensor in () if is_left else saved:
            detached += (tensor.detach(),)
            versions.append((detached[-1], tensor._version))
        names, shapes = {}, {}
        for slot, p in parameters.items():
            names[slot], shapes[slot] = self._names.get(id(p)) or self._name(p), p.shape
        is_several = isinstance(acts, tuple) and not is_left
        use = Use(
            function=func,
            rule=rule,
            held=names,
            shapes=shapes,
            acts=detached if is_several else next(iter(detached), None),
            options=options,
            edge=get_gradient_edge(out),
            out_shape=out.shape,
            position=self._seen - 1,
            signature=(func, tuple(names.items()), out.dim(), self._seen - 1),
            can_skip=can_skip,
            versions=versions,
            waits=is_left,
        )
        if frame is not None:
            if self._recomputing:  # of a checkpoint in a checkpoint, which runs again by itself
                return
            self._uses_of(frame).append(use)
        self.uses.append(use)
        if self._on_use:
            self._on_use(use, out)

    @property
    def has_checkpoints(self) -> bool:
        """True if a use lies inside an activation checkpoint."""
        return bool(self._frames)

    def _uses_of(self, frame: Any) -> list[Use]:
        """Return the uses inside one activation checkpoint, which is captured when it runs again.

        `frame` is that of `torch.utils.checkpoint`. What it holds has weak references only, as
        frame, graph and uses would hold each other for ever.
        """
        if frame in self._frames:
            return self._frames[frame]
        uses = self._frames[frame] = list[Use]()
        owner, of_frame, function = weakref.ref(self), weakref.ref(frame), frame.recompute_fn
        modes = _get_current_function_mode_stack()

        def run_again(*args: Any) -> Any:
            capture, key = owner(), of_frame()
            if capture is None:
                return function(*args)
            with contextlib.ExitStack() as stack:
                for mode in modes:  # a backward switches them off
                    if mode not in _get_current_function_mode_stack():
                        stack.enter_context(mode)
                again = stack.enter_context(capture._of_second_run())
                out = function(*args)
            _take_inputs(capture._frames[key], again.uses)
            return out

        frame.recompute_fn, frame.early_stop = run_again, False
        return uses

    def _of_second_run(self) -> Capture:
        """Return a capture for a part of the same forward that runs again."""
        again = Capture(self._names)
        again._from_parameters = self._from_parameters
        again._skipped, again._recomputing = self._skipped, True
        return again

    def backward(self, total: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
        """Set `grads_out` of every use to the gradient of the scalar `total`.

        Returns the names of the parameters that also reach `total` outside of captured uses. One
        that is used only inside a reentrant checkpoint would get no gradient, without an error.
        """
        held = {name for use in self.uses for name in use.held.values()}
        for node in () if held >= parameters.keys() else graph_nodes([total.grad_fn]):
            if node.name() == "CheckpointFunctionBackward":
                raise UnsupportedLayerError(REENTRANT)
        if not total.requires_grad:
            return []
        targets: list[Any] = [*(use.edge for use in self.uses), *parameters.values()]
        if not targets:  # nothing is trained
            return []
        try:
            found = torch.autograd.grad(total, targets, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            raise UnsupportedLayerError(REENTRANT) from error
        for use, grad in zip(self.uses, found, strict=False):
            use.grads_out = grad
        leftover = found[len(self.uses) :]
        return [name for name, g in zip(parameters, leftover, strict=True) if g is not None]


def checkpoint_frame() -> Any:
    """Return torch's record of the innermost activation checkpoint that runs forward, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or "checkpoint" not in hooks[0].__module__:
        return None
    pack = inspect.unwrap(hooks[0])
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in cells if name == "frame"), None)


def _take_inputs(uses: list[Use], again: list[Use]) -> None:
    """Give the uses inside a checkpoint the inputs of its second run.

    Raises:
        UnsupportedLayerError: the second run called other functions, or with other shapes.
    """
    ours, theirs = [
        [
            (u.function, u.out_shape, u.shapes, [k for k in u.held.values() if k[0] != "#"])
            for u in run
        ]
        for run in (uses, again)
    ]
    if ours != theirs:
        raise UnsupportedLayerError(
            "A checkpointed part of the model called other layers when it ran again in the "
            "backward. Expected the same ones: it may decide by nothing that changes in between."
        )
    for use, second in zip(uses, again, strict=True):
        if use.waits:
            use.acts, use.versions = second.acts, second.versions

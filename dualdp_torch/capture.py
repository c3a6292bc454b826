# SPDX-License-Identifier: Apache-2.0
"""Collects (activations, output gradient) per use of a parameter; no parameter gradient.

A function of the table `RULES` that receives a trainable parameter is run on the DETACHED
parameter instead. What autograd then differentiates holds no parameter at all, so it computes the
gradients of the outputs only (Bu et al. 2023, "book-keeping"). Each call is a `Use`: the saved
input, and the edge of the graph at which the output's gradient will arrive. Edges, unlike module
hooks, survive in-place changes of the output. Tied, shared and functionally used weights are just
more uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualdp import UnsupportedLayerError

from .moves import Moves, picks_unseen
from .rules import FOLLOWING, REWRITES, RULES
from .rules.base import Rule, Tensor
from .uses import (
    REENTRANT,
    SECOND_ORDER,
    Derived,
    SecondOrderError,
    Use,
    attach,
    name_of,
    refuse_reentrant_checkpoints,
    refuse_transforms,
)


def _refuse_batch_statistics(arguments: Mapping[str, Any]) -> None:
    """Refuse a batch norm that looks at the batch."""
    if arguments.get("training") or arguments.get("running_mean") is None:
        raise UnsupportedLayerError(
            "batch_norm was called with batch statistics: it mixes examples, so no per-sample "
            "gradient exists. Replace BatchNorm by GroupNorm, or call the module's eval()."
        )


#: Functions of autograd and their arguments: they would miss the parameters, which are detached.
_DIFFERENTIATE = {
    torch.autograd.grad: ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
    torch.autograd.backward: ("tensors", "grad_tensors", "retain_graph", "create_graph"),
    Tensor.backward: ("self", "gradient", "retain_graph", "create_graph", "inputs"),
}
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training")


class Capture(TorchFunctionMode):
    """While active, records every use of the given parameters.

    A tensor computed from parameters alone (a slice, a transpose, a normalised weight) is a
    parameter too, under a name of its own in `derived`; its gradients are carried on to the
    parameters at the end.

    Args:
        names: id of a parameter -> its name.
        on_use: called with each `Use` and its output.
        skip: positions of uses that hold no examples, as a table of positions: their outputs count
            as computed from parameters alone.
        model: where other tensors may stand in for the parameters while it runs, as sharding
            wrappers have it; they are recognised by module and attribute.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        on_use: Callable[[Use, Tensor], None] | None = None,
        skip: frozenset[int] = frozenset(),
        model: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.derived: dict[str, Derived] = {}
        self._names = dict(names)
        self._model, self.stand_ins = model, dict[str, Tensor]()
        self._strangers: dict[int, Tensor] = {}
        self.moves = Moves(partial(picks_unseen, model, self.uses))
        self._from_parameters: dict[int, Tensor] = {}  # by id, kept alive so that ids stay true
        self._on_use, self._skip, self._seen = on_use, skip, 0
        self._skipped: set[tuple[Any, ...]] = set()
        self.checkpointed = False
        self._recomputing = False
        self._leaf = torch.zeros((), requires_grad=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rewrite = REWRITES.get(func)
        if rewrite and self._holds_any(args, kwargs) and rewrite.covers(args, kwargs):
            refuse_transforms(func)
            if rewrite.function not in FOLLOWING:
                self.moves.used(args, kwargs)
            with self, self.moves.quietly():
                return rewrite.function(self, *args, **kwargs)
        rule = RULES.get(func)
        if rule is None:
            if func is F.batch_norm:
                call = dict(zip(_BATCH_NORM, args, strict=False)) | kwargs
                if not self._is_parameter(call["input"]):  # weights hold no examples
                    _refuse_batch_statistics(call)
            if func in _DIFFERENTIATE:
                self._refuse_second_order(func, args, kwargs)
            return self._plain(func, args, kwargs)
        call = dict(zip(rule.arguments, args, strict=False)) | kwargs
        held = {slot for slot, value in call.items() if self._is_parameter(value)}
        reason = rule.refuse(call) if rule.refuse else None
        if reason:
            names = ", ".join(repr(self._name(call[slot])) for slot in held)
            raise UnsupportedLayerError(
                f"{name_of(func)}{f' (parameter {names})' if names else ''}: {reason}."
            )
        if not self._covers(rule, call, held):
            return self._plain(func, args, kwargs)
        if self._is_skipped(func, call, held):
            return self._plain(func, args, kwargs)
        return self._use(func, rule, args, kwargs, call, held)

    def _is_skipped(self, func: Any, call: Mapping[str, Any], held: set[str]) -> bool:
        """Whether this call holds no examples; a recomputed one is known by what it holds."""
        if self._recomputing:
            return (func, *(id(call[slot]) for slot in held)) in self._skipped
        self._seen += 1
        if self._seen - 1 not in self._skip:
            return False
        self._skipped.add((func, *(id(call[slot]) for slot in held)))
        return True

    def _covers(self, rule: Rule, call: Mapping[str, Any], held: set[str]) -> bool:
        """Whether the rule speaks of this call."""
        if not held or not held <= rule.grads.keys() or not torch.is_grad_enabled():
            return False
        if any(torch.is_tensor(value) and value.is_complex() for value in call.values()):
            return False
        if all(slot in held for slot, value in call.items() if torch.is_tensor(value)):
            return rule.alone
        return rule.applies is None or rule.applies(call)

    def _holds_any(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a parameter is among the arguments, or in a list of them."""
        values = [v for a in (*args, *kwargs.values()) for v in (a if type(a) is list else (a,))]
        return torch.is_grad_enabled() and any(self._is_parameter(value) for value in values)

    def _is_parameter(self, value: Any) -> bool:
        """Whether a value is a trainable parameter, or computed from such alone."""
        known = id(value) in self._names or id(value) in self._from_parameters
        return known or self._stands_in(value)

    def _stands_in(self, value: Any) -> bool:
        """Whether a leaf lies where a parameter has its place; its name is remembered."""
        if self._model is None or not torch.is_tensor(value) or id(value) in self._strangers:
            return False
        if not (value.requires_grad and value.is_leaf):
            return False
        expected = set(self._names.values())
        for path, module in self._model.named_modules():
            for attribute, parameter in module._parameters.items():
                name = f"{path}.{attribute}" if path else attribute
                if parameter is value and name in expected:
                    self._names[id(value)], self.stand_ins[name] = name, value
                    return True
        self._strangers[id(value)] = value  # kept alive, so that the id stays its own
        return False

    def _name(self, value: Tensor) -> str:
        """The name of a parameter, or of what is computed from some."""
        if id(value) not in self._names:
            name = f"#{len(self.derived)}"
            self._names[id(value)], self.derived[name] = name, Derived(value, value._version)
        return self._names[id(value)]

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function as it is, and see whether its output is made of parameters alone."""
        out = func(*args, **kwargs)
        self.moves.note(func, args, kwargs, out)
        outs = out if type(out) in (tuple, list) else (out,)
        made = [o for o in outs if torch.is_tensor(o) and o.requires_grad]
        if made:
            values = [
                v for a in (*args, *kwargs.values()) for v in (a if type(a) is list else (a,))
            ]
            graph = [v for v in values if torch.is_tensor(v) and v.requires_grad]
            if graph and all(self._is_parameter(v) for v in graph):
                self._from_parameters |= {id(o): o for o in made if id(o) not in self._names}
        return out

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
        held: set[str],
    ) -> Tensor:
        """Run the function on detached parameters and remember the call."""
        refuse_transforms(func)
        self.moves.used(args, kwargs)
        detached = {id(call[slot]): call[slot].detach() for slot in held}
        out: Tensor = func(
            *(detached.get(id(a), a) for a in args),
            **{name: detached.get(id(a), a) for name, a in kwargs.items()},
        )
        names = {slot: self._name(call[slot]) for slot in call if slot in held}
        acts = None
        if not held <= rule.light:
            wanted = rule.acts(names) if callable(rule.acts) else rule.acts
            acts = call[wanted] if isinstance(wanted, str) else tuple(call[w] for w in wanted)
        if not out.requires_grad:
            if out._is_view():
                out = out.clone()
            out = attach(out, self._leaf)
        parameters = {slot: call[slot] for slot in names}
        options = {k: v for k, v in call.items() if k not in held and not torch.is_tensor(v)}
        self._remember(func, rule, parameters, acts, options, out)
        return out

    def record(
        self,
        func: Callable[..., Any],
        rule: Rule,
        parameters: Mapping[str, Any],
        acts: Tensor,
        out: Tensor,
    ) -> None:
        """Add a use that a rewritten function has carried out by itself.

        Args:
            func: the original function.
            rule: of the use.
            parameters: argument of the rule -> parameter, where it is one.
            acts: saved input.
            out: a tensor of the output's shape, at whose edge the output's gradient arrives.
        """
        held = {slot: p for slot, p in parameters.items() if self._is_parameter(p)}
        self._seen += not self._recomputing
        if held:
            kept = None if held.keys() <= rule.light else acts
            self._remember(func, rule, held, kept, {}, out, can_skip=False)

    def _remember(
        self,
        func: Callable[..., Any],
        rule: Rule,
        parameters: Mapping[str, Tensor],
        acts: Any,
        options: dict[str, Any],
        out: Tensor,
        can_skip: bool = True,
    ) -> None:
        """Append a use, unless it is a recomputed one, which is there already."""
        if self._recomputing:
            return
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.checkpointed |= hooks is not None and "checkpoint" in hooks[0].__module__
        saved = acts if isinstance(acts, tuple) else () if acts is None else (acts,)
        cut = tuple(tensor.detach() for tensor in saved)
        use = Use(
            function=func,
            rule=rule,
            held={slot: self._name(p) for slot, p in parameters.items()},
            shapes={slot: p.shape for slot, p in parameters.items()},
            acts=cut if isinstance(acts, tuple) else cut[0] if cut else None,
            options=options,
            edge=get_gradient_edge(out),
            out_shape=out.shape,
            position=self._seen - 1,
            can_skip=can_skip,
            versions=[(tensor, tensor._version) for tensor in cut],
            turns=self.moves.turns,
        )
        self.uses.append(use)
        if self._on_use:
            self._on_use(use, out)

    def _recompute(self, total: Tensor, targets: Sequence[Any], retain: bool) -> Any:
        """`torch.autograd.grad` with the capture active: checkpointed parts run forward again.

        The public function leaves every mode that is active, so the engine is called below it.
        """
        self._recomputing = True
        try:
            with self:
                return torch.autograd.graph._engine_run_backward(
                    (total,),
                    (torch.ones_like(total),),
                    retain,
                    False,
                    tuple(targets),
                    True,
                    accumulate_grad=False,
                )
        finally:
            self._recomputing = False

    def backward(
        self, total: Tensor, parameters: Mapping[str, Tensor], *, retain: bool = False
    ) -> list[str]:
        """Put the gradient of `total` on every use.

        Args:
            total: a scalar.
            parameters: name -> parameter.
            retain: the graph will be used again.

        Returns:
            The parameters that reach `total` some other way.
        """
        for use in self.uses:
            use.grads_out = None
        held = {name for use in self.uses for name in use.held.values()}
        if retain or not held >= parameters.keys():
            refuse_reentrant_checkpoints(total)
        if not total.requires_grad:
            return []
        leaves = [*parameters.items(), *self.stand_ins.items()]
        targets: list[Any] = [*(use.edge for use in self.uses), *(leaf for _, leaf in leaves)]
        try:
            if self.checkpointed:
                found = self._recompute(total, targets, retain)
            else:
                found = torch.autograd.grad(total, targets, retain_graph=retain, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            raise UnsupportedLayerError(REENTRANT) from error
        for use, grad in zip(self.uses, found, strict=False):
            use.grads_out = grad
        leftover = found[len(self.uses) :]
        return [name for (name, _), g in zip(leaves, leftover, strict=True) if g is not None]

# SPDX-License-Identifier: Apache-2.0
"""Records of a capture: parameter uses, and tensors computed from parameters alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.parameter import is_lazy

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.rules.base import Rule, Tensor, wide

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eagerly() -> AbstractContextManager[Any]:
    """Context in which compiled models run eagerly: a compiled graph hides its parameters."""
    compiles = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def never_compiled(function: _Function) -> _Function:
    """Decorate a function that compiled code calls as it is: Dynamo can't trace a capture."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        run = disabled if "torch._dynamo" in sys.modules else function
        return run(*args, **kwargs)

    return cast("_Function", called)


def comes_from(function: Any, *packages: str) -> bool:
    """True if a function's module lies in one of the packages, such as "torch."."""
    return (getattr(function, "__module__", None) or "").startswith(packages)


class _OwnNode(torch.autograd.Function):
    """Identity that gives an output a graph node of its own, and shares its memory.

    The first layer's output would have no node, and a change in place of a view gets a graph around
    the node at which its gradient would arrive. The result is no view, so that such a change stays
    legal.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, leaf: Tensor) -> Tensor:
        """Return the same values; `leaf` makes them part of the graph."""
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return grad, None


own_node: Callable[[Tensor, Tensor], Tensor] = _OwnNode.apply


class SecondOrderError(UnsupportedLayerError):
    """The forward differentiates, so that captured uses would miss a part of the gradient."""


USE_LOOP = (
    'Use method="loop" (of make_private: grad_sample_mode="loop"), which is exact for every model.'
)
SECOND_ORDER = (
    "The model or the loss {} inside the forward: the gradient has a part that no layer's input "
    f"and output show. {USE_LOOP}"
)


def refuse_transforms(function: Callable[..., Any]) -> None:
    """Refuse a call inside a `torch.func` transform, whose tensors are not the batch's."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise SecondOrderError(SECOND_ORDER.format(f"calls {name_of(function)} under torch.func"))


class ChangedInPlaceError(UnsupportedLayerError):
    """An input that a parameter's gradient needs was overwritten after it was used."""


@dataclass(eq=False)
class Use:
    """One call of a function with a rule, on at least one trainable parameter.

    Attributes:
        held: mapping from parameter argument to parameter name.
        shapes: mapping from parameter argument to parameter shape.
        acts: saved input(s), as the call had them; None when not needed.
        options: mapping of the call's other arguments.
        edge: graph edge at which the output's gradient arrives.
        position: index among all calls that rules cover.
        signature: key of this use that is equal for the same use on other data.
        can_skip: True if the call can be run without being captured.
        versions: saved inputs with their versions at the call.
        waits: True if the inputs come when an activation checkpoint runs again.
        grads_out: gradient of the output, or None before it arrives.
    """

    function: Callable[..., Any]
    rule: Rule
    held: dict[str, str]
    shapes: dict[str, torch.Size]
    acts: Any
    options: dict[str, Any]
    edge: GradientEdge
    out_shape: torch.Size
    position: int
    signature: tuple[Any, ...]
    can_skip: bool = True
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    waits: bool = False
    grads_out: Tensor | None = None

    @property
    def possible_axes(self) -> Sequence[int]:
        """Axes of the output that may be the batch."""
        return self.rule.batch_axes(self.out_shape, list(self.shapes.values()))

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.held.values()))
        return f"{name_of(self.function)} with {names}"

    def check_unchanged(self) -> None:
        """Refuse a saved input that was changed in place, or that never came."""
        if self.waits and self.acts is None:
            raise UnsupportedLayerError(
                f"The checkpointed part of the model with {self} did not run again in the "
                "backward, so its input is not known. Leave it out of the checkpoint."
            )
        for tensor, version in self.versions:
            if tensor._version == version:
                continue
            raise ChangedInPlaceError(
                f"The input of {self} was changed in place after it was used, so the gradient of "
                'the parameter is lost. Use the out-of-place operation, or method="vmap".'
            )


@dataclass(frozen=True, eq=False)
class Derived:
    """Tensor that was computed from parameters alone and used like one, and its version then."""

    value: Tensor
    version: int

    def pull_back(self, grads: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients of the parameters, (n, *shape), from those of the value.

        They are float32 or wider, and of each example alone: a sum over the batch in the value's
        precision would be rounded by more than the contribution of one.
        """
        if self.value._version != self.version:
            raise ChangedInPlaceError(
                "A tensor computed from parameters was changed in place after it was used. Use the "
                'out-of-place operation, or method="vmap".'
            )
        found = torch.autograd.grad(
            self.value,
            list(parameters.values()),
            grads.to(self.value.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        pairs = zip(parameters, found, strict=True)
        return {name: grad.to(wide(grad.dtype)) for name, grad in pairs if grad is not None}


def graph_nodes(roots: Iterable[Any]) -> list[Any]:
    """Return every node of the autograd graph at or below these nodes, once."""
    seen, stack = dict[Any, None](), list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            for child, _ in node.next_functions:
                stack.append(child)
    return [*seen]


REENTRANT = (
    "A part of the model is checkpointed with use_reentrant=True, which hides its gradients. Use "
    "checkpoint(..., use_reentrant=False)."
)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function as in torch's documentation."""
    return getattr(function, "__name__", str(function))


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> trainable parameter; a tied weight is listed under its first name.

    Complex parameters, those without numbers, and hooks that would change a gradient, are refused.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in found.items():
        if is_lazy(p) or p.is_meta:
            where = "not made before the first batch" if is_lazy(p) else "on the meta device"
            raise ValueError(
                f"Parameter {name!r} has no numbers: it is {where}. Expected a model with its "
                "weights: run a batch through it first, or use to_empty(device=) and load them."
            )
        if not p.is_leaf:
            raise ValueError(
                f"Parameter {name!r} is no leaf, so that no gradient is kept for it, as in "
                "functional_call with parameters that were made (fast weights) and in a deep copy "
                "of a TorchScript module. Expected the model's own parameters in a private step, "
                "and functional_call under engine.pause(); or the module that was copied."
            )
        if p.is_complex():
            raise UnsupportedLayerError(
                f"Parameter {name!r} is {p.dtype}. Expected real numbers: store "
                "torch.view_as_real(it) and use torch.view_as_complex in forward."
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            refuse_hook(name)
    return found


def refuse_hook(name: str) -> None:
    """Refuse a gradient hook of a parameter."""
    raise UnsupportedLayerError(
        f"Parameter {name!r} has a gradient hook, which would see no example's gradient. Remove it "
        "(handle.remove()), or change the optimizer or the loss instead."
    )

# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of a loop that the user owns: `loss.backward()` after `model(x)`.

Module hooks only tell that the model is entered and left; in between, the same capture as in
`clipped_grad_sum` is active. Gradients arrive through hooks on the outputs of the captured calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dualdp import UnsupportedLayerError, _validate

from .batch import Batch
from .call import METHODS
from .capture import Capture, Derived, Use, eagerly, trainable_parameters
from .clip import clip_and_sum, clipping_bounds, whole_norms
from .fallback import by_vmap
from .gradients import Captured, Gradients
from .layout import Layout, of_single
from .proof import Proof, known, prove
from .reduction import REDUCTIONS, check_reduction, current_loss
from .rules.base import Tensor
from .validate import refuse_mixing_modules

#: Methods that need the recorded forward and backward only.
RECORDED = ("auto", "book_keeping", "materialize", "vmap")


def _projected(model: nn.Module, args: Any, kwargs: Any, cotangents: Any = None) -> Tensor:
    """(n,) one number per example from the model's outputs: their product with `cotangents`."""
    leaves = _float_leaves(model(*args, **kwargs))
    n = len(leaves[0]) if leaves and leaves[0].dim() else 0
    total = None
    for position, leaf in enumerate(leaves):
        if leaf.dim() == 0 or len(leaf) != n:
            raise UnsupportedLayerError(
                f"The model returned a tensor of shape {tuple(leaf.shape)}. Expected the examples "
                "on axis 0 of every output; use clipped_grad_sum, which sees the losses."
            )
        if cotangents is None:
            weight = torch.arange(leaf[0].numel(), device=leaf.device).cos().view(leaf[0].shape)
            part = (leaf * weight.to(leaf.dtype)).flatten(1) if leaf.dim() > 1 else leaf[:, None]
        else:
            part = (leaf * cotangents[position]).reshape(n, -1)
        total = part.sum(1) if total is None else total + part.sum(1)
    if total is None:
        raise UnsupportedLayerError("The model returned no tensor. Expected its outputs.")
    return total


def _float_leaves(outputs: Any) -> list[Tensor]:
    """The floating-point tensors of the outputs."""
    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if torch.is_tensor(leaf) and leaf.is_floating_point()
    ]


def _on_grad(tensor: Any, function: Callable[[Tensor], None]) -> Any:
    """Call a function with the tensor's gradient when it arrives."""
    return tensor.register_hook(function)


class _Silent:
    """What a copy of a recorded model has in the recorder's place: it is not recorded.

    A deep copy binds the recorder's own functions to it, a pickle its methods of the same names.
    """

    _paused, _mode = True, None

    def _enter(self, *_: Any) -> None:
        """The copy is entered."""

    def _leave(self, *_: Any) -> None:
        """The copy is left."""


class Recorder:
    """Listens to one model: one forward, one backward, then the gradients.

    Args:
        model: the module, which is left as it is; `detach` removes every hook.
        method: "auto", "book_keeping", "materialize" or "vmap".
        when: () -> whether a forward that begins now is to be recorded.
        check: called with the loss when its backward reaches the model, where it can be seen.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        method: str,
        when: Callable[[], bool],
        check: Callable[[Tensor], None],
    ) -> None:
        refuse_mixing_modules(model)
        self.model, self._method, self._when, self._check = model, method, when, check
        self.parameters = trainable_parameters(model)
        self._names = {id(p): name for name, p in self.parameters.items()}
        # Run when a gradient is accumulated, not when one is asked for as `pull_back` does.
        nodes = {n: get_gradient_edge(p).node for n, p in self.parameters.items()}
        self._accumulators = nodes  # their hooks live as long as they do
        self._mode: Any = None
        self._paused = False
        self.clear()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            *(node.register_prehook(partial(self._escaped, name)) for name, node in nodes.items()),
        ]

    def __reduce__(self) -> Any:
        return _Silent, ()

    def clear(self) -> None:
        """Forget the forward that was recorded."""
        self.n: int | None = None
        self.has_gradients = False
        self._uses: list[Use] = []
        self._derived: dict[str, Derived] = {}
        self._layouts: tuple[Layout | None, ...] = ()
        self._arguments: Any = None
        self._outputs: list[Tensor] | None = None
        self._cotangents: dict[int, Tensor] = {}
        self._without_graph = False

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """The model may be called without being recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    # ------------------------------------------------------------------ forward

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is entered."""
        if self._paused or not torch.is_grad_enabled() or not self._when():
            return
        if self._mode is not None or self.n is not None:
            raise RuntimeError(
                "The model was called twice for one batch. Expected one recorded forward per "
                "backward; put further calls under torch.no_grad()."
            )
        current = trainable_parameters(model)
        if {id(p) for p in current.values()} != set(self._names):
            changed = sorted(set(current) ^ set(self.parameters)) or sorted(current)
            raise RuntimeError(
                f"The parameters {changed} were frozen, unfrozen or replaced after set-up. Set "
                "up again, so that what is clipped is what is trained."
            )
        self._batch = Batch((args, kwargs))
        self.n = self._batch.n
        if self._method == "vmap" or self._problem():
            self._without_graph = True
            torch.set_grad_enabled(False)
        proofs = known(self.model, _projected, self._batch).values()
        skip = next((proof.skip for proof in proofs), frozenset())
        self._mode = Capture(self._names, self._listen, skip)
        self._eager = eagerly()
        self._eager.__enter__()
        self._mode.__enter__()

    def _problem(self) -> str | None:
        """Why captured uses cannot be trusted, examining the model on its first call."""
        proofs = known(self.model, _projected, self._batch)
        if not proofs:
            self._prove(proofs)
        return proofs["problem"].problem if "problem" in proofs else None

    def _prove(self, proofs: dict[Any, Proof]) -> None:
        """Examine the model on this batch and remember the result if it is complete."""
        if self._batch.n == 1:
            return
        with self._pause(), torch.enable_grad():
            proof = prove(self.model, _projected, self._batch, self.parameters)
        if proof is not None and (proof.complete or proof.signatures):
            proofs["problem" if proof.problem else proof.signatures] = proof

    def _find_layouts(self) -> tuple[Layout | None, ...]:
        """Where the examples lie in the uses of this forward."""
        if self.n == 1:
            return tuple(
                of_single(use.out_shape, use.batch_axes, use.rule.rows_are_free)
                for use in self._uses
            )
        proofs = known(self.model, _projected, self._batch)
        signatures = tuple(use.signature for use in self._uses)
        if signatures not in proofs:
            self._prove(proofs)
        if signatures not in proofs:
            raise UnsupportedLayerError(
                "The model uses other parameters on a few of these examples than on all of them. "
                'Use clipped_grad_sum, or method="vmap".'
            )
        return proofs[signatures].layouts

    def _leave(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """The model is left, by return or by exception."""
        if self._mode is None or self._paused:
            return None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self._eager.__exit__(None, None, None)
        if self._without_graph:
            self._without_graph = False
            torch.set_grad_enabled(True)
            return None if outputs is None else self._listen_to_outputs(outputs)
        if mode.checkpointed:
            raise UnsupportedLayerError(
                "The model checkpoints activations, which runs parts of it again in a backward "
                "that is not ours. Use clipped_grad_sum, or train without checkpointing."
            )
        self._uses, self._derived = mode.uses, mode.derived
        if outputs is not None:
            self._layouts = self._find_layouts()
        return None

    def _listen(self, use: Use, out: Tensor) -> None:
        """Keep the gradient of one captured call's output."""

        def arrived(grad: Tensor) -> None:
            if self._paused or use not in self._uses:
                return
            self._check_first(use.grads_out)
            use.grads_out = grad.detach()

        _on_grad(out, arrived)

    def _check_first(self, before: Tensor | None) -> None:
        """Refuse a second backward."""
        if before is not None:
            raise RuntimeError(
                "backward ran twice over one recorded forward. Expected one backward per step; "
                "add the losses before calling backward."
            )
        if not self.has_gradients:
            self.has_gradients = True
            loss = current_loss()
            if loss is not None:
                self._check(loss)

    def _listen_to_outputs(self, outputs: Any) -> Any:
        """Outputs computed without a graph, made to hear the gradients of the loss."""
        leaves, spec = pytree.tree_flatten(outputs)
        self._outputs = []
        for i, leaf in enumerate(leaves):
            if torch.is_tensor(leaf) and leaf.is_floating_point():
                leaves[i] = leaf.detach().requires_grad_() * 1  # no leaf, so in-place is legal
                _on_grad(leaves[i], partial(self._hear, len(self._outputs)))
                self._outputs.append(leaf)
        return pytree.tree_unflatten(leaves, spec)

    def _hear(self, position: int, grad: Tensor) -> None:
        """The gradient of one output arrived."""
        self._check_first(self._cotangents.get(position))
        self._cotangents[position] = grad.detach()

    def _escaped(self, name: str, grads: Any) -> None:
        """A gradient reached a parameter without passing through a captured call."""
        if self._paused:
            return
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
        if self.n is None:
            raise RuntimeError(
                "No forward was recorded. Call the model inside, with gradients on, before this."
            )
        if not self.has_gradients:
            raise RuntimeError(
                "No backward was recorded. Call loss.backward() before reading gradients."
            )
        if self._outputs is not None:
            return self._vmapped(scale)
        for use, layout in zip(self._uses, self._layouts, strict=True):
            if use.grads_out is None:
                continue
            use.check_unchanged()
            if layout is None and bool(use.grads_out.any()):
                raise UnsupportedLayerError(
                    f"Where the examples lie in {use} could not be seen when the model was "
                    'examined, since gradients vanished there. Use method="vmap".'
                )
            if scale != 1:
                use.grads_out = use.grads_out * scale
        return Captured(
            self._uses, self._layouts, self.parameters, self._derived, n=self.n, keep=keep
        )

    def _vmapped(self, scale: float) -> Gradients:
        """The gradients through `vmap` over the model, from the gradients of its outputs."""
        cotangents = [
            self._cotangents[i] * scale if i in self._cotangents else torch.zeros_like(out)
            for i, out in enumerate(self._outputs or [])
        ]
        batch = Batch((*self._batch.arguments(), cotangents))
        with self._pause():
            found, _, _ = by_vmap(
                self.model, _projected, batch, self.parameters, False, randomness="error"
            )
        return found


class _SeeBackward(TorchFunctionMode):
    """Sees which loss `backward` is called on."""

    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward:
            self._check(args[0])
        return func(*args, **(kwargs or {}))


class Record:
    """The gradients of one recorded forward and backward."""

    def __init__(self, recorder: Recorder, loss_reduction: str, keep: str) -> None:
        self._recorder, self._reduction, self._keep = recorder, loss_reduction, keep
        self._gradients: Gradients | None = None

    def _read(self) -> Gradients:
        """The gradients, taken from the recorder once."""
        if self._gradients is None:
            scale = float(self._recorder.n or 0) if self._reduction == "mean" else 1.0
            self._gradients = self._recorder.gradients(scale, self._keep)
        return self._gradients

    def grads(self) -> dict[str, Tensor]:
        """Name -> (n, *shape), the gradient of each example's own loss."""
        found, parameters = self._read().grads(), self._recorder.parameters
        return {name: g.to(parameters[name].dtype) for name, g in found.items()}

    def norms(self, *, per_parameter: bool = False) -> Any:
        """(n,) norms of whole gradients, or name -> (n,)."""
        squares = self._read().sq_norms(None)
        if per_parameter:
            return {name: square.sqrt() for name, square in squares.items()}
        return whole_norms(squares, self._recorder.n or 0)

    def clipped_sum(
        self, *, max_grad_norm: Any, clipping: str = "flat", mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Name -> sum over examples of clipped gradients; arguments as in `clipped_grad_sum`."""
        bounds = clipping_bounds(self._recorder.parameters, clipping, max_grad_norm)
        return clip_and_sum(self._read(), self._recorder.n or 0, bounds, clipping, mask)[0]


@contextlib.contextmanager
def record_per_sample(
    model: nn.Module, *, loss_reduction: str, method: str = "auto"
) -> Iterator[Record]:
    """Record one forward and one backward of a loop that the user owns.

    Args:
        model: the module.
        loss_reduction: "mean" or "sum": what turns the examples' losses into the loss.
        method: "auto", "book_keeping", "materialize" or "vmap".

    Yields:
        A `Record`, readable after backward and after the block.

    Raises:
        ValueError: an unknown word, or a loss whose graph contradicts `loss_reduction`.
        UnsupportedLayerError: the model mixes examples, or a trainable parameter reaches the loss
            outside its forward.
    """
    _validate.choice("loss_reduction", loss_reduction, REDUCTIONS)
    _validate.choice("method", method, RECORDED)

    def check(loss: Tensor) -> None:
        check_reduction(loss, loss_reduction)

    recorder = Recorder(model, method=method, when=lambda: True, check=check)
    try:
        with _SeeBackward(check):
            yield Record(recorder, loss_reduction, METHODS[method] or "all")
    finally:
        recorder.detach()

# SPDX-License-Identifier: Apache-2.0
"""Compiled forward, loss and backward of the batches of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dualdp.plan.plan import PrivacyPlan
from dualdp_torch.per_sample.compiled import METHODS, CompiledGradSum, compile_clipped_grad_sum
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import GRAD_SAMPLE_MODES, RunSettings


class CompiledStep:
    """Function of a loader's batch that computes its clipped sum; see `PrivacyEngine.compile`.

    Attributes:
        sums: `CompiledGradSum`, whose `reasons` say why batches ran eagerly.
    """

    def __init__(self, sums: CompiledGradSum, compute: Callable[..., Tensor]) -> None:
        self.sums, self._compute = sums, compute

    def __call__(self, *batch: Any) -> Tensor:
        """Compute the clipped sum of the batch that the loader yielded, and return its losses.

        Args:
            *batch: the loader's tensors as they came, the arguments of the loss after the model.

        Returns:
            (n,) losses, not private.

        Raises:
            ExactnessError: a spot check failed; nothing was released for this batch.
            RuntimeError: no batch of the loader, or one that has its sum or its forward already, or
                from which the loop computed something before; parameters changed since set-up.
            UnsupportedLayerError: the losses depend on other examples.
            ValueError: what the loader did not yield, or was changed since; `keep_per_sample`.
        """
        return self._compute(self.sums, batch)


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a batch, also of mappings that are no dict."""
    for leaf in pytree.tree_leaves(batch):
        yield from _leaves(dict(leaf)) if isinstance(leaf, Mapping) else (leaf,)


class YieldedBatch:
    """Copies of a batch's leaves, as the loader yielded them.

    Values are compared, since not every change of a tensor, as by NumPy, changes its version.
    """

    def __init__(self, batch: Any) -> None:
        leaves = list(_leaves(batch))
        self._copies = [t.detach().clone() for t in leaves if torch.is_tensor(t)]
        self._others = {id(leaf): leaf for leaf in leaves if not torch.is_tensor(leaf)}

    def _has(self, tensor: Tensor) -> bool:
        """True for a tensor of the batch, moved to a device or a dtype at most."""
        return any(_holds(copy, tensor) for copy in self._copies)

    def moved(self, batch: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
        """Return a batch of these leaves, tensors on a device; refuse others, and changed ones.

        What the loop computes from them, nobody would check for a dependence on other examples.
        """

        def checked(leaf: Any) -> Any:
            if isinstance(leaf, Mapping):
                return {key: checked(value) for key, value in leaf.items()}
            if torch.is_tensor(leaf) and self._has(leaf):
                return leaf.to(device, non_blocking=True)
            if torch.is_tensor(leaf):
                raise ValueError(
                    f"A tensor of shape {tuple(leaf.shape)} is not what the loader yielded, or was "
                    "changed since. Expected its tensors as they came: they are moved to the "
                    "model's device, and what changes them belongs into the loss function, where "
                    "it is checked."
                )
            if leaf is not None and id(leaf) not in self._others:
                raise ValueError(
                    f"{leaf!r} is not what the loader yielded. Expected its leaves as they came; a "
                    "constant belongs into the loss function."
                )
            return leaf

        return tuple(pytree.tree_map(checked, batch))

    def require_in(self, tensors: Iterable[Tensor]) -> None:
        """Refuse tensors that are not those of this batch."""
        for tensor in tensors:
            if not self._has(tensor):
                raise ValueError(
                    f"training_step got a tensor of shape {tuple(tensor.shape)} that is not one of "
                    "the loader's batch, or was changed since, as by on_after_batch_transfer or "
                    "on_train_batch_start: nobody would check it for a dependence on other "
                    "examples. Expected the loader's tensors; compute in training_step or in the "
                    "data set, or call one module."
                )


def _holds(copy: Tensor, tensor: Tensor) -> bool:
    """True if a tensor has the values of the copy, after a move; nan is the same nan."""
    if copy.shape != tensor.shape:
        return False
    moved = copy.to(tensor)
    return bool(((moved == tensor) | ((moved != moved) & (tensor != tensor))).all())


def compiled_sums(
    loss_fn: Callable[..., Any],
    model: Any,
    plan: PrivacyPlan,
    settings: RunSettings,
    physical_batch_size: int | None,
    backend: str | Callable[..., Any],
) -> CompiledGradSum:
    """Return the compiled clipped sums of a run's batches; refuse runs that have none.

    By default a graph takes the expected batch size and three standard deviations of a Poisson
    draw, in rows, or the plan's physical batch size.
    """
    method = GRAD_SAMPLE_MODES[settings.grad_sample_mode]
    if method not in METHODS:
        raise ValueError(
            f"grad_sample_mode={settings.grad_sample_mode!r} has no compiled graph. Expected one "
            f"of {[*METHODS]} in make_private, or the loop without engine.compile."
        )
    if settings.views > 1 or (plan.rows_per_unit or 1) * (plan.rows_per_item or 1) > 1:
        raise ValueError(
            "An example of this run has several rows (views, users, rows_per_unit), which "
            "engine.compile does not join. Expected one row per example, or the loop without it."
        )
    if physical_batch_size is None:
        expected = plan.expected_batch_size_at(0)
        usual = min(math.ceil(expected + 3 * math.sqrt(expected)), plan.num_examples)
        physical_batch_size = max(plan.physical_batch_size or usual, 2)
    return compile_clipped_grad_sum(
        loss_fn,
        model,
        clipping=plan.clipping,
        method=method,
        physical_batch_size=physical_batch_size,
        backend=backend,
        check="first" if settings.checks else "off",
    )

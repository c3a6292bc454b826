# SPDX-License-Identifier: Apache-2.0
"""The batch arguments of a call: their tensors have the examples on axis 0, the rest passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .rules.base import Tensor


class Batch:
    """Batch arguments, taken apart once.

    Args:
        arguments: of the loss function after the model; nested dicts, lists and tuples allowed.

    Raises:
        TypeError: a NumPy array.
        ValueError: no tensor, or tensors with different numbers of examples.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments
        self.leaves, self.spec = pytree.tree_flatten(arguments)
        sizes: set[int] = set()
        for leaf in self.leaves:
            if isinstance(leaf, np.ndarray):
                raise TypeError(
                    f"The batch holds a NumPy array of shape {leaf.shape}. Expected torch tensors; "
                    "use torch.as_tensor."
                )
            if torch.is_tensor(leaf):
                if leaf.dim() == 0:
                    raise ValueError(
                        "The batch holds a tensor without axes. Expected the examples on axis 0 of "
                        "every tensor; pass numbers as Python floats."
                    )
                sizes.add(len(leaf))
        if len(sizes) != 1:
            came = f"{sorted(sizes)} examples" if sizes else "no tensor"
            raise ValueError(
                f"The batch arguments hold {came}. Expected the same number of examples on axis 0 "
                "of every tensor."
            )
        self.n = sizes.pop()

    def _map(self, change: Any) -> Any:
        """The arguments with every tensor changed."""
        leaves = [change(leaf) if torch.is_tensor(leaf) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def arguments(self) -> Any:
        """The arguments, cut off from any graph they came with; dicts and lists are new ones."""
        if all(torch.is_tensor(a) and not a.requires_grad for a in self._arguments):
            return self._arguments
        return self._map(lambda leaf: leaf.detach() if leaf.requires_grad else leaf)

    def rows(self, which: slice | Tensor) -> Batch:
        """Some of the examples."""

        def pick(leaf: Tensor) -> Tensor:
            return leaf[which if isinstance(which, slice) else which.to(leaf.device)]

        return Batch(self._map(pick))

    def chunks(self, size: int | None) -> Iterator[tuple[slice, Batch]]:
        """Consecutive pieces of at most `size` examples; none when there are no examples."""
        if self.n and (size is None or size >= self.n):
            yield slice(0, self.n), self
            return
        for start in range(0, self.n, size or 1):
            which = slice(start, min(start + (size or 1), self.n))
            yield which, self.rows(which)

    def tensors(self) -> list[Tensor]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if torch.is_tensor(leaf)]

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """The arguments with these tensors instead."""
        queue = iter(tensors)
        return self._map(lambda _: next(queue))

    def signature(self) -> tuple[Any, ...]:
        """Shapes without n, dtypes and the types of everything else."""
        return self.spec, tuple(
            (leaf.shape[1:], leaf.dtype, leaf.device) if torch.is_tensor(leaf) else type(leaf)
            for leaf in self.leaves
        )


def check_losses(losses: Any, n: int) -> Tensor:
    """The losses, if there is one per example.

    Raises:
        TypeError: no floating-point tensor.
        ValueError: any other shape than (n,).
    """
    if not torch.is_tensor(losses) or not losses.is_floating_point():
        what = losses.dtype if torch.is_tensor(losses) else type(losses).__name__
        raise TypeError(
            f"loss_fn returned {what}. Expected a floating-point tensor of shape ({n},): one loss "
            "per example."
        )
    if losses.shape != (n,):
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(losses.shape)}. Expected ({n},): one loss "
            'per example, for instance with reduction="none" and a mean over the other axes.'
        )
    return losses


def join_aux(parts: list[Any], sizes: list[int]) -> Any:
    """Auxiliary outputs of consecutive pieces as those of the whole.

    Raises:
        ValueError: a tensor without the piece's examples on axis 0, or something else that differs
            between the pieces.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    flat = [pytree.tree_flatten(part) for part in parts]
    leaves = []
    for pieces in zip(*(leaves for leaves, _ in flat), strict=True):
        if not torch.is_tensor(pieces[0]):
            if any(piece is not pieces[0] and piece != pieces[0] for piece in pieces):
                raise ValueError(
                    f"aux holds a {type(pieces[0]).__name__} that differs between the chunks of "
                    "the batch. Expected tensors with the examples on axis 0, which can be joined."
                )
            leaves.append(pieces[0])
            continue
        for piece, size in zip(pieces, sizes, strict=True):
            if piece.dim() == 0 or len(piece) != size:
                raise ValueError(
                    f"aux holds a tensor of shape {tuple(piece.shape)} for {size} examples. "
                    "Expected the examples on axis 0, so that pieces of a batch can be joined."
                )
        leaves.append(torch.cat(pieces))
    return pytree.tree_unflatten(leaves, flat[0][1])

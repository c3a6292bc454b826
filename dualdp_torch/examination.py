# SPDX-License-Identifier: Apache-2.0
"""What must be known of a model before and after a recorded forward; by all processes alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from dualdp import UnsupportedLayerError

from .batch import Batch
from .capture import Capture
from .fallback import gradients_set_aside
from .layout import Layout, of_single
from .outputs import projected
from .proof import prove
from .remembered import Remembered, known
from .rows import refuse_moved
from .sharded import Shards


class Examination:
    """Proves where the examples lie in the uses of a model's parameters.

    The parameters of a model in pieces are gathered when it is called, by all processes together.
    There all of them examine it on the same few examples, whenever one of them needs to.

    Args:
        model: the model.
        inside: name -> parameter, as the forward sees it.
        shards: of a model in pieces.
        pause: a context in which the model may be called without being recorded.

    Attributes:
        skip: positions of uses that hold no examples.
        known: what is remembered of the model on batches like the last one.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: Mapping[str, nn.Parameter],
        shards: Shards | None,
        pause: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model, self._inside, self._shards, self._pause = model, inside, shards, pause
        self.known = Remembered([])
        self.skip: frozenset[int] = frozenset()

    def begin(self, batch: Batch) -> str | None:
        """Why captured uses can't be trusted, examining the model on its first call.

        Args:
            batch: arguments of the forward that is about to begin.

        Raises:
            UnsupportedLayerError: they can't, and the model is in pieces.
        """
        self._batch, self.known = batch, known(self._model, projected, batch)
        self._complete(lambda: not self.known)
        problem = self.known["problem"].problem if "problem" in self.known else None
        if problem and self._shards is not None:
            raise UnsupportedLayerError(
                f"{problem}, so its gradients need vmap, which can't gather the parameters of a "
                "model under fully_shard. Expected layers that a rule covers; change that layer, "
                "or train without fully_shard."
            )
        # One example alone proves nothing; what it skips must be what other processes skip.
        before = self.skip if self._shards is not None else frozenset()
        self.skip = next((proof.skip for proof in self.known.values()), before)
        return problem

    @property
    def writes(self) -> set[str]:
        """Names of the buffers that a forward writes, the same on every batch."""
        return self.known.writes

    def layouts(self, capture: Capture, outputs: Any) -> tuple[Layout | None, ...]:
        """Where the examples lie in the uses of the forward that has ended.

        Args:
            capture: of that forward.
            outputs: of the model.

        Raises:
            UnsupportedLayerError: it can't be told, or the data brought examples elsewhere.
        """
        proofs, signatures = self.known, tuple(use.signature for use in capture.uses)
        self._complete(lambda: signatures not in proofs or not proofs[signatures].complete)
        if self._batch.n == 1:
            found = tuple(
                of_single(use.out_shape, use.batch_axes, use.rule.rows_are_free)
                for use in capture.uses
            )
        elif signatures not in proofs:
            raise UnsupportedLayerError(
                "The model could not be examined on this batch: fewer than two of its outputs are "
                "finite, or a few of the examples take another way through it than all of them. "
                'Use clipped_grad_sum, or method="vmap".'
            )
        else:
            found = proofs[signatures].layouts
        rounds = self._rounds(capture)
        if rounds != 0:
            looked_at = found if self._batch.n > 1 else [None] * len(found)
            with self._pause():
                refuse_moved(
                    capture, outputs, self._batch.n, looked_at, self._inside, rounds=rounds
                )
        return found

    def _rounds(self, capture: Capture) -> int | None:
        """How often all processes differentiate the forward, if one of them must look at its rows.

        None leaves that to this process alone; 0 is never.
        """
        n, shards = self._batch.n, self._shards
        if shards is None:
            return None
        matters = n > 1 and capture.moves.matter(n)
        return shards.largest((n - 1).bit_length()) if shards.largest(matters) else 0

    def _complete(self, is_missing: Callable[[], bool]) -> None:
        """Examine the model if something is missing, each process that misses it in its turn."""
        missing = self._batch.n > 1 and is_missing()
        if self._shards is None:
            if missing:
                self._prove(self._batch)
            return
        while (rank := self._shards.first_that(missing)) is not None:
            self._prove(self._shards.sample_of(rank, self._batch))
            missing = missing and rank != self._shards.group.rank and is_missing()

    def _prove(self, batch: Batch) -> None:
        """Examine the model on a batch and remember the result if it is complete."""
        with self._pause(), gradients_set_aside(self._inside), torch.enable_grad():
            proof = prove(self._model, projected, batch, dict(self._inside), writes=self.writes)
        is_ours = batch.signature() == self._batch.signature()
        if is_ours and proof is not None and (proof.complete or proof.signatures):
            self.known["problem" if proof.problem else proof.signatures] = proof

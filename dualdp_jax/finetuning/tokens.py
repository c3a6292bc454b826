# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the response tokens of each row of an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp.finetuning.rows import IGNORED
from dualdp_jax.rules.arrays import widen

#: Entries of an example that are not inputs of the model.
_OURS = ("input_ids", "labels", "reference_log_probs")


class Tokens(NamedTuple):
    """Positions of each row that predict a token."""

    log_probs: Any  # (..., s) log-probability of the token, 0 where it is not of a response
    counts: Any  # (..., s) bool, True where the token is of a response
    documents: Any  # (..., s) int, document of the token, or None where a row is one document

    def sums(self) -> Any:
        """(...) log-probability of the response."""
        return self.log_probs.sum(-1)

    def means(self) -> Any:
        """(...) mean log-probability of a token; in packed rows the mean of that of documents."""
        counts = self.counts.astype(self.log_probs.dtype)
        if self.documents is None:
            return self.log_probs.sum(-1) / jnp.maximum(counts.sum(-1), 1)
        same = self.documents[..., :, None] == self.documents[..., None, :]
        lengths = jnp.einsum("...ts,...s->...t", same.astype(counts.dtype), counts)
        weights = counts / jnp.maximum(lengths, 1)  # one over the length of the token's document
        return (self.log_probs * weights).sum(-1) / jnp.maximum(weights.sum(-1), 1)


def response_tokens(model: Any, batch: Any, of: str) -> Tokens:
    """Run the model on the rows of a batch or example; return its predictions of their responses.

    `of` is the name of the loss; see `sft_loss`.
    """
    _check_batch(batch, of)
    ids, labels = jnp.asarray(batch["input_ids"]), jnp.asarray(batch["labels"])
    labels = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)  # holds -100
    front = ids.ndim - 1
    inputs = {name: _as_rows(value, front) for name, value in batch.items() if name not in _OURS}
    logits = _logits(model(_as_rows(ids, front), **inputs), _as_rows(ids, front).shape)
    logits = widen(logits).reshape(*ids.shape, -1)
    documents = None
    if "decoder_input_ids" in batch:
        counts = labels != IGNORED
    else:
        logits, counts, labels = logits[..., :-1, :], labels[..., 1:] != IGNORED, labels[..., 1:]
        if batch.get("position_ids") is not None:
            documents = _documents(jnp.broadcast_to(batch["position_ids"], ids.shape))
            counts = counts & (documents[..., 1:] == documents[..., :-1])
            documents = documents[..., 1:]
    wrong = logits.shape[-1]  # a label that is no token has the log-probability nan
    index = jnp.where(counts, jnp.where(labels < 0, wrong, labels), 0)[..., None]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), index, axis=-1)[..., 0]
    return Tokens(jnp.where(counts, picked, 0), counts, documents)


def _check_batch(batch: Any, of: str) -> None:
    """Refuse what is no mapping with token ids and labels of one shape."""
    expected = "Expected a mapping of arrays: input_ids, labels (-100 is none), and more inputs."
    if not isinstance(batch, Mapping):
        raise TypeError(f"{of} got {_validate.kind(batch)} as batch. {expected}")
    arrays = (jax.Array, np.ndarray)
    missing = [name for name in ("input_ids", "labels") if not isinstance(batch.get(name), arrays)]
    if missing:
        raise ValueError(f"The batch of {of} has no array {missing[0]!r}. {expected}")
    ids, labels = batch["input_ids"].shape, batch["labels"].shape
    ids = batch["decoder_input_ids"].shape if "decoder_input_ids" in batch else ids
    if ids != labels:
        raise ValueError(
            f"labels have the shape {labels} and the token ids {ids}. Expected a label for each "
            "token id, -100 where there is none."
        )


def _as_rows(value: Any, front: int) -> Any:
    """Array with one axis of rows in the place of the `front` first axes."""
    if not isinstance(value, jax.Array | np.ndarray):
        return value
    return jnp.asarray(value).reshape(-1, *value.shape[front:])


def _documents(positions: Any) -> Any:
    """(..., t) position ids -> (..., t) int, the document of each token in its row."""
    starts = positions[..., 1:] != positions[..., :-1] + 1
    return jnp.cumsum(jnp.pad(starts, [(0, 0)] * (starts.ndim - 1) + [(1, 0)]), -1)


def _logits(outputs: Any, shape: tuple[int, ...]) -> Any:
    """Logits (rows, t, v) of the model's outputs."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        outputs = outputs.logits
    elif isinstance(outputs, tuple):
        outputs = outputs[0]
    found = getattr(outputs, "shape", _validate.kind(outputs))
    if not isinstance(found, tuple) or len(found) != 3 or found[:2] != shape:
        raise ValueError(
            f"The model returned {found} as logits. Expected an array {(*shape, 'v')}, a row of v "
            "numbers for each token id; a model of one sequence needs jax.vmap."
        )
    return outputs

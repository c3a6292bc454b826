# SPDX-License-Identifier: Apache-2.0
"""Losses of single examples for language models: supervised, and of preferences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp.finetuning import preference
from dualdp.finetuning.rows import IGNORED
from dualdp_jax.compat import PyTree
from dualdp_jax.rules.arrays import widen

Model = Callable[..., PyTree]
Batch = Mapping[str, PyTree]
#: Entries of an example that are not inputs of the model.
_OURS = ("input_ids", "labels", "reference_log_probs")


def sft_loss(model: Model, batch: Batch) -> jax.Array:
    """Return one example's loss: the mean over its response tokens of -log pi(token).

    Args:
        model: callable; `model(input_ids, **inputs)` takes rows (rows, t) and returns logits
            (rows, t, v), or an object or mapping with `logits`: an `nnx.Module`, or
            `partial(net.apply, params)` of linen. The label of the next position is predicted.
        batch: mapping of `input_ids` (t,), `labels` (t,), where -100 is no label, and further
            inputs of the model. Where `position_ids` begin again, the row holds several documents,
            whose boundaries the model must respect: its loss is the mean of theirs. With
            `decoder_input_ids`, labels are those of the same position. Axes in front of t, as with
            `keep_batch_dim=True`, are axes of the result.

    Returns:
        () loss, float32 or wider; 0 for a response of length 0.

    Raises:
        TypeError, ValueError: a wrong batch, or outputs of another shape.

    Guarantees:
        Gradients are those of plain autodiff.  [test_losses_of_flax_are_plain_autodiff]
        Losses are those of PyTorch.  [test_losses_of_both_stacks_are_equal]
    """
    return -responses(model, batch, "sft_loss").means


def dpo_loss(model: Model, batch: Batch, *, beta: float = 0.1) -> jax.Array:
    """Return the loss of direct preference optimization of a pair, which is one example.

    Args:
        model: callable; see `sft_loss`.
        batch: mapping of arrays (2, ...), of the chosen and of the rejected response: those of
            `sft_loss`, and `reference_log_probs` (2,), from the function of that name.
        beta: float > 0, strength of the tie to the reference model.

    Returns:
        () loss, float32 or wider.

    Raises:
        TypeError, ValueError: a wrong argument or batch; a pair that was split.

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7.
    """
    beta = _validate.positive("beta", beta)
    return preference.dpo(*_log_prob_ratios(model, batch, "dpo_loss"), beta=beta, xp=jnp)


def ipo_loss(model: Model, batch: Batch, *, tau: float = 0.1) -> jax.Array:
    """Return the loss of identity preference optimization of a pair; see `dpo_loss`.

    `tau` > 0 is the strength of the tie to the reference model.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17.
    """
    tau = _validate.positive("tau", tau)
    return preference.ipo(*_log_prob_ratios(model, batch, "ipo_loss"), tau=tau, xp=jnp)


def simpo_loss(model: Model, batch: Batch, *, beta: float = 2.0, gamma: float = 1.0) -> jax.Array:
    """Return the loss of simple preference optimization of a pair, without a reference model.

    `beta` > 0 is the scale of the mean log-probabilities, `gamma` >= 0 the margin by which the
    chosen response should win. See `dpo_loss` for the batch, here without `reference_log_probs`.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.
    """
    beta, gamma = _validate.positive("beta", beta), _validate.non_negative("gamma", gamma)
    means = _pair(responses(model, batch, "simpo_loss").means, "simpo_loss")
    return preference.simpo(*means, beta=beta, gamma=gamma, xp=jnp)


def orpo_loss(model: Model, batch: Batch, *, weight: float = 0.1) -> jax.Array:
    """Return the loss of odds ratio preference optimization of a pair, without a reference.

    `weight` >= 0 is that of the odds ratio beside the chosen response's own loss. See `dpo_loss`
    for the batch, here without `reference_log_probs`.

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7.
    """
    weight = _validate.non_negative("weight", weight)
    means = _pair(responses(model, batch, "orpo_loss").means, "orpo_loss")
    return preference.orpo(*means, weight=weight, xp=jnp)


def reference_log_probs(model: Model, batch: Batch, *, physical_batch_size: int = 16) -> jax.Array:
    """Return the log-probability of every response under a reference model, to be kept as data.

    Computed once for the whole data, before training: `rows["reference_log_probs"] = ...`.

    Args:
        model: callable without random numbers; see `sft_loss`. It must not have been trained on
            the private data, unless that was private training.
        batch: mapping of arrays (n, t) or (u, 2, t); see `dpo_loss`. All of the data, if you like.
        physical_batch_size: int, number of rows or pairs computed at once.

    Returns:
        (n,) or (u, 2), float32 or wider.

    Raises:
        TypeError, ValueError: a model that draws random numbers; a response of length 0; a wrong
            batch.
    """
    size = _validate.integer("physical_batch_size", physical_batch_size, minimum=1)
    total, found = len(batch["input_ids"]), []
    for start in range(0, total, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        given = responses(model, part, "reference_log_probs")
        if not bool(given.lengths.all()):
            raise ValueError(
                f"One of the rows from {start} on has a response of length 0: all labels that a "
                "token predicts are -100. Leave the row out."
            )
        found.append(given.sums)
        again = None if start else responses(model, part, "reference_log_probs").sums
        if again is not None and not bool((again == given.sums).all()):
            raise ValueError(
                "The reference model gave other log-probabilities when it was asked again, as with "
                "dropout. Call model.eval() (nnx), or give deterministic=True (linen)."
            )
    return jnp.concatenate(found) if found else jnp.zeros(batch["input_ids"].shape[:-1])


def _log_prob_ratios(model: Model, batch: Batch, of: str) -> tuple[jax.Array, jax.Array]:
    """Return log pi(y|x) - log pi_ref(y|x) of the chosen and of the rejected response."""
    sums = responses(model, batch, of).sums
    found, shape = batch.get("reference_log_probs"), batch["input_ids"].shape[:-1]
    reference = preference.checked_reference(found, shape, of)
    return _pair(sums - reference, of)


def _pair(numbers: jax.Array, of: str) -> tuple[jax.Array, jax.Array]:
    """(..., 2) -> (...), (...); rows that are no pairs are refused."""
    if not numbers.ndim or numbers.shape[-1] != 2:
        raise ValueError(
            f"The example of {of} has rows of shape {numbers.shape}, which are no pair. Expected "
            "(2, t), a chosen and a rejected row, of data (u, 2, t) without rows_per_unit."
        )
    return numbers[..., 0], numbers[..., 1]


class Responses(NamedTuple):
    """Responses of the rows of a batch or example."""

    sums: jax.Array  # (...) log-probability of the response
    means: jax.Array  # (...) mean of its tokens; in packed rows the mean over the documents
    lengths: jax.Array  # (...) number of tokens


def responses(model: Model, batch: Batch, of: str) -> Responses:
    """Run the model on the rows of a batch or example; return the log-probabilities of responses.

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
            positions = jnp.broadcast_to(batch["position_ids"], ids.shape)
            begins = positions[..., 1:] != positions[..., :-1] + 1  # a document
            counts, documents = counts & ~begins, jnp.cumsum(begins, -1)
    wrong = logits.shape[-1]  # a label that is no token has the log-probability nan
    index = jnp.where(counts, jnp.where(labels < 0, wrong, labels), 0)[..., None]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), index, axis=-1)[..., 0]
    log_probs = jnp.where(counts, picked, 0)
    weights = counts = counts.astype(log_probs.dtype)
    if documents is not None:
        same = (documents[..., :, None] == documents[..., None, :]).astype(counts.dtype)
        weights = counts / jnp.maximum(jnp.einsum("...ts,...s->...t", same, counts), 1)
    means = (log_probs * weights).sum(-1) / jnp.maximum(weights.sum(-1), 1)
    return Responses(log_probs.sum(-1), means, counts.sum(-1))


def _check_batch(batch: Batch, of: str) -> None:
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


def _as_rows(value: PyTree, front: int) -> PyTree:
    """Array with one axis of rows in the place of the `front` first axes."""
    if not isinstance(value, jax.Array | np.ndarray):
        return value
    return jnp.asarray(value).reshape(-1, *value.shape[front:])


def _logits(outputs: PyTree, shape: tuple[int, ...]) -> jax.Array:
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

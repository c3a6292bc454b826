# SPDX-License-Identifier: Apache-2.0
"""Losses of single examples for language models: supervised, and of preferences."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dualdp import _validate
from dualdp.finetuning import preference
from dualdp_jax.finetuning.tokens import response_tokens


def sft_loss(model: Any, batch: Any) -> Any:
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
    return -response_tokens(model, batch, "sft_loss").means()


def dpo_loss(model: Any, batch: Any, *, beta: float = 0.1) -> Any:
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


def ipo_loss(model: Any, batch: Any, *, tau: float = 0.1) -> Any:
    """Return the loss of identity preference optimization of a pair; see `dpo_loss`.

    `tau` > 0 is the strength of the tie to the reference model.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17.
    """
    tau = _validate.positive("tau", tau)
    return preference.ipo(*_log_prob_ratios(model, batch, "ipo_loss"), tau=tau, xp=jnp)


def simpo_loss(model: Any, batch: Any, *, beta: float = 2.0, gamma: float = 1.0) -> Any:
    """Return the loss of simple preference optimization of a pair, without a reference model.

    `beta` > 0 is the scale of the mean log-probabilities, `gamma` >= 0 the margin by which the
    chosen response should win. See `dpo_loss` for the batch, here without `reference_log_probs`.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.
    """
    beta, gamma = _validate.positive("beta", beta), _validate.non_negative("gamma", gamma)
    means = _mean_log_probs(model, batch, "simpo_loss")
    return preference.simpo(*means, beta=beta, gamma=gamma, xp=jnp)


def orpo_loss(model: Any, batch: Any, *, weight: float = 0.1) -> Any:
    """Return the loss of odds ratio preference optimization of a pair, without a reference.

    `weight` >= 0 is that of the odds ratio beside the chosen response's own loss. See `dpo_loss`
    for the batch, here without `reference_log_probs`.

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7.
    """
    weight = _validate.non_negative("weight", weight)
    means = _mean_log_probs(model, batch, "orpo_loss")
    return preference.orpo(*means, weight=weight, xp=jnp)


def reference_log_probs(model: Any, batch: Any, *, physical_batch_size: int = 16) -> Any:
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
        tokens = response_tokens(model, part, "reference_log_probs")
        if not bool(tokens.counts.any(-1).all()):
            raise ValueError(
                f"One of the rows from {start} on has a response of length 0: all labels that a "
                "token predicts are -100. Expected one or more in each row; leave the row out."
            )
        found.append(tokens.sums())
        again = found if start else [response_tokens(model, part, "reference_log_probs").sums()]
        if not bool((again[0] == found[0]).all()):
            raise ValueError(
                "The reference model gave other log-probabilities when it was asked again, as one "
                "in training mode does, with dropout. Call model.eval() before (nnx), or apply it "
                "with deterministic=True (linen)."
            )
    return jnp.concatenate(found) if found else jnp.zeros(batch["input_ids"].shape[:-1])


def _log_prob_ratios(model: Any, batch: Any, of: str) -> tuple[Any, Any]:
    """Return log pi(y|x) - log pi_ref(y|x) of the chosen and of the rejected response."""
    tokens = response_tokens(model, batch, of)
    reference = batch.get("reference_log_probs")
    if reference is None:
        raise ValueError(
            f"The batch of {of} has no 'reference_log_probs'. Compute them once for all rows of "
            "the data: reference_log_probs(reference_model, rows)."
        )
    if reference.shape != batch["input_ids"].shape[:-1]:
        raise ValueError(
            f"reference_log_probs have the shape {reference.shape}. Expected "
            f"{batch['input_ids'].shape[:-1]}, a number for each row of token ids."
        )
    return _pair(tokens.sums() - reference, of)


def _mean_log_probs(model: Any, batch: Any, of: str) -> tuple[Any, Any]:
    """Return log pi(y|x) / |y| of the chosen and of the rejected response."""
    return _pair(response_tokens(model, batch, of).means(), of)


def _pair(numbers: Any, of: str) -> tuple[Any, Any]:
    """(..., 2) -> (...), (...); rows that are no pairs are refused."""
    if not numbers.ndim or numbers.shape[-1] != 2:
        raise ValueError(
            f"The example of {of} has rows of shape {numbers.shape}, which are no pair. Expected "
            "(2, t): the chosen and the rejected row as one example, from data (u, 2, t) and "
            "without rows_per_unit."
        )
    return numbers[..., 0], numbers[..., 1]

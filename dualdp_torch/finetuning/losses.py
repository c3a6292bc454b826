# SPDX-License-Identifier: Apache-2.0
"""Losses of single examples for language models: supervised, and of preferences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from dualdp import _validate
from dualdp.finetuning import preference
from dualdp_torch.finetuning.tokens import check_batch, response_tokens
from dualdp_torch.rules.base import Tensor


def sft_loss(model: Any, batch: Any) -> Tensor:
    """Return each example's own loss: the mean over its response tokens of -log pi(token).

    Args:
        model: module; `model(input_ids, **inputs)` returns logits (n, t, v), or an object or
            mapping with `logits`. A causal model predicts the label of the next position.
        batch: mapping of `input_ids` (n, t), `labels` (n, t), where -100 is no label, and further
            inputs of the model. Where `position_ids` begin again, a row holds several documents:
            its loss is the mean of theirs, and the row is one example. With `decoder_input_ids`,
            labels are those of the same position.

    Returns:
        (n,) losses, float32 or wider.

    Raises:
        TypeError, ValueError: a wrong batch; a response of length 0; packed documents whose
            boundaries the model does not see; padding on the left without `position_ids`.

    Guarantees:
        Gradients are those of plain autograd of each example alone.
            [test_sft_gradients_are_plain_autograd]
        A row of k documents is a unit of k rows.  [test_a_packed_row_is_the_unit_of_its_documents]
    """
    check_batch(batch, "sft_loss")
    if batch["input_ids"].dim() != 2:
        raise ValueError(
            f"input_ids have the shape {tuple(batch['input_ids'].shape)}. Expected (n, t), a row "
            "for each example. Pairs are for a preference loss."
        )
    return -response_tokens(model, batch, may_be_packed=True).means()


def dpo_loss(model: Any, batch: Any, *, beta: float = 0.1) -> Tensor:
    """Return the loss of direct preference optimization of each pair.

    A pair is one unit: its rows come one after the other, that of the chosen response first, and
    the call, or `make_private`, takes `rows_per_unit=2`, so that a pair is clipped once and no
    chunk splits it.

    Args:
        model: module; see `sft_loss`.
        batch: mapping of tensors (2 u, ...): those of `sft_loss`, and `reference_log_probs`
            (2 u,), from the function of that name.
        beta: float > 0, strength of the tie to the reference model.

    Returns:
        (u,) losses, float32 or wider.

    Raises:
        TypeError, ValueError: a wrong argument; a batch that `sft_loss` refuses; packed rows; a
            pair that was split.

    Guarantees:
        Gradients are those of plain autograd of each pair alone.
            [test_preference_gradients_are_plain_autograd]
        A pair that is replaced moves the clipped sum by at most 2C.
            [test_a_pair_that_is_replaced_moves_the_sum_by_at_most_2c]

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7.
    """
    beta = _validate.positive("beta", beta)
    chosen, rejected = _log_prob_ratios(model, batch, "dpo_loss")
    return preference.dpo(chosen, rejected, beta=beta, xp=torch)


def ipo_loss(model: Any, batch: Any, *, tau: float = 0.1) -> Tensor:
    """Return the loss of identity preference optimization of each pair.

    Model, batch and errors are those of `dpo_loss`; `tau` > 0 is the strength of the tie to the
    reference model.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17.
    """
    tau = _validate.positive("tau", tau)
    chosen, rejected = _log_prob_ratios(model, batch, "ipo_loss")
    return preference.ipo(chosen, rejected, tau=tau, xp=torch)


def simpo_loss(model: Any, batch: Any, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Return the loss of simple preference optimization of each pair, without a reference model.

    Model, batch and errors are those of `dpo_loss`, without `reference_log_probs`. `beta` > 0 is
    the scale of the mean log-probabilities, `gamma` >= 0 the margin by which the chosen response
    should win.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.
    """
    beta, gamma = _validate.positive("beta", beta), _validate.non_negative("gamma", gamma)
    chosen, rejected = _mean_log_probs(model, batch, "simpo_loss")
    return preference.simpo(chosen, rejected, beta=beta, gamma=gamma, xp=torch)


def orpo_loss(model: Any, batch: Any, *, weight: float = 0.1) -> Tensor:
    """Return the loss of odds ratio preference optimization of each pair, without a reference.

    Model, batch and errors are those of `dpo_loss`, without `reference_log_probs`. `weight` >= 0 is
    that of the odds ratio beside the chosen response's own loss.

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7.
    """
    weight = _validate.non_negative("weight", weight)
    chosen, rejected = _mean_log_probs(model, batch, "orpo_loss")
    return preference.orpo(chosen, rejected, weight=weight, xp=torch)


def reference_log_probs(model: nn.Module, batch: Any, *, physical_batch_size: int = 16) -> Tensor:
    """Return the log-probability of every response under a reference model, to be kept as data.

    Computed once for the whole data, before training: `rows["reference_log_probs"] = ...`.

    Args:
        model: module in evaluation mode; it must not have been trained on the private data, unless
            that was private training.
        batch: mapping of tensors or NumPy arrays, of rows (n, ...) or pairs (u, 2, ...), as in
            `sft_loss`. All of the data, if you like.
        physical_batch_size: int, number of rows or pairs computed at once.

    Returns:
        (n,) or (u, 2), float32 or wider, on the model's device, without gradient.

    Raises:
        TypeError, ValueError: a model in training mode; a wrong batch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The reference model is {_validate.kind(model)}. Expected a module.")
    if model.training:
        raise ValueError(
            "The reference model is in training mode, where dropout makes its log-probabilities "
            "random. Call model.eval() before, and model.train() afterwards if it will be trained."
        )
    size = _validate.integer("physical_batch_size", physical_batch_size, minimum=1)
    device = next((p.device for p in model.parameters()), None)
    others = [name for name, v in batch.items() if not isinstance(v, Tensor | np.ndarray)]
    if others:
        raise TypeError(
            f"The batch has {others[0]!r}, which is {_validate.kind(batch[others[0]])}. Expected "
            "tensors or NumPy arrays; leave out what is no input of the model."
        )
    data = {name: torch.as_tensor(value, device=device) for name, value in batch.items()}
    check_batch(data, "reference_log_probs")
    shape, found = data["input_ids"].shape[:-1], []
    with torch.no_grad():
        for start in range(0, shape[0], size):
            rows = _as_rows({name: value[start : start + size] for name, value in data.items()})
            found.append(response_tokens(model, rows, may_be_packed=False).sums())
    return torch.cat(found).view(shape) if found else torch.zeros(shape, device=device)


def _log_prob_ratios(model: Any, batch: Any, of: str) -> tuple[Tensor, Tensor]:
    """Return log pi(y|x) - log pi_ref(y|x) of chosen and rejected responses, (u,) each."""
    _check_pairs(batch, of)
    reference = batch.get("reference_log_probs")
    if not torch.is_tensor(reference):
        raise ValueError(
            f"The batch of {of} has no 'reference_log_probs'. Compute them once for all rows of "
            "the data: reference_log_probs(reference_model, rows)."
        )
    if reference.shape != batch["input_ids"].shape[:-1]:
        raise ValueError(
            f"reference_log_probs have the shape {tuple(reference.shape)}. Expected "
            f"{tuple(batch['input_ids'].shape[:-1])}, a number for each row of token ids."
        )
    sums = response_tokens(model, batch, may_be_packed=False).sums()
    ratios = sums - reference.detach().to(sums.dtype)
    return ratios[::2], ratios[1::2]


def _mean_log_probs(model: Any, batch: Any, of: str) -> tuple[Tensor, Tensor]:
    """Return log pi(y|x) / |y| of chosen and rejected responses, (u,) each."""
    _check_pairs(batch, of)
    means = response_tokens(model, batch, may_be_packed=False).means()
    return means[::2], means[1::2]


def _check_pairs(batch: Any, of: str) -> None:
    """Refuse rows that are no pairs, and pairs that are not yet rows."""
    check_batch(batch, of)
    ids = batch["input_ids"]
    if ids.dim() != 2 or len(ids) % 2:
        raise ValueError(
            f"input_ids of {of} have the shape {tuple(ids.shape)}. Expected (2 u, t), the chosen "
            "and the rejected row of each pair in turn, with rows_per_unit=2 of the call, or of "
            "make_private, whose loader then gives such rows, so that nothing splits a pair; of "
            "(u, 2, t) make rows by {name: v.flatten(0, 1) for name, v in batch.items()}."
        )


def _as_rows(batch: Any) -> dict[str, Any]:
    """Batch whose tensors have rows in front, (u, 2, ...) -> (2 u, ...)."""
    if batch["input_ids"].dim() == 2:
        return dict(batch)
    return {name: v.flatten(0, 1) if torch.is_tensor(v) else v for name, v in batch.items()}

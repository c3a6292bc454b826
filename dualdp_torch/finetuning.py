# SPDX-License-Identifier: Apache-2.0
"""Losses of single examples for language models: supervised, and of preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from dualdp import _validate
from dualdp.finetuning import preference
from dualdp.finetuning.rows import IGNORED
from dualdp_torch.rules.base import Tensor, wide

#: Entries of a batch that are not inputs of the model.
_OURS = ("input_ids", "labels", "reference_log_probs")
#: Entries of batches whose rows were joined to one, by the collate functions that make them.
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "seq_lengths")


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
    _check_batch(batch, "sft_loss")
    if batch["input_ids"].dim() != 2:
        raise ValueError(
            f"input_ids have the shape {tuple(batch['input_ids'].shape)}. Expected (n, t), a row "
            "for each example. Pairs are for a preference loss."
        )
    return -_responses(model, batch, may_be_packed=True).means()


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
    means = _responses_of_pairs(model, batch, "simpo_loss").means()
    return preference.simpo(means[::2], means[1::2], beta=beta, gamma=gamma, xp=torch)


def orpo_loss(model: Any, batch: Any, *, weight: float = 0.1) -> Tensor:
    """Return the loss of odds ratio preference optimization of each pair, without a reference.

    Model, batch and errors are those of `dpo_loss`, without `reference_log_probs`. `weight` >= 0 is
    that of the odds ratio beside the chosen response's own loss.

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7.
    """
    weight = _validate.non_negative("weight", weight)
    means = _responses_of_pairs(model, batch, "orpo_loss").means()
    return preference.orpo(means[::2], means[1::2], weight=weight, xp=torch)


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
    _check_batch(data, "reference_log_probs")
    shape, found = data["input_ids"].shape[:-1], []
    if len(shape) == 2:  # (u, 2, ...) -> (2 u, ...)
        data, size = {name: value.flatten(0, 1) for name, value in data.items()}, 2 * size
    with torch.no_grad():
        for start in range(0, shape.numel(), size):
            rows = {name: value[start : start + size] for name, value in data.items()}
            found.append(_responses(model, rows).sums())
    return torch.cat(found).view(shape) if found else torch.zeros(shape, device=device)


def _log_prob_ratios(model: Any, batch: Any, of: str) -> tuple[Tensor, Tensor]:
    """Return log pi(y|x) - log pi_ref(y|x) of chosen and rejected responses, (u,) each."""
    sums = _responses_of_pairs(model, batch, of).sums()
    found = batch.get("reference_log_probs")
    found = found if torch.is_tensor(found) else None
    reference = preference.checked_reference(found, batch["input_ids"].shape[:-1], of)
    ratios = sums - reference.detach().to(sums.dtype)
    return ratios[::2], ratios[1::2]


def _responses_of_pairs(model: Any, batch: Any, of: str) -> Tokens:
    """Predictions of rows that are pairs, the chosen and the rejected one in turn."""
    _check_batch(batch, of)
    ids = batch["input_ids"]
    if ids.dim() != 2 or len(ids) % 2:
        raise ValueError(
            f"input_ids of {of} have the shape {tuple(ids.shape)}. Expected (2 u, t), the chosen "
            "and the rejected row of each pair in turn, with rows_per_unit=2 of the call, or of "
            "make_private, whose loader then gives such rows, so that nothing splits a pair; of "
            "(u, 2, t) make rows by {name: v.flatten(0, 1) for name, v in batch.items()}."
        )
    return _responses(model, batch)


class Tokens(NamedTuple):
    """Positions of each row that predict a token."""

    log_probs: Tensor  # (rows, s) log-probability of the token, 0 where it is not of a response
    counts: Tensor  # (rows, s) bool, True where the token is of a response
    documents: Tensor | None  # (rows, s) int, that of the token; None where a row is one document

    def sums(self) -> Tensor:
        """(rows,) log-probability of the response."""
        return self.log_probs.sum(1)

    def means(self) -> Tensor:
        """(rows,) mean log-probability of a token; in packed rows the mean of that of documents."""
        counts = self.counts.to(self.log_probs.dtype)
        if self.documents is None:
            return self.log_probs.sum(1) / counts.sum(1).clamp(min=1)
        same = (self.documents[:, :, None] == self.documents[:, None, :]).to(counts.dtype)
        lengths = torch.einsum("nts,ns->nt", same, counts).clamp(min=1)  # of each token's document
        weights = counts / lengths
        return (self.log_probs * weights).sum(1) / weights.sum(1).clamp(min=1)


def _responses(model: Any, batch: Any, *, may_be_packed: bool = False) -> Tokens:
    """Run the model on the rows of a batch, and return its predictions of their responses.

    A row that is not one document is refused unless it `may_be_packed`.
    """
    ids, labels = batch["input_ids"], batch["labels"].long()  # -100 is no number of 8 bits
    inputs = {name: value for name, value in batch.items() if name not in _OURS}
    is_shifted, documents, counts = "decoder_input_ids" not in batch, None, labels != IGNORED
    if is_shifted:
        counts, positions = counts[:, 1:], batch.get("position_ids")
        if positions is not None:
            documents = _documents(positions.expand(labels.shape))
            counts = counts & (documents[:, 1:] == documents[:, :-1])
            documents = documents[:, 1:]
    _check_values(counts, documents, batch, model, may_be_packed)
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs.setdefault("use_cache", False)  # with one, boundaries of documents are not looked at
    logits = _logits(model(ids, **inputs), labels)
    if is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.masked_fill(~counts, IGNORED)
    logits = logits.to(wide(logits.dtype)).movedim(-1, 1)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return Tokens(-losses, counts, documents)


def _check_batch(batch: Any, of: str) -> None:
    """Refuse what is no batch of rows; `of` is the name of the loss."""
    expected = "Expected a mapping of tensors: input_ids, labels (-100 is none), and more inputs."
    if not isinstance(batch, Mapping):
        raise TypeError(f"{of} got {_validate.kind(batch)} as batch. {expected}")
    missing = [name for name in ("input_ids", "labels") if not torch.is_tensor(batch.get(name))]
    if missing:
        raise ValueError(f"The batch of {of} has no tensor {missing[0]!r}. {expected}")
    joined = [name for name in _FLATTENED if batch.get(name) is not None]
    if joined:
        raise ValueError(
            f"The batch has {joined[0]!r}, as batches have whose examples were joined to one row, "
            "where no example has a loss of its own. Expected a row for each example, padded, or "
            "the documents of one unit in a row (dualdp.finetuning.packed_rows)."
        )
    ids, labels = batch["input_ids"].shape, batch["labels"].shape
    if "decoder_input_ids" in batch:
        ids = batch["decoder_input_ids"].shape
    if ids != labels:
        raise ValueError(
            f"labels have the shape {tuple(labels)} and the token ids {tuple(ids)}. Expected a "
            "label for each token id, -100 where there is none."
        )


def _documents(positions: Tensor) -> Tensor:
    """(rows, t) position ids -> (rows, t) int, the document of each token in its row."""
    starts = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    return starts.cumsum(1)


def _check_values(
    counts: Tensor, documents: Tensor | None, batch: Any, model: Any, may_be_packed: bool
) -> None:
    """Refuse rows without a response, and packed or padded rows that would lose their boundaries.

    Values can't be read inside `torch.func` or while a program is traced; a response of length 0
    has the loss 0 there.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        if "decoder_input_ids" not in batch:
            raise ValueError(
                "The model has an encoder and a decoder, and the batch has no decoder_input_ids. "
                "Add model.prepare_decoder_input_ids_from_labels(labels)."
            )
    if torch.compiler.is_compiling() or get_proxy_mode() is not None:
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(counts) or type(counts) is not Tensor:
        return
    mask, none = batch.get("attention_mask"), counts.new_zeros(len(counts))
    is_packed = is_left = none
    if documents is not None:
        first = documents.masked_fill(~counts, int(1e9)).amin(1)  # of those with a response
        is_packed = documents.masked_fill(~counts, -1).amax(1) > first
    elif mask is not None and mask.dim() == 2 and "decoder_input_ids" not in batch:
        is_left = (mask[:, 1:] > mask[:, :-1]).any(1)
    is_wrong = ((batch["labels"] < 0) & (batch["labels"] != IGNORED)).any(1)
    problems = {
        f"has a negative label other than {IGNORED}. Expected a token id, or {IGNORED} for no "
        "label.": is_wrong,
        "has a response of length 0: all labels that a token predicts are -100. Expected one or "
        "more in each row; leave the row out, and pad a batch with copies of other rows.": (
            ~counts.any(1)
        ),
        "is padded on the left and has no position_ids, so the positions of its tokens would "
        "depend on the longest row of the batch, which is another example. Pad on the right, or "
        "give position_ids.": is_left,
    }
    flags = [flag.to(counts.device) for flag in (*problems.values(), is_packed)]
    *found, packed = torch.stack(flags).tolist()
    for text, rows in zip(problems, found, strict=True):
        if any(rows):
            raise ValueError(f"Row {rows.index(True)} of the batch {text}")
    if any(packed):
        _check_packed(packed.index(True), mask, model, may_be_packed)


def _check_packed(row: int, mask: Tensor | None, model: Any, may_be_packed: bool) -> None:
    """Refuse packed rows whose boundaries the model or the loss does not see."""
    began = f"position_ids of row {row} begin again, so several documents are packed in it"
    if not may_be_packed:
        raise ValueError(f"{began}. Expected one response in each row of a pair.")
    if mask is not None:
        raise ValueError(
            f"{began}, and attention_mask hides their boundaries from models of transformers. "
            "Leave attention_mask out; padding without labels at the end needs none."
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{began}, and the virtual tokens of the adapter come before the first one only. "
            "Expected one document in each row, or another adapter, such as LoRA."
        )


def _logits(outputs: Any, labels: Tensor) -> Tensor:
    """Logits (rows, t, v) of the model's outputs, without those of virtual tokens in front."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        outputs = outputs.logits
    elif isinstance(outputs, tuple):
        outputs = outputs[0]
    rows, length = labels.shape
    shape = tuple(outputs.shape) if torch.is_tensor(outputs) else ()
    if len(shape) != 3 or shape[0] != rows or shape[1] < length:
        found = shape or _validate.kind(outputs)
        raise ValueError(
            f"The model returned {found} as logits. Expected a tensor ({rows}, {length}, v), a row "
            "of v numbers for each token id."
        )
    return outputs[:, -length:]

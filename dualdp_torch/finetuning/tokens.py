# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the response tokens of each row of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from dualdp import _validate
from dualdp.finetuning.rows import IGNORED
from dualdp_torch.rules.base import Tensor, wide

#: Entries of a batch that are not inputs of the model.
_OURS = ("input_ids", "labels", "reference_log_probs")
#: Entries of batches whose rows were joined to one, by the collate functions that make them.
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "seq_lengths")


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


def response_tokens(model: Any, batch: Any, *, may_be_packed: bool) -> Tokens:
    """Run the model on the rows of a batch, and return its predictions of their responses.

    A row that is not one document is refused unless it `may_be_packed`.
    """
    ids, labels = batch["input_ids"], batch["labels"].long()  # -100 is no number of 8 bits
    inputs = {name: value for name, value in batch.items() if name not in _OURS}
    is_shifted = "decoder_input_ids" not in batch
    positions = batch.get("position_ids") if is_shifted else None
    documents = None if positions is None else _documents(positions.expand(labels.shape))
    if is_shifted:
        counts = labels[:, 1:] != IGNORED
        if documents is not None:
            counts = counts & (documents[:, 1:] == documents[:, :-1])
            documents = documents[:, 1:]
    else:
        counts = labels != IGNORED
    _check_values(counts, documents, batch, model, may_be_packed)
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs.setdefault("use_cache", False)  # with one, boundaries of documents are not looked at
    logits = _logits(model(ids, **inputs), labels)
    if is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.masked_fill(~counts, IGNORED)
    losses = F.cross_entropy(
        logits.to(wide(logits.dtype)).movedim(-1, 1),
        labels,
        ignore_index=IGNORED,
        reduction="none",
    )
    return Tokens(-losses, counts, documents)


def check_batch(batch: Any, of: str) -> None:
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
    flags = [~counts.any(1), is_wrong, is_packed, is_left]
    empty, wrong, packed, left = torch.stack([f.to(counts.device) for f in flags]).tolist()
    if any(wrong):
        raise ValueError(
            f"Row {wrong.index(True)} of the batch has a negative label other than {IGNORED}. "
            f"Expected a token id, or {IGNORED} for no label."
        )
    if any(empty):
        raise ValueError(
            f"Row {empty.index(True)} of the batch has a response of length 0: all labels that a "
            "token predicts are -100. Expected one or more in each row; leave the row out, and "
            "pad a batch with copies of other rows."
        )
    if any(packed):
        _check_packed(packed.index(True), mask, model, may_be_packed)
    if any(left):
        raise ValueError(
            f"Row {left.index(True)} of the batch is padded on the left and has no position_ids, "
            "so the positions of its tokens would depend on the longest row of the batch, which "
            "is another example. Pad on the right, or give position_ids."
        )


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

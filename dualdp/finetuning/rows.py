# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids, of one public length, with the labels of their responses.

A row ends with padding, which is without labels. A causal model sees no later token, so it needs no
attention mask. The length of a row must not depend on the other rows: it is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate

#: Label of a position without a loss.
IGNORED = -100
Rows = dict[str, NDArray[np.int64]]
Tokens = Sequence[int] | NDArray[np.int64]
Document = tuple[Tokens, Tokens]  # prompt, response


def sft_rows(
    prompts: Sequence[Tokens], responses: Sequence[Tokens], *, length: int, pad_token_id: int
) -> Rows:
    """Return one row for each prompt and its response, whose tokens are the labels.

    Args:
        prompts: (n,) sequences of token ids, which may be empty.
        responses: (n,) sequences of at least one token id.
        length: int, number of tokens of a row.
        pad_token_id: int, token id of the padding.

    Returns:
        Mapping of `input_ids` and `labels`, (n, length) int64; -100 is no label.

    Raises:
        TypeError, ValueError: a response of length 0, or one that is too long for a row.

    >>> rows = sft_rows([[5, 6]], [[7]], length=4, pad_token_id=0)
    >>> rows["input_ids"], rows["labels"]
    (array([[5, 6, 7, 0]]), array([[-100, -100,    7, -100]]))
    """
    documents = [[(x, y)] for x, y in _together(prompts=prompts, responses=responses)]
    rows = _rows(documents, length, pad_token_id)
    return {name: rows[name] for name in ("input_ids", "labels")}


def preference_rows(
    prompts: Sequence[Tokens],
    chosen: Sequence[Tokens],
    rejected: Sequence[Tokens],
    *,
    length: int,
    pad_token_id: int,
) -> Rows:
    """Return two rows for each prompt: one with the chosen response, one with the rejected one.

    The pair is one item of the data, so that it is drawn, clipped and masked as one example.

    Args:
        prompts: (u,) sequences of token ids.
        chosen: (u,) sequences of at least one token id.
        rejected: (u,) sequences of at least one token id.
        length: int, number of tokens of a row.
        pad_token_id: int, token id of the padding.

    Returns:
        Mapping of `input_ids` and `labels`, (u, 2, length) int64; -100 is no label.

    Raises:
        TypeError, ValueError: a response of length 0, or one that is too long for a row.
    """
    triples = _together(prompts=prompts, chosen=chosen, rejected=rejected)
    documents = [[(prompt, y)] for prompt, *pair in triples for y in pair]
    rows = _rows(documents, length, pad_token_id)
    return {name: rows[name].reshape(-1, 2, length) for name in ("input_ids", "labels")}


def packed_rows(units: Iterable[Iterable[Document]], *, length: int, pad_token_id: int) -> Rows:
    """Return one row for each unit of privacy, which holds all of its documents one after another.

    Documents of different units are never in one row, so a row is a unit and is clipped once.

    Args:
        units: (u,) sequences of at least one document, each a pair (prompt, response) of
            sequences of token ids.
        length: int, number of tokens of a row.
        pad_token_id: int, token id of the padding.

    Returns:
        Mapping of `input_ids`, `labels` and `position_ids`, (u, length) int64; `position_ids`
        begin again at 0 with every document, and with the padding.

    Raises:
        TypeError, ValueError: a unit without documents, a response of length 0, or a unit that is
            too long for a row.
    """
    return _rows([list(unit) for unit in units], length, pad_token_id)


def _together(**columns: Sequence[Tokens]) -> list[tuple[Tokens, ...]]:
    """Return the rows of some columns of one length."""
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ValueError(f"There are {listed}. Expected one of each for every example.")
    return list(zip(*columns.values(), strict=True))


def _rows(units: Sequence[Sequence[Document]], length: int, pad_token_id: int) -> Rows:
    """Return `input_ids`, `labels` and `position_ids`, (u, length), of lists of documents."""
    length = _validate.integer("length", length, minimum=1)
    pad = _validate.integer("pad_token_id", pad_token_id)
    shape = (len(units), length)
    rows = {
        "input_ids": np.full(shape, pad, np.int64),
        "labels": np.full(shape, IGNORED, np.int64),
        "position_ids": np.zeros(shape, np.int64),
    }
    for row, documents in enumerate(units):
        if not documents:
            raise ValueError(f"Unit {row} has no documents. Expected one or more; leave it out.")
        end = 0
        for prompt, response in documents:
            prompt, response = _ids(prompt, row), _ids(response, row)
            if len(response) <= (not len(prompt)):
                raise ValueError(
                    f"Row {row} has a response of length {len(response)} after a prompt of length "
                    f"{len(prompt)}: no token is predicted. Expected one or more, such as that of "
                    "the end, after a first token that nothing predicts; leave the row out."
                )
            start, middle = end, end + len(prompt)
            end = middle + len(response)
            if end > length:
                raise ValueError(
                    f"Row {row} needs {end} tokens or more, and length={length}. Cut its prompt "
                    "or response by a rule that looks at no other row, or give a larger length."
                )
            rows["input_ids"][row, start:end] = np.concatenate([prompt, response])
            rows["labels"][row, middle:end] = response
            rows["position_ids"][row, start:end] = np.arange(end - start)
        rows["position_ids"][row, end:] = np.arange(length - end)
    return rows


def _ids(tokens: Tokens, row: int) -> NDArray[np.int64]:
    """Return token ids as an array."""
    found = np.asarray(tokens if hasattr(tokens, "__array__") else list(tokens))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(
            f"Row {row} has tokens of shape {found.shape} and dtype {found.dtype}. Expected a "
            "sequence of token ids; a tokenizer makes them of text."
        )
    return found.astype(np.int64)

# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids: prompts, responses, pairs, packed documents."""

import numpy as np
import pytest

from dualdp.finetuning import packed_rows, preference_rows, sft_rows
from tests.mistakes import refused


def test_rows_hold_prompt_response_and_padding():
    rows = sft_rows([[5, 6], []], [[7], (8, 9)], length=4, pad_token_id=3)
    assert rows["input_ids"].tolist() == [[5, 6, 7, 3], [8, 9, 3, 3]]
    assert rows["labels"].tolist() == [[-100, -100, 7, -100], [8, 9, -100, -100]]
    assert {column.dtype for column in rows.values()} == {np.dtype(np.int64)}


def test_a_pair_is_one_item():
    rows = preference_rows([[1], [2, 3]], [[4, 5], [6]], [[7], [8]], length=3, pad_token_id=0)
    assert rows["input_ids"].tolist() == [[[1, 4, 5], [1, 7, 0]], [[2, 3, 6], [2, 3, 8]]]
    assert rows["labels"][0].tolist() == [[-100, 4, 5], [-100, 7, -100]]


def test_positions_begin_again_with_every_document():
    rows = packed_rows([[([1], [2, 3]), ([4], [5])], [([6, 7], [8])]], length=7, pad_token_id=0)
    assert rows["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0], [6, 7, 8, 0, 0, 0, 0]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 3]]
    assert rows["labels"][0].tolist() == [-100, 2, 3, -100, 5, -100, -100]


def test_no_rows_are_no_rows():
    assert sft_rows([], [], length=4, pad_token_id=0)["input_ids"].shape == (0, 4)
    assert preference_rows([], [], [], length=4, pad_token_id=0)["labels"].shape == (0, 2, 4)


def sft(prompts, responses, length=4, pad_token_id=0):
    return lambda: sft_rows(prompts, responses, length=length, pad_token_id=pad_token_id)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (sft([[1]], [[]]), ValueError, "a response of length 0"),
        (sft([[]], [[2]]), ValueError, "no token is predicted"),
        (sft([[1, 2]], [[3, 4, 5]]), ValueError, "needs 5 tokens or more"),
        (sft([[1]], [[2], [3]]), ValueError, "1 prompts, 2 responses"),
        (sft(["to be"], [[2]], length=9), TypeError, "a tokenizer makes them"),
        (sft([[1]], [[2.5]]), TypeError, "a sequence of token ids"),
        (sft([[1]], [[2]], length=0), ValueError, "length=0 is out of range"),
        (sft([[1]], [[2]], pad_token_id=None), TypeError, "pad_token_id=None"),
        (
            lambda: packed_rows([[]], length=4, pad_token_id=0),
            ValueError,
            "Unit 0 has no documents",
        ),
        (
            lambda: preference_rows([[1]], [[2]], [[]], length=4, pad_token_id=0),
            ValueError,
            "Row 1 has a response of length 0",
        ),
    ],
)
def test_wrong_rows_are_refused(call, error, words):
    refused(call, error, words)

# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids, and the published formulas of preference losses."""

import math

import numpy as np
import pytest

from dualdp.finetuning import packed_rows, preference, preference_rows, sft_rows

CHOSEN, REJECTED = np.array([-0.7, -2.5, -0.01]), np.array([-1.9, -0.4, -6.0])


def log_sigmoid(z):
    return math.log(1 / (1 + math.exp(-z)))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


#: Name -> options, and the loss of one pair as its paper writes it.
FORMULAS = {
    "dpo": ({"beta": 0.3}, lambda w, r: -log_sigmoid(0.3 * (w - r))),
    "ipo": ({"tau": 0.2}, lambda w, r: (w - r - 1 / 0.4) ** 2),
    "simpo": ({"beta": 2.0, "gamma": 0.7}, lambda w, r: -log_sigmoid(2 * w - 2 * r - 0.7)),
    "orpo": ({"weight": 0.4}, lambda w, r: -w - 0.4 * log_sigmoid(log_odds(w) - log_odds(r))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_the_published_ones(name):
    options, formula = FORMULAS[name]
    found = getattr(preference, name)(CHOSEN, REJECTED, **options, xp=np)
    expected = [formula(w, r) for w, r in zip(CHOSEN, REJECTED, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_formulas_do_not_overflow():
    far = np.array([-2e4, 2e4])
    found = preference.dpo(far, -far, beta=1.0, xp=np)
    np.testing.assert_allclose(found, [4e4, 0.0])


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


#: Arguments that are refused -> words of the message.
MISTAKES = [
    (lambda: sft_rows([[1]], [[]], length=4, pad_token_id=0), "a response of length 0"),
    (lambda: sft_rows([[]], [[2]], length=4, pad_token_id=0), "no token is predicted"),
    (lambda: sft_rows([[1, 2]], [[3, 4, 5]], length=4, pad_token_id=0), "needs 5 tokens or more"),
    (lambda: sft_rows([[1]], [[2], [3]], length=4, pad_token_id=0), "1 prompts, 2 responses"),
    (lambda: sft_rows(["to be"], [[2]], length=9, pad_token_id=0), "a tokenizer makes them"),
    (lambda: sft_rows([[1]], [[2.5]], length=4, pad_token_id=0), "a sequence of token ids"),
    (lambda: sft_rows([[1]], [[2]], length=0, pad_token_id=0), "length=0 is out of range"),
    (lambda: sft_rows([[1]], [[2]], length=4, pad_token_id=None), "pad_token_id=None"),
    (lambda: packed_rows([[]], length=4, pad_token_id=0), "Unit 0 has no documents"),
    (
        lambda: preference_rows([[1]], [[2]], [[]], length=4, pad_token_id=0),
        "Row 1 has a response of length 0",
    ),
]


@pytest.mark.parametrize(("call", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_wrong_rows_are_refused(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()

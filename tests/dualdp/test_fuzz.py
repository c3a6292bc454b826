# SPDX-License-Identifier: Apache-2.0
"""A short campaign of `tests.fuzz`, and the corpus: what it found once is tried for ever."""

import json
from pathlib import Path

import pytest

from dualdp import PrivacyPlan
from tests import fuzz

CORPUS = json.loads((Path(__file__).parents[1] / "cases" / "bad_inputs.json").read_text())


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_hostile_inputs_are_refused_in_time(name):
    fuzz.run(name, 15 if name == "command line" else 60)


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_is_refused(name):
    """Every line is wrong: a parser that accepts one of them fails here."""
    function = fuzz.TARGETS[name][1]
    for entry in CORPUS[name]:
        if name == "command line":
            fuzz.judge(name, function, entry)
            continue
        value = entry.encode("latin1") if name.endswith("bytes") and name != "plan bytes" else entry
        with fuzz.in_time(), pytest.raises((ValueError, TypeError)):
            function(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 10**400}, "num_examples is out of range. Expected an integer of at most"),
        ({"num_steps": 10**9}, "num_steps is out of range. Expected an integer of at most 1e.07"),
        (
            {"max_grad_norm": 10**400},
            "max_grad_norm is out of range. Expected a number below 1e308",
        ),
        ({"noise_multiplier": {"schedule": "table", "values": []}}, "The text is not a plan"),
    ],
)
def test_numbers_beyond_all_use_are_refused(changes, message):
    with fuzz.in_time(), pytest.raises(ValueError, match=message):
        PrivacyPlan.from_json(json.dumps({**fuzz.PLANS[0], **changes}))

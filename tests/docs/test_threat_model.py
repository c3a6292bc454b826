# SPDX-License-Identifier: Apache-2.0
"""docs/threat_model.md and SECURITY.md: each promise names a test that exists."""

import re
from pathlib import Path

import pytest

from tests.docs.test_docs import existing_tests

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"\[(test_\w+)\]")


def promises():
    text = (ROOT / "docs" / "threat_model.md").read_text()
    section = re.search(r"^## Promises\n(.*?)^## ", text, re.M | re.S).group(1)
    return re.findall(r"^- (.*?)(?=^- |\Z)", section, re.M | re.S)


def test_every_promise_names_its_test():
    found = promises()
    assert len(found) >= 10
    for promise in found:
        assert NAMED.search(promise), promise


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/threat_model.md"])
def test_the_tests_exist_and_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    assert set(NAMED.findall(text)) <= existing_tests()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_what_is_not_covered_is_said():
    text = (ROOT / "docs" / "threat_model.md").read_text()
    for word in ("hyper-parameters", "group_size", "Time, memory", "Floating point", "seed="):
        assert word in text, word

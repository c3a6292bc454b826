# SPDX-License-Identifier: Apache-2.0
"""Programs on PyTorch: right ones run and are exact, their planted mistakes are refused."""

import re
from pathlib import Path

import pytest

from tests.user import conftest, metrics_and_loops, tables_and_graphs, text, vision, ways_out

PROGRAMS = [
    entry
    for module in (vision, text, tables_and_graphs, metrics_and_loops, ways_out)
    for entry in module.PROGRAMS
]
WRONG = [entry for entry in PROGRAMS if entry.mistake]


def each(entries):
    return pytest.mark.parametrize("entry", entries, ids=[e.run.__name__ for e in entries])


@each(PROGRAMS)
def test_it_equals_a_loop_over_rows(entry):
    conftest.equals_rows_alone(entry)


@each(PROGRAMS)
def test_it_runs_by_default(entry):
    conftest.runs_as_a_users(entry)


@each(WRONG)
def test_its_mistake_is_refused(entry):
    conftest.is_refused(entry)


def test_the_page_has_each_program_and_its_lines():
    page = (Path(__file__).parents[2] / "docs" / "from_opacus.md").read_text()
    for entry in PROGRAMS:
        lines, name = conftest.lines_here(entry.run), entry.run.__name__
        assert re.search(rf"^\| {lines} \| [^|]+ \| (.*, )?{name}(,.*)? \|$", page, re.M), name

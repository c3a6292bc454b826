# SPDX-License-Identifier: Apache-2.0
"""Programs on PyTorch: right ones run and are exact, their planted mistakes are refused."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.user import metrics_and_loops, tables_and_graphs, text, vision, ways_out
from tests.user.conftest import LOOKED_AT, STEPS, Private, changed, lines_here, run

FILES = (vision, text, tables_and_graphs, metrics_and_loops, ways_out)
PROGRAMS = [entry for module in FILES for entry in module.PROGRAMS]
FAST = {"classifier_with_meters", "dcgan", "annealed_term_beside_logged_numbers"}


NAMES = [entry.run.__name__ for entry in PROGRAMS]
MARKS = [() if name in FAST else pytest.mark.slow for name in NAMES]
each = pytest.mark.parametrize(
    "entry", [pytest.param(e, marks=m) for e, m in zip(PROGRAMS, MARKS, strict=True)], ids=NAMES
)


@pytest.mark.slow
@each
def test_it_equals_a_loop_over_rows(entry):
    """30 steps with checks=1.0, compared with each row alone."""
    private = Private(True, noise_multiplier=1e-12, checks=1.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        run(entry.run, private)
    finally:
        torch.set_default_dtype(before)
    assert len(private.engine.ledger) == STEPS
    assert private.compared >= len(LOOKED_AT)


@each
def test_it_runs_by_default(entry):
    """30 steps with the default checks and noise; warnings are errors in the whole suite."""
    private = Private(False, noise_multiplier=1.0)
    run(entry.run, private)
    assert len(private.engine.ledger) == STEPS


@pytest.mark.parametrize("entry", PROGRAMS, ids=NAMES)
def test_its_mistake_is_refused(entry):
    """At its first step, or what the loop does right after it; or it is noted."""
    wrong, private = changed(entry.run, [entry.mistake]), Private(False, noise_multiplier=1.0)
    if entry.is_noted:
        run(wrong, private)
        assert entry.words in private.engine.ledger.to_json()
        return
    refused = pytest.raises((RuntimeError, ValueError, TypeError), match=entry.words)
    with refused, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of shapes that broadcast
        run(wrong, private)
    assert private.engine is None or len(private.engine.ledger) <= 1


def test_the_page_has_each_program_and_its_lines():
    page = (Path(__file__).parents[2] / "docs" / "from_opacus.md").read_text()
    for entry in PROGRAMS:
        lines, name = lines_here(entry.run), entry.run.__name__
        assert re.search(rf"^\| {lines} \| [^|]+ \| (.*, )?{name}(,.*)? \|$", page, re.M), name

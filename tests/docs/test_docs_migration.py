# SPDX-License-Identifier: Apache-2.0
"""The migration pages: every name of ours exists; Opacus' examples change in five lines."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from benchmarks import opacus_examples
from dualdp_torch.training import opacus_names

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "from_opacus.md").read_text()
ROW = re.compile(r"^\| (`.*?) \| (.*?) \| (.*?)\|$", re.MULTILINE)
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
ROOTS = {name: name for name in ("dualdp", "dualdp_torch", "torch")}
ROOTS |= {"dpt": "dualdp.torch", "dpj": "dualdp.jax"}


def rows(page):
    found = ROW.findall((DOCS / page).read_text())
    assert len(found) > 15
    return found


def resolve(name):
    """The object of a dotted name; fails if there is none."""
    root, *path = name.split(".")
    value = importlib.import_module(ROOTS.get(root, root))
    for part in path:
        if not hasattr(value, part):
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            value = getattr(value, part)
    return value


def test_the_page_has_every_name_that_errors_know():
    for name in opacus_names.NAMES:
        assert re.search(rf"`(opacus\.)?{re.escape(name)}`", PAGE), name


@pytest.mark.parametrize("page", ["from_opacus.md", "from_jax_privacy.md"])
def test_every_name_here_exists(page):
    for left, right, _ in rows(page):
        names = [name for name in NAME.findall(right) if name.split(".")[0] in ROOTS]
        assert names or right in ("-", "the same words"), (left, right)
        for name in names:
            assert resolve(name) is not None


@pytest.mark.parametrize(("name", "text"), opacus_examples.examples())
def test_an_example_of_opacus_changes_at_most_five_lines(name, text):
    ours, theirs = opacus_examples.changed(text)
    assert 0 < max(ours, theirs) <= 5
    assert f"[{name}](../examples/{name}.py) | {ours}/{theirs} |" in PAGE
    other = opacus_examples.for_opacus(text)
    assert len(other.splitlines()) == len(text.splitlines()) - ours
    ast.parse(other)
    for program, package, missing in ((text, "dualdp", "opacus"), (other, "opacus", "dualdp")):
        imported = re.findall(r"^from (\w+)(?:\.\w+)* import ", program, re.MULTILINE)
        assert package in imported
        assert missing not in imported

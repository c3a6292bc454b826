# SPDX-License-Identifier: Apache-2.0
"""A test file for every source file, in the same place; names that can be read at a glance."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_budgets import code_lines

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MOVED = ("dualdp", "dualdp_tools")  # packages whose tests mirror their sources
SMALL = 40  # lines of code that need no test file of their own
LONGEST = 60  # characters of the name of a test; its sentence is its docstring
TEST_FILES = [path for package in MOVED for path in sorted((TESTS / package).rglob("test_*.py"))]


@pytest.mark.parametrize("package", MOVED)
def test_every_source_file_has_its_test_file(package):
    missing = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = f"test_{path.name.lstrip('_')}"
        place = TESTS / path.parent.relative_to(ROOT) / name
        if not place.exists() and code_lines(path.read_text()) > SMALL:
            missing.append(f"{path.relative_to(ROOT)} -> {place.relative_to(ROOT)}")
    assert not missing


def test_names_of_tests_are_short():
    long = []
    for path in TEST_FILES:
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M):
            long += [f"{path.name}: {name}"] if len(name) > LONGEST else []
    assert not long


def test_no_test_is_written_twice():
    """A second function of one name replaces the first without a word."""
    for path in TEST_FILES:
        names = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert len(names) == len(set(names)), path

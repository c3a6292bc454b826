# SPDX-License-Identifier: Apache-2.0
"""Six faults that a person would make, drawn by the commit, are found by the tests of their folder.

`python -m tests.mutants` plants many more.
"""

import subprocess

import pytest

from tests import mutants


def drawn():
    """Six of `BY_HAND`, others for each commit."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=mutants.ROOT, capture_output=True, text=True, check=False
    )
    return mutants.faults(6, done.stdout.strip() or "no commit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mutants.copied(tmp_path_factory.mktemp("mutants"))


@pytest.mark.slow
@pytest.mark.xdist_group("mutants")
@pytest.mark.parametrize("number", range(6))
def test_a_planted_fault_is_found(number, folder):
    """The tests of its folder fail."""
    fault = drawn()[number]
    assert not mutants.survives(fault, folder), fault

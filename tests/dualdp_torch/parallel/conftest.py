# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one start have found, for all tests of a module."""

import functools
import json

import pytest
import torch

from tests.distributed import models, runs, spawn

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """(how they work together, number of ranks) -> what each rank ended with."""

    @functools.cache
    def found(way, size):
        folder = tmp_path_factory.mktemp("runs")
        return spawn.together(runs.runs, size, folder, way, *runs.named(way, size))

    return found


def releases(text):
    """Releases of a ledger's text, in order."""
    records = map(json.loads, text.splitlines())
    return [record["r"] for record in records if "r" in record]


@pytest.fixture
def assert_ends_alike(ended):
    """A run ends on all ranks where one process ends, with its epsilon and its record."""

    def check(way, size, name):
        parameters, epsilon, ledger = runs.ended(name)
        first, *others = [rank[name] for rank in ended(way, size)]
        limit = TOLERANCE[next(iter(parameters.values())).dtype]
        assert models.distance(first[0], parameters) <= limit
        assert first[1] == epsilon
        # Headers have an id of their own, on which the hashes depend.
        assert releases(first[2]) == releases(ledger)
        for other in others:
            assert models.distance(other[0], first[0]) == 0
            assert (other[1], releases(other[2])) == (epsilon, releases(ledger))

    return check


@pytest.fixture(scope="module")
def passed(request, tmp_path_factory):
    """What each of two ranks says to each check of the module that `CHECKS` of the test names."""
    folder = tmp_path_factory.mktemp("checks")
    return spawn.together(spawn.checks, 2, folder, request.module.CHECKS)

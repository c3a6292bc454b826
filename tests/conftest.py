# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings of the whole suite. Imports neither torch nor jax by itself."""

import importlib
import os

import hypothesis
import pytest

# Two workers on two cores: one thread each, or they fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

hypothesis.settings.register_profile(
    "dualdp", deadline=None, derandomize=True, print_blob=True, max_examples=100
)
hypothesis.settings.load_profile("dualdp")

BACKENDS = ("torch", "jax")


@pytest.fixture
def backend(request):
    """The test adapter of a stack; parametrize it with `BACKENDS` and `indirect=True`."""
    return importlib.import_module(f"tests.backends._{request.param}")

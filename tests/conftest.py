# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings of the whole suite. Imports neither torch nor jax by itself."""

import gc
import os
import random
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Two workers on two cores: one thread each, or they fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's older way to make code: compiling takes most of the suite's time, and this is quicker.
# A jaxlib that does not know a flag ends the process, so only the pinned one gets them.
COMPILE_QUICKLY = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if any(found.version.startswith("0.10.") for found in metadata.distributions(name="jaxlib")):
    os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)

hypothesis.settings.register_profile(
    "dualdp", deadline=None, derandomize=True, print_blob=True, max_examples=100
)
hypothesis.settings.load_profile("dualdp")

BACKENDS = ("torch", "jax")
# Of the PyTorch models and batches of tests that can run on a GPU; JAX has JAX_PLATFORMS.
DEVICE = os.environ.get("DUALDP_TEST_DEVICE", "cpu")
_MOST_MEMORY = 3 * 2**30


@pytest.fixture(autouse=True, scope="session")
def compiled_once():
    """XLA compiles a program once for a worker and for the processes that its tests start."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"compilation_cache_dir": folder, "persistent_cache_min_compile_time_secs": 0.01}
        for name, value in settings.items():
            os.environ[f"JAX_{name.upper()}"] = str(value)  # of a process that imports jax later
            if "jax" in sys.modules:
                sys.modules["jax"].config.update(f"jax_{name}", value)
        yield


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Compiled programs of many modules take gigabytes: they go once a process is that large."""
    yield
    if "jax" in sys.modules and resident() > _MOST_MEMORY:
        sys.modules["jax"].clear_caches()
        gc.collect()


def resident():
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def same_numbers():
    """A test draws the same numbers whichever tests ran before it in its process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the generator that users' code draws from
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """One worker has the tests of a case, and compiles them once."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case = params.get("case", params.get("entry"))
        if hasattr(case, "name"):
            item.add_marker(pytest.mark.xdist_group(case.name.partition("[seed=")[0]))


def pytest_collection_finish():
    """What was imported and collected is no garbage, and need not be looked through again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)

# SPDX-License-Identifier: Apache-2.0
"""What must agree to the last bit, by the code that users get: the suite compiles another way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BITWISE = ("tests/backends/test_noise.py", "tests/dualdp_jax/noise")


@pytest.mark.slow
def test_noise_is_right_without_the_flags_of_the_suite():
    """`conftest.py` asks for XLA's older emitters, whose sums and roots might round otherwise."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, *BITWISE],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout

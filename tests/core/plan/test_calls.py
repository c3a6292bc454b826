# SPDX-License-Identifier: Apache-2.0
"""How many Python calls a plan makes: a number that is the same on every machine."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import dualdp
from dualdp.plan import accounting

BASE = {
    **{"num_examples": 50_000, "expected_batch_size": 512, "num_steps": 2000},
    **{"max_grad_norm": 1.0, "delta": 1e-5},
}
PLAN = str(Path(accounting.__file__).parent)


def calls(function):
    """Calls of Python functions in each file of the package, after the first use."""
    function()
    found = Counter()

    def note(frame, event, argument):
        if event == "call" and f"{Path(dualdp.__file__).parent}" in frame.f_code.co_filename:
            found[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("use", "most"),
    [
        (dualdp.PrivacyPlan(noise_multiplier=1.1, **BASE).epsilon, 25),
        (lambda: dualdp.PrivacyPlan(noise_multiplier=1.1, **BASE), 75),
        (lambda: dualdp.PrivacyPlan.calibrate(target_epsilon=3.0, **BASE), 400),
    ],
    ids=["epsilon", "new", "calibrate"],
)
def test_a_plan_adds_few_calls_to_those_of_its_accountant(use, most):
    """Those of files in dualdp/plan."""
    found = calls(use)
    assert 0 < sum(count for file, count in found.items() if file.startswith(PLAN)) <= most


def test_the_core_imports_neither_framework():
    program = "import sys, dualdp; print({'torch', 'jax', 'scipy.stats'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"

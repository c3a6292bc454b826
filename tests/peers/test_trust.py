# SPDX-License-Identifier: Apache-2.0
"""The same kit on other libraries, where they are installed: it reports what it finds.

Nothing is asserted about them but that every check could be made; the reports are printed (`-s`).
"""

import importlib

import pytest

from dualdp.testing import check_private_step
from tests.peers import private_steps

CASES = {
    "opacus": ("opacus", lambda: private_steps.OpacusStep()),
    "opacus functorch": ("opacus", lambda: private_steps.OpacusStep("functorch")),
    "jax_privacy": ("jax_privacy", private_steps.JaxPrivacyStep),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_report_on(name):
    module, make = CASES[name]
    version = getattr(pytest.importorskip(module), "__version__", None)
    version = version or importlib.metadata.version(module.replace("_", "-"))
    report = check_private_step(make(), seed=1)
    print(f"\n{name} {version}: {report}")
    assert sum(check.passed is not None for check in report.checks) >= 20

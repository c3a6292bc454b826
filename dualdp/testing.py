# SPDX-License-Identifier: Apache-2.0
"""Statistical and exact tests of any implementation of a private step.

    report = check_private_step(step)        # see `PrivateStep` for what a step must offer
    print(report)
    assert report.passed

`dualdp_torch.testing.EngineStep` and `dualdp_jax.testing.EngineStep` are such steps for any model.
"""

from dualdp.audit.checks import FALSE_ALARM as FALSE_ALARM
from dualdp.audit.checks import Check as Check
from dualdp.audit.checks import Report as Report
from dualdp.audit.checks import check_private_step as check_private_step
from dualdp.audit.protocol import Claims as Claims
from dualdp.audit.protocol import Event as Event
from dualdp.audit.protocol import PrivateStep as PrivateStep
from dualdp.audit.protocol import Release as Release

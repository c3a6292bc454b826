# SPDX-License-Identifier: Apache-2.0
"""Tests of a private step, and lower bounds on its epsilon from canaries."""

from dualdp.audit.canaries import Audit as Audit
from dualdp.audit.canaries import Bound as Bound
from dualdp.audit.canaries import audit as audit

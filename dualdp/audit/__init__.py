# SPDX-License-Identifier: Apache-2.0
"""Tests of a private step, and a lower bound on its epsilon from canaries."""

from dualdp.audit.canaries import Audit as Audit
from dualdp.audit.canaries import audit as audit

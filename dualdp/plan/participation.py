# SPDX-License-Identifier: Apache-2.0
"""Legacy names, which go with their last users."""

from dualdp.plan.cost import PATTERNED as PATTERNED


def is_patterned(plan):
    return plan.cost().is_patterned

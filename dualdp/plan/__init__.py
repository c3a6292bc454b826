# SPDX-License-Identifier: Apache-2.0
"""`PrivacyPlan`, the settings of a private run."""

from dualdp.plan.plan import PrivacyPlan as PrivacyPlan

# SPDX-License-Identifier: Apache-2.0
"""Text that the commands still import; goes with them."""

REFUSAL = "accountant='gdp' bounds nothing. Expected 'pld'; see accountants.gdp_epsilon."

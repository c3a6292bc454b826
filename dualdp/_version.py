# SPDX-License-Identifier: Apache-2.0
"""Version of this package, also written to ledgers."""

__version__ = "1.0.0"

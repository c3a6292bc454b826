# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, their norms, and their clipped sum."""

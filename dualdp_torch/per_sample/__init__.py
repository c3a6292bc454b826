# SPDX-License-Identifier: Apache-2.0
"""Engine of per-sample gradients, their norms, and their clipped sum."""

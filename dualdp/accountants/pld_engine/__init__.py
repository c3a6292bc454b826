# SPDX-License-Identifier: Apache-2.0
"""Engine of privacy-loss distributions: dominating pairs, discretization, composition, epsilon."""

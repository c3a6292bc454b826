# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: strategies C, their sensitivity, their error, and the best of each family."""

# SPDX-License-Identifier: Apache-2.0
"""Exactness checks: comparisons with plain autodiff of single examples."""

# SPDX-License-Identifier: Apache-2.0
"""Checks that compare released numbers with plain autograd of single examples."""

# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints between the two backends."""

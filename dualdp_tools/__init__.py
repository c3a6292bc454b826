# SPDX-License-Identifier: Apache-2.0
"""Command line, and the comparison of both backends."""

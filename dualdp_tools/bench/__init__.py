# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of speed, memory and accounting against peers: `python -m benchmarks`."""

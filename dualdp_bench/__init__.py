# SPDX-License-Identifier: Apache-2.0
"""Speed, memory and accounting, measured against peers: `python -m benchmarks`."""

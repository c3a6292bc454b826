# SPDX-License-Identifier: Apache-2.0
"""Command line, benchmarks, comparison of both backends, and scaling forecasts."""

# SPDX-License-Identifier: Apache-2.0
"""Experiment behind `dualdp compare`: one private run on both backends."""

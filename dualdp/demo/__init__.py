# SPDX-License-Identifier: Apache-2.0
"""The demonstration behind `dualdp compare`: one private experiment, run on both stacks."""

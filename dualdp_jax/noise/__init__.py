# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise of a step."""

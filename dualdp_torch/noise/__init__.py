# SPDX-License-Identifier: Apache-2.0
"""The Gaussian noise of a step."""

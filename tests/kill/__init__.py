# SPDX-License-Identifier: Apache-2.0
"""Training runs that are killed at random instants and go on."""

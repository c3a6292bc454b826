# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in one file or in shards, optimizer state, and weights."""

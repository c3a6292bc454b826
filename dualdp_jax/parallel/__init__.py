# SPDX-License-Identifier: Apache-2.0
"""Meshes of devices, groups of processes, and exchange of messages between processes."""

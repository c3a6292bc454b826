# SPDX-License-Identifier: Apache-2.0
"""Callback for Lightning, under its public import path."""

from dualdp_torch.integrations.lightning import PrivacyCallback as PrivacyCallback

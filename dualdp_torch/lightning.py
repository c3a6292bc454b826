# SPDX-License-Identifier: Apache-2.0
"""Callback for Lightning, under its public import path."""

try:
    from dualdp_torch.integrations.lightning import PrivacyCallback as PrivacyCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "dualdp_torch.lightning needs Lightning, which is not installed. Run: pip install lightning"
    ) from error

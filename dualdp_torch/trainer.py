# SPDX-License-Identifier: Apache-2.0
"""Callback for the Hugging Face Trainer, under its public import path."""

try:
    from dualdp_torch.integrations.huggingface import PrivacyCallback as PrivacyCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dualdp_torch.trainer needs {error.name}, which is not installed. "
        "Run: pip install transformers accelerate"
    ) from error

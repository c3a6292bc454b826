# SPDX-License-Identifier: Apache-2.0
"""Callback and loss for models of Hugging Face, under their public import path."""

try:
    from dualdp_torch.integrations.huggingface import PrivacyCallback as PrivacyCallback
    from dualdp_torch.integrations.huggingface import per_example_loss as per_example_loss
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dualdp_torch.trainer needs {error.name}, which is not installed. "
        "Run: pip install transformers accelerate"
    ) from error

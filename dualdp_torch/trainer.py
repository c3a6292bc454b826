# SPDX-License-Identifier: Apache-2.0
"""Callback for the Hugging Face Trainer, under its public import path."""

from dualdp_torch.integrations.huggingface import PrivacyCallback as PrivacyCallback

# SPDX-License-Identifier: Apache-2.0
"""Callbacks for the training loops of other packages: Lightning and the Hugging Face Trainer."""

# SPDX-License-Identifier: Apache-2.0
"""Per-example losses for fine-tuning language models."""

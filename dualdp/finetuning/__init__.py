# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids for fine-tuning a language model, and the formulas of preference losses."""

from dualdp.finetuning.rows import packed_rows as packed_rows
from dualdp.finetuning.rows import preference_rows as preference_rows
from dualdp.finetuning.rows import sft_rows as sft_rows

# SPDX-License-Identifier: Apache-2.0
"""Public API of the PyTorch backend: `import dualdp.torch as dpt`."""

from typing import TYPE_CHECKING

from dualdp_torch import METHODS as METHODS
from dualdp_torch import RULES as RULES
from dualdp_torch import AdamBC as AdamBC
from dualdp_torch import BatchMemoryManager as BatchMemoryManager
from dualdp_torch import ChangedInPlaceError as ChangedInPlaceError
from dualdp_torch import Chunk as Chunk
from dualdp_torch import ClippedGradSum as ClippedGradSum
from dualdp_torch import CompiledGradSum as CompiledGradSum
from dualdp_torch import CompiledStep as CompiledStep
from dualdp_torch import Finding as Finding
from dualdp_torch import LogicalBatch as LogicalBatch
from dualdp_torch import ModuleValidator as ModuleValidator
from dualdp_torch import OwnLoopLoader as OwnLoopLoader
from dualdp_torch import PlannedLoader as PlannedLoader
from dualdp_torch import PrivacyEngine as PrivacyEngine
from dualdp_torch import Record as Record
from dualdp_torch import Rule as Rule
from dualdp_torch import Stages as Stages
from dualdp_torch import clipped_grad_sum as clipped_grad_sum
from dualdp_torch import compile_clipped_grad_sum as compile_clipped_grad_sum
from dualdp_torch import consolidate_checkpoint as consolidate_checkpoint
from dualdp_torch import dpo_loss as dpo_loss
from dualdp_torch import explain as explain
from dualdp_torch import fix as fix
from dualdp_torch import ipo_loss as ipo_loss
from dualdp_torch import load_checkpoint as load_checkpoint
from dualdp_torch import load_sharded_checkpoint as load_sharded_checkpoint
from dualdp_torch import noisy_mean as noisy_mean
from dualdp_torch import orpo_loss as orpo_loss
from dualdp_torch import per_sample_grads as per_sample_grads
from dualdp_torch import per_sample_norms as per_sample_norms
from dualdp_torch import record_per_sample as record_per_sample
from dualdp_torch import reference_log_probs as reference_log_probs
from dualdp_torch import register_rule as register_rule
from dualdp_torch import save_checkpoint as save_checkpoint
from dualdp_torch import save_sharded_checkpoint as save_sharded_checkpoint
from dualdp_torch import sft_loss as sft_loss
from dualdp_torch import simpo_loss as simpo_loss
from dualdp_torch import validate as validate
from dualdp_torch.checkpoint import weights as weights
from dualdp_torch.training import opacus_names

if not TYPE_CHECKING:  # a type checker refuses unknown names by itself
    __getattr__ = opacus_names.missing_from(__name__)

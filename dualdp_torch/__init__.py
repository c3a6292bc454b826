# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend of dualdp."""

try:
    import torch as _framework  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "dualdp.torch needs PyTorch, which is not installed. Run: pip install 'dualdp[torch]'"
    ) from error

from dualdp_torch.checkpoint import weights as weights
from dualdp_torch.checkpoint.sharded import consolidate_checkpoint as consolidate_checkpoint
from dualdp_torch.checkpoint.sharded import load_sharded_checkpoint as load_sharded_checkpoint
from dualdp_torch.checkpoint.sharded import save_sharded_checkpoint as save_sharded_checkpoint
from dualdp_torch.checkpoint.single_file import load_checkpoint as load_checkpoint
from dualdp_torch.checkpoint.single_file import save_checkpoint as save_checkpoint
from dualdp_torch.finetuning import dpo_loss as dpo_loss
from dualdp_torch.finetuning import ipo_loss as ipo_loss
from dualdp_torch.finetuning import orpo_loss as orpo_loss
from dualdp_torch.finetuning import reference_log_probs as reference_log_probs
from dualdp_torch.finetuning import sft_loss as sft_loss
from dualdp_torch.finetuning import simpo_loss as simpo_loss
from dualdp_torch.noise.noise import noisy_mean as noisy_mean
from dualdp_torch.per_sample.api import ClippedGradSum as ClippedGradSum
from dualdp_torch.per_sample.api import clipped_grad_sum as clipped_grad_sum
from dualdp_torch.per_sample.api import per_sample_grads as per_sample_grads
from dualdp_torch.per_sample.api import per_sample_norms as per_sample_norms
from dualdp_torch.per_sample.call import METHODS as METHODS
from dualdp_torch.per_sample.compiled import CompiledGradSum as CompiledGradSum
from dualdp_torch.per_sample.compiled import (
    compile_clipped_grad_sum as compile_clipped_grad_sum,
)
from dualdp_torch.per_sample.explanation import explain as explain
from dualdp_torch.per_sample.model_checks import Finding as Finding
from dualdp_torch.per_sample.model_checks import ModuleValidator as ModuleValidator
from dualdp_torch.per_sample.model_checks import fix as fix
from dualdp_torch.per_sample.parameter_use import ChangedInPlaceError as ChangedInPlaceError
from dualdp_torch.per_sample.recorded_forward import Record as Record
from dualdp_torch.per_sample.recorded_forward import record_per_sample as record_per_sample
from dualdp_torch.per_sample.validate import validate as validate
from dualdp_torch.rules import RULES as RULES
from dualdp_torch.rules import Rule as Rule
from dualdp_torch.rules import register_rule as register_rule
from dualdp_torch.training.adam_bc import AdamBC as AdamBC
from dualdp_torch.training.compiled_step import CompiledStep as CompiledStep
from dualdp_torch.training.engine import PrivacyEngine as PrivacyEngine
from dualdp_torch.training.loader import BatchMemoryManager as BatchMemoryManager
from dualdp_torch.training.loader import Chunk as Chunk
from dualdp_torch.training.loader import LogicalBatch as LogicalBatch
from dualdp_torch.training.loader import OwnLoopLoader as OwnLoopLoader
from dualdp_torch.training.loader import PlannedLoader as PlannedLoader
from dualdp_torch.training.step import Stages as Stages

# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend of dualdp."""

from . import weights as weights
from .call import METHODS as METHODS
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .data import BatchMemoryManager as BatchMemoryManager
from .data import PlannedLoader as PlannedLoader
from .engine import PrivacyEngine as PrivacyEngine
from .explanation import explain as explain
from .fix import ModuleValidator as ModuleValidator
from .fix import fix as fix
from .noise import noisy_mean as noisy_mean
from .optimizer import Stages as Stages
from .own_loop import Chunk as Chunk
from .own_loop import LogicalBatch as LogicalBatch
from .own_loop import OwnLoopLoader as OwnLoopLoader
from .per_sample import ClippedGradSum as ClippedGradSum
from .per_sample import clipped_grad_sum as clipped_grad_sum
from .per_sample import per_sample_grads as per_sample_grads
from .per_sample import per_sample_norms as per_sample_norms
from .record import Record as Record
from .record import record_per_sample as record_per_sample
from .rules import RULES as RULES
from .rules import Rule as Rule
from .rules import register_rule as register_rule
from .sharded_checkpoint import consolidate_checkpoint as consolidate_checkpoint
from .sharded_checkpoint import load_sharded_checkpoint as load_sharded_checkpoint
from .sharded_checkpoint import save_sharded_checkpoint as save_sharded_checkpoint
from .uses import ChangedInPlaceError as ChangedInPlaceError
from .validate import Finding as Finding
from .validate import validate as validate

ClippedSum = ClippedGradSum  # its name in dualdp 0.1.0

# SPDX-License-Identifier: Apache-2.0
"""JAX backend of dualdp; `dualdp.jax` exports its public names."""

from dualdp_jax.checkpoint import weights as weights
from dualdp_jax.checkpoint.sharded import consolidate_checkpoint as consolidate_checkpoint
from dualdp_jax.checkpoint.sharded import load_sharded_checkpoint as load_sharded_checkpoint
from dualdp_jax.checkpoint.sharded import save_sharded_checkpoint as save_sharded_checkpoint
from dualdp_jax.checkpoint.single_file import load_checkpoint as load_checkpoint
from dualdp_jax.checkpoint.single_file import save_checkpoint as save_checkpoint
from dualdp_jax.chunk import Chunk as Chunk
from dualdp_jax.finetuning import dpo_loss as dpo_loss
from dualdp_jax.finetuning import ipo_loss as ipo_loss
from dualdp_jax.finetuning import orpo_loss as orpo_loss
from dualdp_jax.finetuning import reference_log_probs as reference_log_probs
from dualdp_jax.finetuning import sft_loss as sft_loss
from dualdp_jax.finetuning import simpo_loss as simpo_loss
from dualdp_jax.noise.noise import AddNoiseState as AddNoiseState
from dualdp_jax.noise.noise import add_noise as add_noise
from dualdp_jax.noise.noise import noise_keys as noise_keys
from dualdp_jax.noise.noise import noisy_mean as noisy_mean
from dualdp_jax.per_sample.api import ClippedGradSum as ClippedGradSum
from dualdp_jax.per_sample.api import clipped_grad_sum as clipped_grad_sum
from dualdp_jax.per_sample.api import per_sample_grads as per_sample_grads
from dualdp_jax.per_sample.api import per_sample_norms as per_sample_norms
from dualdp_jax.per_sample.explanation import explain as explain
from dualdp_jax.per_sample.methods import METHODS as METHODS
from dualdp_jax.rules import RULES as RULES
from dualdp_jax.rules import Rule as Rule
from dualdp_jax.rules import Spec as Spec
from dualdp_jax.rules import register_rule as register_rule
from dualdp_jax.training.adam_bc import AdamBCState as AdamBCState
from dualdp_jax.training.adam_bc import adam_bc as adam_bc
from dualdp_jax.training.engine import PrivacyEngine as PrivacyEngine
from dualdp_jax.training.loader import PlannedLoader as PlannedLoader
from dualdp_jax.training.step import Stages as Stages
from dualdp_jax.training.step import TrainState as TrainState
from dualdp_jax.validate import Finding as Finding
from dualdp_jax.validate import validate as validate

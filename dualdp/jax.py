# SPDX-License-Identifier: Apache-2.0
"""Public API of the JAX backend: `import dualdp.jax as dpj`."""

try:
    import jax as _framework  # noqa: F401
    import optax as _optimizers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dualdp.jax needs {error.name}, which is not installed. Run: pip install 'dualdp[jax]'"
    ) from error

from dualdp_jax import METHODS as METHODS
from dualdp_jax import RULES as RULES
from dualdp_jax import AdamBCState as AdamBCState
from dualdp_jax import AddNoiseState as AddNoiseState
from dualdp_jax import Chunk as Chunk
from dualdp_jax import ClippedGradSum as ClippedGradSum
from dualdp_jax import Finding as Finding
from dualdp_jax import PlannedLoader as PlannedLoader
from dualdp_jax import PrivacyEngine as PrivacyEngine
from dualdp_jax import Rule as Rule
from dualdp_jax import Spec as Spec
from dualdp_jax import Stages as Stages
from dualdp_jax import TrainState as TrainState
from dualdp_jax import adam_bc as adam_bc
from dualdp_jax import add_noise as add_noise
from dualdp_jax import check as check
from dualdp_jax import clipped_grad_sum as clipped_grad_sum
from dualdp_jax import consolidate_checkpoint as consolidate_checkpoint
from dualdp_jax import dpo_loss as dpo_loss
from dualdp_jax import explain as explain
from dualdp_jax import ipo_loss as ipo_loss
from dualdp_jax import load_checkpoint as load_checkpoint
from dualdp_jax import load_sharded_checkpoint as load_sharded_checkpoint
from dualdp_jax import noise_keys as noise_keys
from dualdp_jax import noisy_mean as noisy_mean
from dualdp_jax import orpo_loss as orpo_loss
from dualdp_jax import per_sample_grads as per_sample_grads
from dualdp_jax import per_sample_norms as per_sample_norms
from dualdp_jax import reference_log_probs as reference_log_probs
from dualdp_jax import register_rule as register_rule
from dualdp_jax import save_checkpoint as save_checkpoint
from dualdp_jax import save_sharded_checkpoint as save_sharded_checkpoint
from dualdp_jax import sft_loss as sft_loss
from dualdp_jax import simpo_loss as simpo_loss
from dualdp_jax import validate as validate
from dualdp_jax.checkpoint import weights as weights

# SPDX-License-Identifier: Apache-2.0
"""Names of Opacus that have another one here; docs/from_opacus.md explains each."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dualdp.plan.plan import PrivacyPlan

_MORE = "More: docs/from_opacus.md."
_PLAN = "engine.plan; a value that changes is a schedule or a callable of the step, given before it"
_LAYERS = ("LSTM", "GRU", "RNN", "MultiheadAttention")
_PLANNED = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
#: Name of Opacus -> what to write.
NAMES = {
    **{f"DP{layer}": f"torch.nn.{layer}, as it is" for layer in _LAYERS},
    **{f"DPOptimizer.{name}": _PLAN for name in _PLANNED},
    **dict.fromkeys(
        ("utils", "validators", "layers", "grad_sample", "optimizers", "schedulers", "data_loader"),
        "dualdp.torch, which is one module, as in from dualdp.torch import BatchMemoryManager",
    ),
    "PrivacyEngine.save_checkpoint": "dpt.save_checkpoint",
    "PrivacyEngine.load_checkpoint": "dpt.load_checkpoint",
    "PrivacyEngine.validate": "dpt.validate",
    "PrivacyEngine.is_compatible": "dpt.validate",
    "PrivacyEngine.get_compatible_module": "dpt.fix",
    "PrivacyEngine.attach": "dpt.PrivacyEngine.make_private",
    "DPDataLoader.sample_rate": "engine.plan.sample_rate",
    "DPDataLoader.batch_size": "engine.plan.expected_batch_size",
    "DPOptimizer": "your own optimizer, which make_private returns as it is",
    "DPDataLoader": "dpt.PlannedLoader, which make_private returns",
    "GradSampleModule": "dpt.per_sample_grads, or dpt.record_per_sample around a loop of your own",
    "DPLossFastGradientClipping": 'dpt.clipped_grad_sum(..., method="two_pass")',
    "register_grad_sampler": "dpt.register_rule",
    "wrap_data_loader": "dpt.BatchMemoryManager",
    "create_accountant": "dualdp.accountants.create",
    "RDPAccountant": 'dualdp.accountants.create("rdp")',
    "PRVAccountant": 'dualdp.accountants.create("pld")',
    "GaussianAccountant": "dualdp.accountants.gdp_epsilon, whose number bounds nothing",
    "get_noise_multiplier": "dualdp.get_noise_multiplier",
}


def advice(name: str) -> str:
    """Return what to write for a name of Opacus, as a further sentence of an error.

    >>> advice("DPLSTM")
    '. Expected torch.nn.LSTM, as it is. More: docs/from_opacus.md.'
    """
    return f". Expected {NAMES[name]}. {_MORE}" if name in NAMES else ""


def missing_in(owner: str, theirs: str) -> Callable[[Any, str], NoReturn]:
    """Return the `__getattr__` of our class `owner`, which stands for `theirs` of Opacus."""

    def __getattr__(self: Any, name: str) -> NoReturn:
        text = f"{owner!r} object has no attribute {name!r}{advice(f'{theirs}.{name}')}"
        raise AttributeError(text, name=name, obj=self)

    return __getattr__


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of the module with this name.

    `from module import name` hides the text of an AttributeError, so it gets an ImportError.
    """

    def __getattr__(name: str) -> NoReturn:
        text = f"module {module!r} has no attribute {name!r}{advice(name)}"
        caller = sys._getframe(1)
        is_import = caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]
        if name in NAMES and is_import:
            raise ImportError(text, name=module)
        raise AttributeError(text, name=name, obj=sys.modules[module])

    return __getattr__


def optimizer_values(optimizer: torch.optim.Optimizer, plan: PrivacyPlan) -> dict[str, Any]:
    """Return what Opacus' optimizer has and the user's lacks: settings of the plan."""
    return {n: getattr(plan, n) for n in _PLANNED if not hasattr(optimizer, n)}

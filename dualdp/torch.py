# SPDX-License-Identifier: Apache-2.0
"""Public API of the PyTorch backend: `import dualdp.torch as dpt`."""

from typing import TYPE_CHECKING

from dualdp_torch import *  # noqa: F403
from dualdp_torch.training import opacus_names

if not TYPE_CHECKING:  # a type checker refuses unknown names by itself
    __getattr__ = opacus_names.missing_from(__name__)

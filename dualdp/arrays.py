# SPDX-License-Identifier: Apache-2.0
"""Types of formulas that work on the arrays of any library."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

#: Array of NumPy, PyTorch or JAX, of which the core imports the first only.
Array: TypeAlias = Any
#: Its functions: `numpy`, `torch` or `jax.numpy`.
Namespace: TypeAlias = ModuleType

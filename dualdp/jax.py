# SPDX-License-Identifier: Apache-2.0
"""Public API of the JAX backend: `import dualdp.jax as dpj`."""

try:
    import jax as _framework  # noqa: F401
    import optax as _optimizers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dualdp.jax needs {error.name}, which is not installed. Run: pip install 'dualdp[jax]'"
    ) from error

from dualdp_jax import *  # noqa: F403

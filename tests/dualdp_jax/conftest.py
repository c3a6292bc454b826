# SPDX-License-Identifier: Apache-2.0
"""Settings of the jax-only tests: XLA's optimizations cost more compile time than they save."""

import jax

jax.config.update("jax_disable_most_optimizations", True)

# SPDX-License-Identifier: Apache-2.0
"""What the fork server of a test process imports, for every process that it forks.

There is one server, which heeds the list of whoever starts it; so everybody gives it this one.
"""

MODULES = ["tests.distributed.spawn", "tests.kill.train_torch", "tests.kill.train_jax"]

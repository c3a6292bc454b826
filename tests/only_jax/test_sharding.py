# SPDX-License-Identifier: Apache-2.0
"""Plain operations only: XLA's partitioner can spread a batch over devices."""

import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import dualdp_jax as dpj

def loss(p, ids, x):
    h = jnp.tanh(p["table"][ids].sum(0) + x @ p["w"] + p["b"])
    return jnp.sum(h ** 2)

rng = np.random.default_rng(0)
params = {"table": rng.normal(size=(9, 5)), "w": rng.normal(size=(4, 5)), "b": np.zeros(5)}
params = jax.tree.map(jnp.float32, params)
ids, x = rng.integers(0, 9, (8, 6)), rng.normal(size=(8, 4)).astype(np.float32)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
spread = NamedSharding(mesh, PartitionSpec("data"))
clipped = jax.jit(lambda ids, x: dpj.clipped_grad_sum(loss, params, ids, x, max_grad_norm=1.0))
once = clipped(jnp.asarray(ids), jnp.asarray(x))
parts = clipped(jax.device_put(ids, spread), jax.device_put(x, spread))
assert len(parts.norms.sharding.device_set) == 2
for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
print("same")
"""


def test_a_batch_spread_over_two_devices_gives_the_same_sum(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout == "same\n", done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Plain operations only: XLA's partitioner can spread a batch, and the parameters, over devices.

Each test is a process of its own, in which one processor plays eight devices.
"""

import os
import subprocess
import sys

import pytest

HEAD = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import dualdp_jax as dpj

assert len(jax.devices()) == 8
rng = np.random.default_rng(0)

def loss(p, ids, x):
    h = jnp.tanh(p["table"][ids] @ p["w"] + p["b"])  # (6, 8)
    h = jax.lax.scan(lambda c, row: (jnp.tanh(c @ p["r"] + row), None), x @ p["v"], h)[0]
    y = jax.lax.conv_general_dilated(h[None, :, None], p["k"], (1,), "SAME",
                                     dimension_numbers=("NHC", "HIO", "NHC"))
    return jnp.sum(jnp.square(y)) + jnp.sum(p["table"][ids[:2]].sum(0) * p["scale"])

def made(dtype):
    shapes = {"table": (16, 8), "w": (8, 8), "b": (8,), "r": (8, 8), "v": (4, 8),
              "k": (3, 1, 2), "scale": (8,)}
    params = {name: jnp.asarray(rng.normal(size=s) / 2, dtype) for name, s in shapes.items()}
    return params, jnp.asarray(rng.integers(0, 16, (16, 6))), jnp.asarray(
        rng.normal(size=(16, 4)), dtype)

def same(a, b, dtype):
    bound = 1e-5 if dtype == "float32" else 1e-10
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and np.abs(x - y).max() <= bound * np.abs(x).max()

def clipped(method, params, *batch):
    mask = jnp.arange(batch[0].shape[0]) < 13
    options = {"mask": mask, "method": method, "check": "off"}
    return dpj.clipped_grad_sum(loss, params, *batch, max_grad_norm=1.0, **options)

def norms(method, params, *batch):
    options = {"per_parameter": True, "method": method, "check": "off"}
    return dpj.per_sample_norms(loss, params, *batch, **options)
"""

SPREAD = """
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
with jax.enable_x64({dtype!r} == "float64"):
    params, *batch = made({dtype!r})
    spread = [place(leaf, P(("data", "model"))) for leaf in batch]
    split = {{name: place(leaf, P(*[None] * (leaf.ndim - 1), "model"))
             for name, leaf in params.items()}}
    for function, method in [(clipped, "auto"), (clipped, "two_pass"), (norms, "auto")]:
        run = jax.jit(lambda *args: function(method, *args))
        once = run(params, *batch)
        for weights in (params, split):
            same(once, run(weights, *spread), {dtype!r})
    assert len(run(split, *spread)["w"].sharding.device_set) == 8
print("same")
"""

EXPLICIT = """
from dualdp import UnsupportedLayerError
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
params, *batch = made("float32")
with jax.set_mesh(mesh):
    spread = [jax.device_put(leaf, P("data")) for leaf in batch]
    for method in ("auto", "vmap", "loop"):
        for attempt in (clipped, jax.jit(clipped, static_argnums=0)):
            try:
                attempt(method, params, *spread)
            except UnsupportedLayerError as error:
                assert "a mesh with explicit axes" in str(error)
            else:
                raise AssertionError("not refused")
print("same")
"""

#: What the refusal is for. When this fails, XLA was mended: `check_devices` can go.
WRONG = """
gradient = jax.grad(lambda k, x: jnp.sum(jnp.square(jax.lax.conv_general_dilated(
    x[None, :, None], k, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")))))
run = jax.jit(jax.vmap(gradient, (None, 0)))
kernel, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 1, 2), (16, 8)))
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
parts = run(kernel, jax.device_put(x, NamedSharding(mesh, P("data"))))
once = run(kernel, x)
assert jnp.abs(parts - once).max() > 0.1 * jnp.abs(once).max()

from dualdp import UnsupportedLayerError
params, *batch = made("float32")
own_kernel = lambda p, ids, x: jnp.sum(jax.lax.conv_general_dilated(
    x[None, :, None], x[:3, None, None] * p["scale"], (1,), "SAME",
    dimension_numbers=("NHC", "HIO", "NHC")))
spread = [jax.device_put(leaf, NamedSharding(mesh, P("data"))) for leaf in batch]
for function, method in [(loss, "vmap"), (own_kernel, "auto")]:
    call = lambda p, *b: dpj.per_sample_norms(function, p, *b, method=method)
    for attempt in (call, jax.jit(call)):
        try:
            attempt(params, *spread)
        except UnsupportedLayerError as error:
            assert "XLA computes wrong gradients for convolutions with a kernel per" in str(error)
        else:
            raise AssertionError("not refused")
print("same")
"""


def run(program, monkeypatch):
    flags = ("--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    monkeypatch.setenv("NPROC", "32")  # threads: of fewer than devices all may wait in a collective
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # to compile faster
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batch_and_parameters_spread_over_devices_give_the_same_sum(monkeypatch, dtype):
    run(SPREAD.format(dtype=dtype), monkeypatch)


@pytest.mark.slow
def test_an_explicit_mesh_is_refused_by_name(monkeypatch):
    run(EXPLICIT, monkeypatch)


@pytest.mark.slow
def test_what_the_partitioner_gets_wrong_is_refused(monkeypatch):
    run(WRONG, monkeypatch)

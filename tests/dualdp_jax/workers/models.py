# SPDX-License-Identifier: Apache-2.0
"""Small models and data, the same in every process, and how their parameters lie on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dualdp_jax as dpj
from dualdp_jax.parallel.mesh import whole
from tests.dualdp_jax.runs import make_plan

N, CLASSES, WORDS, LENGTH = 203, 4, 13, 6


def _draw(rng, *shape):
    return rng.normal(size=shape) / np.sqrt(shape[0])


def _loss(logits, label):
    return -jax.nn.log_softmax(logits)[..., label].mean()


def mlp():
    rng = np.random.default_rng(1)
    params = {"w": _draw(rng, 12, 16), "b": np.zeros(16), "v": _draw(rng, 16, CLASSES)}
    x, y = rng.normal(size=(N, 12)), rng.integers(0, CLASSES, N)

    def loss(p, x, y):
        return _loss(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"], y)

    return params, loss, (x, y)


def cnn():
    rng = np.random.default_rng(2)
    params = {
        "k": _draw(rng, 3, 3, 1, 8) / 3,
        "l": _draw(rng, 3, 3, 8, 8) / 9,
        "v": _draw(rng, 8 * 4, CLASSES),
    }
    x, y = rng.normal(size=(N, 8, 8, 1)), rng.integers(0, CLASSES, N)

    def convolved(x, kernel):
        names = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x[None], kernel, (2, 2), "SAME", dimension_numbers=names)
        return jnp.tanh(y[0])

    def loss(p, x, y):
        return _loss(convolved(convolved(x, p["k"]), p["l"]).reshape(-1) @ p["v"], y)

    return params, loss, (x, y)


def words():
    """Tied embeddings, next-word loss, dropout by key."""
    rng = np.random.default_rng(3)
    params = {"words": _draw(rng, WORDS, 16), "up": _draw(rng, 16, 16), "scale": np.ones(16)}
    ids = rng.integers(0, WORDS, (N, LENGTH + 1))

    def loss(p, ids, key):
        h = p["words"][ids[:-1]]
        h = h * jax.random.bernoulli(key, 0.9, h.shape) * p["scale"]
        scores = jax.nn.log_softmax(jnp.tanh(jnp.cumsum(h, 0) @ p["up"]) @ p["words"].T)
        return -jnp.take_along_axis(scores, ids[1:, None], 1).mean()

    return params, loss, (ids,)


def layers():
    """The MLP, of two groups."""
    params, loss, data = mlp()
    nested = {"one": {"w": params["w"], "b": params["b"]}, "two": {"v": params["v"]}}
    return nested, lambda p, x, y: loss(p["one"] | p["two"], x, y), data


MODELS = {"mlp": mlp, "cnn": cnn, "words": words, "layers": layers}


def mesh_of(shape, names=("data",), kind=AxisType.Auto):
    """A mesh over the first devices."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names))


def place(params, mesh, axis, dtype):
    """Each leaf on the mesh, its largest axis split by a mesh axis where that divides it."""

    def one(leaf):
        leaf = np.asarray(leaf, dtype)
        largest = int(np.argmax(leaf.shape))
        divides = axis is not None and leaf.shape[largest] % mesh.shape[axis] == 0
        spec = [axis if divides and i == largest else None for i in range(leaf.ndim)]
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(one, params)


def plan(**changes):
    sizes = {"num_examples": N, "expected_batch_size": 24, "num_steps": 20}
    return make_plan(**sizes | {"delta": 1e-4, "seed": 5} | changes)


def arguments(model, mesh=None, split=None, dtype="float32", data_axes="data", **changes):
    """Of `make_private`, on one device or on a mesh; spot checks compile programs of their own."""
    params, loss, data = model
    data = tuple(x.astype(dtype) if x.dtype.kind == "f" else x.astype("int32") for x in data)
    placed = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    sharding = None
    if mesh is not None:
        placed = place(params, mesh, split, dtype)
        sharding = NamedSharding(mesh, P(data_axes))
    return {
        "loss_fn": loss,
        "params": placed,
        "optimizer": optax.sgd(0.2, momentum=0.5),
        "data": data,
        "needs_key": "words" in params,
        "data_sharding": sharding,
        "checks": 0,
    } | changes


def begin(model, *where, run=None, ledger=None, **changes):
    """Engine, step, state, loader."""
    engine = dpj.PrivacyEngine()
    given = arguments(model, *where, **changes)
    return engine, *engine.make_private(plan=run or plan(), ledger=ledger, **given)


def distance(ours, theirs):
    """Largest difference of two pytrees, relative to the largest number of each leaf."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    arrays = [(whole(a), whole(b)) for a, b in pairs]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in arrays)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in arrays)


BOUND = {"float32": 1e-5, "float64": 1e-10}

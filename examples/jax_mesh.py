# SPDX-License-Identifier: Apache-2.0
"""A private run on a mesh of eight devices, with parameters split over it, beside one device.

Without accelerators it plays the eight on a CPU. On several hosts start one process on each, and
call `jax.distributed.initialize()` first; nothing else changes.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)
os.environ.setdefault("NPROC", "32")  # threads that virtual devices share

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import dualdp.jax as dpj

STEPS = 10 if "--toy" in sys.argv else 300
BATCH_SIZE, NOISE_MULTIPLIER, MAX_GRAD_NORM, DELTA = 256, 1.0, 1.0, 1e-4
HIDDEN = 256


def first_params():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(64, HIDDEN)).astype(np.float32) / 8,
        "b": np.zeros(HIDDEN, np.float32),
        "v": rng.normal(size=(HIDDEN, 10)).astype(np.float32) / 16,
    }


def logits(params, image):
    """(64,) -> (10,)."""
    return jnp.tanh(image @ params["w"] + params["b"]) @ params["v"]


def loss_fn(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)


def split_over(mesh):
    """The parameters, each device with a part of every leaf."""
    specs = {"w": P(None, "data"), "b": P("data"), "v": P("data")}
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, specs[name]))
        for name, leaf in first_params().items()
    }


def trained(data, params, data_sharding):
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(1.0, momentum=0.5),
        data=data,
        data_sharding=data_sharding,
        expected_batch_size=BATCH_SIZE,
        num_steps=STEPS,
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=MAX_GRAD_NORM,
        delta=DELTA,
        seed=0,  # to compare the two runs; a real one has none
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    return engine, state.params


def main():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = np.split(np.random.default_rng(0).permutation(len(images)), [1500])
    data = images[train], labels[train]

    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    engine, params = trained(data, split_over(mesh), NamedSharding(mesh, P("data")))
    part = params["w"].addressable_shards[0].data.shape
    print(f"{mesh.size} devices; each holds {part} of {params['w'].shape} of w")

    _, alone = trained(data, first_params(), None)
    gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), params, alone)
    print(f"largest difference from the run on one device {max(gaps.values()):.1e}")

    found = jax.vmap(logits, (None, 0))(params, images[test]).argmax(-1)
    accuracy, epsilon = np.mean(found == labels[test]), engine.get_epsilon(delta=DELTA)
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {DELTA}")


if __name__ == "__main__":
    main()

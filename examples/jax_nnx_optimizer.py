# SPDX-License-Identifier: Apache-2.0
"""Your own loop with `nnx.Module` and `nnx.Optimizer`: the optimizer sees the noisy mean."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import dualdp
import dualdp.jax as dpj

STEPS = 5 if "--toy" in sys.argv else 200
DELTA = 1e-4


class MLP(nnx.Module):
    """64 - 64 - 10."""

    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        """(..., 64) -> (..., 10) logits."""
        return self.head(jnp.tanh(self.hidden(x)))


def loss_fn(model, image, label):
    """Loss of ONE example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


def main():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)

    plan = dualdp.PrivacyPlan(
        num_examples=len(images),
        expected_batch_size=128,
        num_steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=DELTA,
        physical_batch_size=64,
    )
    engine = dpj.PrivacyEngine()
    loader = engine.make_loader(data=(images, labels), plan=plan)
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def chunk_sum(model, chunk):
        return dpj.clipped_grad_sum(loss_fn, model, chunk).grads

    @nnx.jit
    def update(model, optimizer, mean):
        optimizer.update(model, mean)

    dpj.check(loss_fn, model, images[:16], labels[:16])  # once, outside of jit
    for batch in loader.remaining():
        parts = [chunk_sum(model, chunk) for chunk in batch.chunks]
        sums = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        engine.record()  # before its noise is drawn
        update(model, optimizer, dpj.noisy_mean(sums, batch))

    accuracy = (model(images).argmax(-1) == labels).mean()
    print(f"training accuracy {accuracy:.1%} at epsilon {engine.get_epsilon(delta=DELTA):.2f}")


if __name__ == "__main__":
    main()

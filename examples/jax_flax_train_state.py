# SPDX-License-Identifier: Apache-2.0
"""Your own loop with Flax' TrainState: three lines make it private.

`clipped_grad_sum` in the place of `jax.grad`, `engine.record()` before each
release, and `noisy_mean` before the optimizer. The loader draws what the accountant assumes.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import dualdp
import dualdp.jax as dpj

STEPS = 5 if "--toy" in sys.argv else 200
DELTA = 1e-4


class MLP(nn.Module):
    """64 - 64 - 10."""

    @nn.compact
    def __call__(self, x):
        """(64,) -> (10,) logits of one example."""
        return nn.Dense(10)(jnp.tanh(nn.Dense(64)(x)))


def main():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    model = MLP()

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
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), images[0]),
        tx=optax.adam(1e-2),
    )

    def loss_fn(params, image, label):
        logits = model.apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    @jax.jit
    def add_chunk(sums, params, chunk):
        return jax.tree.map(jnp.add, sums, dpj.clipped_grad_sum(loss_fn, params, chunk).grads)

    update = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))

    dpj.check(loss_fn, state.params, images[:16], labels[:16])  # once, outside of jit
    for batch in loader.remaining():
        sums = jax.tree.map(jnp.zeros_like, state.params)
        for chunk in batch.chunks:
            sums = add_chunk(sums, state.params, chunk)
        engine.record()  # before its noise is drawn
        state = update(state, dpj.noisy_mean(sums, batch))

    accuracy = (jax.vmap(model.apply, (None, 0))(state.params, images).argmax(-1) == labels).mean()
    print(f"training accuracy {accuracy:.1%} at epsilon {engine.get_epsilon(delta=DELTA):.2f}")


if __name__ == "__main__":
    main()

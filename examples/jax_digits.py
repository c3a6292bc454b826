# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with Flax: a private run from a target epsilon to the accuracy it buys."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import dualdp.jax as dpj

EPOCHS = 1 if "--toy" in sys.argv else 20
TARGET_EPSILON, TARGET_DELTA = 8.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 128, 1.0, 0.5


class CNN(nn.Module):
    """Two convolutions and one linear layer, for one image."""

    @nn.compact
    def __call__(self, x):
        """(8, 8, 1) -> (10,) logits."""
        for features in (16, 32):
            x = nn.avg_pool(jnp.tanh(nn.Conv(features, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(-1))


def main():
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1500], order[1500:]

    model = CNN()

    def loss_fn(params, image, label):
        logits = model.apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private_with_epsilon(
        loss_fn=loss_fn,
        params=model.init(jax.random.key(0), images[0]),
        optimizer=optax.sgd(LEARNING_RATE, momentum=0.5),
        data=(images[train], labels[train]),
        expected_batch_size=BATCH_SIZE,
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)

    logits = jax.vmap(model.apply, (None, 0))(state.params, images[test])
    accuracy = (logits.argmax(-1) == labels[test]).mean()
    epsilon = engine.get_epsilon(delta=TARGET_DELTA)
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()

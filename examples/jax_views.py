# SPDX-License-Identifier: Apache-2.0
"""The recipe of De et al. 2022 on handwritten digits with Flax: views of each image, an average.

A network whose layers mix no examples (weight standardisation, GroupNorm), a large batch, random
views of each image whose gradients are averaged before the clip, and for evaluation the average of
the parameters over the steps. None of it costs any epsilon.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import dualdp.jax as dpj

EPOCHS, VIEWS = (1, 2) if "--toy" in sys.argv else (20, 4)
TARGET_EPSILON, TARGET_DELTA = 4.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 256, 1.0, 2.0


class StandardisedConv(nn.Module):
    """Convolution by its weights less their mean, over their norm, for each output channel."""

    features: int

    @nn.compact
    def __call__(self, x):
        """(n, h, w, i) -> (n, h, w, o)."""
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        centred = kernel - kernel.mean((0, 1, 2))
        kernel = centred * jax.lax.rsqrt((centred**2).sum((0, 1, 2)) + 1e-4)
        layout = ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout) + bias
        )


class CNN(nn.Module):
    """Two convolutions and one linear layer."""

    @nn.compact
    def __call__(self, x):
        """(n, 8, 8, 1) -> (n, 10) logits."""
        for features in (16, 32):
            x = nn.relu(nn.GroupNorm(4)(StandardisedConv(features)(x)))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def view(example, key):
    """One view: the image, mixed with up to one half of itself, moved by at most one pixel."""
    image, label = example
    for_place, for_share = jax.random.split(key)
    down, right = jax.random.randint(for_place, (2,), 0, 3)
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
    moved = jax.lax.dynamic_slice(padded, (down, right, 0), image.shape)
    return image + jax.random.uniform(for_share) / 2 * (moved - image), label


def main():
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]

    model = CNN()

    def loss_fn(params, image, label):
        logits = model.apply(params, image[None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private_with_epsilon(
        loss_fn=loss_fn,
        params=model.init(jax.random.key(0), images[:1]),
        optimizer=dpj.with_ema(optax.sgd(LEARNING_RATE)),
        data=(images[train], labels[train]),
        expected_batch_size=BATCH_SIZE,
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
        views=VIEWS,
        augment=view,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)

    for name, params in (("last parameters", state.params), ("their average", engine.ema(state))):
        accuracy = (model.apply(params, images[test]).argmax(-1) == labels[test]).mean()
        epsilon = engine.get_epsilon(delta=TARGET_DELTA)
        print(f"{name}: accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()

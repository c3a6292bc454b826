# SPDX-License-Identifier: Apache-2.0
"""An Equinox model is a pytree, so it goes in as it is; here with an adaptive clipping bound."""

import sys

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import dualdp.jax as dpj
from dualdp.schedules import AdaptiveNorm

STEPS = 5 if "--toy" in sys.argv else 200
DELTA = 1e-4


def main():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)

    def loss_fn(model, image, label, key):
        logits = model(eqx.nn.Dropout(0.1)(image, key=key))
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=loss_fn,
        params=eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0)),
        optimizer=optax.adam(1e-2),
        data=(images, labels),
        needs_key=True,
        expected_batch_size=128,
        num_steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=AdaptiveNorm(initial=1.0, quantile=0.5),
        delta=DELTA,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)

    accuracy = (jax.vmap(state.params)(images).argmax(-1) == labels).mean()
    bound = engine.ledger.max_grad_norm
    epsilon = engine.get_epsilon(delta=DELTA)
    print(f"training accuracy {accuracy:.1%}, clipped at {bound:.2f}, epsilon {epsilon:.2f}")


if __name__ == "__main__":
    main()

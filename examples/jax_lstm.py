# SPDX-License-Identifier: Apache-2.0
"""Text with Flax's LSTM: which of two toy languages wrote this line?"""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn

import dualdp.jax as dpj

EPOCHS = 1 if "--toy" in sys.argv else 8
TARGET_EPSILON, TARGET_DELTA = 4.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 128, 1.0, 1e-2
ALPHABET, LENGTH, LINES = "abcdefgh ", 20, 2000


def lines(count, seed):
    """Lines of two languages that differ in which letter follows which: (count, LENGTH), labels."""
    rng = np.random.default_rng(seed)
    labels, size = rng.integers(2, size=count), len(ALPHABET)
    text = np.zeros((count, LENGTH), dtype=np.int32)
    text[:, 0] = rng.integers(size, size=count)
    for t in range(1, LENGTH):
        follows = (text[:, t - 1] + np.where(labels == 0, 1, 2)) % size
        text[:, t] = np.where(rng.random(count) < 0.5, follows, rng.integers(size, size=count))
    return text, labels.astype(np.int32)


class Reader(nn.Module):
    """Embedding, LSTM, and a decision from its last state; for one line."""

    @nn.compact
    def __call__(self, text):
        """(t,) -> (2,) logits."""
        states = nn.RNN(nn.LSTMCell(32))(nn.Embed(len(ALPHABET), 16)(text)[None])
        return nn.Dense(2)(states[0, -1])


def main():
    text, labels = lines(LINES, seed=0)
    print("one line:", "".join(ALPHABET[i] for i in text[0]))
    model = Reader()

    def loss_fn(params, line, label):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, line), label)

    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private_with_epsilon(
        loss_fn=loss_fn,
        params=model.init(jax.random.key(0), text[0]),
        optimizer=optax.adam(LEARNING_RATE),
        data=(text, labels),
        expected_batch_size=BATCH_SIZE,
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)

    new_text, new_labels = lines(500, seed=1)
    logits = jax.jit(jax.vmap(model.apply, (None, 0)))(state.params, new_text)
    accuracy = (logits.argmax(1) == new_labels).mean()
    epsilon = engine.get_epsilon(delta=TARGET_DELTA)
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()

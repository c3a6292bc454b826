# SPDX-License-Identifier: Apache-2.0
"""One epsilon, two kinds of noise, two stacks: digits with DP-SGD and with a band.

Each run has the same epsilon, batches of the same size and the same learning rate. The band takes
back a part of the noise of the seven steps before.
"""

import sys

import jax
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits
from torch import nn

import dualdp
import dualdp.jax as dpj
import dualdp.torch as dpt

STEPS, BATCH_SIZE = (8, 64) if "--toy" in sys.argv else (400, 64)
LEARNING_RATE, EPSILON, DELTA = 1.0, 8.0, 1e-4


def data():
    """Training and test images in [-1, 1], and labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def plan_for(**noise):
    return dualdp.PrivacyPlan.calibrate(
        target_epsilon=EPSILON,
        delta=DELTA,
        num_examples=1437,
        expected_batch_size=BATCH_SIZE,
        num_steps=STEPS,
        max_grad_norm=1.0,
        seed=0,
        **noise,
    )


def with_torch(plan, x, y, test_x, test_y):
    """Accuracy of a linear classifier on PyTorch."""
    torch.manual_seed(0)
    model, engine = nn.Linear(64, 10), dpt.PrivacyEngine()
    pairs = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(pairs, batch_size=BATCH_SIZE),
        plan=plan,
    )
    for images, labels in loader.remaining():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(torch.tensor(test_x)).argmax(1).numpy() == test_y).mean()


def with_jax(plan, x, y, test_x, test_y):
    """Accuracy of a linear classifier on JAX."""

    def loss_fn(params, image, label):
        logits = image @ params["weight"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    weight = jax.random.normal(jax.random.key(0), (64, 10)) / 8
    step, state, loader = dpj.PrivacyEngine().make_private(
        loss_fn=loss_fn,
        params={"weight": weight, "bias": np.zeros(10, np.float32)},
        optimizer=optax.sgd(LEARNING_RATE),
        data=(x, y),
        plan=plan,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    logits = test_x @ state.params["weight"] + state.params["bias"]
    return (np.asarray(logits).argmax(1) == test_y).mean()


def main():
    digits = data()
    band = dualdp.correlated.optimise(family="band", num_steps=STEPS, bands=8)
    plans = {
        "independent": plan_for(),
        "band of 8": plan_for(correlation=band, sampler="cyclic_poisson", min_separation=8),
    }
    for name, plan in plans.items():
        scores = with_torch(plan, *digits), with_jax(plan, *digits)
        spent = f"epsilon {plan.epsilon():.2f}"
        print(f"{name}: accuracy {scores[0]:.3f} (PyTorch), {scores[1]:.3f} (JAX), {spent}")


if __name__ == "__main__":
    main()

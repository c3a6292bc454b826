# SPDX-License-Identifier: Apache-2.0
"""Data, networks and numbers that the accuracy tables share."""

import math
import platform
import statistics
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

QUICK = "--quick" in sys.argv
SEEDS = range(2 if QUICK else 10)
TUNING_SEEDS = range(1000, 1001 if QUICK else 1003)
EPSILONS = (2.0, 8.0)
DELTA = 1e-4


def on_one_core():
    """Let both frameworks compute on one core."""
    jax.config.update("jax_platforms", "cpu")
    torch.set_num_threads(1)


def digits():
    """Return training and test data of the digits, (n, 64) and labels."""
    x, y = load_digits(return_X_y=True)
    return split((x / 8 - 1).astype(np.float32), y.astype(np.int64), 1437)


def split(x, y, cut):
    """Cut the data after a fixed permutation."""
    order = np.random.default_rng(0).permutation(len(x))
    return x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]]


def start(sizes, seed):
    """Return the weights of a network, (in, out) and (out,) each."""
    rng = np.random.default_rng(seed)
    pairs = zip(sizes, sizes[1:], strict=False)
    return [
        (rng.normal(size=pair).astype(np.float32) / math.sqrt(pair[0]), np.zeros(pair[1], "f"))
        for pair in pairs
    ]


def torch_network(weights):
    """Return linear layers with tanh between them."""
    layers = []
    for weight, bias in weights:
        linear = nn.Linear(*weight.shape)
        linear.load_state_dict({"weight": torch.tensor(weight.T), "bias": torch.tensor(bias)})
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def jax_outputs(weights, x):
    """Return the outputs of the same network."""
    for number, (weight, bias) in enumerate(weights):
        x = (jnp.tanh(x) if number else x) @ weight + bias
    return x


def accuracy(outputs, y):
    """Return the share of outputs whose largest is at the label."""
    return float((outputs.argmax(-1) == y).mean())


def standard_error(scores):
    """Return the standard error of the mean."""
    return statistics.stdev(scores) / math.sqrt(len(scores))


def mean_and_error(scores):
    """Return the mean and its standard error as text."""
    return f"{statistics.mean(scores):.4f} ± {standard_error(scores):.4f}"


def versions():
    """Return the versions of Python and the frameworks as text."""
    python = platform.python_version()
    return f"Python {python}, torch {version('torch')}, jax {version('jax')}"

# SPDX-License-Identifier: Apache-2.0
"""docs/resuming.md: every line of its table is true, on both stacks; its first example runs."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen
from torch import nn
from torch.nn import functional as F  # noqa: N812

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "resuming.md").read_text()
LINES = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.split("## What differs by default")[1].splitlines()
    if line.startswith("| ") and "`" in line
]

assert len(LINES) >= 15
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(40, 5)),
    "p": RNG.dirichlet(np.ones(5), 40),
    "small": 1e-2 * RNG.normal(size=(6, 5)),
    "image": RNG.normal(size=(3, 4, 6, 6)),
    "faint": 1e-2 * RNG.normal(size=(3, 4, 6, 6)),
    "w": RNG.normal(size=(2, 4, 3, 3)),
    "wide": np.zeros((2, 64)),
}
LABELS = RNG.integers(0, 5, 40)


def spread(values):
    """Standard deviation and largest absolute value, of 500 x 64 numbers and more."""
    values = np.asarray(values.detach() if isinstance(values, torch.Tensor) else values)
    return Spread([values.std(), np.abs(values).max()])


class Spread(np.ndarray):
    """Two numbers that are only about the same."""

    def __new__(cls, values):
        return np.asarray(values).view(cls)


def new(layer, *inputs):
    return layer.init(jax.random.key(0), *inputs).get("params", {})


def fresh(layer, *inputs):
    return layer.apply(layer.init(jax.random.key(0), *inputs), *inputs)


def running_mean(layer, x):
    if isinstance(layer, nn.Module):
        layer(x)
        return layer.running_mean
    variables = layer.init(jax.random.key(0), x)
    _, changed = layer.apply(variables, x, mutable=["batch_stats"])
    return changed["batch_stats"]["mean"]


TORCH = {
    "nn": nn, "F": F, "last": lambda x: x.movedim(1, -1),
    **{name: torch.as_tensor(value, dtype=torch.float32) for name, value in DATA.items()},
    "y": torch.as_tensor(LABELS),
}  # fmt: skip
JAX = {
    "jax": jax, "linen": linen, "optax": optax, "fresh": fresh, "new": new,
    "last": lambda x: jnp.moveaxis(x, 1, -1),
    **{name: jnp.asarray(value, jnp.float32) for name, value in DATA.items()},
    "y": jnp.asarray(LABELS),
}  # fmt: skip


def value(cell, names):
    """What the code of a cell gives; after "with" stands a definition that it uses."""
    code, *definitions = re.findall(r"`([^`]+)`", cell)
    names = {**names, "spread": spread, "running_mean": running_mean}
    for definition in definitions:
        exec(definition, names)
    found = eval(code, names)
    return np.asarray(found.detach()) if isinstance(found, torch.Tensor) else np.asanyarray(found)


def agree(one, two):
    tolerance = 0.1 if isinstance(one, Spread) else 1e-5  # the largest of 500 normals scatters
    return one.shape == two.shape and np.allclose(one, two, rtol=tolerance, atol=1e-6)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
@pytest.mark.parametrize("cells", LINES, ids=lambda cells: cells[0])
def test_every_line_of_the_table_is_true(cells):
    _, torch_says, jax_says, to_write = cells
    torch.manual_seed(0)
    theirs, ours = value(torch_says, TORCH), value(jax_says, JAX)
    if to_write == "the same":
        assert agree(theirs, ours)
        return
    assert not agree(theirs, ours), "the default is the same: say so"
    assert agree(theirs, value(to_write, JAX))


@pytest.mark.slow
def test_the_first_example_prints_what_the_page_says():
    said = re.search(r"\$ python (examples/port_digits.py)\n(.*?)```", PAGE, re.DOTALL)
    command = [sys.executable, said[1]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == said[2]

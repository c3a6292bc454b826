# SPDX-License-Identifier: Apache-2.0
"""What a step does, operation by operation, does not depend on which examples are clipped.

Equal operations on equal shapes are what can be promised of time; docs/promises.md says what
remains. Seconds are not measured here: they would show the machine.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from tests.backends.runs import make_plan

ROWS, BOUND = 8, 1.0
SLOW = pytest.mark.slow
methods = pytest.mark.parametrize(
    "method", ["auto", *(pytest.param(m, marks=SLOW) for m in ("materialize", "two_pass"))]
)
#: How much larger than the bound the examples' gradients are.
SCALES = {
    "none is clipped": [1e-3] * ROWS,
    "all are clipped": [1e3] * ROWS,
    "the first half": [1e3] * 4 + [1e-3] * 4,
    "one": [1e-3] * 7 + [1e3],
}


class Operations(TorchDispatchMode):
    """Notes every operation with the shapes it works on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(t.shape) for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def inputs(positions):
    rng = np.random.default_rng(1)
    return rng.normal(size=(ROWS, 8, 5) if positions else (ROWS, 40)).astype("f")


def torch_step(scales, method, positions, clipping):
    """Operations of the second step, and how many examples it clipped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5 if positions else 40, 16), nn.Tanh(), nn.Linear(16, 3))
    data = TensorDataset(torch.from_numpy(inputs(positions)), torch.tensor(scales))
    engine = dpt.PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-9),
        data_loader=DataLoader(data, batch_size=ROWS),
        plan=make_plan(
            num_examples=ROWS,
            expected_batch_size=ROWS,
            num_steps=2,
            max_grad_norm=BOUND,
            sampler="shuffle",
            clipping=clipping,
        ),
        grad_sample_mode=method,
        loss_reduction="sum",
    )
    for x, scale in loader.remaining():  # the first step also examines the model
        optimizer.zero_grad()
        with Operations() as operations:
            out = F.log_softmax(net(x), -1)[..., 0]
            (out.reshape(len(x), -1).sum(1) * scale).sum().backward()
            optimizer.step()
    return operations.seen, int((engine.stages().unprotected_norms > BOUND).sum())


@pytest.mark.parametrize(
    ("clipping", "positions"), [("flat", True), ("per_layer", False)], ids=["flat", "per_layer"]
)
@methods
def test_torch_does_the_same_whoever_is_clipped(method, clipping, positions):
    if (method, clipping) == ("two_pass", "per_layer"):
        method = "vmap"  # two_pass can't clip by layers
    found = {n: torch_step(s, method, positions, clipping) for n, s in SCALES.items()}
    assert [clipped for _, clipped in found.values()] == [0, ROWS, 4, 1]
    first, *others = (seen for seen, _ in found.values())
    assert len(first) > 20
    for seen in others:
        assert seen == first


def loss(params, x, scale):
    out = jnp.tanh(x @ params["a"]) @ params["b"]
    return jax.nn.log_softmax(out)[0] * scale


def weights():
    rng = np.random.default_rng(2)
    return {name: rng.normal(size=s).astype("f") for name, s in (("a", (40, 16)), ("b", (16, 3)))}


@methods
def test_the_compiled_step_of_jax_has_one_way(method):
    """A branch leads to norms that are computed a second way, whoever is clipped."""
    x, mask, counts = inputs(False), np.ones(ROWS, bool), []
    program = jax.jit(
        lambda params, x, scale: dpj.clipped_grad_sum(
            loss, params, x, scale, max_grad_norm=BOUND, mask=mask, method=method
        )
    )
    jaxpr = jax.make_jaxpr(program)(weights(), x, np.ones(ROWS, "f"))
    assert "while[" not in str(jaxpr)
    for scales in SCALES.values():
        norms = program(weights(), x, np.asarray(scales, "f")).norms
        counts.append(int((norms > BOUND).sum()))
    assert counts == [0, ROWS, 4, 1]
    assert program._cache_size() == 1

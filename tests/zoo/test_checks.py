# SPDX-License-Identifier: Apache-2.0
"""Checks at every step over the zoo: no false alarm.

A comparison is one example's numbers, or one sum, against plain autodiff. Each model makes at least
a given number of them, so that the models may be tested in any order and by several processes.
"""

import jax
import numpy as np
import optax
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import dualdp_jax as dpj
import dualdp_torch as dpt
import dualdp_torch.per_sample.api
from dualdp import PrivacyPlan
from dualdp_jax.per_sample.checks import identity as jax_identity
from dualdp_torch.per_sample.checks import identity
from tests.zoo import torch_check
from tests.zoo.entry import N
from tests.zoo.jax_models import JAX
from tests.zoo.torch_zoo import TORCH

pytestmark = pytest.mark.filterwarnings("ignore")  # code from outside warns about itself
jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
slow = pytest.mark.slow
named = {"ids": lambda entry: entry.name}

TORCH_STEPS, JAX_STEPS = 4, 200
OF_TORCH_STEPS = TORCH_STEPS + 2
OF_JAX_STEPS = 2 * JAX_STEPS

IN_TORCH_ENGINE = [entry for entry in TORCH if entry.engine_refusal is None]
#: Half of the models and twice the steps: compiling takes the time. test_jax_zoo.py has all models.
IN_JAX_ENGINE = [entry for entry in JAX if entry.engine_refusal is None][::2]


# ---------------------------------------------------------------------- PyTorch, nothing wrong


class Count:
    """How many comparisons were made."""

    def __init__(self):
        self.number = 0


@pytest.fixture
def in_torch(monkeypatch):
    """Counts comparisons: of a few rows alone, of a sum, and of the other rows replaced."""
    count, right = Count(), identity.check

    def check(*arguments, **options):
        compared = right(*arguments, **options)
        count.number += (min(N, identity.ROWS_LATER) + 2) * compared
        return compared

    monkeypatch.setattr(identity, "check", check)
    return count


def torch_batch(batch, generator):
    """Its rows in another order, every floating number moved."""
    index = torch.randperm(N, generator=generator)

    def moved(part):
        if not torch.is_tensor(part):
            return part
        part = part[index]
        if not part.is_floating_point():
            return part
        return part * (1 + 0.3 * torch.randn(part.shape, generator=generator).to(part))

    return pytree.tree_map(moved, batch)


class Rows(torch_check.Rows):
    """The examples of several batches."""

    def __init__(self, batches):
        super().__init__(None)
        self._batches = batches

    def __len__(self):
        return N * len(self._batches)

    def __getitem__(self, k):
        return torch_check.rows(self._batches[k // N], k % N)


def plan_of(count, size, steps, bound, noise=1.0, **changes):
    return PrivacyPlan(
        num_examples=count, expected_batch_size=size, num_steps=steps, noise_multiplier=noise,
        max_grad_norm=bound, delta=1e-3, accountant="rdp", seed=3, **changes,
    )  # fmt: skip


@slow
@pytest.mark.parametrize("entry", IN_TORCH_ENGINE, **named)
def test_steps_in_torch_raise_nothing(entry, in_torch):
    """Every step of a short run is checked."""
    model, loss_fn, batch, _ = entry.build()
    norms = dpt.per_sample_norms(loss_fn, model, *batch, method="loop")
    generator = torch.Generator().manual_seed(0)
    data = Rows([batch, *(torch_batch(batch, generator) for _ in range(2))])
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        data_loader=DataLoader(data, batch_size=N),
        plan=plan_of(len(data), N, TORCH_STEPS, float(norms.median()), sampler="shuffle"),
        checks=1.0,
    )
    steps = 0
    try:
        while steps < TORCH_STEPS:
            for rows in loader:
                optimizer.zero_grad()
                loss_fn(model, *rows).mean().backward()
                optimizer.step()
                steps += 1
        assert engine.ledger.failed_check is None
        assert engine.ledger.last_check == TORCH_STEPS - 1
    finally:
        engine.detach()
    assert in_torch.number >= OF_TORCH_STEPS


# ---------------------------------------------------------------------- JAX, nothing wrong
# Calls inside jit are checked where they are compared with the loop, in test_jax_zoo.py.


@pytest.fixture
def in_jax(monkeypatch):
    """Counts examples and sums that were compared."""
    count = Count()
    for name in ("of_row", "of_sum"):
        right = getattr(jax_identity.Comparison, name)

        def counted(*arguments, right=right):
            found = right(*arguments)
            count.number += 1
            return found

        monkeypatch.setattr(jax_identity.Comparison, name, counted)
    return count


def jax_batch(batch, rng):
    """Its rows in another order, every floating number moved."""
    index = rng.permutation(N)

    def moved(part):
        part = np.asarray(part)[index]
        if not np.issubdtype(part.dtype, np.floating):
            return part
        return (part * (1 + 0.3 * rng.normal(size=part.shape))).astype(part.dtype)

    return tuple(map(moved, batch))


@slow
@pytest.mark.parametrize("entry", IN_JAX_ENGINE, **named)
def test_steps_in_jax_raise_nothing(entry, in_jax):
    """Every step of a run is checked."""
    problem, rng = entry.build(), np.random.default_rng(0)
    batches = [tuple(map(np.asarray, problem.batch))]
    batches += [jax_batch(problem.batch, rng) for _ in range(3)]
    data = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=problem.loss_fn,
        params=problem.model,
        optimizer=optax.sgd(1e-3),
        data=data,
        plan=plan_of(4 * N, 6, JAX_STEPS, 1.0, physical_batch_size=6),
        trainable=problem.trainable,
        checks=1.0,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    assert engine.ledger.failed_check is None
    assert in_jax.number >= OF_JAX_STEPS


# ---------------------------------------------------------------------- faults

# SPDX-License-Identifier: Apache-2.0
"""The mechanism as it is: noise and batches that both engines make, put to statistical tests.

Every test has a twin with a fault of the size that the test is meant to find, and rejects it. Seeds
are fixed, so that a right mechanism passes always; p-values below `LEVEL` reject.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from scipy import stats

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan
from tests.conftest import BACKENDS, DEVICE

LEVEL = 1e-4
N, STEPS = 40, 30
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 50)).astype(np.float32)
WEIGHT = RNG.normal(size=(40, 50)).astype(np.float32) / 7
HEAD = RNG.normal(size=(30, 40)).astype(np.float32) / 6

stacks = pytest.mark.parametrize("stack", BACKENDS)
noises = pytest.mark.parametrize("noise", ["fast", "portable"])
splits = pytest.mark.parametrize("rows", [None, 5], ids=["whole", "split"])


def make_plan(**changes):
    arguments = {
        "num_examples": N,
        "expected_batch_size": 12,
        "num_steps": STEPS,
        "noise_multiplier": lambda step: 0.5 + step / STEPS,
        "max_grad_norm": lambda step: 1.5 - step / STEPS,
        "delta": 1e-5,
        "accountant": "rdp",
        "seed": 1,
    }
    return PrivacyPlan(**{**arguments, **changes})


def torch_run(plan):
    """(rows, sums, what the optimizer got) of every release of a run in torch."""
    model = torch.nn.Sequential(
        torch.nn.Linear(50, 40, bias=False), torch.nn.Tanh(), torch.nn.Linear(40, 30, bias=False)
    )
    for layer, weight in ((model[0], WEIGHT), (model[2], HEAD)):
        layer.weight.data = torch.tensor(weight)
    model.to(DEVICE)
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.arange(N))
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=torch.utils.data.DataLoader(data, batch_size=12),
        loss_reduction="sum",
        plan=plan,
    )
    drawn = []
    for x, index in loader.remaining():
        before = engine.ledger.position
        optimizer.zero_grad()
        (model(x.to(DEVICE)) ** 2).sum().backward()
        optimizer.step()
        drawn += index.tolist()  # no draw is empty at these sizes; padding repeats example 0
        if engine.ledger.position > before:
            stages = engine.stages()
            got = {name: p.grad.cpu() for name, p in model.named_parameters()}
            sums = {name: total.cpu() for name, total in stages.unprotected_sum.items()}
            yield drawn[: len(stages.unprotected_norms)], sums, got
            drawn = []


def jax_run(plan):
    """(rows, sums, what the optimizer got) of every release of a run in JAX."""
    keep = optax.GradientTransformation(lambda p: p, lambda updates, _, p=None: (updates, updates))
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=lambda p, x: ((p["b"] @ jnp.tanh(p["a"] @ x)) ** 2).sum(),
        params={"a": jnp.asarray(WEIGHT), "b": jnp.asarray(HEAD)},
        optimizer=optax.chain(keep, optax.sgd(0.01)),
        data=X,
        plan=plan,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
        rows = np.concatenate([chunk.indices[chunk.mask] for chunk in batch.chunks])
        yield rows, engine.stages().unprotected_sum, state.opt_state[0]


@cache
def releases(stack, noise="fast", rows=None, scale=1.0):
    """Noise of each release, (STEPS, numbers) in units of what is declared, leaf after leaf."""
    declared = make_plan()
    plan = make_plan(
        noise=noise,
        physical_batch_size=rows,
        noise_multiplier=lambda step: scale * declared.noise_multiplier_at(step),
    )
    found = []
    for step, (_, sums, got) in enumerate({"torch": torch_run, "jax": jax_run}[stack](plan)):
        leaves = (
            np.asarray(mean, np.float64) * plan.expected_batch_size_at(step) - np.asarray(total)
            for mean, total in zip(values(got), values(sums), strict=True)
        )
        flat = np.concatenate([leaf.ravel() for leaf in leaves])
        found.append(flat / declared.noise_stddev(step))
    return np.array(found)


def values(tree):
    """The leaves of a dict, as NumPy."""
    return [np.asarray(leaf) for _, leaf in sorted(tree.items())]


def spread_p(z):
    """Two-sided p-value of the variance of standard normals, chi-square."""
    total = (z**2).sum()
    return 2 * min(stats.chi2.cdf(total, z.size), stats.chi2.sf(total, z.size))


def largest_p(z):
    """p-value of the largest of standard normals, corrected for their number."""
    return min(1.0, 2 * z.size * stats.norm.sf(np.abs(z).max()))


@stacks
@noises
@splits
def test_noise_has_the_declared_scale_and_shape(stack, noise, rows):
    z = releases(stack, noise, rows)
    assert z.shape == (STEPS, WEIGHT.size + HEAD.size)
    assert spread_p(z) > LEVEL
    for step in z:  # each step by itself, as the schedules move
        assert spread_p(step) > LEVEL / STEPS
    assert stats.kstest(z.ravel(), "norm").pvalue > LEVEL
    assert abs(z.mean()) < 4 / np.sqrt(z.size)


def largest_correlation(rows):
    """Largest |correlation| of two rows, in standard deviations."""
    rows = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
    found = rows @ rows.T / np.sqrt(rows.shape[1])
    np.fill_diagonal(found, 0)
    return np.abs(found).max()


def both_leaves(z):
    """(2 * STEPS, numbers): the beginning of the first leaf, then the second leaf."""
    return np.concatenate([z[:, : HEAD.size], z[:, WEIGHT.size :]])


def repeated(z):
    """Share of the numbers that occur more than once, to 10 digits."""
    rounded = np.round(np.abs(z.ravel()), 10)
    return 1 - len(np.unique(rounded)) / rounded.size


@stacks
@noises
@splits
def test_noise_is_independent_across_steps_and_leaves(stack, noise, rows):
    z = releases(stack, noise, rows)
    assert largest_correlation(z) < 5.5  # of STEPS^2 / 2 pairs
    assert largest_correlation(both_leaves(z)) < 5.5
    lagged = [(z[:, lag:] * z[:, :-lag]).sum() / np.sqrt(z[:, lag:].size) for lag in range(1, 40)]
    assert np.abs(lagged).max() < 5
    assert repeated(z) < 0.02  # float32 normals have few values; noise used twice shows as 1/30


@stacks
@noises
def test_noise_does_not_depend_on_the_physical_batches(stack, noise):
    """One draw of noise per release, however many physical batches it took."""
    np.testing.assert_allclose(releases(stack, noise, None), releases(stack, noise, 5), atol=2e-4)


# ---------------------------------------------------------------------- batches

DRAWS, RATE = 400, 0.3


@cache
def memberships(stack, sampler="poisson"):
    """(DRAWS, N) bool: which examples the loader of a stack gave to the step."""
    plan = make_plan(
        num_steps=DRAWS,
        expected_batch_size=RATE * N,
        sampler=sampler,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=N,
        accountant="rdp" if sampler == "poisson" else "pld",
        neighboring_relation="replace" if sampler == "fixed_size" else "add_or_remove",
        seed=2,
    )
    found = np.zeros((DRAWS, N), bool)
    for step, (rows, *_) in enumerate({"torch": torch_run, "jax": jax_run}[stack](plan)):
        found[step, rows] = True
    return found


def batch_p_values(member):
    """p-values of the ways in which draws can fail to be Poisson."""
    member, rate = member.astype(float), RATE
    spread = rate * (1 - rate)
    z = (member - rate) / np.sqrt(spread)
    examples = z.sum(0) / np.sqrt(DRAWS)
    pairs = (z.T @ z / np.sqrt(DRAWS))[np.triu_indices(N, 1)]
    steps = (z[1:] * z[:-1]).sum(0) / np.sqrt(DRAWS - 1)
    sizes = z.sum(1) / np.sqrt(N)
    return {
        "inclusion": spread_p(examples),
        "one example": largest_p(examples),
        "pairs": largest_p(pairs),
        "steps": largest_p(steps),
        "sizes": spread_p(sizes),
    }


@pytest.mark.slow
@stacks
def test_batches_are_poisson(stack):
    found = batch_p_values(memberships(stack))
    assert min(found.values()) > LEVEL, found

# SPDX-License-Identifier: Apache-2.0
"""Spot checks over the zoo: no false alarm in ten thousand comparisons, and none that is blind.

A comparison is one example's numbers, or one sum, against plain autodiff. Each model makes at least
a given number of them, so that the models may be tested in any order and by several processes.
"""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import dualdp_jax as dpj
import dualdp_torch as dpt
import dualdp_torch.per_sample.api
from dualdp import ExactnessError, PrivacyPlan, exactness
from dualdp_jax.per_sample import clip as jax_bounds
from dualdp_jax.per_sample.checks import identity as jax_identity
from dualdp_jax.rules import RULES as JAX_RULES
from dualdp_torch.per_sample import clip as torch_clip
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.rules import RULES as TORCH_RULES
from tests.zoo import torch_check
from tests.zoo.entry import N
from tests.zoo.jax_models import JAX
from tests.zoo.torch_zoo import BY_LOOP, TORCH

pytestmark = pytest.mark.filterwarnings("ignore")  # code from outside warns about itself
jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
slow = pytest.mark.slow
named = {"ids": lambda entry: entry.name}

WANTED = 10_000
METHODS = ("auto", "book_keeping", "two_pass", "materialize")
ROUNDS, EACH = 2, 2  # batches of a functional call in PyTorch, and methods of each
TORCH_STEPS, JAX_STEPS = 4, 200
#: Fewest comparisons of a model: a call or step that is checked looks at one example or two, a call
#: at the sum, too. On JAX, one step in five is looked at as a whole.
OF_TORCH_CALLS = 2 * EACH * ROUNDS
OF_TORCH_STEPS = TORCH_STEPS + 2
OF_JAX_STEPS = 2 * JAX_STEPS

IN_TORCH_CALLS = [entry for entry in TORCH if not (entry.refusal or entry.name in BY_LOOP)]
IN_TORCH_ENGINE = [entry for entry in TORCH if entry.engine_refusal is None]
IN_JAX_CALLS = [entry for entry in JAX if entry.refusal is None][1::6]
#: Half of the models and twice the steps: compiling takes the time. test_jax_zoo.py has all models.
IN_JAX_ENGINE = [entry for entry in JAX if entry.engine_refusal is None][::2]


def test_there_are_ten_thousand_comparisons():
    pairs = (
        (IN_TORCH_CALLS, OF_TORCH_CALLS),
        (IN_TORCH_ENGINE, OF_TORCH_STEPS),
        (IN_JAX_ENGINE, OF_JAX_STEPS),
    )
    assert sum(len(entries) * fewest for entries, fewest in pairs) >= WANTED


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


@slow
@pytest.mark.parametrize("entry", IN_TORCH_CALLS, **named)
def test_calls_in_torch_raise_nothing(entry, in_torch):
    """Other weights, rows and bounds in each round; the methods take turns."""
    problem = entry.build()
    start = [p.detach().clone() for p in problem.model.parameters()]
    loss_fn, model = problem.loss_fn, problem.model
    norms = dpt.per_sample_norms(loss_fn, model, *problem.batch, method="loop")
    for number in range(ROUNDS):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value * (1 + 0.3 * torch.randn(value.shape, generator=generator)))
        batch = torch_batch(problem.batch, generator)
        bound = float(norms.median()) * (0.3, 1, 3)[number % 3]
        for turn in range(EACH):
            method = METHODS[(EACH * number + turn) % len(METHODS)]
            dpt.clipped_grad_sum(
                loss_fn, model, *batch, max_grad_norm=bound, method=method, check="always"
            )
    assert in_torch.number >= OF_TORCH_CALLS


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
    for name in ("_check_row", "_compare"):
        right = getattr(jax_identity, name)

        def counted(*arguments, right=right):
            right(*arguments)
            count.number += 1

        monkeypatch.setattr(jax_identity, name, counted)
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
@pytest.mark.parametrize("entry", IN_JAX_CALLS, **named)
def test_calls_outside_of_jit_raise_nothing(entry, in_jax):
    problem = entry.build()
    batch = map(jnp.asarray, jax_batch(problem.batch, np.random.default_rng(1)))
    dpj.clipped_grad_sum(
        problem.loss_fn,
        problem.model,
        *batch,
        max_grad_norm=1.0,
        trainable=problem.trainable,
        check="always",
    )
    assert in_jax.number >= 2


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

EXAMPLES = 8
RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(EXAMPLES, 6)), RNG.normal(size=(3, 6))
#: Share of the tolerance -> whether it is caught.
SHARES = {2.0: True, -2.0: True, 0.1: False}
PRECISIONS = ("float32", "float64")
BOUND = 1e-2  # every example is clipped
#: In PyTorch the example with the largest gradient is looked at when it is drawn, one time in
#: eight, and always only where no norm has an error bound.
TURNS = 60


def one_wrong(values, error, xp):
    """(n,) values, of which the largest is off by a relative error; of single ones none."""
    if values.ndim == 0:
        return values
    return xp.where(values == values.max(), values * (1 + error), values)


def largest_factor_wrong(owner, xp):
    """Plant: the example with the largest norm is scaled by a wrong factor."""

    def plant(patch, error):
        right = owner.factors_for

        def wrong(clipping, norms, bound, *, xp):
            factors = right(clipping, norms, bound, xp=xp)
            if xp is not ours or norms.ndim == 0:
                return factors
            return xp.where(norms == norms.max(), factors * (1 + error), factors)

        ours = xp
        patch.setattr(owner, "factors_for", wrong)

    return plant


def torch_norm_wrong(patch, error):
    right = torch_clip.norms_of

    def wrong(*arguments):
        squares, norms = right(*arguments)
        return squares, one_wrong(norms, error, torch)

    patch.setattr(torch_clip, "norms_of", wrong)


def torch_rule_wrong(patch, error):
    """The gradient of the example with the largest one, which the rule of a layer forms."""
    right = TORCH_RULES[F.linear]

    def grads(*arguments, **options):
        found = right.grads["weight"](*arguments, **options)
        sizes = found.flatten(1).norm(dim=1)
        factors = one_wrong(sizes, error, torch) / sizes
        return found * factors.view(-1, *[1] * (found.dim() - 1))

    wrong = replace(right, grads={**right.grads, "weight": grads})
    patch.setitem(TORCH_RULES, F.linear, wrong)


def jax_norm_wrong(patch, error):
    right = jax_bounds.Clip.__call__

    def wrong(self, found, mask, given=None):
        norms, factors = right(self, found, mask, given)
        return one_wrong(norms, error, jnp), factors

    patch.setattr(jax_bounds.Clip, "__call__", wrong)


def jax_rule_wrong(patch, error):
    """The norm of the example with the largest one, which the rule of a primitive finds."""
    right = JAX_RULES["dot_general"]

    def norms(*arguments):
        found = right.norms(*arguments)
        return found._replace(sq_norms=one_wrong(found.sq_norms, (1 + error) ** 2 - 1, jnp))

    patch.setitem(JAX_RULES, "dot_general", right._replace(norms=norms))


#: Name -> (plant, method of the functional call that meets it).
TORCH_FAULTS = {
    "contribution": (largest_factor_wrong(torch_clip, torch), "auto"),
    "norm": (torch_norm_wrong, "auto"),
    "rule": (torch_rule_wrong, "materialize"),
}
JAX_FAULTS = {
    "contribution": (largest_factor_wrong(jax_bounds, jnp), "auto"),
    "norm": (jax_norm_wrong, "auto"),
    "rule": (jax_rule_wrong, "book_keeping"),
}


def expectation(caught):
    if not caught:
        return contextlib.nullcontext()
    return pytest.raises(ExactnessError, match="A spot check failed")


def error_of(share, precision):
    return share * exactness.TOLERANCE[precision]


def torch_problem(precision):
    model = torch.nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(W))
    dtype = getattr(torch, precision)
    return model.to(dtype), torch.tensor(X, dtype=dtype)


def torch_loss(model, x):
    return (model(x) ** 2).sum(1)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fault", TORCH_FAULTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_calls_in_torch_are_held_to_the_tolerance(precision, fault, share, monkeypatch):
    model, x = torch_problem(precision)
    plant, method = TORCH_FAULTS[fault]
    plant(monkeypatch, error_of(share, precision))
    with expectation(SHARES[share]):
        for _ in range(TURNS):
            dpt.clipped_grad_sum(
                torch_loss, model, x, max_grad_norm=BOUND, method=method, check="always"
            )


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fault", TORCH_FAULTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_in_torch_are_held_to_the_tolerance(precision, fault, share, monkeypatch):
    model, x = torch_problem(precision)
    plant, _ = TORCH_FAULTS[fault]
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data_loader=DataLoader(torch.utils.data.TensorDataset(x), batch_size=EXAMPLES),
        plan=plan_of(EXAMPLES, EXAMPLES, TURNS, BOUND, sampler="shuffle"),
        grad_sample_mode="ew" if fault == "rule" else "auto",
        checks=1.0,
    )
    plant(monkeypatch, error_of(share, precision))
    try:
        with expectation(SHARES[share]):
            for (rows,) in loader.remaining():
                optimizer.zero_grad()
                torch_loss(model, rows).mean().backward()
                optimizer.step()
    finally:
        engine.detach()
    assert (engine.ledger.failed_check is not None) == SHARES[share]


def jax_loss(params, x):
    return jnp.sum((params @ x) ** 2)


@pytest.fixture
def jax_problem(request):
    """Parameters and a batch in a precision."""
    with jax.enable_x64(request.param == "float64"):
        yield request.param, jnp.asarray(W, request.param), jnp.asarray(X, request.param)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fault", JAX_FAULTS)
@pytest.mark.parametrize("jax_problem", PRECISIONS, indirect=True)
def test_calls_in_jax_are_held_to_the_tolerance(jax_problem, fault, share, monkeypatch):
    precision, params, x = jax_problem
    plant, method = JAX_FAULTS[fault]
    plant(monkeypatch, error_of(share, precision))
    with expectation(SHARES[share]):
        dpj.clipped_grad_sum(
            jax_loss, params, x, max_grad_norm=BOUND, method=method, check="always"
        )


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fault", JAX_FAULTS)
@pytest.mark.parametrize("jax_problem", PRECISIONS, indirect=True)
def test_steps_in_jax_are_held_to_the_tolerance(jax_problem, fault, share, monkeypatch):
    precision, params, x = jax_problem
    plant, method = JAX_FAULTS[fault]
    plant(monkeypatch, error_of(share, precision))
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=jax_loss,
        params=params,
        optimizer=optax.sgd(1e-3),
        data=(np.asarray(x),),
        plan=plan_of(EXAMPLES, EXAMPLES, 2, BOUND, sampler="shuffle", physical_batch_size=EXAMPLES),
        method=method,
        checks=1.0,
    )
    with expectation(SHARES[share]):
        for batch in loader.remaining():
            state, _ = step(state, batch)
    assert (engine.ledger.failed_check is not None) == SHARES[share]

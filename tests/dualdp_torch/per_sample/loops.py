# SPDX-License-Identifier: Apache-2.0
"""Small private loops of any model, in an engine and in a record, and what they are held to."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp_torch.rules import RULES
from dualdp_torch.rules.together import sq_norms_of
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.loop import build, dataset, plan, start

N, C = 24, 0.1  # rows, bound of `trained`
CAPTURED = ("book_keeping", "two_pass", "materialize")


def slow(*values):
    """Values of a parameter that are left to `make test-slow`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


BY_METHOD = ["auto", *slow("vmap", "loop", *CAPTURED)]


class Model(nn.Module):
    """A forward given as a function, and its layers."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)
        randomise(self)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def linear(d_out=3):
    return nn.Linear(6, d_out)


def squares(model, *batch):
    """(n,) losses."""
    return model(*batch).flatten(1).square().sum(1)


def classified(model, x, y):
    """(n,) losses."""
    return F.cross_entropy(model(x), y, reduction="none")


def size_of(grads):
    """Norm of all gradients together, in float64."""
    return float(torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt())


def recorded(model, *batch, loss=squares, **options):
    """The record of one backward of the summed losses."""
    with dpt.record_per_sample(model, loss_reduction="sum", **options) as record:
        loss(model, *batch).sum().backward()
    return record


def private(model=None, mode="auto", checks=None, lr=0.5, reduction="mean", **changes):
    """Engine, model, optimizer and loader of a run on the usual data."""
    plain, optimizer, loader = build()
    if model is not None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=lr)
    return start(
        (model or plain, optimizer, loader),
        plan=plan(**changes),
        grad_sample_mode=mode,
        checks=checks,
        loss_reduction=reduction,
    )


def once(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def engine_loop(loop, model=None, steps=6, **options):
    """`loop(model, x, y, step)` -> backward, in an engine."""
    engine, model, optimizer, loader = private(model, num_steps=steps, **options)
    for step, (x, y, _) in enumerate(loader):
        loop(model, x, y, step)
        optimizer.step()
    assert len(engine.ledger) == steps
    return engine


def recorded_loop(loop, model=None, steps=1, reduction="mean"):
    """The same in a block of `record_per_sample`."""
    model, (x, y, _) = model or build()[0], dataset().tensors
    for step in range(steps):
        rows = slice(step, step + 12)
        with dpt.record_per_sample(model, loss_reduction=reduction) as record:
            loop(model, x[rows], y[rows], step)
    assert record.norms().isfinite().all()
    return record


RUNS = [engine_loop, recorded_loop]


# ---------------------------------------------------------------------- held to plain autograd


def trained(model, items, loop, reduction="mean", mode="loop", steps=2, collate=None, **changes):
    """Run a few checked steps; yields (state before the step, batch, engine)."""
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(items, batch_size=6, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=C,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        num_steps=steps,
        delta=1e-5,
        seed=3,
        checks=1.0,
        **changes,
    )
    for batch in loader.remaining():
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loop(model, batch).backward()
        optimizer.step()
        yield before, batch, engine
    assert len(engine.ledger) == steps == engine.ledger.last_check + 1
    engine.detach()


def by_hand(model, batch, loop):
    """Norms, and the sum of clipped gradients of each example's own loss, in float64."""
    norms, sums = [], {name: 0 for name, p in model.named_parameters() if p.requires_grad}
    for row in range(len(batch[0])):
        model.zero_grad()
        loop(model, [t[row : row + 1] for t in batch]).backward()
        named = model.named_parameters()
        grads = {name: p.grad.to_dense() for name, p in named if p.grad is not None}
        norms.append(size_of(grads))
        factor = min(1.0, C / ((1 + 1e-4) * norms[-1]))
        sums |= {name: sums[name] + factor * g for name, g in grads.items()}
    return torch.tensor(norms, dtype=torch.float64), sums


def held_to_plain_autograd(model, items, loop, **options):
    """Run checked steps; norms and sums are those of each example's own loss in float64."""
    exact = copy.deepcopy(model).double()
    for before, batch, engine in trained(model, items, loop, **options):
        exact.load_state_dict(before)
        wide = [t.double() if t.is_floating_point() else t for t in batch]
        stages, (norms, sums) = engine.stages(), by_hand(exact, wide, loop)
        torch.testing.assert_close(stages.unprotected_norms.double(), norms, rtol=2e-5, atol=1e-8)
        assert stages.unprotected_sum.keys() == sums.keys()
        for name, total in sums.items():
            assert (stages.unprotected_sum[name] - total).norm() <= 1e-5 * C * len(norms), name


def loss(reduction="mean"):
    """A loop of a classifier, for `trained`."""
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def words():
    return TensorDataset(ids(9, N, 5), ids(3, N))


def rows():
    return TensorDataset(data(N, 6), ids(3, N))


class Everything(nn.Module):
    """Draws from every generator, counts in a buffer, in a number and in a list."""

    def __init__(self, draws=True, counts=True):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.draws, self.counts, self.count, self.seen = draws, counts, 0, []
        self.own = torch.Generator()

    def seed(self, seed):
        """Seed all generators."""
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        self.own.manual_seed(seed)

    def drawn(self):
        """The next numbers of all generators."""
        shared = torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002
        return *shared, torch.rand(2, generator=self.own)

    def forward(self, x):
        if self.counts:
            self.calls += 1
            self.count += 1
            self.seen.append(self.count)
        h = torch.tanh(self.first(x))
        if self.draws:
            h = F.dropout(h, 0.4) + torch.rand(h.shape, generator=self.own)
            scales = [random.random() for _ in h], np.random.rand(len(h))  # noqa: NPY002
            h = h * torch.tensor(np.array(scales), dtype=h.dtype).sum(0)[:, None]
        return self.second(h)


def rule_with(fault, kind="grads", slot="weight", function=F.linear):
    """A rule with a fault in the gradients, or the norms, of one slot, and no other form."""
    right = RULES[function]
    table = getattr(right, kind)

    def wrong(acts, grads_out, **options):
        found = table[slot](acts, grads_out, **options)
        return fault(sq_norms_of(found, len(grads_out)) if kind == "sq_norms" else found)

    tables = {kind: {**table, slot: wrong}}
    for form in ("sums", "sq_norms") if kind == "grads" else ():
        tables[form] = {name: f for name, f in getattr(right, form).items() if name != slot}
    return replace(right, pair=None, **tables)


def scaled_rows(factor, *rows):
    """A fault: these rows, or all, are multiplied; of squared norms and their error, the norms."""

    def fault(found):
        if isinstance(found, tuple):
            return fault(found[0]), found[1]
        wrong = found.clone()
        wrong[list(rows) if rows else slice(None)] *= factor
        return wrong

    return fault

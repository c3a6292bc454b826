# SPDX-License-Identifier: Apache-2.0
"""The engine's own gradients against plain autograd, in the user's loop: faults, state, failures."""

import copy
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp.clipping
import dualdp_torch as dpt
from dualdp import AccountingError, ExactnessError, UnsupportedLayerError
from dualdp_torch import clip, gradients, parts, recorder
from dualdp_torch import optimizer as private_step
from dualdp_torch.rules import RULES
from tests.only_torch.checks import data, ids, randomise
from tests.only_torch.loop import build, by_hand, dataset, first_batch, plan, start, train

LATE = 25  # first step at which a fault shows
LONG = 200


class Words(nn.Module):
    """A table, a convolution over positions and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 6), nn.Conv1d(6, 5, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, words):
        x = self.mix(self.table(words).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.norm(x)).mean(1))


def run(mode="auto", checks=None, steps=LONG, model=None, on_step=lambda step: None, **changes):
    """A run over words; the engine, also of one that was stopped, and what stopped it."""
    model = randomise(model or Words())
    items = TensorDataset(ids(9, 60, 4), ids(3, 60, seed=2))
    changes = {"expected_batch_size": 10, "num_steps": steps, "seed": 4, **changes}
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(items, batch_size=10)),
        plan=plan(**changes),
        grad_sample_mode=mode,
        checks=checks,
    )
    stopped = None
    try:
        for step, (x, y) in enumerate(loader):
            on_step(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    except ExactnessError as error:
        stopped = error
    return engine, model, stopped


# ---------------------------------------------------------------------- planted faults


class Planted:
    """A fault that shows from some step on, in one row of eight or in all."""

    def __init__(self, patch, rows=1):
        self.patch, self.rows, self.begins, self.is_on = patch, rows, LATE, False

    def at(self, step):
        """A step begins."""
        self.is_on = step >= self.begins

    def scaled(self, rows_first, factor):
        """A tensor of rows with the fault in it."""
        if not self.is_on or rows_first is None:
            return rows_first
        wrong = rows_first.clone()
        wrong[:: self.rows] *= factor
        return wrong

    def rule(self, function, slot, factor):
        """The gradients that a rule forms for one parameter are wrong, and sums made of them."""
        right = RULES[function]

        def grads(acts, grads_out, **options):
            return self.scaled(right.grads[slot](acts, grads_out, **options), factor)

        self.patch.setitem(
            RULES,
            function,
            replace(
                right,
                grads={**right.grads, slot: grads},
                sums={name: f for name, f in right.sums.items() if name != slot},
                sq_norms={name: f for name, f in right.sq_norms.items() if name != slot},
            ),
        )

    def norms(self, function, slot, factor):
        """Only the squared norms of a rule are wrong."""
        right = RULES[function]

        def sq_norms(*arguments, **options):
            found, bound = right.sq_norms[slot](*arguments, **options)
            return self.scaled(found, factor), bound

        norms = {**right.sq_norms, slot: sq_norms}
        self.patch.setitem(RULES, function, replace(right, sq_norms=norms))


def of_rule(function, slot, factor):
    return lambda fault: fault.rule(function, slot, factor)


def gram(fault):
    """The norm of a linear layer, in the form that needs no gradient."""
    fault.norms(F.linear, "weight", 0.25)
    fault.patch.setattr(gradients.Captured, "_keeps", lambda self, parts: False)


def index_of_words(fault):
    """Ids are read in eight bits, as if a table had no more rows."""
    right = RULES[F.embedding]

    def wrong(acts, grads_out, **options):
        ids_ = acts[0] if isinstance(acts, tuple) else acts
        shifted = (ids_ + 1) % 9 if fault.is_on else ids_
        acts = (shifted, *acts[1:]) if isinstance(acts, tuple) else shifted
        return right.grads["weight"](acts, grads_out, **options)

    grads = {**right.grads, "weight": wrong}
    fault.patch.setitem(RULES, F.embedding, replace(right, grads=grads, sums={}, sq_norms={}))


def factors(fault):
    right = dualdp.clipping.factors_for

    def wrong(clipping, norms, bound, *, xp):
        return fault.scaled(right(clipping, norms, bound, xp=xp), 1.2)

    fault.patch.setattr(clip, "factors_for", wrong)


def whole_norm(fault):
    """A norm without its smallest part."""
    right = clip.whole_norms

    def wrong(squares, n, *dtype):
        few = dict(list(squares.items())[:-1]) if fault.is_on and len(squares) > 1 else squares
        return right(few, n, *dtype)

    fault.patch.setattr(clip, "whole_norms", wrong)


def sums(fault):
    right = gradients.Captured.sums

    def wrong(self, factors, rows):
        for name, total in right(self, factors, rows):
            yield name, total * 1.3 if fault.is_on and name == "head.weight" else total

    fault.patch.setattr(gradients.Captured, "sums", wrong)


def scale(fault):
    """The loss's mean is undone by another number."""
    right = recorder.complete

    def wrong(use, layout, scale):
        return right(use, layout, scale * 1.1 if fault.is_on else scale)

    fault.patch.setattr(recorder, "complete", wrong)


def dropped_part(fault):
    """One use of a parameter is forgotten where sums are formed."""
    right = parts.Part.sum

    def wrong(self, factors, rows):
        total = right(self, factors, rows)
        return total * 0 if fault.is_on and self.slot == "bias" else total

    fault.patch.setattr(parts.Part, "sum", wrong)
    fault.patch.setattr(gradients.Captured, "_keeps", lambda self, parts: False)


def second_pass(fault):
    """The factors of the second pass are those of other rows."""
    right = recorder.reweighted

    def wrong(losses, parameters, factors, *expected):
        return right(losses, parameters, factors.roll(1) if fault.is_on else factors, *expected)

    fault.patch.setattr(recorder, "reweighted", wrong)


#: Name -> (how to plant it, the mode, one row in so many, changes of the plan).
FAULTS = {
    "linear weight": (of_rule(F.linear, "weight", 1.5), "auto", 1, {}),
    "linear weight, one row in eight": (of_rule(F.linear, "weight", 3.0), "materialize", 8, {}),
    "linear bias, one row in eight": (of_rule(F.linear, "bias", 3.0), "auto", 8, {}),
    "convolution": (of_rule(F.conv1d, "weight", 0.5), "auto", 1, {}),
    "convolution's bias, one row in eight": (of_rule(F.conv1d, "bias", 4.0), "hooks", 8, {}),
    "table": (of_rule(F.embedding, "weight", 0.5), "auto", 1, {}),
    "norm": (of_rule(F.layer_norm, "weight", 2.0), "auto", 1, {}),
    "gram": (gram, "book_keeping", 1, {}),
    "indices": (index_of_words, "auto", 1, {}),
    "factors": (factors, "auto", 1, {}),
    "factors, one row in eight": (factors, "auto", 8, {}),
    "factors of layers": (factors, "auto", 1, {"clipping": "per_layer"}),
    "a norm that lacks a part": (whole_norm, "auto", 1, {}),
    "a sum": (sums, "auto", 1, {}),
    "the reduction": (scale, "auto", 1, {}),
    "a part of a sum": (dropped_part, "auto", 1, {}),
    "the second pass": (second_pass, "ghost", 1, {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_begins_later_is_stopped(name, monkeypatch):
    """Caught on a step after it began, within 200 steps; without checks nobody notices."""
    plant, mode, rows, changes = FAULTS[name]
    fault = Planted(monkeypatch, rows)
    plant(fault)
    _, _, stopped = run(mode, on_step=fault.at, checks=0, **changes)
    assert stopped is None
    engine, _, stopped = run(mode, on_step=fault.at, **changes)
    assert stopped is not None
    step = engine.ledger.failed_check["step"]
    assert LATE <= step < LONG
    assert len(engine.ledger) == step
    assert engine.ledger.failed_check["last_passed"] < step
    with pytest.raises(AccountingError, match=f"A spot check failed at step {step}"):
        engine.get_epsilon()
    assert engine.get_epsilon(accept_unverified=True) > 0

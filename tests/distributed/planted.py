# SPDX-License-Identifier: Apache-2.0
"""Worker: runs of several ranks in which a fault begins after some steps."""

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dualdp import ExactnessError
from dualdp_torch.rules import RULES

from . import sharded_models as models
from .mutants import replaced

BEGINS, STEPS = 21, 200


class Clock:
    """Counts the steps of a run, on each rank for itself."""

    step = 0

    @classmethod
    def has_begun(cls):
        return cls.step >= BEGINS


def of_reduction(change):
    """What this rank sends is another tensor than what it has."""
    real = dist.all_reduce

    def sent(tensor, *args, **options):
        if Clock.has_begun() and tensor.is_floating_point():
            tensor.copy_(change(dist.get_rank(), tensor))
        return real(tensor, *args, **options)

    return lambda: replaced(dist, "all_reduce", sent)


def without_rows(rank, tensor):
    """A tensor without every eighth number, on all ranks but the first."""
    if rank == 0:
        return tensor
    wrong = tensor.clone()
    wrong[3::8] = 0
    return wrong


def of_one_rank():
    """The rule of a linear layer is wrong on rank 1 alone, for one row in eight."""
    right = RULES[F.linear]

    def weight_sum(acts, grads_out, **options):
        if Clock.has_begun() and dist.get_rank() == 1:
            grads_out = grads_out.clone()
            grads_out[1::8] *= 3
        return right.sums["weight"](acts, grads_out, **options)

    wrong = replace(right, sums={**right.sums, "weight": weight_sum})
    return mock.patch.dict(RULES, {F.linear: wrong})


FAULTS = {
    "a rank is lost": of_reduction(lambda rank, tensor: 0 * tensor if rank == 1 else tensor),
    "a rank counts twice": of_reduction(lambda rank, tensor: 2 * tensor if rank else tensor),
    "a rank sends one number in eight as nought": of_reduction(without_rows),
    "a rank sends a little too much": of_reduction(
        lambda rank, tensor: 1.02 * tensor if rank else tensor
    ),
    "a rule is wrong on one rank": of_one_rank,
}


def run(checks, begins):
    """(step at which a check failed or None, its words, steps that are on record)."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(40, 20), torch.randint(3, (40,)))
    plan = models.plan(num_steps=STEPS, expected_batch_size=20)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = models.begin(
        model, data, plan, optimizer=plain, checks=checks
    )
    Clock.step, said = 0, None
    try:
        with begins():
            for batch in loader:
                models.step(model, optimizer, batch)
                Clock.step += 1
    except ExactnessError as error:
        said = str(error)
    stopped = None if said is None else Clock.step
    failed, released = engine.ledger.failed_check, len(engine.ledger)
    engine.detach()
    return stopped, said, failed, released


def everything(folder):
    """Fault -> what each rank saw with checks, and without."""
    return {name: (run(None, fault), run(0.0, fault)) for name, fault in FAULTS.items()}

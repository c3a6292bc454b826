# SPDX-License-Identifier: Apache-2.0
"""Worker: what processes disagree on, or do out of step, and what they say to it."""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import ExactnessError
from dualdp_torch.parallel.process_group import Group, unwrapped
from dualdp_torch.training.step_checks import StepChecks

from . import sharded_models as models


def said(call):
    """Class and text of the error that a call ends with."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


def start(data=None, model=None, lr=0.2, kind=torch.optim.SGD, run=None, wrap=None, **options):
    """make_private on parts of which some may be other ones on this rank."""
    made, rows = models.build("mlp")
    model = made if model is None else model
    module = DistributedDataParallel(model, **wrap) if wrap is not None else model
    engine = dpt.PrivacyEngine()
    parts = engine.make_private(
        module=module,
        optimizer=kind(model.parameters(), lr=lr),
        data_loader=DataLoader(rows if data is None else data, batch_size=10),
        **({"plan": models.plan(num_steps=3)} if run is None else {"plan": run} if run else {}),
        **options,
    )
    return engine, *parts


def other_weights():
    """The usual model after another seed."""
    model, _ = models.build("mlp")
    torch.manual_seed(12)
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def hooked(engine_arguments=None):
    """A run whose wrapper compresses gradients."""
    model, _ = models.build("mlp")
    module = DistributedDataParallel(model)
    module.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    return start(model=module)


class Rows(torch.utils.data.Dataset):
    """Some of the rows, of which nothing can be seen but their number."""

    def __init__(self, num):
        self._rows, self._num = models.build("mlp")[1], num

    def __len__(self):
        return self._num

    def __getitem__(self, index):
        return self._rows[index]


def split(seed):
    """All rows, in an order that a generator of this process chose."""
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.random_split(Rows(40), [40], generator=generator)[0]


OF_USERS = models.plan(num_steps=3, num_examples=20, unit="user", rows_per_unit=2)


def disagreements(rank):
    """Case -> a start in which rank 1 differs from rank 0."""
    x, y = models.build("mlp")[1].tensors
    odd = {
        "noise_multiplier": {"run": models.plan(num_steps=3, noise_multiplier=0.5)},
        "seed": {"run": models.plan(num_steps=3, seed=6)},
        "num_examples": {
            "run": models.plan(num_steps=3, num_examples=39),
            "data": TensorDataset(x[:39], y[:39]),
        },
        "loss_reduction": {"loss_reduction": "sum"},
        "mode": {"grad_sample_mode": "materialize"},
        "architecture": {"model": nn.Sequential(nn.Linear(6, 3))},
        "dtype": {"model": models.build("mlp", torch.float64)[0]},
        "weights": {"model": other_weights()},
        "learning rate": {"lr": 0.3},
        "optimizer": {"kind": torch.optim.Adam},
        "data": {"data": Rows(35)},
        "shorter data": {"data": Rows(30)},
        "other data": {"data": TensorDataset(x.flip(0), y.flip(0))},
        "other split": {"data": split(1)},
        "users": {"run": OF_USERS, "users": torch.arange(40).roll(1) // 2},
    }
    usual = {
        "data": {"data": Rows(40)},
        "shorter data": {"data": Rows(40)},
        "other split": {"data": split(0)},
        "users": {"run": OF_USERS, "users": torch.arange(40) // 2},
    }
    return {
        name: partial(start, **(changes if rank else usual.get(name, {})))
        for name, changes in odd.items()
    }


def refusals(folder):
    """Case -> what this rank said."""
    rank = dist.get_rank()
    found = {name: said(call) for name, call in disagreements(rank).items()}
    found["hook"] = said(hooked)
    found["ledger"] = said(lambda: start(ledger=folder / "taken.ledger"))
    rows = models.build("mlp")[1]
    sampler = torch.utils.data.DistributedSampler(rows, 3, rank)
    found["sampler"] = said(
        lambda: dpt.PrivacyEngine().make_private(
            module=(model := models.build("mlp")[0]),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(rows, batch_size=5, sampler=sampler),
            plan=models.plan(num_steps=3),
        )
    )
    found["drawn"] = drawn(models.plan(num_steps=3, seed=None))
    found["steps out of place"] = said(lambda: out_of_place(folder, rank))
    found["learning rate later"] = said(lambda: drifting(rank))
    found["sums"] = said(lambda: faulty_link(rank))
    found["a failed check"] = said(lambda: failing(rank))
    found["budget"] = said(over_budget)
    found["a failed loop"] = said(lambda: Group().on_all("a test", lambda: 1 / (1 - rank)))
    return found


def drawn(run):
    """Rows that this rank draws of each batch, and the noise, without a seed."""
    engine, model, optimizer, loader = start(run=run)
    rows, releases = [], []
    for draw, batch in loader.with_draws():
        models.step(model, optimizer, batch)
        rows.append(np.array(draw.indices)[draw.mask.numpy()].tolist())
        releases.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return rows, torch.stack(releases)


def failing(rank):
    """A check that fails on one rank; how many releases are on record then."""
    engine, model, optimizer, loader = start()
    real = StepChecks.criterion

    def criterion(self, draw):
        if rank and draw.step:
            raise ExactnessError("A spot check failed: planted.")
        return real(self, draw)

    StepChecks.criterion = criterion
    try:
        for batch in loader:
            models.step(model, optimizer, batch)
    except ExactnessError as error:
        raise ExactnessError(f"{error} {len(engine.ledger)} on record.") from error
    finally:
        StepChecks.criterion = real


def out_of_place(folder, rank):
    """Rank 0 saves a checkpoint that the others do not save."""
    engine, model, optimizer, loader = start()
    batches = iter(loader)
    models.step(model, optimizer, next(batches))
    if rank == 0:
        dpt.save_checkpoint(folder / "alone", model=model, optimizer=optimizer, engine=engine)
    models.step(model, optimizer, next(batches))


def drifting(rank):
    """A learning rate that follows something of its own on one rank."""
    engine, model, optimizer, loader = start(wrap={})
    for batch in loader:
        optimizer.param_groups[0]["lr"] = 0.2 + 0.1 * rank
        models.step(model, optimizer, batch)


def faulty_link(rank):
    """A sum that arrives differently on one rank."""
    engine, model, optimizer, loader = start()
    real = Group.summed

    def summed(self, point, sums):
        totals = real(self, point, sums)
        totals["0.bias"][0] += rank
        return totals

    Group.summed = summed
    try:
        for batch in loader:
            models.step(model, optimizer, batch)
    finally:
        Group.summed = real


def over_budget():
    """More steps than the target allows."""
    run = models.plan(num_steps=None, target_epsilon=8.0, seed=8)
    engine, model, optimizer, loader = start(run=run)
    for _ in range(100):
        for batch in loader:
            models.step(model, optimizer, batch)


def wrapper(folder):
    """What DistributedDataParallel is after detach, and whether it trains again as usual."""
    rank = dist.get_rank()
    model, data = models.build("mlp", torch.float64)
    model.register_buffer("own", torch.full((2,), float(rank)))
    module = DistributedDataParallel(model, find_unused_parameters=True)
    before = {name: vars(module)[name] for name in sorted(vars(module)) if "require" in name}
    model.own.fill_(rank)
    engine, same, optimizer, loader = models.begin(
        module,
        data,
        models.plan(num_steps=3),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
    )
    assert same is module
    names = list(engine.parameters)
    for batch in loader:
        models.step(module, optimizer, batch)
    buffers = model.own.tolist()
    engine.detach()
    after = {name: vars(module)[name] for name in before}
    x, y = data.tensors
    rows = slice(rank * 4, rank * 4 + 4)
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
    ours = [p.grad.clone() for p in model.parameters()]
    alone = models.build("mlp", torch.float64)[0]
    alone.load_state_dict({n: p for n, p in unwrapped(module).state_dict().items() if n != "own"})
    nn.functional.cross_entropy(alone(x[:8]), y[:8]).backward()
    pairs = zip(ours, alone.parameters(), strict=True)
    return {
        "flags": before == after,
        "unused": module.find_unused_parameters,
        "names": names,
        "buffers": buffers,
        "gap": max(float((a - p.grad).abs().max()) for a, p in pairs),
    }


def everything(folder):
    """All of the above, in one start of the processes."""
    return {"refusals": refusals(folder), "wrapper": wrapper(folder)}

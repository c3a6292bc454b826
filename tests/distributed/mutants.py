# SPDX-License-Identifier: Apache-2.0
"""Worker: what ranks release, also when something is wrong with how they work together."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import dualdp_torch.training.engine
import dualdp_torch.training.step
from dualdp import PrivacyPlan
from dualdp.ledger.ledger import Ledger
from dualdp.plan import schedules
from dualdp.randomness import SegmentBits, seeded_bits
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.parallel.process_group import Group
from dualdp_torch.training import arguments
from dualdp_torch.training.loader import PlannedLoader

from . import models

STEPS = 6


def start(ledger=None, **changes):
    """A run whose parameters stand still, so that each step's clipped sum is known."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(60, 100), nn.Tanh(), nn.Linear(100, 3)).double()
    data = TensorDataset(torch.randn(40, 60).double(), torch.randint(3, (40,)))
    return models.begin(
        model,
        data,
        models.plan(num_steps=STEPS, **changes),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        ledger=ledger,
        checks=0.0,  # which would stop some of the mutants before their releases are looked at
    )


def releases(ledger=None, **changes):
    """(released, clipped sum if it can be seen) of every step, each as one array."""
    engine, model, optimizer, loader = start(ledger, **changes)
    found = []
    for batch in loader:
        models.step(model, optimizer, batch)
        if not engine.is_between_steps:
            continue
        release = torch.cat([p.grad.flatten() for p in model.parameters()])
        if engine.plan.noise == "secure":  # which shows nothing else
            found.append((release, None))
            continue
        total = torch.cat([t.flatten() for t in engine.stages().unprotected_sum.values()])
        found.append((release, total))
    engine.detach()
    return found


@contextlib.contextmanager
def replaced(owner, name, value):
    """An attribute is another one inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _without_noise(self, sums, release, bits, **options):
    return {name: total / release.expected_batch_size for name, total in sums.items()}


def no_noise():
    """Rank 1 adds no noise."""
    real = NoiseSource.noisy_mean
    mutant = _without_noise if dist.get_rank() else real
    return replaced(NoiseSource, "noisy_mean", mutant)


@contextlib.contextmanager
def known_bits():
    """Secret bits that are the same in every run, as no user can have them."""
    with (
        replaced(
            dualdp_torch.training.step,
            "noise_bits",
            lambda seed, step: seeded_bits(9, "noise", step),
        ),
        replaced(arguments, "SegmentBits", lambda seed, secret=None: SegmentBits(9)),
    ):
        yield


@contextlib.contextmanager
def noise_before(seed_of):
    """Each rank adds noise of full size to its own sum, and none is added later."""
    real = Group.summed

    def summed(self, point, sums):
        noisy = {}
        for index, (name, total) in enumerate(sums.items()):
            generator = torch.Generator().manual_seed(100 * seed_of(self.rank, point) + index)
            noise = torch.randn(total.shape, generator=generator, dtype=total.dtype)
            noisy[name] = total + 0.2 * noise
        return real(self, point, noisy)

    with replaced(Group, "summed", summed), replaced(NoiseSource, "noisy_mean", _without_noise):
        yield


def noise_scaled(factor):
    """Noise of another size than what is accounted."""
    real = PrivacyPlan.noise_multiplier_at
    return replaced(
        PrivacyPlan, "noise_multiplier_at", lambda plan, step: factor * real(plan, step)
    )


def share(rank=None, size=None):
    """Ranks draw other shares."""

    def loader(data, plan, bits, span, group, *others):
        own = SimpleNamespace(rank=group.rank if rank is None else rank, size=size or group.size)
        return PlannedLoader(data, plan, bits, span, own, *others)

    return replaced(dualdp_torch.training.engine, "PlannedLoader", loader)


def local_counts():
    """Rank 0 alone counts who lies below an adaptive bound."""
    real = Group.gather

    def gather(self, point, value):
        if isinstance(value, tuple) and len(value) == 4 and dist.get_rank():
            value = *value[:3], (0, 0)
        return real(self, point, value)

    return replaced(Group, "gather", gather)


def empty_skipped():
    """A share without examples gives no batch."""
    real = PlannedLoader.draws
    return replaced(
        PlannedLoader, "draws", lambda *a: (draw for draw in real(*a) if draw.mask.any())
    )


ADAPTIVE = {"max_grad_norm": schedules.AdaptiveNorm(0.5, learning_rate=0.9)}
#: Name -> what is wrong, and the plan's changes.
MUTANTS = {
    "none": (contextlib.nullcontext, {}),
    "none, adaptive": (contextlib.nullcontext, ADAPTIVE),
    "none, portable": (contextlib.nullcontext, {"noise": "portable"}),
    "none, secure": (known_bits, {"noise": "secure", "seed": None}),
    "a rank adds no noise": (no_noise, {}),
    "each rank adds its own noise": (
        lambda: noise_before(lambda rank, place: 10 * int(place.split()[1]) + rank),
        {},
    ),
    "the same noise is added by each rank": (
        lambda: noise_before(lambda rank, place: int(place.split()[1])),
        {},
    ),
    "noise x 0.97": (lambda: noise_scaled(0.97), {}),
    "noise x 1.05": (lambda: noise_scaled(1.05), {}),
    "the same share on all ranks": (lambda: share(rank=0), {}),
    "the whole batch on all ranks": (lambda: share(rank=0, size=1), {}),
    "one rank counts": (local_counts, ADAPTIVE),
    "empty shares are skipped": (empty_skipped, {"expected_batch_size": 1}),
}


def everything(folder):
    """Mutant -> what this rank released, or the error that stopped it; and the order of things."""
    found = {}
    for name, (mutant, changes) in MUTANTS.items():
        try:
            with mutant():
                found[name] = releases(**changes)
        except Exception as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    found["recorded before noise"] = order(folder / "order.ledger")
    found["one tensor twice"] = one_tensor_twice()
    return found


def one_tensor_twice():
    """The sums of two parameters that are one tensor, reduced together."""
    one = torch.ones(3)
    totals = Group().summed("a test", {"a": one, "b": one})
    return [one, totals["a"], totals["b"]]


def order(path):
    """For each step: whether the file of rank 0 held its release when this rank drew noise."""
    real, recorded = NoiseSource.noisy_mean, []

    def noted(self, sums, release, bits, **options):
        steps = [record["r"][0] for record in Ledger.read(path) if "r" in record]
        recorded.append(steps == list(range(release.step + 1)))
        return real(self, sums, release, bits, **options)

    with replaced(NoiseSource, "noisy_mean", noted):
        releases(ledger=path)
    return recorded

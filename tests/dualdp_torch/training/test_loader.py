# SPDX-License-Identifier: Apache-2.0
"""The loader: any items, workers, samplers with their accounting, physical batches."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dualdp_torch as dpt
from dualdp import AccountingError, get_epsilon
from dualdp.randomness import SegmentBits
from dualdp_torch.training import loader as planned
from dualdp_torch.training.loader import Data, PlannedLoader
from tests.dualdp_torch.checks import data
from tests.dualdp_torch.loop import (
    NUM,
    assert_by_hand,
    build,
    dataset,
    first_batch,
    plan,
    start,
    train,
)

# JAX, which other tests bring into this process, warns of every fork.
forks = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def with_loader(loader, **options):
    """An engine around this loader."""
    model, optimizer, _ = build()
    return start((model, optimizer, loader), **options)


def drawn(run, start, stop):
    """Rows of the plan's batches."""
    return [run.batch_indices(step).tolist() for step in range(start, stop)]


# ---------------------------------------------------------------------- items


def options_of(monkeypatch):
    """Options of each `DataLoader` that is made from now on."""
    made = []

    def seen(*arguments, **options):
        made.append(options)
        return DataLoader(*arguments, **options)

    monkeypatch.setattr(planned, "DataLoader", seen)
    return made


class Pair(NamedTuple):
    """An item with names."""

    x: torch.Tensor
    y: torch.Tensor


class Items(Dataset):
    """Items of a form that is asked for."""

    def __init__(self, form):
        self.form, (self.x, self.y, _) = form, dataset().tensors

    def __len__(self):
        return NUM

    def __getitem__(self, k):
        x, y = self.x[k], self.y[k]
        return {
            "dict": {"in": {"x": x}, "y": y, "text": f"row {k}", "number": 0.5},
            "namedtuple": Pair(x, y),
            "nested": (x, [y, (y, "text")]),
            "none": (x, None, y),
        }[self.form]


def with_none(rows):
    """Stacks tensors; None stays."""
    return tuple(
        None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
    )


#: Form -> (collate function, batch -> (x, y)).
FORMS = {
    "dict": (None, lambda b: (b["in"]["x"], b["y"])),
    "namedtuple": (None, lambda b: (b.x, b.y)),
    "nested": (None, lambda b: (b[0], b[1][1][0])),
    "none": (with_none, lambda b: (b[0], b[2])),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rate", [12, 0.2], ids=["plain", "first draw empty"])
def test_items_of_any_form(form, rate):
    """known_failures 48."""
    collate, parts_of = FORMS[form]
    run = plan(expected_batch_size=rate, num_steps=8)
    assert len(run.batch_indices(0)) == 0 or rate == 12
    loader = DataLoader(Items(form), batch_size=12, collate_fn=collate)
    engine, model, optimizer, loader = with_loader(loader, plan=run)
    for batch in loader:
        x, y = parts_of(batch)
        assert form != "dict" or len(batch["text"]) == len(x)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_by_hand(model, run)
    assert engine.get_epsilon() == pytest.approx(run.epsilon())


@forks
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_keep_the_order_of_the_plan(persistent):
    loader = DataLoader(
        dataset(), batch_size=12, num_workers=2, persistent_workers=persistent, prefetch_factor=3
    )
    _, model, optimizer, loader = with_loader(loader, plan=plan())
    for x, y, _ in itertools.islice(loader, 2):  # leaves the workers in the middle
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert train(model, optimizer, loader) == drawn(plan(), 2, 6)
    assert_by_hand(model, plan())


@forks
def test_options_of_the_loader_are_kept(monkeypatch):
    loader = DataLoader(
        dataset(),
        batch_size=12,
        num_workers=1,
        timeout=60,
        collate_fn=lambda rows: {"x": torch.stack([r[0] for r in rows]), "note": "kept"},
    )
    _, model, optimizer, loader = with_loader(loader, plan=plan(num_steps=2))
    made = options_of(monkeypatch)
    for batch in loader:
        assert batch["note"] == "kept"
        model(batch["x"]).square().mean().backward()
        optimizer.step()
    assert made[0]["timeout"] == 60


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_pinned_memory_is_asked_for(monkeypatch):
    _, model, optimizer, loader = with_loader(
        DataLoader(dataset(), batch_size=12, pin_memory=True), plan=plan(num_steps=1)
    )
    made = options_of(monkeypatch)
    assert train(model, optimizer, loader) == drawn(plan(), 0, 1)
    assert made[0]["pin_memory"]


def test_a_pass_leaves_the_users_random_numbers_alone():
    _, model, optimizer, loader = start(plan=plan())
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    train(model, optimizer, loader)
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("mode", ["auto", "functorch", "ghost"])
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_masked_row_changes_nothing(mode, value):
    """An empty draw shows the loop row 0, whatever it holds."""
    run, models = plan(expected_batch_size=0.01, num_steps=3), []
    for first in (None, value):
        x, y, _ = (t.clone() for t in dataset().tensors)
        x[0] = x[0] if first is None else first
        engine, model, optimizer, loader = with_loader(
            DataLoader(TensorDataset(x, y), batch_size=12), plan=run, grad_sample_mode=mode
        )
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert len(engine.ledger) == 3
        models.append(model)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------------- samplers


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "truncated_poisson", "max_batch_size": 13},
        {"sampler": "fixed_size", "neighboring_relation": "replace"},
        {"sampler": "balls_in_bins"},
        {"sampler": "balls_in_bins", "epochs_per_assignment": 2},
        {"sampler": "shuffle"},
        {"sampler": "fixed_order"},
        {"sampler": "cyclic_poisson", "min_separation": 2},
    ],
    ids=lambda changes: changes["sampler"],
)
@pytest.mark.parametrize("size", [None, 5])
def test_every_sampler_of_a_plan(changes, size):
    run = plan(**changes, num_steps=5, accountant="pld")
    engine, model, optimizer, loader = start(plan=run)
    with dpt.BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=size or NUM, optimizer=optimizer
    ) as physical:
        rows = [row for part in train(model, optimizer, physical) for row in part]
    assert rows == [row for step in drawn(run, 0, 5) for row in step]
    assert engine.get_epsilon() == pytest.approx(run.epsilon())
    assert_by_hand(model, run)


def test_without_poisson_sampling_nothing_is_amplified():
    engine, model, optimizer, loader = start(
        noise_multiplier=4.0, max_grad_norm=1.0, poisson_sampling=False
    )
    seen = [row for part in train(model, optimizer, loader) for row in part]
    assert sorted(seen) == list(range(NUM))
    amplified, *_ = start(noise_multiplier=4.0, max_grad_norm=1.0, poisson_sampling=True)
    assert engine.plan.sampler == "shuffle"
    assert amplified.plan.sampler == "poisson"
    whole = get_epsilon(
        noise_multiplier=4.0, sample_rate=1.0, num_steps=1, delta=1e-5, accountant="rdp"
    )
    assert engine.get_epsilon(delta=1e-5) == pytest.approx(whole)


class Stream(IterableDataset):
    """A stream of examples."""

    def __iter__(self):
        return iter(dataset())


class Scaled(DataLoader):
    """A loader that prepares batches, which those of the plan would not pass."""

    def __iter__(self):
        return ((x / 2, *others) for x, *others in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "error", "match"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), TypeError, "Stream, which can't be drawn"),
        (lambda: Scaled(dataset(), batch_size=4), ValueError, "Scaled with an __iter__ of its own"),
        (
            lambda: DataLoader(dataset(), sampler=SubsetRandomSampler(range(5)), batch_size=4),
            ValueError,
            "draws by SubsetRandomSampler",
        ),
        (
            lambda: DataLoader(
                dataset(), sampler=RandomSampler(dataset(), replacement=True), batch_size=4
            ),
            ValueError,
            "draws by RandomSampler",
        ),
        (
            lambda: DataLoader(
                dataset(),
                batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * NUM, NUM), 4, False),
            ),
            ValueError,
            "draws by WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(dataset(), batch_sampler=[[0, 1], [2, 3]]),
            ValueError,
            "draws by list",
        ),
        (
            lambda: DataLoader(dataset(), batch_size=None),
            ValueError,
            "draws by SequentialSampler with batch_size=None",
        ),
        (lambda: [1, 2], TypeError, "data_loader is a list"),
        (lambda: DataLoader(dataset(30), batch_size=4), ValueError, "30 examples but the plan has"),
    ],
)
def test_other_loaders_are_refused(loader, error, match):
    model, optimizer, _ = build()
    with pytest.raises(error, match=match):
        start((model, optimizer, loader()), plan=plan())
    assert not model._forward_hooks


def test_a_batch_sampler_says_the_batch_size():
    loader = DataLoader(
        dataset(), batch_sampler=BatchSampler(SequentialSampler(dataset()), 20, False)
    )
    engine, *_, private = with_loader(loader, noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.plan.expected_batch_size_at(0) == 20
    assert len(private) == 3


# ---------------------------------------------------------------------- physical batches


def test_length_is_true_and_batches_are_the_plans():
    """known_failures 46."""
    run = plan(physical_batch_size=4)
    _, model, optimizer, loader = start(plan=run)
    announced, during = len(loader), []
    rows = []
    for x, y, row in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rows += row.tolist()
        during.append(len(loader))
    assert set(during) == {announced}
    assert len(during) == announced > 6
    assert rows == [row for step in drawn(run, 0, 6) for row in step]
    assert len(loader) == announced


def test_make_private_takes_the_physical_size():
    engine, model, optimizer, loader = start(
        noise_multiplier=1.0, max_grad_norm=1.0, max_physical_batch_size=3
    )
    announced = len(loader)
    rows = train(model, optimizer, loader)
    assert len(rows) == announced > 5
    assert max(map(len, rows)) <= 3
    assert len(engine.ledger) == 5
    assert engine.plan.physical_batch_size == 3


def test_wrong_arguments_of_the_memory_manager_are_refused():
    *_, optimizer, loader = start(plan=plan())
    with pytest.raises(TypeError, match="data_loader is a DataLoader. Expected the loader that"):
        dpt.BatchMemoryManager(
            data_loader=build()[2], max_physical_batch_size=4, optimizer=optimizer
        )
    with pytest.raises(ValueError, match="max_physical_batch_size=0"):
        dpt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=0, optimizer=optimizer)


def test_an_old_pass_cannot_go_on_after_a_new_one_began():
    _, model, optimizer, loader = start(plan=plan())
    old, x, y = first_batch(loader)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    new, x, y = first_batch(loader)
    with pytest.raises(RuntimeError, match="another one began, and examples would count"):
        next(old)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    new.close()


# ---------------------------------------------------------------------- the budget


def target(**options):
    """An open-ended run that may spend as much as 7 steps do."""
    spent = plan(num_steps=7).epsilon()
    return start(
        noise_multiplier=0.8,
        max_grad_norm=0.5,
        target_epsilon=spent * 1.001,
        target_delta=1e-5,
        **options,
    )


def test_a_spent_budget_stops_the_loader():
    engine, model, optimizer, loader = target(on_budget="stop")
    lengths = []
    for _ in range(3):
        lengths.append(len(loader))
        train(model, optimizer, loader)
    assert len(engine.ledger) == 7
    assert lengths == [5, 2, 2]
    assert engine.get_epsilon() <= engine.plan.target_epsilon


def test_a_spent_budget_raises():
    engine, model, optimizer, loader = target()
    train(model, optimizer, loader)
    for x, y, _ in loader:
        F.cross_entropy(model(x), y).backward()
        if len(engine.ledger) == 7:
            break
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(AccountingError, match="step=7 would exceed target_epsilon=.*7 releases"):
        optimizer.step()
    assert len(engine.ledger) == 7
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_a_dataset_of_one_tensor_and_a_module_of_one_weight():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(NUM, 6), batch_size=12)
    engine, model, optimizer, loader = start((model, optimizer, loader), plan=plan(num_steps=2))
    for batch in loader:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        model(x).mean().backward()
        optimizer.step()
    assert len(engine.ledger) == 2


def place(rank, size):
    """In the place of the `Group` of one of several processes."""
    return SimpleNamespace(rank=rank, size=size)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_are_the_batch_cut_in_pieces(ranks, size):
    """Every example once, on one process, and as many physical batches on each."""
    run = plan(expected_batch_size=2, physical_batch_size=size)
    bits, own = SegmentBits(run.seed), Data.of(build()[2], 1, None, None)
    shares = [
        list(PlannedLoader(own, run, bits, None, place(rank, ranks)).draws(0, 6))
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = {step: [] for step in range(6)}
    for share in shares:
        assert [draw.step for draw in share if draw.is_last] == list(range(6))
        for draw in share:
            assert len(draw.indices) == len(draw.mask) >= 1
            kept = np.array(draw.indices)[draw.mask.numpy()]
            assert size is None or len(kept) <= size
            seen[draw.step] += kept.tolist()
    for step, rows in seen.items():
        assert sorted(rows) == run.batch_indices(step).tolist()
    empty = [draw for share in shares for draw in share if not draw.mask.any()]
    assert empty
    assert all(draw.indices == [0] for draw in empty)


class Noisy(torch.utils.data.Dataset):
    """Rows that are drawn anew whenever they are asked for."""

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return torch.rand(3)


@forks
def test_workers_of_other_processes_draw_other_numbers():
    """Augmentation in worker processes, whose seeds come from the plan."""
    own = Data.of(DataLoader(Noisy(), batch_size=12, num_workers=1), 1, None, None)
    first, bits = [], SegmentBits(None)
    for rank in (0, 1, 1):
        batches = PlannedLoader(own, plan(), bits, None, place(rank, 2))
        first.append(next(batches.of_steps(0, 1))[1][0])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1], first[2])

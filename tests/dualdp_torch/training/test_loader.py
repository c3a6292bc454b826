# SPDX-License-Identifier: Apache-2.0
"""The loader: any items, workers, samplers with their accounting, physical batches."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dualdp_torch as dpt
from dualdp import get_epsilon
from dualdp.randomness import SegmentBits
from dualdp_torch.training import loader as planned
from dualdp_torch.training.loader import Data, PlannedLoader
from tests.dualdp_torch.loop import NUM, assert_by_hand, build, dataset, plan, start, train
from tests.dualdp_torch.training.runs import Open, end_of, fit, forks


def with_loader(loader, **options):
    """An engine around this loader."""
    return start((*build()[:2], loader), **options)


def drawn(run, start, stop):
    """Rows of the plan's batches."""
    return [run.batch_indices(step).tolist() for step in range(start, stop)]


# ---------------------------------------------------------------------- items


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
            "tensor": torch.cat([x, y[None]]),
        }[self.form]


def with_none(rows):
    """Stacks tensors; None stays."""
    return [None if c[0] is None else torch.stack(c) for c in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("form", "rate", "parts_of"),
    [
        ("dict", 0.2, lambda b: (b["in"]["x"][: len(b["text"])], b["y"])),
        ("namedtuple", 12, lambda b: (b.x, b.y)),
        ("nested", 12, lambda b: (b[0], b[1][1][0])),
        ("none", 0.2, lambda b: (b[0], b[2])),
        ("tensor", 12, lambda b: (b[:, :6], b[:, 6].long())),
    ],
)
def test_items_of_any_form(form, rate, parts_of):
    """known_failures 48; at the small rate the first draw is empty."""
    run = plan(expected_batch_size=rate, num_steps=8)
    assert len(run.batch_indices(0)) == 0 or rate == 12
    collate = with_none if form == "none" else None
    loader = DataLoader(Items(form), batch_size=12, collate_fn=collate)
    engine, model, optimizer, loader = with_loader(loader, plan=run)
    for batch in loader:
        x, y = parts_of(batch)
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
    train(model, optimizer, itertools.islice(loader, 2))  # leaves the workers in the middle
    assert train(model, optimizer, loader) == drawn(plan(), 2, 6)
    assert_by_hand(model, plan())


def test_options_of_the_loader_are_kept(monkeypatch):
    made, options = [], {"worker_init_fn": print, "pin_memory": True, "collate_fn": len}
    _, _, _, loader = with_loader(DataLoader(dataset(), 12, **options), plan=plan())
    monkeypatch.setattr(planned, "DataLoader", lambda *a, **o: made.append(o) or o["batch_sampler"])
    assert [items for _, items in loader.of_steps(0, 1)] == drawn(plan(), 0, 1)
    assert options.items() <= made[0].items()


def test_a_pass_leaves_the_users_random_numbers_alone():
    _, model, optimizer, loader = start(plan=plan())
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    train(model, optimizer, loader)
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("mode", "value"), [("auto", float("nan")), ("ghost", float("nan")), ("functorch", 1e30)]
)
def test_a_masked_row_changes_nothing(mode, value):
    """An empty draw shows the loop row 0, whatever it holds."""
    run, ends = plan(expected_batch_size=0.01, num_steps=3), []
    for first in (1.0, value):
        x, y, _ = (t.clone() for t in dataset().tensors)
        x[0] *= first
        loader = DataLoader(TensorDataset(x, y), batch_size=12)
        engine, *parts = with_loader(loader, plan=run, grad_sample_mode=mode)
        fit(*parts, lambda model, x, y: F.cross_entropy(model(x), y))
        assert len(engine.ledger) == 3
        ends.append(end_of(parts[0]))
    assert torch.equal(*ends)


# ---------------------------------------------------------------------- samplers


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (5, {"sampler": "truncated_poisson", "max_batch_size": 13}),
        (None, {"sampler": "fixed_size", "neighboring_relation": "replace"}),
        (5, {"sampler": "balls_in_bins"}),
        (None, {"sampler": "balls_in_bins", "epochs_per_assignment": 2}),
        (5, {"sampler": "shuffle"}),
        (None, {"sampler": "fixed_order"}),
        (5, {"sampler": "cyclic_poisson", "min_separation": 2}),
    ],
)
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
    """known_failures 12."""
    numbers = {"noise_multiplier": 4.0, "max_grad_norm": 1.0}
    engine, model, optimizer, loader = start(**numbers, poisson_sampling=False)
    assert sorted(row for part in train(model, optimizer, loader) for row in part) == list(
        range(NUM)
    )
    amplified, *_ = start(**numbers, poisson_sampling=True)
    assert (engine.plan.sampler, amplified.plan.sampler) == ("shuffle", "poisson")
    whole = get_epsilon(
        noise_multiplier=4.0, sample_rate=1.0, num_steps=1, delta=1e-5, accountant="rdp"
    )
    assert engine.get_epsilon(delta=1e-5) == pytest.approx(whole)


class Scaled(DataLoader):
    """A loader that prepares batches, which those of the plan would not pass."""

    def __iter__(self):
        return ((x / 2, *others) for x, *others in super().__iter__())


ROWS = dataset()
ORDER, AGAIN = SequentialSampler(ROWS), RandomSampler(ROWS, replacement=True)
WEIGHTED = BatchSampler(WeightedRandomSampler([1.0] * NUM, NUM), 4, False)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (Scaled(ROWS, batch_size=4), "Scaled with an __iter__ of its own"),
        (DataLoader(ROWS, 4, sampler=SubsetRandomSampler(range(5))), "draws by SubsetRandomSample"),
        (DataLoader(ROWS, 4, sampler=AGAIN), "draws by RandomSampler"),
        (DataLoader(ROWS, batch_sampler=WEIGHTED), "draws by WeightedRandomSampler"),
        (DataLoader(ROWS, batch_sampler=[[0, 1], [2, 3]]), "draws by list"),
        (DataLoader(dataset(30), 4), "30 examples but the plan has"),
    ],
)
def test_other_loaders_are_refused(loader, match):
    """known_failures 13; what is no loader: tests/backends/test_mistakes.py."""
    model, optimizer, _ = build()
    with pytest.raises(ValueError, match=match):
        start((model, optimizer, loader), plan=plan())
    assert not model._forward_hooks


def test_a_batch_sampler_says_the_batch_size():
    loader = DataLoader(ROWS, batch_sampler=BatchSampler(ORDER, 20, False))
    engine, *_, private = with_loader(loader, noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.plan.expected_batch_size_at(0) == 20
    assert len(private) == 3
    loader = DataLoader(ROWS, batch_size=100)  # of more than there are
    engine, *_ = with_loader(loader, noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.plan.expected_batch_size_at(0) == NUM


# ---------------------------------------------------------------------- physical batches


def test_length_is_true_and_batches_are_the_plans():
    """known_failures 46."""
    run = plan(physical_batch_size=4)
    _, model, optimizer, loader = start(plan=run)
    lengths, rows = [len(loader)], []
    for x, y, own in loader:
        F.cross_entropy(model(x), y).backward()  # without zero_grad
        optimizer.step()
        assert len(x) <= 4
        rows += own.tolist()
        lengths.append(len(loader))
    assert {*lengths, len(loader)} == {len(lengths) - 1}
    assert rows == [row for step in drawn(run, 0, 6) for row in step]
    assert_by_hand(model, run)


def test_a_physical_size_is_positive():
    with pytest.raises(ValueError, match="max_physical_batch_size=0"):
        start(plan=plan())[3].limited(0)


def test_an_old_pass_cannot_go_on_after_a_new_one_began():
    run = Open()
    run.step()
    old, run.batches = run.batches, iter(run.loader)
    run.x, run.y, _ = next(run.batches)
    with pytest.raises(RuntimeError, match="another one began, and examples would count"):
        next(old)
    run.step()


# ---------------------------------------------------------------------- the budget


def test_an_open_ended_run_ends_with_its_budget():
    """Its target is what 7 steps spend; the other way: tests/backends/test_engine.py."""
    target = {"target_epsilon": plan(num_steps=7).epsilon() * 1.001, "target_delta": 1e-5}
    numbers = {"noise_multiplier": 0.8, "max_grad_norm": 0.5, "on_budget": "stop"}
    engine, model, optimizer, loader = start(**numbers, **target)
    lengths = [(len(loader), len(train(model, optimizer, loader))) for _ in range(3)]
    assert lengths == [(5, 5), (2, 2), (2, 0)]
    assert engine.get_epsilon() <= engine.plan.target_epsilon


# ---------------------------------------------------------------------- several processes


def place(rank, size):
    """In the place of the `Group` of one of several processes."""
    return SimpleNamespace(rank=rank, size=size)


@pytest.mark.parametrize(("ranks", "size"), [(2, None), (4, 2), (2, 2)])
def test_shares_are_the_batch_cut_in_pieces(ranks, size):
    """Every example once, on one process, and as many physical batches on each."""
    run = plan(expected_batch_size=2, physical_batch_size=size)
    bits, own = SegmentBits(run.seed), Data.of(build()[2], 1, None, None)
    shares = [
        list(PlannedLoader(own, run, bits, None, place(rank, ranks)).draws(0, 6))
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    seen, draws = {step: [] for step in range(6)}, [draw for share in shares for draw in share]
    assert [draw.step for draw in draws if draw.is_last] == [*range(6)] * ranks
    for draw in draws:
        assert len(draw.indices) == len(draw.mask) >= 1
        assert draw.mask.any() or draw.indices == [0]
        kept = np.array(draw.indices)[draw.mask.numpy()]
        assert len(kept) <= (size or NUM)
        seen[draw.step] += kept.tolist()
    assert not all(draw.mask.any() for draw in draws)
    for step, rows in seen.items():
        assert sorted(rows) == run.batch_indices(step).tolist()


class Noisy(Dataset):
    """Rows that are drawn anew whenever they are asked for."""

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return torch.rand(3)


@forks
def test_workers_of_other_processes_draw_other_numbers():
    """Augmentation in worker processes, whose seeds come from the plan."""
    own = Data.of(DataLoader(Noisy(), batch_size=12, num_workers=1), 1, None, None)
    bits = SegmentBits(None)
    one, two, same = (
        next(PlannedLoader(own, plan(), bits, None, place(rank, 2)).of_steps(0, 1))[1][0]
        for rank in (0, 1, 1)
    )
    assert not torch.equal(one, two)
    assert torch.equal(two, same)


# ---------------------------------------------------------------------- a loop of one's own


def own_loop(**changes):
    """The loader of a run, to the end of its plan."""
    made = DataLoader(ROWS, batch_size=12)
    return dpt.PrivacyEngine().make_loader(data_loader=made, plan=plan(**changes)).remaining()


def chunk_sum(chunk, **options):
    model = torch.nn.Linear(6, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return dpt.clipped_grad_sum(
        lambda model, x, *_: model(x).square().sum(1), model, *chunk.args, **options
    ).grads


def test_an_empty_draw_adds_nothing_without_its_mask_too():
    """Its one row of padding was an example that nobody drew."""
    seen = set()
    for batch in own_loop(expected_batch_size=1, num_steps=30):
        for chunk in batch.chunks:
            own = chunk_sum(chunk, max_grad_norm=0.5)["weight"]
            assert torch.equal(own, chunk_sum(chunk, max_grad_norm=0.5, mask=chunk.mask)["weight"])
            assert bool(own.any()) == bool(chunk.mask.any())
            seen.add(bool(own.any()))
    assert seen == {True, False}


def test_loops_beside_each_other_do_not_meet():
    """known_failures 98: two bounds, and a call on other rows beside the open loops."""
    bounds = 2.0, 0.5
    for batches in zip(*(own_loop(max_grad_norm=bound) for bound in bounds), strict=True):
        for bound, (chunk,) in zip(bounds, (batch.chunks for batch in batches), strict=True):
            most = bound * len(chunk.mask) * (1 + 1e-4)
            assert chunk_sum(chunk, max_grad_norm=bound)["weight"].norm() <= most
            with pytest.raises(ValueError, match="max_grad_norm=25.0 came for a chunk"):
                chunk_sum(chunk, max_grad_norm=25.0)
            other = SimpleNamespace(args=(torch.ones(len(chunk.mask), 6),))
            assert chunk_sum(other, max_grad_norm=25.0)["weight"].norm() > most


def test_a_larger_bound_than_that_of_the_noise_is_refused():
    (chunk,) = next(iter(own_loop())).chunks
    with pytest.raises(ValueError, match="max_grad_norm=25.0 came for a chunk of engine.make_loa"):
        chunk_sum(chunk, max_grad_norm=25.0)
    for bound in (0.5, torch.tensor(0.5), 0.1):
        chunk_sum(chunk, max_grad_norm=bound)


@pytest.mark.parametrize("physical", [None, 3])
def test_indices_are_those_of_the_chunks(physical):
    """As on JAX: (indices, mask) of each step, whole also where chunks are smaller."""
    found = list(own_loop(num_steps=4, physical_batch_size=physical).indices())
    assert [indices[mask].tolist() for indices, mask in found] == drawn(plan(), 0, 4)

# SPDX-License-Identifier: Apache-2.0
"""Several views of each example: their gradients are averaged, and clipped once."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.training.loader import DrawnViews
from tests.dualdp_torch import loop
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.training.test_loader import forks
from tests.dualdp_torch.training.test_users import Parts

K, C = 3, 0.5
MODES = ("auto", "book_keeping", "two_pass", "materialize", "vmap", "loop")


def noisy(example, generator):
    """A view: the inputs with noise of the view's own generator."""
    x, *rest = example
    return x + 0.3 * torch.randn(x.shape, generator=generator), *rest


def parts(**options):
    model = randomise(Parts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, DataLoader(loop.dataset(), batch_size=12, **options)


def start(given=None, views=K, augment=noisy, **options):
    options.setdefault("plan", loop.plan(num_steps=2))
    return loop.start(given or parts(), views=views, augment=augment, checks=1.0, **options)


class StatesOfTwelve(Parts):
    """States for the rows of twelve examples, as recurrent models of one batch size keep them."""

    def forward(self, x):
        return super().forward(x) + torch.zeros(12 * K, 1)


def test_a_model_of_one_batch_size_is_named():
    model = randomise(StatesOfTwelve())
    given = model, torch.optim.SGD(model.parameters(), lr=0.5), parts()[2]
    _, model, _, loader = start(given)
    x, *_ = next(batch for batch in loader if len(batch[0]) != 12 * K)
    with pytest.raises(UnsupportedLayerError, match="takes batches of one size only"):
        model(x)


def clipped_by_hand(weights, x, y, clipping="flat", c=C):
    """Name -> sum over the examples of clipped mean gradients of their views, in float64."""
    model = Parts()
    model.load_state_dict(weights)
    model.double()
    names = [name for name, _ in model.named_parameters()]
    total = dict.fromkeys(names, 0.0)
    for start in range(0, len(x), K):
        rows = slice(start, start + K)
        loss = F.cross_entropy(model(x[rows].double()), y[rows])
        grads = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        for name, g in grads.items():
            group, members = name.rpartition(".")[0], list(grads.values())
            if clipping == "per_layer":
                members = [v for k, v in grads.items() if k.rpartition(".")[0] == group]
            norm = torch.cat([v.flatten() for v in members]).norm()
            bound = c / 2 if clipping == "per_layer" else c  # groups: conv, norm, head, scale
            total[name] = total[name] + g * min(1.0, bound / (1 + 1e-4) / float(norm))
    return total


def mean_of(model, x, y, reduction):
    return F.cross_entropy(model(x), y, reduction=reduction)


def held_to_the_definition(run, limit=None, clipping="flat", reduction="mean", loss=mean_of):
    """Train; the clipped sum of every step is that of the mean gradients of the views."""
    engine, model, optimizer, loader = run
    seen, sums, c = [[]], [], engine.plan.max_grad_norm_at(0)
    for x, y, rows in loader if limit is None else loader.limited(limit):
        weights = {name: v.clone() for name, v in model.state_dict().items()}
        optimizer.zero_grad()
        loss(model, x, y, reduction).backward()
        optimizer.step()
        seen[-1].append((weights, x, y, rows))
        if model.scale.grad is not None:  # None within a logical batch
            sums.append(engine.stages().unprotected_sum)
            seen.append([])
    assert engine.ledger.last_check == 1
    assert len(sums) == 2
    for batches, found in zip(seen[:-1], sums, strict=True):
        each = [clipped_by_hand(weights, x, y, clipping, c) for weights, x, y, _ in batches]
        for name, total in found.items():
            expected = sum(part[name] for part in each)
            torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
        for _, x, _, rows in batches:
            assert (rows.view(-1, K) == rows[::K, None]).all()
            assert not (x.view(-1, K, 6)[:, :1] == x.view(-1, K, 6)[:, 1:]).any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bound", [C, 50.0])
@pytest.mark.parametrize("mode", MODES)
def test_the_mean_gradient_of_the_views_is_clipped(mode, bound, reduction):
    plan = loop.plan(num_steps=2, max_grad_norm=bound, noise_multiplier=0.01)
    run = start(plan=plan, grad_sample_mode=mode, loss_reduction=reduction)
    held_to_the_definition(run, reduction=reduction)


def test_layers_are_clipped_by_the_mean_of_the_views():
    plan = loop.plan(num_steps=2, clipping="per_layer")
    held_to_the_definition(start(plan=plan), clipping="per_layer")


@pytest.mark.parametrize("size", [1, 5])
def test_physical_batches_count_examples(size):
    held_to_the_definition(start(), limit=size)


def batches(**options):
    engine, *_, loader = start(parts(**options), plan=loop.plan(num_steps=4))
    before = torch.get_rng_state()
    found = [(x, rows) for _, (x, _, rows) in loader.of_steps(0, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    engine.detach()
    return found


@forks
def test_views_depend_on_step_example_and_view_alone():
    whole = batches()
    for again in (batches(), batches(num_workers=2)):
        for (x, rows), (other, same) in zip(whole, again, strict=True):
            assert torch.equal(rows, same)
            assert torch.equal(x, other)
    clean = loop.dataset().tensors[0]
    assert len(torch.cat([rows.unique() for _, rows in whole]).unique()) < sum(
        len(rows.unique()) for _, rows in whole
    )  # examples come in several steps, with other views
    added = torch.cat([x - clean[rows] for x, rows in whole])
    assert len(added.double().flatten().unique()) > 0.99 * added.numel()
    assert len(added[:, 0].unique()) > 0.99 * len(added)
    assert abs(float(added.std()) - 0.3) < 0.05


def test_functions_of_the_global_generator_are_keyed_too():
    def by_torch(example, generator):
        return example[0] + torch.rand(6), *example[1:]

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engine, *_, loader = start(augment=by_torch)
        found.append(torch.cat([x for _, (x, *_) in loader.of_steps(0, 2)]))
        engine.detach()
    assert torch.equal(*found)


def test_one_view_without_augment_is_the_run_without_views():
    ends = []
    for options in ({}, {"views": 1}):
        model, optimizer, loader = parts()
        plan = loop.plan(num_steps=2)
        engine, *run = loop.start((model, optimizer, loader), plan=plan, **options)
        loop.train(*run)
        engine.detach()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_a_resumed_run_sees_the_same_views(tmp_path):
    plan = loop.plan(num_steps=4)
    engine, model, optimizer, loader = start(plan=plan)
    loop.train(model, optimizer, loader)
    whole = {name: v.clone() for name, v in model.state_dict().items()}
    engine.detach()

    engine, model, optimizer, loader = start(plan=loop.plan(num_steps=4))
    for count, (x, y, _) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if count == 1:
            break
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model, optimizer, data_loader = parts()
    engine = dpt.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="views=3 came without augment"):
        engine.resume(data_loader=data_loader)
    *_, loader = engine.resume(data_loader=data_loader, augment=noisy)
    loop.train(model, optimizer, loader.remaining())
    assert all(torch.equal(v, whole[name]) for name, v in model.state_dict().items())


def test_a_loop_of_ones_own_takes_views_as_units():
    engine = dpt.PrivacyEngine()
    plan = loop.plan(num_steps=2, physical_batch_size=5)
    model, _, data_loader = parts()
    loader = engine.make_loader(data_loader=data_loader, plan=plan, views=K, augment=noisy)
    for batch in loader.remaining():
        total = {}
        for chunk in batch.chunks:
            x, y, rows = chunk.args
            assert len(x) == K * len(chunk.mask) == K * len(chunk.indices)
            assert rows[::K].tolist() == list(chunk.indices)
            sums = dpt.clipped_grad_sum(
                lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
                model,
                x,
                y,
                max_grad_norm=C,
                mask=chunk.mask,
                rows_per_unit=K,
            ).grads
            counted = chunk.mask.repeat_interleave(K)
            expected = clipped_by_hand(model.state_dict(), x[counted], y[counted])
            for name, value in sums.items():
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
            total = {name: total.get(name, 0) + value for name, value in sums.items()}
        engine.record()
        dpt.noisy_mean(total, plan, batch.step)


MISTAKES = {
    "views in another order": (
        lambda m, x, y: F.cross_entropy(
            m(x.view(-1, K, 6).transpose(0, 1).reshape(-1, 6)),
            y.view(-1, K).transpose(0, 1).reshape(-1),
        ),
        "other rows",
    ),
    "a mean over the views of an example": (
        lambda m, x, y: F.cross_entropy(m(x).view(-1, K, 3).mean(1), y[::K]),
        "other rows",
    ),
    "a mean over all views": (lambda m, x, y: F.cross_entropy(m(x - x.mean(0)), y), "other rows"),
    "one view of each": (lambda m, x, y: F.cross_entropy(m(x[::K]), y[::K]), "examples"),
    "a split example": (lambda m, x, y: F.cross_entropy(m(x[1:]), y[1:]), "split a unit of 3"),
    "views as positions": (
        lambda m, x, y: F.cross_entropy(m(x.view(-1, K * 6)[:, :6]), y[::K]),
        "examples",
    ),
    "a sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), "sum"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_other_uses_of_views_are_refused(name):
    loss, match = MISTAKES[name]
    engine, model, optimizer, loader = start()

    def train():
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()

    with pytest.raises((ValueError, RuntimeError), match=match):
        train()
    assert len(engine.ledger) == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"augment": None}, ValueError, "views=3 came without augment"),
        ({"views": 0}, ValueError, "views=0 is out of range"),
        ({"views": 2.5}, TypeError, "views=2.5 is a float"),
        ({"augment": "flip"}, TypeError, "augment is a str. Expected a function"),
        ({"augment": lambda x: x}, TypeError, r"augment takes \(x\).*\(example, generator\)"),
    ],
)
def test_wrong_views_are_refused_before_anything_changes(options, error, match):
    model, optimizer, loader = parts()
    engine, given = dpt.PrivacyEngine(), {"views": K, "augment": noisy, **options}
    with pytest.raises(error, match=match):
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, plan=loop.plan(), **given
        )
    with pytest.raises(error, match=match):
        engine.make_loader(data_loader=loader, plan=loop.plan(), **given)
    loop.start((model, optimizer, loader), plan=loop.plan())


def test_a_function_may_write_into_its_example():
    """Windows of one array: the next view, and the examples beside, have the data as they were."""
    series = np.arange(40, dtype=np.float32)

    class Windows(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return series[index : index + 6], torch.from_numpy(series[index : index + 6])

    def moved(example, generator):
        for part in example:
            part += 1
        return example

    drawn = DrawnViews(Windows(), moved)
    for array, tensor in drawn[3, [np.array([1, 2], np.uint32)] * 2]:
        assert array.tolist() == tensor.tolist() == list(range(4, 10))
    assert series.tolist() == list(range(40))

# SPDX-License-Identifier: Apache-2.0
"""Users, pairs and views in the loop: the rows of a unit are averaged or joined, and clipped once.

Each run is held to plain autograd of every unit alone, in float64.
"""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError, units
from dualdp.ledger.verify import verify
from dualdp_torch.integrations.host_loop import HostedRun
from dualdp_torch.training.loader import DrawnViews
from tests.dualdp_torch import loop
from tests.dualdp_torch.training.kinds import KINDS, MODES, OWNERS, USERS, C, K, Parts, noisy
from tests.dualdp_torch.training.runs import end_of, fit, forks

OF_USERS, OF_VIEWS = KINDS["users"], KINDS["views"]
each = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def assert_by_hand(kind, model, truth, run):
    kind.by_hand(truth, run)
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("mode", "reduction"),
    [("auto", "sum"), *((mode, "mean") for mode in MODES)],
)
@each
def test_training_is_plain_autograd_of_each_unit(kind, mode, reduction):
    run = kind.plan(max_grad_norm=kind.middle)
    options = {"grad_sample_mode": mode, "loss_reduction": reduction}
    engine, model, optimizer, loader = kind.start(plan=run, **options)
    truth = copy.deepcopy(model)
    rows = kind.train(model, optimizer, loader, reduction)
    assert engine.ledger.last_check == 2
    assert engine.get_epsilon() == run.epsilon()
    norms = engine.stages().unprotected_norms
    assert len(norms) == len(rows[-1]) // kind.k == len(run.batch_indices(2))
    assert norms.min() < kind.middle < norms.max()
    assert_by_hand(kind, model, truth, run)


@pytest.mark.parametrize("size", [3, 1])
@each
def test_physical_batches_count_units_and_split_none(kind, size):
    run = kind.plan(physical_batch_size=size)
    _, model, optimizer, loader = kind.start(plan=run)
    truth, rows = copy.deepcopy(model), kind.train(model, optimizer, loader)
    assert max(map(len, rows)) == size * kind.k
    assert not any(len(some) % kind.k for some in rows)
    assert_by_hand(kind, model, truth, run)


@each
def test_a_replaced_unit_moves_the_sum_by_at_most_two_bounds(kind):
    size = kind.plan().num_examples
    run = kind.plan(expected_batch_size=size, num_steps=1, noise_multiplier=0.0)

    def total(rows):
        engine, model, optimizer, loader = kind.start(kind.parts(rows), plan=run, checks=0)
        kind.train(model, optimizer, loader)
        return torch.cat([part.flatten() for part in engine.stages().unprotected_sum.values()])

    before = total(kind.data)
    apart = [
        float((total(kind.replaced(value)) - before).norm())
        for value in (300.0, -30.0, float("nan"))
    ]
    assert C / 2 < max(apart) <= 2 * C


@each
def test_a_resumed_run_of_a_seed_is_the_uninterrupted_one(kind, tmp_path):
    _, whole, optimizer, loader = kind.start()
    kind.train(whole, optimizer, loader)
    engine, model, optimizer, loader = kind.start()
    kind.train(model, optimizer, [next(iter(loader))])
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model, optimizer, data_loader = kind.parts()
    engine = dpt.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    for wrong, match in kind.refused_at_resume:
        with pytest.raises(ValueError, match=match):
            engine.resume(data_loader=data_loader, **wrong)
    *_, loader = engine.resume(data_loader=data_loader, **kind.at_resume)
    kind.train(model, optimizer, loader.remaining())
    assert torch.equal(end_of(model), end_of(whole))


@forks
@each
def test_workers_give_the_same_rows(kind):
    found = []
    for workers in (0, 2):
        engine, *_, loader = kind.start(kind.parts(num_workers=workers))
        before = torch.get_rng_state()
        found.append([part for _, batch in loader.of_steps(0, 3) for part in batch])
        assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, *found))


@each
def test_a_loop_of_ones_own_gets_units(kind):
    engine, run = dpt.PrivacyEngine(), kind.plan(physical_batch_size=3)
    model, _, data_loader = kind.parts()
    truth = copy.deepcopy(model)
    loader = engine.make_loader(data_loader=data_loader, plan=run, **kind.options)
    for batch in loader.remaining():
        total = {}
        for chunk in batch.chunks:
            x, y, _ = chunk.args
            assert len(x) == kind.k * len(chunk.mask) == kind.k * len(chunk.indices)
            sums = dpt.clipped_grad_sum(
                lambda m, x, y: kind.losses(m(x), y),
                *(model, x, y),
                max_grad_norm=C,
                mask=chunk.mask,
                rows_per_unit=kind.k,
                row_weights=chunk.row_weights,
            ).grads
            total = {name: total.get(name, 0) + value for name, value in sums.items()}
        engine.record()
        for name, mean in dpt.noisy_mean(total, run, batch.step).items():
            model.get_parameter(name).data.sub_(0.5 * mean)
    engine.detach()
    assert_by_hand(kind, model, truth, run)


ROWS = OF_VIEWS.data.tensors
ONE_ROW = {
    "users": ({"unit": "user", "rows_per_unit": 1}, {"users": np.arange(60) + 7}, ROWS),
    "items": ({"rows_per_unit": 1}, {}, [part[:, None] for part in ROWS]),
    "views": ({}, {"views": 1}, ROWS),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_units_of_one_row_are_examples(name):
    """Bit for bit."""
    ends = []
    for changes, options, rows in (({}, {}, ROWS), ONE_ROW[name]):
        run, given = loop.plan(num_steps=3, **changes), OF_VIEWS.parts(TensorDataset(*rows))
        _, model, optimizer, loader = loop.start(given, plan=run, **options)
        ends.append((loop.train(model, optimizer, loader), end_of(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


# ---------------------------------------------------------------------- refused


def by_view(x):
    """Views in another order."""
    return x.view(-1, K, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def mean_of_rows(model, x, y, _):
    return F.cross_entropy(model(x).view(-1, K, 3).mean(1), y[::K])


MISTAKES = [  # kind, loss, text
    ("users", mean_of_rows, "other rows"),
    ("views", mean_of_rows, "other rows"),
    ("views", lambda m, x, y, _: F.cross_entropy(m(by_view(x)), by_view(y)), "other rows"),
    ("views", lambda m, x, y, _: F.cross_entropy(m(x - x.mean(0)), y), "other rows"),
    ("users", lambda m, x, y, _: F.cross_entropy(m(x[:K]), y[:K]), "called on 3 rows"),
    ("views", lambda m, x, y, _: F.cross_entropy(m(x[::K]), y[::K]), "examples"),
    ("views", lambda m, x, y, _: F.cross_entropy(m(x[1:]), y[1:]), "split a unit of 3"),
    ("users", lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum"), "sum"),
    ("views", lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum"), "sum"),
]


@pytest.mark.parametrize(("kind", "loss", "match"), MISTAKES)
def test_losses_that_are_no_mean_of_rows_are_refused(kind, loss, match):
    engine, *parts = KINDS[kind].start()
    with pytest.raises((ValueError, RuntimeError), match=match):
        fit(*parts, loss)
    assert len(engine.ledger) == 0


TWICE = units.UserRows(np.zeros(60, np.int64), units.user_rows(OWNERS).starts)
BOTH = {"views": 2, "augment": noisy}
WRONG = [  # shapes and kinds of ids: tests/dualdp/plan/test_units.py
    ("users", {"users": OWNERS[1:]}, ValueError, "59 ids but the data has 60 rows"),
    ("users", {"plan": OF_USERS.plan(num_examples=26)}, ValueError, "25 users but the plan has nu"),
    ("users", {"users": TWICE}, ValueError, r"users\[1\]=-1 is negative"),
    ("users", BOTH, ValueError, "users and views= or augment= came together"),
    ("views", {"augment": None}, ValueError, "views=3 came without augment"),
    ("views", {"views": 0}, ValueError, "views=0 is out of range"),
    ("views", {"views": 2.5}, TypeError, "views=2.5 is a float"),
    ("views", {"augment": "flip"}, TypeError, "augment is a str. Expected a function"),
    ("views", {"augment": lambda x: x}, TypeError, r"takes \(x\).*\(example, generator\)"),
]


@pytest.mark.parametrize(("kind", "options", "error", "match"), WRONG)
def test_wrong_units_are_refused_before_anything_changes(kind, options, error, match):
    kind, engine = KINDS[kind], dpt.PrivacyEngine()
    model, optimizer, loader = kind.parts()
    options = {"data_loader": loader, "plan": kind.plan(), **kind.options, **options}
    with pytest.raises(error, match=match):
        engine.make_private(module=model, optimizer=optimizer, **options)
    with pytest.raises(error, match=match):
        engine.make_loader(**options)
    kind.start((model, optimizer, loader))


# ---------------------------------------------------------------------- users


def test_layers_and_several_forwards_know_the_weights():
    ends = []
    for shares in ((1.0,), (0.25, 0.75)):
        _, *parts, loader = OF_USERS.start(plan=OF_USERS.plan(clipping="automatic"))
        batches = ((x, y) for x, y, _ in loader)
        fit(*parts, batches, lambda m, x, y, s=shares: sum(w * F.cross_entropy(m(x), y) for w in s))
        ends.append(end_of(parts[0]))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-10)


def test_users_without_rows_are_drawn_and_add_nothing():
    rows = units.user_rows(OWNERS // 2, num_users=2 * USERS)
    run = OF_USERS.plan(num_examples=2 * USERS, expected_batch_size=16, physical_batch_size=2)
    data = OF_USERS.replaced(0.0)
    data.tensors[0][0] = torch.nan  # which pads masked batches
    engine, model, optimizer, loader = OF_USERS.start(OF_USERS.parts(data), users=rows, plan=run)
    before, draws = end_of(model), [draw for draw, _ in loader.of_steps(0, 3)]
    assert all(rows.counts[i] for draw in draws if draw.mask.any() for i in draw.indices)
    assert len(draws) == loader.num_batches(0, 3)
    OF_USERS.train(model, optimizer, loader)
    assert engine.ledger.position == 3
    assert end_of(model).isfinite().all()
    assert not torch.equal(end_of(model), before)


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def test_rows_of_a_loader_are_never_taken_for_examples():
    """Neither clipped one by one nor, if they are padding, counted."""
    model, _, data_loader = OF_USERS.parts()
    loader = dpt.PrivacyEngine().make_loader(
        data_loader=data_loader, plan=OF_USERS.plan(), users=OWNERS
    )
    chunk = next(iter(loader)).chunks[0]
    x, y, _ = chunk.args
    compiled = dpt.compile_clipped_grad_sum(losses, model, backend="eager")
    for call in (
        lambda **o: dpt.clipped_grad_sum(losses, model, x, y, **o),
        lambda **o: dpt.clipped_grad_sum(losses, model, x, y, rows_per_unit=1, **o),
        lambda **o: dpt.clipped_grad_sum(losses, model, x, y, rows_per_unit=K, **o),
        lambda **o: dpt.clipped_grad_sum(
            *(losses, model, x, y), rows_per_unit=1, row_weights=chunk.row_weights, **o
        ),
        lambda **o: compiled(x, y, **o),
    ):
        with pytest.raises(ValueError, match=f"rows_per_unit={K}, row_weights=chunk.row_weights"):
            call(max_grad_norm=C)


def test_gradients_of_inputs_are_those_of_the_loop():
    """FGSM: the gradient that the loop asks for is not weighted, and the step is."""
    engine, model, optimizer, loader = OF_USERS.start(checks=0)
    truth = copy.deepcopy(model)
    for x, y, rows in loader:
        seen = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(seen), y), seen)
        with engine.pause():
            (expected,) = torch.autograd.grad(F.cross_entropy(model(seen), y), seen)
        assert torch.equal(grad, expected)
        assert bool(grad.flatten(1).any(1).all())  # also of padding
        OF_USERS.train(model, optimizer, [(x, y, rows)])
    OF_USERS.by_hand(truth, OF_USERS.plan())
    torch.testing.assert_close(end_of(model), end_of(truth), rtol=1e-10, atol=1e-10)


def test_a_batch_of_more_users_than_there_are_is_refused():
    """The loader's batch size counts users, and one that counted rows may be larger than all."""
    loader = DataLoader(OF_USERS.data, batch_size=50)
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "epochs": 1}
    with pytest.raises(ValueError, match="Expected a finite number > 0, at most num_examples=25"):
        loop.start(
            (*OF_USERS.parts()[:2], loader), users=OWNERS, unit="user", rows_per_unit=K, **numbers
        )


def test_trainers_of_other_packages_take_no_units():
    for given in ({"users": OWNERS}, {"views": 2}, {"plan": OF_USERS.plan()}, {"unit": "user"}):
        with pytest.raises(ValueError, match="came to a trainer of another package"):
            HostedRun(**given)


def test_a_plan_is_made_of_the_number_of_users():
    engine = dpt.PrivacyEngine(accountant="rdp")
    given = zip(("module", "optimizer", "data_loader"), OF_USERS.parts(drop_last=True), strict=True)
    target = {"target_epsilon": 8.0, "target_delta": 1e-3, "epochs": 2, "max_grad_norm": C}
    unit = {"unit": "user", "rows_per_unit": K, "users": torch.as_tensor(OWNERS)}
    *parts, loader = engine.make_private_with_epsilon(**dict(given), **target, **unit)
    run = engine.plan
    assert (run.num_examples, run.expected_batch_size_at(0), run.num_steps) == (USERS, 8, 6)
    assert len(loader) == 3
    OF_USERS.train(*parts, loader.remaining())
    assert engine.get_epsilon() <= 8.0


def test_a_ledger_says_whom_it_protects():
    engine, *parts = OF_USERS.start()
    OF_USERS.train(*parts)
    text = engine.ledger.to_json()
    assert '"unit":"user"' in text
    assert str(OWNERS.tolist()) not in text
    found = verify(text, allow_seed=True).findings
    assert any("of one user" in finding.detail for finding in found)


# ---------------------------------------------------------------------- views


def test_every_view_of_a_run_is_another():
    """By step, example and view: examples come in several steps, with other views."""
    _, *_, loader = OF_VIEWS.start(plan=OF_VIEWS.plan(num_steps=4))
    whole = [batch for _, batch in loader.of_steps(0, 4)]
    seen = torch.cat([rows[::K] for *_, rows in whole])
    assert len(seen.unique()) < len(seen)
    added = torch.cat([x - OF_VIEWS.data.tensors[0][rows] for x, _, rows in whole]).float()
    assert len(added.flatten().unique()) > 0.99 * added.numel()
    assert abs(float(added.std()) - 0.3) < 0.05


def test_functions_of_the_global_generator_are_keyed_too():
    def by_torch(example, generator):
        return example[0] + torch.rand(6), *example[1:]

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        *_, loader = OF_VIEWS.start(augment=by_torch)
        found.append(torch.cat([x for _, (x, *_) in loader.of_steps(0, 2)]))
    assert torch.equal(*found)
    assert len((found[0][:K] - found[0][0]).unique(dim=0)) == K


def test_a_function_may_write_into_its_example():
    """Windows of one array: the next view, and the examples beside, have the data as they were."""
    series = np.arange(40, dtype=np.float32)

    class Windows(Dataset):
        def __getitem__(self, index):
            return series[index : index + 6], torch.from_numpy(series[index : index + 6])

    def moved(example, generator):
        for part in example:
            part += 1
        return example

    for array, tensor in DrawnViews(Windows(), moved)[3, [np.array([1, 2], np.uint32)] * 2]:
        assert array.tolist() == tensor.tolist() == list(range(4, 10))
    assert series.tolist() == list(range(40))


class StatesOfEight(Parts):
    """States for the rows of eight examples, as recurrent models of one batch size keep them."""

    def forward(self, x):
        return super().forward(x) + torch.zeros(8 * K, 1)


def test_a_model_of_one_batch_size_is_named():
    _, model, _, loader = OF_VIEWS.start(OF_VIEWS.parts(model=StatesOfEight()))
    x, *_ = next(batch for batch in loader if len(batch[0]) != 8 * K)
    with pytest.raises(UnsupportedLayerError, match="takes batches of one size only"):
        model(x)

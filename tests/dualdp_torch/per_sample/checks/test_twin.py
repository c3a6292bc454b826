# SPDX-License-Identifier: Apache-2.0
"""Twins beside a loop: inputs, later branches, numbers, second losses, and what is only noted.

known_failures 63, 64, 66 and 71: each fault is planted in the engine and in `record_per_sample`.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualdp_torch as dpt
from dualdp import ExactnessError
from dualdp_torch.per_sample.checks.twin import Twins
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import build, by_hand, dataset, plan, start

N = 12


def same_parameters(model, run, steps):
    """Whether the run ended where DP-SGD by hand ends."""
    expected = build()[0]
    by_hand(expected, run, steps)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def engine_loop(loop, model=None, steps=6, **options):
    """`loop(model, x, y, step)` -> backward, in an engine; the number of steps that were made."""
    parts = build()
    if model is not None:
        parts = model, torch.optim.SGD(model.parameters(), lr=0.5), parts[2]
    run = plan(num_steps=steps)
    engine, model, optimizer, loader = start(parts, plan=run, **options)
    for step, (x, y, _) in enumerate(loader):
        loop(model, x, y, step)
        optimizer.step()
    return engine


def recorded_loop(loop, model=None, steps=1, **options):
    """The same in a block of `record_per_sample`."""
    model = model or build()[0]
    x, y, _ = dataset().tensors
    for step in range(steps):
        rows = slice(step, step + N)
        with dpt.record_per_sample(model, loss_reduction="mean", **options) as record:
            loop(model, x[rows], y[rows], step)
    return record


RUNS = [engine_loop, recorded_loop]


# ---------------------------------------------------------------------- alone, and among others


def by_place(model, x, y, step):
    """Found only by the row alone: no other row matters, but how many there are does."""
    out, weights = model(x), torch.linspace(1, 2, len(y))
    (F.cross_entropy(out, y, reduction="none") * weights).mean().backward()


def first_of_its_class(model, x, y, step):
    """Found only among others: weight 1 for who is alone, or the first of its class."""
    out = model(x)
    later = (y[:, None] == y[None]).tril(-1).any(1).float()
    (F.cross_entropy(out, y, reduction="none") * (1 + later)).mean().backward()


# ---------------------------------------------------------------------- preparation of inputs


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loop", [by_place, first_of_its_class])
def test_the_row_alone_and_among_others_find_faults(loop, run):
    with pytest.raises(ValueError, match="mixes the examples|What one example weighs"):
        run(loop)


def test_a_row_among_others_is_found_by_its_place_too():
    """Without the row alone: every row of the other batch is a row of this one elsewhere."""

    def loop(model, x, y, step):
        out, weights = model(x), torch.linspace(1, 2, len(y))
        out[1].sum()  # which a batch of one row has not
        (F.cross_entropy(out, y, reduction="none") * weights).mean().backward()

    with pytest.raises(ValueError, match="mixes the examples"):
        engine_loop(loop)


INPUTS = {
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "centred in place": lambda x: x.sub_(x.mean(0)),
    "scaled by the largest": lambda x: x / x.abs().amax(),
    "mixed up": lambda x: 0.8 * x + 0.2 * x[torch.randperm(len(x))],
    "whitened": lambda x: x @ torch.linalg.inv(torch.cov(x.T) + torch.eye(6)),
    "sorted": lambda x: x[x[:, 0].argsort()],
    "masked by a rank": lambda x: x * (x.norm(dim=1) < x.norm(dim=1).median())[:, None],
}


@pytest.mark.parametrize("prepare", [pytest.param(f, id=n) for n, f in INPUTS.items()])
def test_inputs_that_are_prepared_from_the_batch_are_refused(prepare):
    torch.manual_seed(2)  # of which no row is mixed with itself

    def loop(model, x, y, step):
        F.cross_entropy(model(prepare(x.clone())), y).backward()

    with pytest.raises(ValueError, match="What the model gets for one example|mixes the examples"):
        engine_loop(loop)


OWN = {
    "scaled": lambda x: x / 255,
    "in place": lambda x: x.sub_(0.5).div_(2.0),
    "its own mean": lambda x: x - x.mean(1, keepdim=True),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "noise of a generator": lambda x: (
        x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    ),
    "dropped": lambda x: F.dropout(x, 0.3),
    "flipped at random": lambda x: torch.where(torch.rand(len(x), 1) < 0.5, x, x.flip(1)),
    "public numbers": lambda x: (x - torch.arange(6.0)) / torch.tensor([1.0, 2, 3, 4, 5, 6]),
    "a copy": lambda x: x.to(torch.float64).to("cpu").float().contiguous(),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("prepare", [pytest.param(f, id=n) for n, f in OWN.items()])
def test_inputs_that_are_prepared_one_by_one_pass(prepare, run):
    def loop(model, x, y, step):
        F.cross_entropy(model(prepare(x.clone())), y).backward()

    run(loop)


# ---------------------------------------------------------------------- later, or by chance (66)


class Switched(nn.Module):
    """A criterion with an attribute."""

    weight = 0.0

    def forward(self, out, y):
        loss = F.cross_entropy(out, y)
        return loss + self.weight * (out.std(0).sum() if self.weight else 0.0)


def test_another_loss_is_checked_on_the_step_where_it_comes():
    criterion = Switched()

    def loop(model, x, y, step):
        criterion.weight = 0.1 * (step > 3)
        criterion(model(x), y).backward()

    with pytest.raises(ExactnessError, match="The loss mixes the examples"):
        engine_loop(loop, checks=1.0)


def test_a_weight_that_grows_from_zero_is_checked_when_it_does():
    def loop(model, x, y, step):
        out = model(x)
        spread = (out - out.mean(0)).square().mean()
        (F.cross_entropy(out, y) + max(0.0, 0.1 * (step - 3)) * spread).backward()

    with pytest.raises(ExactnessError, match="The loss mixes the examples"):
        engine_loop(loop, checks=1.0)


def test_mixing_by_chance_is_refused_when_it_happens():
    torch.manual_seed(1)

    def loop(model, x, y, step):
        if torch.rand(1) < 0.3:
            x = 0.5 * (x + x.flip(0))
        F.cross_entropy(model(x), y).backward()

    with pytest.raises((ValueError, ExactnessError), match="What the model gets for one example"):
        engine_loop(loop, steps=12, checks=1.0)


def reduced(out, y, how="mean"):
    return F.cross_entropy(out, y, reduction=how)


def test_a_loss_of_the_same_code_with_another_default_is_another_loss():
    calls = []

    def loop(model, x, y, step):
        if step == 3:
            reduced.__defaults__ = ("sum",)
        calls.append(step)
        reduced(model(x), y).backward()

    try:
        with pytest.raises(ExactnessError, match="'mean', but the loss is a sum"):
            engine_loop(loop, checks=1.0)
    finally:
        reduced.__defaults__ = ("mean",)
    assert calls == [0, 1, 2, 3]


def turning(engine, model, optimizer, loader):
    """The same functions on the same shapes; after step 20 a tensor holds another number."""
    mixing = nn.Parameter(torch.zeros(()), requires_grad=False)
    for step, (x, _, _) in enumerate(loader):
        out = model(x)
        (out - mixing * out.detach().mean(0)).square().mean().backward()
        optimizer.step()
        mixing.fill_(float(step >= 20))
    return engine


def test_known_code_that_turns_wrong_is_found_at_the_steps_that_are_drawn():
    with pytest.raises(ExactnessError, match="A spot check failed: The loss mixes the examples"):
        turning(*start(plan=plan(num_steps=130), checks=1 / 10))
    engine = turning(*start(plan=plan(num_steps=60), checks=0))  # nobody looks
    assert len(engine.ledger) == 60


def test_a_failed_check_is_on_record():
    engine, *parts = start(plan=plan(num_steps=60), checks=1 / 4)
    with pytest.raises(ExactnessError) as found:
        turning(engine, *parts)
    step = len(engine.ledger)  # the step itself was not recorded
    assert 20 < step <= 28
    assert engine.ledger.failed_check["step"] == step
    assert engine.ledger.failed_check["last_passed"] == engine.ledger.last_check < step
    with pytest.raises(Exception, match="not vouched for since step"):
        engine.get_epsilon(delta=1e-5)
    assert engine.get_epsilon(delta=1e-5, accept_unverified=True) > 0
    assert "e" in found.value.relative_error


# ---------------------------------------------------------------------- second losses (63, 64)


class ActorCritic(nn.Module):
    """Two parts that share nothing."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)[:, 0]


def two_losses(of_critic):
    def loop(model, x, y, step):
        policy, value = model(x)
        F.cross_entropy(policy, y).backward()
        of_critic(value, y.float()).backward()

    return loop


SECOND = {
    "normalised": lambda v, t: (v - v.mean()).square().mean(),
    "a sum": lambda v, t: F.mse_loss(v, t, reduction="sum"),
    "advantages": lambda v, t: (((t - v.detach()) - (t - v.detach()).mean()) * v).mean(),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("of_critic", [pytest.param(f, id=n) for n, f in SECOND.items()])
def test_a_second_backward_over_another_part_is_looked_at(of_critic, run):
    match = "The loss mixes the examples|What one example weighs|'mean', but the loss is a sum"
    with pytest.raises(ValueError, match=match):
        run(two_losses(of_critic), randomise(ActorCritic()))


@pytest.mark.parametrize("run", RUNS)
def test_two_right_losses_of_two_parts_pass(run):
    run(two_losses(F.mse_loss), randomise(ActorCritic()))


class Balanced(nn.Module):
    """Keeps a statistic of the batch on itself."""

    def __init__(self):
        super().__init__()
        self.gate, self.head, self.balance = nn.Linear(6, 4), nn.Linear(6, 3), None

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        self.balance = shares.detach().mean(0).square().sum()
        return self.head(x) * shares.sum(1, keepdim=True)


# ---------------------------------------------------------------------- numbers


def test_a_number_of_examples_is_told_from_a_constant_that_happens_to_be_equal():
    """Declared a sum: over a constant it is one, over the number of examples it is not."""
    sizes = [len(plan().batch_indices(step)) for step in range(6)]
    constant = next(n for n in sizes if n != sizes[0])

    def over_a_constant(model, x, y, step):
        (F.cross_entropy(model(x), y, reduction="sum") / constant).backward()

    engine_loop(over_a_constant, loss_reduction="sum")

    def over_n(model, x, y, step):
        (F.cross_entropy(model(x), y, reduction="sum") / len(x)).backward()

    with pytest.raises((ValueError, ExactnessError), match="'sum', but the loss is a mean"):
        engine_loop(over_n, loss_reduction="sum")
    engine_loop(over_n)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_table_of_as_many_numbers_as_rows_is_a_table(seed):
    """Its 1 / n is read as a count by no twin, and refutes none."""

    def weighted(model, x, y, step):
        weight = torch.tensor([0.25, 0.5, 0.75, 1.0])[y]
        (weight * F.cross_entropy(model(x), y, reduction="none")).mean().backward()

    run = plan(num_steps=20, expected_batch_size=4, seed=seed)
    engine, model, optimizer, loader = start(plan=run, checks=1.0)
    for step, (x, y, _) in enumerate(loader):
        weighted(model, x, y, step)
        optimizer.step()
        optimizer.zero_grad()
    assert len(engine.ledger) == 20


@pytest.mark.parametrize("is_swapped", [False, True])
def test_inputs_that_get_a_gradient_are_followed(is_swapped):
    """Adversarial rows, without a pause: zero_grad() drops their forward."""
    engine, model, optimizer, loader = start(plan=plan(), checks=1.0)
    x, y, _ = next(iter(loader))
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x.requires_grad_()), y), x)
    loss = F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y.flip(0) if is_swapped else y)
    optimizer.zero_grad()
    loss.backward()
    if is_swapped:
        with pytest.raises(ValueError, match="mixes the examples"):
            optimizer.step()
    else:
        optimizer.step()
    assert "check_impossible" not in engine.ledger.to_json()


def test_a_schedule_is_no_data():
    """A number that changes at every step is checked when it begins to, and then known."""

    def loop(model, x, y, step):
        out = model(x)
        (F.cross_entropy(out, y) + 0.01 * math.sqrt(step) * out.square().mean()).backward()

    engine_loop(loop)


# ---------------------------------------------------------------------- the record itself


def test_a_batch_that_was_all_that_was_wanted_of_a_loader_is_looked_at():
    _, model, optimizer, loader = start(plan=plan())
    x, y, _ = next(iter(loader))
    assert not torch.overrides._get_current_function_mode_stack()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    with pytest.raises(ValueError, match="'mean', but the loss is a sum"):
        optimizer.step()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_long_work_between_batches_leaves_no_trace():
    """An evaluation in the middle: what it made is gone, so nothing of it is kept."""
    _, model, optimizer, loader = start(plan=plan(num_steps=1))
    for x, y, _ in loader:
        for k in range(600):
            (torch.full((50,), float(k)) * 2 + 1).sum()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    same_parameters(model, plan(num_steps=1), 1)


def test_twins_change_no_tensor_of_the_loop():
    centre = torch.zeros(3)

    def loop(model, x, y, step):
        out = model(x)
        centre.add_(out.detach()[0] * 0)
        (F.cross_entropy(out, y) + (out - centre).square().mean()).backward()

    def other(model, x, y, step):
        F.cross_entropy(model(x), y).backward()
        kept.append(y + 1)
        y.zero_()

    def beside(model, x, y, step):
        loss = F.cross_entropy(model(x), y)
        teacher(x)
        kept.append(x.mean(0))
        loss.backward()

    kept, teacher = [], nn.BatchNorm1d(6)
    engine_loop(beside, steps=1)
    torch.testing.assert_close(teacher.running_mean, 0.1 * kept.pop())
    engine_loop(loop, checks=1.0)
    assert not centre.any()
    engine_loop(other, steps=2)
    assert all(batch.any() for batch in kept)


def test_a_mode_of_the_users_stays_where_it_is():
    class Counting(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.seen += 1
            return func(*args, **(kwargs or {}))

    _, model, optimizer, loader = start(plan=plan(), checks=1.0)
    for x, y, _ in loader:
        with Counting():
            before = Counting.seen
            F.cross_entropy(model(x), y).backward()
            stack = torch.overrides._get_current_function_mode_stack()
            assert [type(mode) for mode in stack] == [Twins, Counting]
            assert Counting.seen > before
        optimizer.step()
        assert not torch.overrides._get_current_function_mode_stack()


def test_steps_without_a_check_have_no_mode():
    """Two batches of new code, then one step in twenty."""
    led = []

    def loop(model, x, y, step):
        led.append(len(torch.overrides._get_current_function_mode_stack()))
        F.cross_entropy(model(x), y).backward()

    engine_loop(loop, steps=80)
    assert led[:2] == [1, 1]
    assert all(sum(led[k : k + 20]) >= 1 for k in range(0, 80, 20))


# ---------------------------------------------------------------------- notes


def numbers_of_the_data(model, x, y, step):
    out = model(x)
    weight = math.sqrt(out.square().mean().item())
    (F.cross_entropy(out, y) * weight).backward()


def a_branch(model, x, y, step):
    loss = F.cross_entropy(model(x), y)
    if (y == 0).sum() > 3:
        loss = loss * 2
    loss.backward()


def through_numpy(model, x, y, step):
    x = torch.from_numpy(x.numpy() - x.numpy().mean(0))
    F.cross_entropy(model(x), y).backward()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def a_function_of_its_own(model, x, y, step):
    F.cross_entropy(Own.apply(model(x)), y).backward()


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (numbers_of_the_data, "changes from batch to batch after data were read"),
        (a_branch, "decides by data of the batch"),
        (through_numpy, "went through NumPy"),
        (a_function_of_its_own, "could not be followed through the loop"),
    ],
)
def test_what_a_twin_can_not_follow_is_noted_once_and_stops_nothing(loop, words):
    engine = engine_loop(loop, steps=12, checks=1.0)
    assert len(engine.ledger) == 12
    assert engine.get_epsilon(delta=1e-5) > 0
    assert engine.ledger.to_json().count(words) == 1


def test_a_number_that_was_read_is_followed_where_it_comes_again():
    def loop(model, x, y, step):
        out = model(x)
        (F.cross_entropy(out, y) * out.detach().abs().max().item()).backward()

    with pytest.raises(ValueError, match="What one example weighs"):
        engine_loop(loop)


def test_a_number_equal_to_a_logged_one_by_chance_is_none():
    def loop(model, x, y, step):
        out = model(x)
        (out.argmax(1) == out.argmax(1)).float().mean().mul(0.5).item()  # always 0.5
        (0.5 * F.cross_entropy(out, y)).backward()

    assert len(engine_loop(loop, steps=12, checks=1.0).ledger) == 12


def test_a_statistic_that_the_model_keeps_is_refused_on_the_next_batch():
    def loop(model, x, y, step):
        (F.cross_entropy(model(x), y) * model.balance).backward()

    with pytest.raises((ValueError, ExactnessError), match="What one example|mixes the examples"):
        engine_loop(loop, randomise(Balanced()))


# ---------------------------------------------------------------------- lists of rows


def zipped(items):
    return tuple(zip(*items, strict=True))


def named(items):
    return {"x": [item[0] for item in items], "y": [item[1] for item in items]}


FORMS = {
    "tuples": (zipped, lambda batch: (batch[0], batch[1])),
    "lists by name": (named, lambda batch: (batch["x"], batch["y"])),
    "items": (list, lambda batch: ([item[0] for item in batch], [item[1] for item in batch])),
}


def of_lists(form, prepare):
    """Train on batches that are lists of rows, which the loop prepares and stacks."""
    collate, fields = FORMS[form]
    model, optimizer, _ = build()
    loader = torch.utils.data.DataLoader(dataset(), batch_size=N, collate_fn=collate)
    engine, model, optimizer, loader = start(
        (model, optimizer, loader), plan=plan(num_steps=4), checks=1.0
    )
    for batch in loader:
        rows, labels = fields(batch)
        x, y = torch.stack(list(prepare(rows))), torch.stack(list(labels))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_rows_are_rows(form):
    """As the collate functions of detection and segmentation yield them."""
    engine = of_lists(form, lambda rows: [row.clamp(-2, 2) / 2 for row in rows])
    assert len(engine.ledger) == 4


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_rows_that_meet_are_refused(form):
    with pytest.raises(ValueError, match="What the model gets for one example"):
        of_lists(form, lambda rows: [row - torch.stack(list(rows)).mean(0) for row in rows])


# ---------------------------------------------------------------------- joined rows


def test_rows_that_are_joined_are_a_note():
    """Targets of CTC are one tensor of all rows, of which no row alone can be taken."""
    items = [(torch.randn(9, 5), torch.randint(1, 4, (2,))) for _ in range(40)]

    def collate(items):
        lengths = torch.tensor([len(item[1]) for item in items])
        return torch.stack([item[0] for item in items]), torch.cat([y for _, y in items]), lengths

    model = nn.Linear(5, 4)
    loader = torch.utils.data.DataLoader(items, batch_size=N, collate_fn=collate)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.5), loader
    run = plan(num_examples=40, num_steps=4)
    engine, model, optimizer, loader = start(parts, plan=run, checks=1.0)
    for x, y, lengths in loader:
        scores = model(x).log_softmax(2).transpose(0, 1)
        sizes = torch.full((len(x),), 9)
        (F.ctc_loss(scores, y, sizes, lengths, reduction="sum") / len(x)).backward()
        optimizer.step()
    assert len(engine.ledger) == 4
    assert "could not be followed" in engine.ledger.to_json()


# ---------------------------------------------------------------------- checkpoints


def in_a_checkpoint(model, x, y, step):
    checkpoint(F.cross_entropy, model(x), y, use_reentrant=False).backward()


@pytest.mark.parametrize("run", RUNS)
def test_a_loss_in_a_checkpoint_is_followed(run):
    """A checkpoint counts what its functions save, and those of the twins are none of its own."""
    made = run(in_a_checkpoint)
    if run is engine_loop:
        assert "could not be followed" not in made.ledger.to_json()
    else:
        assert made.norms().isfinite().all()


def test_a_checkpointed_loss_that_mixes_is_refused():
    def loop(model, x, y, step):
        def mixed(out, y):
            return F.cross_entropy(out - out.mean(0), y)

        checkpoint(mixed, model(x), y, use_reentrant=False).backward()

    with pytest.raises(ValueError, match="mixes the examples|What one example weighs"):
        engine_loop(loop)


# ---------------------------------------------------------------------- several private models


def test_two_private_models_in_one_loop_have_no_notes():
    """What one model's rows lead to is not followed by the twins of the other."""
    runs = [start(build(), plan=plan(num_steps=4), checks=1.0) for _ in range(2)]
    loaders = [loader for *_, loader in runs]
    for batches in zip(*loaders, strict=True):
        for (_, model, _, _), (x, y, _) in zip(runs, batches, strict=True):
            F.cross_entropy(model(x), y).backward()
        for _, _, optimizer, _ in runs:
            optimizer.step()
    for engine, *_ in runs:
        assert len(engine.ledger) == 4
        assert "check_impossible" not in engine.ledger.to_json()


def test_a_mistake_beside_another_private_model_is_refused():
    (_, good, _, first), (_, bad, optimizer, second) = (
        start(build(), plan=plan(num_steps=4), checks=1.0) for _ in range(2)
    )
    for (x, y, _), (a, b, _) in zip(first, second, strict=True):
        F.cross_entropy(good(x), y).backward()
        out = bad(a)
        F.cross_entropy(out - out.mean(0), b).backward()
        with pytest.raises(ValueError, match="mixes the examples|What one example weighs"):
            optimizer.step()
        break

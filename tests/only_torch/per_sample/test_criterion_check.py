# SPDX-License-Identifier: Apache-2.0
"""What a loop computes outside its model, replayed: later branches, inputs, numbers, second losses.

known_failures 63, 64, 66 and 71: each fault is planted in the engine and in `record_per_sample`.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError
from dualdp_torch.per_sample.checks.criterion_check import CriterionCheck, _BatchReplay
from dualdp_torch.per_sample.checks.replay import ReplayError, Rows, Script
from dualdp_torch.per_sample.checks.tape import Backward, Tape
from tests.only_torch.checks import randomise
from tests.only_torch.loop import build, by_hand, dataset, plan, start

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


# ---------------------------------------------------------------------- what is replaced, what not


def by_place(model, x, y, step):
    """Found only by the row alone: no other row matters, but how many there are does."""
    weights = torch.linspace(1, 2, len(y))
    (F.cross_entropy(model(x), y, reduction="none") * weights).mean().backward()


def first_of_its_class(model, x, y, step):
    """Found only among others: weight 1 for who is alone, or the first of its class."""
    later = (y[:, None] == y[None]).tril(-1).any(1).float()
    (F.cross_entropy(model(x), y, reduction="none") * (1 + later)).mean().backward()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loop", [by_place, first_of_its_class])
def test_both_kinds_of_replay_find_faults(loop, run):
    with pytest.raises(ValueError, match="mixes the examples|What one example weighs"):
        run(loop)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("loop", "test"), [(by_place, "alone"), (first_of_its_class, "others")])
def test_each_kind_of_replay_finds_what_the_other_does_not(loop, test, run, monkeypatch):
    trial = "dualdp_torch.per_sample.checks.criterion_check._BatchReplay"
    others, alone = lambda *a: None, lambda self, *a: None
    if test == "others":  # looked at rows that are the first of their class
        first = next(k for k in range(N) if dataset().tensors[1][k] not in dataset().tensors[1][:k])
        monkeypatch.setattr(f"{trial}.others", others)
        check = CriterionCheck.check
        monkeypatch.setattr(
            CriterionCheck, "check", lambda s, t, c, rows, m, **k: check(s, t, c, [first], m, **k)
        )
        run(loop, steps=1)
        return
    monkeypatch.setattr(f"{trial}.alone", alone)
    run(loop, steps=1)


# ---------------------------------------------------------------------- preparation of inputs


INPUTS = {
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "centred in place": lambda x: x.sub_(x.mean(0)),
    "scaled by the largest": lambda x: x / x.abs().amax(),
    "mixed up": lambda x: 0.8 * x + 0.2 * x[torch.randperm(len(x))],
    "by numpy": lambda x: torch.from_numpy(x.numpy() - x.numpy().mean(0)),
    "whitened": lambda x: x @ torch.linalg.inv(torch.cov(x.T) + torch.eye(6)),
    "sorted": lambda x: x[x[:, 0].argsort()],
    "masked by a rank": lambda x: x * (x.norm(dim=1) < x.norm(dim=1).median())[:, None],
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("prepare", [pytest.param(f, id=n) for n, f in INPUTS.items()])
def test_inputs_that_are_prepared_from_the_batch_are_refused(prepare, run):
    torch.manual_seed(2)  # of which no row is mixed with itself

    def loop(model, x, y, step):
        F.cross_entropy(model(prepare(x.clone())), y).backward()

    with pytest.raises(ValueError, match="What the model gets for one example|mixes the examples"):
        run(loop)


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

    with pytest.raises(ValueError, match="The loss mixes the examples"):
        engine_loop(loop)


def test_a_weight_that_grows_from_zero_is_checked_when_it_does():
    def loop(model, x, y, step):
        out = model(x)
        spread = (out - out.mean(0)).square().mean()
        (F.cross_entropy(out, y) + max(0.0, 0.1 * (step - 3)) * spread).backward()

    with pytest.raises(ValueError, match="The loss mixes the examples"):
        engine_loop(loop)


def test_mixing_by_chance_is_refused_when_it_happens():
    torch.manual_seed(1)

    def loop(model, x, y, step):
        if torch.rand(1) < 0.3:
            x = 0.5 * (x + x.flip(0))
        F.cross_entropy(model(x), y).backward()

    with pytest.raises(ValueError, match="What the model gets for one example"):
        engine_loop(loop, steps=12)


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
        with pytest.raises(ValueError, match="'mean', but the loss is a sum"):
            engine_loop(loop)
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


def test_known_code_is_tried_with_every_replacement_in_turn(monkeypatch):
    """New code with all of them around each row; known code with one, if whole around each row."""
    trial, tried = "dualdp_torch.per_sample.checks.criterion_check._BatchReplay", []
    others = _BatchReplay.others

    def noted(self, row, seed, forms):
        tried[-1] += [(row, form) for form in forms]
        return others(self, row, seed, forms)

    check = CriterionCheck.check

    def numbered(self, tape, cotangents, rows, model, *, is_whole, **options):
        tried.append([])
        is_new = tape.signature() not in self._known
        found = check(self, tape, cotangents, rows, model, is_whole=is_whole, **options)
        forms = [form for _, form in tried[-1]]
        assert len(forms) == (16 if is_new else 4 if is_whole else 1)
        assert len(set(tried[-1])) == len(forms)
        assert is_new or not is_whole or sorted(forms) == [0, 1, 2, 3]
        positions.append(None if is_whole else (rows.index(tried[-1][0][0]), forms[0]))
        return found

    positions = []
    monkeypatch.setattr(f"{trial}.others", noted)
    monkeypatch.setattr(CriterionCheck, "check", numbered)
    engine_loop(lambda m, x, y, step: F.cross_entropy(m(x), y).backward(), steps=80, checks=1.0)
    assert {p for p in positions if p} == {(i, form) for i in (0, 1) for form in range(4)}


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
    """Keeps a term of the loss on itself."""

    def __init__(self, detached=False):
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
        self.detached, self.balance = detached, None

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        self.balance = shares.mean(0).square().sum()
        if self.detached:
            self.balance = self.balance.detach()
        return self.head(x) * shares.sum(1, keepdim=True)


@pytest.mark.parametrize("run", RUNS)
def test_a_term_that_the_model_keeps_is_refused(run):
    def loop(model, x, y, step):
        (F.cross_entropy(model(x), y) + model.balance).backward()

    with pytest.raises(ValueError, match="kept on the module, as its attribute 'balance'"):
        run(loop, randomise(Balanced()))


@pytest.mark.parametrize("run", RUNS)
def test_a_number_that_the_model_keeps_is_refused_without_a_gradient_too(run):
    def loop(model, x, y, step):
        (F.cross_entropy(model(x), y) * model.balance).backward()

    with pytest.raises(ValueError, match="kept on the module, as its attribute 'balance'"):
        run(loop, randomise(Balanced(detached=True)))


@pytest.mark.parametrize("run", RUNS)
def test_parameters_outside_of_the_model_are_refused(run):
    temperature = nn.Parameter(torch.ones(()))

    def loop(model, x, y, step):
        F.cross_entropy(model(x) * temperature, y).backward()

    with pytest.raises(ValueError, match="a parameter of shape .* outside of the model"):
        run(loop)


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

    with pytest.raises(ValueError, match="'sum', but the loss is a mean"):
        engine_loop(over_n, loss_reduction="sum")
    engine_loop(over_n)


def test_a_schedule_is_no_data():
    """A number that changes at every step is checked when it begins to, and then known."""

    def loop(model, x, y, step):
        out = model(x)
        (F.cross_entropy(out, y) + 0.01 * math.sqrt(step) * out.square().mean()).backward()

    engine_loop(loop)


def test_numbers_that_are_read_and_used_are_refused_at_the_latest_on_the_next_batch():
    def loop(model, x, y, step):
        out = model(x)
        weight = math.sqrt(out.square().mean().item())
        (F.cross_entropy(out, y) * weight).backward()

    with pytest.raises((ValueError, ExactnessError), match="read into Python numbers"):
        engine_loop(loop)


@pytest.mark.parametrize("run", RUNS)
def test_python_loops_over_rows_are_refused_by_name(run):
    def loop(model, x, y, step):
        out = model(x)
        sum(F.cross_entropy(out[i : i + 1], y[i : i + 1]) for i in range(len(y))).backward()

    match = "can't be computed for one example alone|What one example weighs|but the loss is a sum"
    with pytest.raises(ValueError, match=match):
        run(loop)


def test_a_branch_on_the_data_is_refused():
    def loop(model, x, y, step):
        loss = F.cross_entropy(model(x), y)
        if (y == 0).sum() > 3:
            loss = loss * 2
        loss.backward()

    with pytest.raises(ValueError, match="decides by the data of the batch .__bool__"):
        engine_loop(loop, steps=12)


# ---------------------------------------------------------------------- the record itself


def test_a_tape_leaves_the_modes_of_others_where_they_are():
    class Counting(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.seen += 1
            return func(*args, **(kwargs or {}))

    _, model, optimizer, loader = start(plan=plan())
    for x, y, _ in loader:
        with Counting():
            before = Counting.seen
            F.cross_entropy(model(x), y).backward()
            stack = torch.overrides._get_current_function_mode_stack()
            assert [type(mode) for mode in stack] == [Tape, Counting]
            assert Counting.seen > before
        optimizer.step()
        assert not torch.overrides._get_current_function_mode_stack()


def test_a_batch_that_was_all_that_was_wanted_of_a_loader_is_looked_at():
    _, model, optimizer, loader = start(plan=plan())
    x, y, _ = next(iter(loader))
    assert not torch.overrides._get_current_function_mode_stack()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    with pytest.raises(ValueError, match="'mean', but the loss is a sum"):
        optimizer.step()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_loop_that_is_left_before_its_backward_is_refused():
    _, model, optimizer, loader = start(plan=plan())
    for x, y, _ in loader:
        loss = F.cross_entropy(model(x), y)
        break
    with pytest.raises(RuntimeError, match="whose loss could not be found|was left before its"):
        loss.backward(), optimizer.step()


def test_long_work_between_batches_leaves_no_trace():
    """An evaluation in the middle: what it made is gone, so nothing of it is kept."""
    _, model, optimizer, loader = start(plan=plan(num_steps=1))
    for x, y, _ in loader:
        for k in range(600):
            (torch.full((50,), float(k)) * 2 + 1).sum()
        F.cross_entropy(model(x), y).backward()
        assert len(model._forward_hooks) == 1
        optimizer.step()
    same_parameters(model, plan(num_steps=1), 1)


def test_a_known_loop_is_not_replayed_again(monkeypatch):
    replays = []
    run = Script.run
    monkeypatch.setattr(
        Script, "run", lambda self, *a, **k: (replays.append(1), run(self, *a, **k))[1]
    )
    seen = []

    def loop(model, x, y, step):
        seen.append(len(replays))
        F.cross_entropy(model(x), y).backward()

    engine_loop(loop, steps=12, checks=1e-6)
    first = next(n for n in seen if n)
    assert set(seen) == {0, first}


def test_a_replay_changes_no_tensor_of_the_loop():
    centre = torch.zeros(3)

    def loop(model, x, y, step):
        out = model(x)
        centre.add_(out.detach()[0] * 0)
        (F.cross_entropy(out, y) + (out - centre).square().mean()).backward()

    def other(model, x, y, step):
        F.cross_entropy(model(x), y).backward()
        kept.append(y + 1)
        y.zero_()

    kept = []
    engine_loop(loop)
    assert not centre.any()
    engine_loop(other, steps=2)
    assert all(batch.any() for batch in kept)


def test_tensors_changed_where_nobody_sees_it_are_refused():
    def loop(model, x, y, step):
        weights = torch.ones(len(x))
        out = model(x)
        loss = (F.cross_entropy(out, y, reduction="none") * weights).mean()
        loss.backward()

    tape = Tape()
    x = torch.ones(4, 2)
    tape.begin([x], 4)
    y = x * 2
    tape.end()
    x.add_(1)
    assert tape.slots[0].is_stale()
    assert y.sum() == 16
    engine_loop(loop)


def test_a_replay_says_what_fails():
    tape, x = Tape(), torch.arange(4.0)
    tape.begin([x], 4)
    tape.enter_model((x,), {}, 4)
    out = torch.ones(4, requires_grad=True) * 1
    tape.leave_model([out])
    loss = (out * x.view(2, 2).flatten()).sum()
    tape.end()
    tape.backwards.append(Backward((tape._slot(loss),), (None,), len(tape.calls)))
    script = Script(tape)
    found = script.run(Rows(torch.arange(4), 0), finds_draws=True)
    assert torch.equal(found.cotangents[0], x)
    with pytest.raises(ReplayError, match=r"view fails there \(shape '\[2, 2\]' is invalid"):
        script.run(Rows(torch.tensor([1]), 0))

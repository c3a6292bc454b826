# SPDX-License-Identifier: Apache-2.0
"""The engine's gradients against plain autograd, in the user's loop: faults, state, failures."""

import copy
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dualdp import AccountingError, ExactnessError
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.per_sample import clip, gradients, numbers, parameter_use, recorder
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.rules import RULES
from dualdp_torch.training import step as private_step
from tests.dualdp_torch.checks import ids, randomise
from tests.dualdp_torch.loop import assert_by_hand, plan, start, train
from tests.dualdp_torch.per_sample.checks.test_right_loops import autoencoder
from tests.dualdp_torch.per_sample.loops import (
    Everything,
    Model,
    linear,
    once,
    private,
    rule_with,
    scaled_rows,
)

LATE = 25  # first step at which a fault shows
LONG = 200


# ---------------------------------------------------------------------- planted faults


def of_rule(function, change, kind="grads", slot="weight"):
    """The gradients, or the squared norms, that a rule forms for one parameter are wrong."""
    return lambda patch: patch.setitem(RULES, function, rule_with(change, kind, slot, function))


def around(owner, name, change):
    """`change(what the function returned)` is returned instead."""
    right = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *a, **o: change(right(*a, **o)))


def some(factor):
    """One row in eight is multiplied."""
    return lambda rows: (
        rows
        * torch.where(torch.arange(len(rows)) % 8 == 0, factor, 1).view(-1, *[1] * (rows.dim() - 1))
    )


def without_a_part(found):
    """A norm without its smallest part."""
    squares, norms = found
    return squares, torch.stack([*squares.of.values()][:-1]).sum(0).sqrt()


CAPTURED, REWEIGHTED = recorder.Captured, clip.reweighted


def scale(patch):
    """The loss's mean is undone by another number."""
    patch.setattr(recorder, "Captured", lambda *a, scale, **o: CAPTURED(*a, scale=scale * 1.1, **o))


def second_pass(patch):
    """The factors of the second pass are those of other rows."""
    patch.setattr(clip, "reweighted", lambda losses, p, f: REWEIGHTED(losses, p, f.roll(1)))


def more_of_the_head(sums):
    return {**sums, "head.weight": sums["head.weight"] * 1.3}


#: Name -> (how to plant it, the mode).
FAULTS = {
    "linear weight": (of_rule(F.linear, some(3.0)), "materialize"),
    "linear bias": (of_rule(F.linear, some(3.0), slot="bias"), "auto"),
    "convolution": (of_rule(F.conv1d, some(4.0)), "hooks"),
    "table": (of_rule(F.embedding, scaled_rows(0.5)), "auto"),
    "gram": (of_rule(F.linear, scaled_rows(0.25), kind="sq_norms"), "book_keeping"),
    "factors": (around(clip, "factors_for", some(1.2)), "auto"),
    "a norm that lacks a part": (around(clip, "norms_of", without_a_part), "auto"),
    "a sum": (around(gradients.Captured, "sums", more_of_the_head), "auto"),
    "the reduction": (scale, "auto"),
    "the second pass": (second_pass, "ghost"),
}


def over_words(self, words):
    x = self.mix(self.table(words).transpose(1, 2)).transpose(1, 2)
    return self.head(torch.tanh(x).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_begins_later_is_stopped(name, monkeypatch):
    """Caught on a step after it began, within 200 steps."""
    plant, mode = FAULTS[name]
    mix = nn.Conv1d(6, 5, 3, padding=1)
    model = Model(over_words, table=nn.Embedding(9, 6), mix=mix, head=nn.Linear(5, 3))
    items = TensorDataset(ids(9, 60, 4), ids(3, 60, seed=2))
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(items, batch_size=10)),
        plan=plan(expected_batch_size=10, num_steps=LONG, seed=4),
        grad_sample_mode=mode,
    )

    def loop():
        for step, (x, y) in enumerate(loader):
            if step == LATE:
                plant(monkeypatch)
            once(model, optimizer, x, y)

    with pytest.raises(ExactnessError):
        loop()
    step = engine.ledger.failed_check["step"]
    assert LATE <= step < LONG
    assert len(engine.ledger) == step
    assert engine.ledger.failed_check["last_passed"] < step
    with pytest.raises(AccountingError, match=f"A check failed at step {step}"):
        engine.get_epsilon()
    assert engine.get_epsilon(accept_unverified=True) > 0


def capacity(h, on):
    """How many stand before a row decides whether it is seen."""
    place = (h.detach()[:, :1] < h.detach()[:, 0]).sum(1)
    return h * (1 - on * (place >= 3).float())[:, None]


def joint_backward(h, on):
    if h.requires_grad:
        h.register_hook(lambda g: g * (1 - on) + on * g / (g.norm() + 1e-3))
    return h


#: How rows are mixed inside the model where a tensor is 1 and not 0.
MIXES = {
    "mean": lambda h, on: h - on * h.detach().mean(0),
    "of dropped rows": lambda h, on: (h := F.dropout(h, 0.2)) - on * h.detach().mean(0),
    "capacity": lambda h, on: capacity(F.dropout(h, 0.2), on),
    "output": lambda h, on: h + on * h.detach().mean(),
    "backward": joint_backward,
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("mean", "auto"),
        *(pytest.param(kind, "auto", marks=pytest.mark.slow) for kind in MIXES if kind != "mean"),
        *(pytest.param(kind, "ghost", marks=pytest.mark.slow) for kind in ("mean", "output")),
    ],
)
def test_mixing_that_begins_later_is_stopped(kind, mode):
    """known_failures 66, 67: nothing of the code changes, only a number that it holds."""
    model = Model(
        lambda self, x: self.second(MIXES[kind](torch.tanh(self.first(x)), self.on)),
        **{"first": linear(8), "second": nn.Linear(8, 3), "on": torch.zeros(())},
    )
    engine, model, optimizer, loader = private(model, mode, lr=0.05, num_steps=LONG)

    def loop():
        for step, (x, y, _) in enumerate(loader):
            model.on.fill_(float(step >= LATE))
            once(model, optimizer, x, y)

    with pytest.raises(ExactnessError, match="A spot check failed"):
        loop()
    assert LATE <= engine.ledger.failed_check["step"] < LONG


# ---------------------------------------------------------------------- checks change nothing


@pytest.mark.parametrize(
    ("mode", "clipping"),
    [("auto", "flat"), ("hooks", "per_layer"), ("ghost", "automatic"), ("functorch", "flat")],
)
def test_a_run_with_checks_and_one_without_end_alike(mode, clipping):
    ends = []
    for checks in (0.0, 1.0):
        changes = mode != "functorch"  # which draws nothing again, and writes no buffer
        model = randomise(Everything(draws=changes, counts=changes))
        model.seed(1)
        engine, *parts = private(model, mode, checks, num_steps=4, clipping=clipping)
        train(*parts)
        assert engine.ledger.last_check == (3 if checks else None)
        hooks = [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()]
        grads = [p.grad for p in model.parameters()]
        counts = model.count, list(model.seen), hooks
        ends.append((model.state_dict(), grads, model.drawn(), counts))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_random_numbers_that_cannot_be_drawn_again_are_on_record(caplog):
    """A generator that nobody knows: what can't be checked is said once, and so is how much."""
    own = torch.Generator().manual_seed(3)

    def hidden(self, x):
        return self.layer(x * torch.rand(x.shape, generator=own) + F.dropout(x, 0.1))

    engine, *parts = private(Model(hidden, layer=linear()), checks=1.0, num_steps=4)
    train(*parts)
    text = engine.ledger.to_json()
    assert text.count("check_impossible") == 1
    assert "can't be drawn again" in text
    assert caplog.text.count("Not checked, and noted in the ledger: The model draws") == 1


@pytest.mark.parametrize(
    ("layer", "dropout", "batch_first"),
    [("LSTM", 0.3, False), ("LSTM", 0.0, True), ("GRU", 0.3, True), ("GRU", 0.0, False)],
)
def test_a_recurrent_model_may_keep_what_it_gave(layer, dropout, batch_first):
    """Its states have the rows on axis 1, and a call of other sizes ends the process."""
    axis = int(batch_first)

    def remembers(self, x):
        out, _ = self.layer(torch.stack([x, -x], axis))
        self.last = out.detach()
        return self.head(out.mean(axis))

    recurrent = getattr(nn, layer)(6, 4, 2, dropout=dropout, batch_first=batch_first)
    model = Model(remembers, layer=recurrent, head=nn.Linear(4, 3))
    engine, *parts = private(model, checks=1.0, num_steps=4)
    train(*parts)
    assert len(engine.ledger) == 4
    assert "check_impossible" not in engine.ledger.to_json()


# ---------------------------------------------------------------------- steps that fail (69)


def fails_once(monkeypatch, owner, name, when):
    """A function that fails on one call."""
    right, calls = getattr(owner, name), []

    def wrong(*arguments, **options):
        calls.append(1)
        if len(calls) == when:
            raise torch.OutOfMemoryError("out of memory")
        return right(*arguments, **options)

    monkeypatch.setattr(owner, name, wrong)


PLACES = {
    "norms": (private_step, "clip_factors", 2),
    "sums": (private_step, "clipped_sums", 2),
    "before them": (parameter_use.Use, "check_unchanged", 4),
}


@pytest.mark.parametrize(
    ("place", "mode"), [*((place, "auto") for place in PLACES), ("sums", "ghost")]
)
def test_a_step_that_failed_begins_again_from_its_forward(place, mode, monkeypatch):
    engine, model, optimizer, loader = private(mode=mode)
    fails_once(monkeypatch, *PLACES[place])
    failed = 0
    for x, y, _ in loader:
        try:
            once(model, optimizer, x, y)
        except torch.OutOfMemoryError:
            failed += 1
            before = copy.deepcopy(model.state_dict())
            for _ in range(2):
                with pytest.raises(RuntimeError, match="No forward was recorded"):
                    optimizer.step()
            assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
            once(model, optimizer, x, y)
    assert failed == 1
    assert len(engine.ledger) == 6
    assert_by_hand(model, plan())


def test_a_step_that_lost_a_part_begins_again_with_its_first(monkeypatch):
    engine, model, optimizer, loader = private(physical_batch_size=4)
    right, failed = private_step.clipped_sums, []

    def wrong(*arguments, **options):
        if engine._step._draw.chunk == 1 and len(engine.ledger) == 2 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return right(*arguments, **options)

    monkeypatch.setattr(private_step, "clipped_sums", wrong)
    batches = iter(loader)
    while not failed:
        x, y, _ = next(batches)
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="step 2 failed after a part of its logical"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Begin a new pass, one at a time"):
        next(batches)
    train(model, optimizer, loader)
    assert len(engine.ledger) == 6
    assert_by_hand(model, plan(physical_batch_size=4))


def test_a_step_that_failed_after_its_record_is_over(monkeypatch):
    engine, model, optimizer, loader = private()
    fails_once(monkeypatch, NoiseSource, "noisy_mean", 3)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, loader)
    assert len(engine.ledger) == 3
    with pytest.raises(RuntimeError, match="step 2 failed after"):
        optimizer.step()
    train(model, optimizer, loader)  # goes on behind it
    assert len(engine.ledger) == 6


# ---------------------------------------------------------------------- backwards that end early


class Interrupted(torch.autograd.Function):
    """Calls `at("backward")` in the backward."""

    at = staticmethod(lambda place: None)

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Interrupted.at("backward")
        return grad


def interruptible(self, x):
    h = self.first(x)
    Interrupted.at("forward")
    return self.second(torch.tanh(Interrupted.apply(h) if h.requires_grad else h))


def interrupting(monkeypatch, place, action):
    """Do something in a place, the first time."""
    left = [place]

    def at(here):
        if left == [here]:
            left.clear()
            action()

    monkeypatch.setattr(Interrupted, "at", staticmethod(at))
    return left


@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_backward_that_failed_is_no_backward(mode, monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("out of memory")

    model = Model(interruptible, first=linear(5), second=nn.Linear(5, 3))
    _, model, optimizer, loader = private(model, mode, num_steps=1)
    x, y, _ = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    interrupting(monkeypatch, "backward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    with pytest.raises(RuntimeError, match="No backward was recorded"):
        optimizer.step()
    once(model, optimizer, x, y)


def state_of(model):
    """Everything that an interrupted call must leave as it was."""
    return (
        torch.is_grad_enabled(),
        [type(m) for m in torch.overrides._get_current_function_mode_stack()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [(p.grad is None, p.requires_grad) for p in model.parameters()],
        torch.get_rng_state().tolist(),
    )


@pytest.fixture
def ctrl_c_interrupts():
    """A shell that starts pytest in the background has it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize(
    ("place", "mode"),
    [
        *((place, "auto") for place in ("forward", "backward", "criterion", "check", "step")),
        *(("backward", "ghost"), ("step", "ghost"), ("forward", "functorch")),
    ],
)
def test_an_interrupt_leaves_everything_as_it_was(place, mode, monkeypatch):
    """known_failures 87: on the second of two checked steps, Ctrl-C is pressed."""
    if mode == "functorch":
        monkeypatch.setattr(Interrupted, "apply", lambda h: h)
    model = Model(interruptible, first=linear(5), second=nn.Linear(5, 3))
    _, model, optimizer, loader = private(model, mode, 1.0, num_steps=2)
    for owner, name, here in (
        *((module, "clip_factors", "step") for module in (private_step, numbers)),
        (identity.Numbers, "weights", "check"),
        (F, "cross_entropy", "criterion"),
    ):
        right = getattr(owner, name)
        pressed = lambda *a, right=right, here=here, **k: Interrupted.at(here) or right(*a, **k)  # noqa: E731
        monkeypatch.setattr(owner, name, pressed)
    for step, (x, y, _) in enumerate(loader):
        model.zero_grad()
        before = state_of(model)
        if step == 1:
            left = interrupting(monkeypatch, place, lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                once(model, optimizer, x, y)
            assert not left
            assert state_of(model) == before
        once(model, optimizer, x, y)


# ---------------------------------------------------------------------- two passes (89, 90)


def of_variational(model, x):
    found, mean, spread = model(x)
    return F.mse_loss(found, x) + mean.square().mean() + spread.exp().mean()


def of_attention(model, x):
    return model(x.view(-1, 3, 2)).square().mean()


@pytest.mark.parametrize("loop", [of_variational, of_attention])
def test_two_passes_are_one_network(loop):
    ends = []
    for mode in ("auto", "ghost"):
        model = autoencoder()
        if loop is of_attention:
            attention = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.4, batch_first=True)
            model = randomise(attention)
        engine, model, optimizer, loader = private(model, mode, 1.0, lr=0.1, num_steps=3)
        torch.manual_seed(7)
        for x, _, _ in loader:
            loop(model, x).backward()
            optimizer.step()
        ends.append(engine.stages().unprotected_sum)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)

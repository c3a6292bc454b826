# SPDX-License-Identifier: Apache-2.0
"""The engine's gradients against plain autograd, in the user's loop: faults, state, failures."""

import copy
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp.plan.clipping
import dualdp_torch as dpt
from dualdp import AccountingError, ExactnessError, UnsupportedLayerError
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.per_sample import (
    clip,
    gradients,
    numbers,
    parameter_use,
    recorder,
    use_gradients,
)
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.rules import RULES, together
from dualdp_torch.training import step as private_step
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.loop import build, by_hand, plan, start, train
from tests.dualdp_torch.per_sample.checks.test_right_loops import Variational
from tests.tiers import first

LATE = 25  # first step at which a fault shows
LONG = 200


class Words(nn.Module):
    """A table, a convolution over positions and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 6), nn.Conv1d(6, 5, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, words):
        x = self.mix(self.table(words).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.norm(x)).mean(1))


def run(mode="auto", checks=None, steps=LONG, model=None, on_step=lambda step: None, **changes):
    """A run over words; the engine, also of one that was stopped, and what stopped it."""
    model = randomise(model or Words())
    items = TensorDataset(ids(9, 60, 4), ids(3, 60, seed=2))
    changes = {"expected_batch_size": 10, "num_steps": steps, "seed": 4, **changes}
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(items, batch_size=10)),
        plan=plan(**changes),
        grad_sample_mode=mode,
        checks=checks,
    )
    stopped = None
    try:
        for step, (x, y) in enumerate(loader):
            on_step(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    except ExactnessError as error:
        stopped = error
    return engine, model, stopped


# ---------------------------------------------------------------------- planted faults


class Planted:
    """A fault that shows from some step on, in one row of eight or in all."""

    def __init__(self, patch, rows=1):
        self.patch, self.rows, self.begins, self.is_on = patch, rows, LATE, False

    def at(self, step):
        """A step begins."""
        self.is_on = step >= self.begins

    def scaled(self, rows_first, factor):
        """A tensor of rows with the fault in it."""
        if not self.is_on or rows_first is None:
            return rows_first
        wrong = rows_first.clone()
        wrong[:: self.rows] *= factor
        return wrong

    def rule(self, function, slot, factor):
        """The gradients that a rule forms for one parameter are wrong, and sums made of them."""
        right = RULES[function]

        def grads(acts, grads_out, **options):
            return self.scaled(right.grads[slot](acts, grads_out, **options), factor)

        self.patch.setitem(
            RULES,
            function,
            replace(
                right,
                grads={**right.grads, slot: grads},
                sums={name: f for name, f in right.sums.items() if name != slot},
                sq_norms={name: f for name, f in right.sq_norms.items() if name != slot},
            ),
        )

    def norms(self, function, slot, factor):
        """Only the squared norms of a rule are wrong."""
        right = RULES[function]

        def sq_norms(*arguments, **options):
            described = right.sq_norms[slot](*arguments, **options)
            found, bound = together.sq_norms_of(described, len(arguments[1]))
            return self.scaled(found, factor), bound

        norms = {**right.sq_norms, slot: sq_norms}
        self.patch.setitem(RULES, function, replace(right, sq_norms=norms))


def of_rule(function, slot, factor):
    return lambda fault: fault.rule(function, slot, factor)


def gram(fault):
    """The norm of a linear layer, in the form that needs no gradient."""
    fault.norms(F.linear, "weight", 0.25)


def index_of_words(fault):
    """Ids are read in eight bits, as if a table had no more rows."""
    right = RULES[F.embedding]

    def wrong(acts, grads_out, **options):
        ids_ = acts[0] if isinstance(acts, tuple) else acts
        shifted = (ids_ + 1) % 9 if fault.is_on else ids_
        acts = (shifted, *acts[1:]) if isinstance(acts, tuple) else shifted
        return right.grads["weight"](acts, grads_out, **options)

    grads = {**right.grads, "weight": wrong}
    fault.patch.setitem(RULES, F.embedding, replace(right, grads=grads, sums={}, sq_norms={}))


def factors(fault):
    right = dualdp.plan.clipping.factors_for

    def wrong(clipping, norms, bound, *, xp):
        return fault.scaled(right(clipping, norms, bound, xp=xp), 1.2)

    fault.patch.setattr(clip, "factors_for", wrong)


def whole_norm(fault):
    """A norm without its smallest part."""
    right = clip.norms_of

    def wrong(*arguments):
        squares, norms = right(*arguments)
        if fault.is_on and len(squares.of) > 1:
            norms = torch.stack([*squares.of.values()][:-1]).sum(0).sqrt()
        return squares, norms

    fault.patch.setattr(clip, "norms_of", wrong)


def sums(fault):
    right = gradients.Captured.sums

    def wrong(self, factors, rows, reduce=None):
        found = right(self, factors, rows, reduce)
        return found | ({"head.weight": found["head.weight"] * 1.3} if fault.is_on else {})

    fault.patch.setattr(gradients.Captured, "sums", wrong)


def scale(fault):
    """The loss's mean is undone by another number."""
    right = recorder.Captured

    def wrong(*arguments, scale, **options):
        return right(*arguments, scale=scale * 1.1 if fault.is_on else scale, **options)

    fault.patch.setattr(recorder, "Captured", wrong)


def dropped_part(fault):
    """One use of a parameter is forgotten where sums are formed."""
    right = use_gradients.Part.sum

    def wrong(self, factors, rows):
        total = right(self, factors, rows)
        return total * 0 if fault.is_on and self.slot == "bias" else total

    fault.patch.setattr(use_gradients.Part, "sum", wrong)
    fault.patch.setattr(gradients.Captured, "_norms_alone", lambda self, parts: (None, False))


def second_pass(fault):
    """The factors of the second pass are those of other rows."""
    right = clip.reweighted

    def wrong(losses, parameters, factors):
        return right(losses, parameters, factors.roll(1) if fault.is_on else factors)

    fault.patch.setattr(clip, "reweighted", wrong)


#: Name -> (how to plant it, the mode, one row in so many, changes of the plan).
FAULTS = {
    "linear weight": (of_rule(F.linear, "weight", 1.5), "auto", 1, {}),
    "linear weight, one row in eight": (of_rule(F.linear, "weight", 3.0), "materialize", 8, {}),
    "linear bias, one row in eight": (of_rule(F.linear, "bias", 3.0), "auto", 8, {}),
    "convolution": (of_rule(F.conv1d, "weight", 0.5), "auto", 1, {}),
    "convolution's bias, one row in eight": (of_rule(F.conv1d, "bias", 4.0), "hooks", 8, {}),
    "table": (of_rule(F.embedding, "weight", 0.5), "auto", 1, {}),
    "norm": (of_rule(F.layer_norm, "weight", 2.0), "auto", 1, {}),
    "gram": (gram, "book_keeping", 1, {}),
    "indices": (index_of_words, "auto", 1, {}),
    "factors": (factors, "auto", 1, {}),
    "factors, one row in eight": (factors, "auto", 8, {}),
    "factors of layers": (factors, "auto", 1, {"clipping": "per_layer"}),
    "a norm that lacks a part": (whole_norm, "auto", 1, {}),
    "a sum": (sums, "auto", 1, {}),
    "the reduction": (scale, "auto", 1, {}),
    "a part of a sum": (dropped_part, "auto", 1, {}),
    "the second pass": (second_pass, "ghost", 1, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first(8, FAULTS))
def test_a_fault_that_begins_later_is_stopped(name, monkeypatch):
    """Caught on a step after it began, within 200 steps; without checks nobody notices."""
    plant, mode, rows, changes = FAULTS[name]
    fault = Planted(monkeypatch, rows)
    plant(fault)
    _, _, stopped = run(mode, on_step=fault.at, checks=0, **changes)
    assert stopped is None
    engine, _, stopped = run(mode, on_step=fault.at, **changes)
    assert stopped is not None
    step = engine.ledger.failed_check["step"]
    assert LATE <= step < LONG
    assert len(engine.ledger) == step
    assert engine.ledger.failed_check["last_passed"] < step
    with pytest.raises(AccountingError, match=f"A check failed at step {step}"):
        engine.get_epsilon()
    assert engine.get_epsilon(accept_unverified=True) > 0


# ---------------------------------------------------------------------- mixing inside the model


class Mixes(nn.Module):
    """Begins to mix its examples when a tensor is set, in a way of its kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.on = torch.zeros(())

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if "dropout" in self.kind:
            h = F.dropout(h, 0.2)
        if "mean" in self.kind:
            h = h - self.on * h.detach().mean(0)
        elif "capacity" in self.kind:
            place = (h.detach()[:, :1] < h.detach()[:, 0]).sum(1)  # how many stand before
            h = h * (1 - self.on * (place >= 3).float())[:, None]
        elif "output" in self.kind:
            return self.second(h) + self.on * h.detach().mean()
        elif "backward" in self.kind and h.requires_grad:
            h.register_hook(lambda g: g * (1 - self.on) + self.on * g / (g.norm() + 1e-3))
        return self.second(h)


def mixing_later(model, optimizer, loader):
    for step, (x, y, _) in enumerate(loader):
        model.on.fill_(float(step >= LATE))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize(
    "kind", ["mean", "mean, dropout", "capacity", "capacity, dropout", "output", "output, dropout"]
)
def test_mixing_that_begins_later_is_stopped(kind, mode):
    """known_failures 66: nothing of the code changes, only a number that it holds."""
    model = randomise(Mixes(kind))
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.05), build()[2]),
        plan=plan(num_steps=LONG),
        grad_sample_mode=mode,
    )
    with pytest.raises(ExactnessError, match="A spot check failed"):
        mixing_later(model, optimizer, loader)
    assert LATE <= engine.ledger.failed_check["step"] < LONG


def test_a_backward_that_is_not_linear_is_stopped():
    """known_failures 67: each example's gradient is scaled by the norm of all."""
    model = randomise(Mixes("backward"))
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.05), build()[2]),
        plan=plan(num_steps=LONG),
    )
    with pytest.raises(ExactnessError, match="A spot check failed: the clipped contribution"):
        mixing_later(model, optimizer, loader)
    assert engine.ledger.failed_check["step"] >= LATE


# ---------------------------------------------------------------------- checks change nothing


class Everything(nn.Module):
    """Draws from every generator, counts in a buffer, in a number and in a list."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.seen = 0, []
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.kind == "plain":
            return self.second(h)
        if self.kind == "counts":
            self.calls += 1
            self.count += 1
            self.seen.append(self.count)
            return self.second(h)
        if self.kind == "own generator":
            return self.second(h + 0.1 * torch.randn(h.shape, generator=self.own))
        if self.kind == "numpy":
            scales = np.random.rand(len(h)), [random.random() for _ in h]  # noqa: NPY002
            return self.second(h * torch.tensor(np.array(scales)).float().sum(0)[:, None])
        return self.second(F.dropout(h, 0.4))


#: Modes that run a kind of model; vmap draws nothing again.
KINDS = ["plain", "dropout", "own generator", "numpy", "counts"]
MODES = ["auto", "hooks", "ghost", "functorch"]
RUNS = [(k, m) for k in KINDS for m in MODES if m != "functorch" or k == "plain"]


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize(("kind", "mode"), RUNS)
def test_a_run_with_checks_and_one_without_end_alike(kind, mode, clipping):
    if clipping == "per_layer" and mode == "ghost":
        clipping = "automatic"
    ends = []
    for checks in (0.0, 1.0):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        model = randomise(Everything(kind))
        engine, model, optimizer, loader = start(
            (model, torch.optim.Adam(model.parameters(), lr=0.05), build()[2]),
            plan=plan(num_steps=4, clipping=clipping),
            grad_sample_mode=mode,
            checks=checks,
        )
        train(model, optimizer, loader)
        assert engine.ledger.last_check == (3 if checks else None)
        hooks = [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()]
        ends.append(
            (
                model.state_dict(),
                {name: p.grad for name, p in model.named_parameters()},
                [torch.rand(2), random.random(), np.random.rand()],  # noqa: NPY002
                torch.rand(2, generator=model.own),
                (model.count, list(model.seen), hooks),
            )
        )
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_random_numbers_that_cannot_be_drawn_again_are_on_record(caplog):
    """A generator that nobody knows: what can't be checked is said once, and so is how much."""
    own = torch.Generator().manual_seed(3)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x * torch.rand(x.shape, generator=own) + F.dropout(x, 0.1))

    model = randomise(Hidden())
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]),
        plan=plan(num_steps=4),
        checks=1.0,
    )
    train(model, optimizer, loader)
    text = engine.ledger.to_json()
    assert text.count("check_impossible") == 1
    assert "can't be drawn again" in text
    assert caplog.text.count("Not checked, and noted in the ledger: The model draws") == 1


def test_dropout_under_autocast_is_drawn_again():
    """Masks of bfloat16 are other ones than those of float32."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = start(
        (model, optimizer, build()[2]), plan=plan(num_steps=4), checks=1.0
    )
    for x, y, _ in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert "check_impossible" not in engine.ledger.to_json()


class Remembers(nn.Module):
    """Keeps what its recurrent layer gave, for a picture."""

    def __init__(self, layer, dropout, batch_first):
        super().__init__()
        self.layer = getattr(nn, layer)(6, 4, 2, dropout=dropout, batch_first=batch_first)
        self.head, self.rows = nn.Linear(4, 3), 0 if batch_first else 1

    def forward(self, x):
        out, _ = self.layer(torch.stack([x, -x], 1 - self.rows))
        self.last = out.detach()
        return self.head(out.mean(1 - self.rows))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_a_recurrent_model_may_keep_what_it_gave(layer, dropout, batch_first):
    """Its states have the rows on axis 1, and a call of other sizes ends the process."""
    model = Remembers(layer, dropout, batch_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *private = start((model, optimizer, build()[2]), plan=plan(num_steps=4), checks=1.0)
    train(*private)
    assert engine.ledger
    assert "check_impossible" not in engine.ledger.to_json()


# ---------------------------------------------------------------------- state (62)


class Keeps(nn.Module):
    """Writes a buffer or a frozen parameter in forward, from some call on."""

    def __init__(self, kind, begins=0):
        super().__init__()
        self.kind, self.begins, self.calls = kind, begins, 0
        self.layer = nn.Linear(6, 3)
        self.register_buffer("memory", torch.zeros(6))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.calls > self.begins:
            if self.kind == "buffer":
                self.memory.copy_(x[0].detach())
            elif self.kind == "replaced":
                self.memory = x.detach().mean(0)
            elif self.kind == "frozen":
                with torch.no_grad():
                    self.frozen.mul_(0.9).add_(0.1 * x.mean(0))
            elif self.kind == "counter":
                self.memory += 1
        return self.layer(x)


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("begins", [0, 12])
@pytest.mark.parametrize("kind", ["buffer", "replaced", "frozen"])
def test_what_a_forward_writes_of_its_examples_is_refused(kind, begins, size):
    model = randomise(Keeps(kind, begins))
    name = "frozen" if kind == "frozen" else "memory"
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD([*model.layer.parameters()], lr=0.1), build()[2]),
        plan=plan(num_steps=20, physical_batch_size=size),
        checks=1.0 if begins else None,
    )
    errors = (UnsupportedLayerError, ExactnessError)  # on a first batch, or later
    with pytest.raises(errors, match=rf"'{name}' (changes|is written) in forward"):
        train(model, optimizer, loader)
    assert len(engine.ledger) < 20


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("kind", ["counter", "spectral norm"])
def test_what_a_forward_writes_alike_on_every_batch_passes(kind, size):
    model = randomise(Keeps("counter"))
    if kind == "spectral norm":
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    engine, model, optimizer, loader = start(
        (
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            build()[2],
        ),
        plan=plan(num_steps=3, physical_batch_size=size),
        checks=1.0,
    )
    train(model, optimizer, loader)
    assert len(engine.ledger) == 3


def test_a_recorded_block_looks_at_buffers_too():
    model = randomise(Keeps("buffer"))
    for n in (1, 4):
        with pytest.raises(UnsupportedLayerError, match="'memory' changes in forward"):
            norms_of(model, data(n, 6), ids(3, n))


def norms_of(model, x, y):
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        F.cross_entropy(model(x), y).backward()
    return record.norms()


# ---------------------------------------------------------------------- steps that fail (69)


def fails_once(monkeypatch, owner, name, when, error=None):
    """A function that fails on one call."""
    right, calls = getattr(owner, name), []

    def wrong(*arguments, **options):
        calls.append(1)
        if len(calls) == when:
            raise error or torch.OutOfMemoryError("out of memory")
        return right(*arguments, **options)

    monkeypatch.setattr(owner, name, wrong)


PLACES = {
    "norms": (private_step, "clip_factors"),
    "sums": (private_step, "clipped_sums"),
    "before them": (parameter_use.Use, "check_unchanged"),
    "noise": (NoiseSource, "noisy_mean"),
}


def assert_by_hand(model, run):
    expected = build()[0]
    by_hand(expected, run, 6)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [p for p in PLACES if p != "noise"])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_step_that_failed_begins_again_from_its_forward(place, mode, monkeypatch):
    engine, model, optimizer, loader = start(plan=plan(), grad_sample_mode=mode)
    fails_once(monkeypatch, *PLACES[place], 2 if place != "before them" else 4)
    failed = 0
    for x, y, _ in loader:
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            failed += 1
            before = copy.deepcopy(model.state_dict())
            for _ in range(2):
                with pytest.raises(RuntimeError, match="No forward was recorded"):
                    optimizer.step()
            assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert failed == 1
    assert len(engine.ledger) == 6
    assert_by_hand(model, plan())


def test_a_step_of_which_a_part_was_lost_begins_again_with_its_first_part(monkeypatch):
    run = plan(physical_batch_size=4)
    engine, model, optimizer, loader = start(plan=run)
    right, failed = private_step.clipped_sums, []

    def wrong(*arguments, **options):
        if engine._step._draw.chunk == 1 and len(engine.ledger) == 2 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return right(*arguments, **options)

    monkeypatch.setattr(private_step, "clipped_sums", wrong)
    batches = iter(loader)
    while True:
        x, y, _ = next(batches)
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            break
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="step 2 failed after a part of its logical"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Begin a new pass, one at a time"):
        next(batches)
    train(model, optimizer, loader)
    assert len(engine.ledger) == 6
    assert_by_hand(model, run)


def test_a_step_that_failed_after_its_record_is_not_released_again(monkeypatch):
    engine, model, optimizer, loader = start(plan=plan())
    fails_once(monkeypatch, *PLACES["noise"], 3)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, loader)
    assert len(engine.ledger) == 3
    with pytest.raises(RuntimeError, match="step 2 failed after"):
        optimizer.step()
    train(model, optimizer, loader)  # goes on behind it
    assert len(engine.ledger) == 6


@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_backward_that_failed_is_no_backward(mode):
    class Breaks(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if Breaks.broken:
                raise torch.OutOfMemoryError("out of memory")
            return grad

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            h = torch.tanh(self.first(x))
            return self.second(Breaks.apply(h) if h.requires_grad else h)

    _, model, optimizer, loader = start(
        (net := randomise(Net()), torch.optim.SGD(net.parameters(), lr=0.1), build()[2]),
        plan=plan(num_steps=1),
        grad_sample_mode=mode,
    )
    Breaks.broken = False
    for x, y, _ in loader:
        loss = F.cross_entropy(model(x), y)
        Breaks.broken = True
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        with pytest.raises(RuntimeError, match="No backward was recorded"):
            optimizer.step()
        Breaks.broken = False
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


# ---------------------------------------------------------------------- Ctrl-C (87)


class Interrupted:
    """Presses Ctrl-C in a place, once."""

    def __init__(self):
        self.place = None

    def at(self, place):
        if self.place == place:
            self.place = None
            signal.raise_signal(signal.SIGINT)


interrupted = Interrupted()


class Pressing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        interrupted.at("backward")
        return grad


class Interruptible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.first(x)
        interrupted.at("forward")
        if h.requires_grad:
            h = Pressing.apply(h)
        return self.second(torch.tanh(h))


def state_of(model):
    """Everything that an interrupted call must leave as it was."""
    modules = list(model.modules())
    return (
        torch.is_grad_enabled(),
        [type(m) for m in torch.overrides._get_current_function_mode_stack()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules],
        [p.grad is None for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        torch.get_rng_state().tolist(),
    )


@pytest.fixture
def ctrl_c_interrupts():
    """A shell that starts pytest in the background has it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("mode", ["auto", "ghost", "functorch"])
@pytest.mark.parametrize("place", ["forward", "backward", "criterion", "check", "step"])
def test_an_interrupt_leaves_everything_as_it_was(place, mode, monkeypatch):
    def press(owner, name, at):
        right = getattr(owner, name)

        def pressed(*arguments, **options):
            interrupted.at(at)
            return right(*arguments, **options)

        monkeypatch.setattr(owner, name, pressed)

    for module in (private_step, numbers):  # of steps that are checked
        press(module, "clip_factors", "step")
    press(identity.Numbers, "weights", "check")
    press(F, "cross_entropy", "criterion")
    model = randomise(Interruptible())
    if mode == "functorch" and place == "backward":
        return
    _, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]),
        plan=plan(num_steps=2),
        grad_sample_mode=mode,
        checks=1.0,
    )
    if mode == "functorch":
        monkeypatch.setattr(Pressing, "apply", lambda h: h)
    for step, (x, y, _) in enumerate(loader):
        model.zero_grad()
        before = state_of(model)
        if step == 1:
            interrupted.place = place
            with pytest.raises(KeyboardInterrupt):
                once(model, optimizer, x, y)
            assert interrupted.place is None
            assert state_of(model) == before
        once(model, optimizer, x, y)


def once(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# ---------------------------------------------------------------------- two passes (89, 90)


def of_variational(model, x):
    found, mean, spread = model(x)
    return F.mse_loss(found, x) + mean.square().mean() + spread.exp().mean()


def of_attention(model, x):
    return model(x.view(-1, 3, 2)).square().mean()


@pytest.mark.parametrize("kind", ["variational", "attention"])
def test_two_passes_are_one_network(kind):
    ends = []
    for mode in ("auto", "ghost"):
        torch.manual_seed(2)
        model = Variational()
        if kind == "attention":
            model = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.4, batch_first=True)
        model, loop = randomise(model), of_variational if kind == "variational" else of_attention
        engine, model, optimizer, loader = start(
            (model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]),
            plan=plan(num_steps=3),
            grad_sample_mode=mode,
            checks=1.0,
        )
        torch.manual_seed(7)
        for x, _, _ in loader:
            loop(model, x).backward()
            optimizer.step()
        ends.append(engine.stages().unprotected_sum)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- beside the arguments


SEEN = {}


class Standardised(nn.Module):
    """Reads a mean and a scale that the loop may set in many places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.mean, self.scale, self.held = None, 1.0, {}
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x, scale=1.0):
        mean = self.held.get("mean", SEEN.get("mean", self.mean))
        x = x - self.shift if mean is None else x - mean
        return self.second(torch.tanh(self.first(x * self.scale * scale)))


def set_attribute(model, x):
    model.mean = x.mean(0)


def set_made_of_made(model, x):
    model.mean = torch.cat([x[:, :3], x[:, 3:]], 1).mean(0).detach() * 2


def set_rows(model, x):
    model.mean = x[:1]


def set_buffer(model, x):
    model.shift = x.median(0).values


def write_buffer(model, x):
    model.shift.copy_(x.mean(0))


def write_into_buffer(model, x):
    model.shift[:3] = x[:, :3].mean(0)


def set_in_dict(model, x):
    model.held["mean"] = x.mean(0)


def set_elsewhere(model, x):
    SEEN["mean"] = x.mean(0)


def write_parameter(model, x):
    with torch.no_grad():
        model.first.bias.add_(x.mean(), alpha=0.1)


BESIDE = [
    *(set_attribute, set_made_of_made, set_rows, set_buffer, write_buffer, write_into_buffer),
    *(set_in_dict, set_elsewhere, write_parameter),
]


def run_beside(prepare, mode, steps=3):
    SEEN.clear()
    model = randomise(Standardised())
    _, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]),
        plan=plan(num_steps=steps),
        grad_sample_mode=mode,
    )
    for x, y, _ in loader:
        given = prepare(model, x) or {}
        F.cross_entropy(model(given.pop("x", x), **given), y).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["auto", "functorch", "loop"])
@pytest.mark.parametrize("prepare", BESIDE, ids=lambda prepare: prepare.__name__)
def test_what_the_loop_makes_of_the_batch_reaches_the_model_as_arguments_only(prepare, mode):
    """A spot check of one example alone would see the same statistic of the batch."""
    with pytest.raises(
        (ValueError, UnsupportedLayerError), match="What the model gets for one example"
    ):
        run_beside(prepare, mode)


def fixed_statistic(model, x):
    model.mean, model.scale = torch.full((6,), 0.5) * 2, 1.5


def rows_as_argument(model, x):
    x = x.clamp(-1, 1) / 2
    return {"x": x, "scale": 0.5}


def written_rows(model, x):
    x.mul_(2)


def logged_statistic(model, x):
    SEEN["of the batch"] = x.mean(), x.std().item()


@pytest.mark.parametrize("mode", ["auto", "functorch", "loop"])
@pytest.mark.parametrize(
    "prepare",
    [fixed_statistic, rows_as_argument, written_rows, logged_statistic],
    ids=lambda prepare: prepare.__name__,
)
def test_what_the_loop_prepares_row_by_row_or_only_logs_passes(prepare, mode):
    run_beside(prepare, mode)

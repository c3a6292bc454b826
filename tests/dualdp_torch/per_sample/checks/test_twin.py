# SPDX-License-Identifier: Apache-2.0
"""Twins beside a loop: mistakes of losses and inputs, right code, numbers, and what is only noted.

known_failures 54, 63, 66 and 71. Longer right loops are in test_right_loops.py, every loss with
every mistake in tests/property.
"""

import math
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dualdp import ExactnessError, UnsupportedLayerError
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import assert_by_hand, build, dataset, plan, start
from tests.dualdp_torch.per_sample.loops import (
    RUNS,
    Model,
    engine_loop,
    linear,
    once,
    private,
    recorded_loop,
    slow,
)

ERRORS = (ValueError, ExactnessError)  # on the first batch, or later
REFUSED = (
    "The loss mixes the examples|What one example weighs|but the loss is a|can't be computed for "
    "one example alone|can't be computed with other rows|Data were read into Python numbers|"
    "decides by the data|What the model gets for one example"
)


def on(prepare):
    """A loss of inputs that are prepared."""
    return lambda m, x, y: F.cross_entropy(m(prepare(x.clone())), y)


def of(loss):
    """A loss of outputs, inputs and targets."""
    return lambda m, x, y: loss(m(x), x, y)


def stepped(loss):
    return lambda model, x, y, step: loss(model, x, y).backward()


def each(o, y):
    return F.cross_entropy(o, y, reduction="none")


# ---------------------------------------------------------------------- mistakes


def shuffled(o):
    return o[torch.randperm(len(o))]


def repeated(o, x, y):
    """1 for the first row of a class, which each row alone is, 2 for the later ones."""
    return (each(o, y) * (1 + (y[:, None] == y[None]).tril(-1).any(1).float())).mean()


#: Losses in which rows meet, by what lets them.
MISTAKES = {
    # (n, 1) against (n,) is (n, n)
    "mse": of(lambda o, x, y: F.mse_loss(o[:, :1], y.float())),
    "by hand": of(lambda o, x, y: ((o[:, :1] - y) ** 2).mean()),
    "poisson": of(lambda o, x, y: F.poisson_nll_loss(o[:, :1], y.float())),
    "gaussian": of(lambda o, x, y: F.gaussian_nll_loss(o[:, :1], y.float(), torch.ones(len(y)))),
    # statistics of the batch
    "centred": of(lambda o, x, y: (o - o.mean(0)).square().mean()),
    "centred, detached": of(lambda o, x, y: (o - o.detach().mean(0)).square().mean()),
    "batch norm": of(lambda o, x, y: F.batch_norm(o, None, None, training=True).pow(3).mean()),
    "largest": of(lambda o, x, y: (o - o.max(0).values).mean()),
    "root of the mean": of(lambda o, x, y: F.mse_loss(o, torch.zeros_like(o)).sqrt()),
    # other rows
    "contrastive": of(lambda o, x, y: F.cross_entropy(o @ o.T, torch.arange(len(y)))),
    "neighbours": of(lambda o, x, y: (o[1:] - o[:-1]).mean()),
    "shuffled": of(lambda o, x, y: (o * shuffled(o)).mean()),
    "scattered": of(lambda o, x, y: o.new_zeros(o.shape).index_add(0, y, o).square().mean()),
    "viewed": of(lambda o, x, y: o.view(3, -1).log_softmax(1).mean()),
    "as a kernel": of(
        lambda o, x, y: F.conv1d(o.T[None].expand(len(o), 3, -1), o[..., None]).mean()
    ),
    # weights
    "by place": of(lambda o, x, y: (each(o, y) * torch.linspace(1, 2, len(y))).mean()),
    "repeated": of(repeated),
    "ranked": of(lambda o, x, y: (o * o[:, 0].detach().argsort().argsort()[:, None]).mean()),
    "advantages": of(lambda o, x, y: (o * ((z := o.detach()) - z.mean()) / z.std()).mean()),
    "counts of classes": of(lambda o, x, y: (each(o, y) / torch.bincount(y)[y]).mean()),
    "a token mean": of(lambda o, x, y: (each(o, y) * (y != 1)).sum() / (y != 1).sum()),
    "a class is ignored": of(lambda o, x, y: F.cross_entropy(o, y, ignore_index=1)),
    "ignored in the loop": of(lambda o, x, y: F.cross_entropy(o, y.masked_fill_(y == 0, -100))),
    "a number that was read": of(lambda o, x, y: F.cross_entropy(o, y) * o.square().mean().item()),
    # inputs
    "standardised": on(lambda x: (x - x.mean(0)) / x.std(0)),
    "centred in place": on(lambda x: x.sub_(x.mean(0))),
    "mixed up": on(lambda x: 0.8 * x + 0.2 * shuffled(x)),
    "sorted": on(lambda x: x[x[:, 0].argsort()]),
    "masked by a rank": on(lambda x: x * (x.norm(dim=1) < x.norm(dim=1).median())[:, None]),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MISTAKES)
def test_rows_that_meet_are_refused(name):
    torch.manual_seed(2)  # of which no row is mixed with itself
    with pytest.raises(ValueError, match=REFUSED):
        engine_loop(stepped(MISTAKES[name]))


@pytest.mark.parametrize(
    "name", ["by hand", "centred, detached", "contrastive", "by place", "repeated"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_that_meet_in_a_record_are_refused(reduction, name):
    def summed(model, x, y, step):
        (MISTAKES[name](model, x, y) * (len(x) if reduction == "sum" else 1)).backward()

    with pytest.raises(ValueError, match=REFUSED):
        recorded_loop(summed, reduction=reduction)


@pytest.mark.parametrize("mode", ["functorch", "ghost", "loop"])
def test_rows_that_meet_are_refused_in_every_mode(mode):
    with pytest.raises(ValueError, match="The loss mixes the examples"):
        engine_loop(stepped(MISTAKES["centred"]), mode=mode)


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize(("declared", "used"), [("mean", "sum"), ("sum", "mean")])
@pytest.mark.parametrize("run", RUNS)
def test_another_reduction_than_declared_is_refused(run, declared, used, call):
    def loop(model, x, y, step):
        call(F.cross_entropy(model(x), y, reduction=used))

    with pytest.raises(ValueError, match=f"'{declared}', but the loss is a {used}"):
        run(loop, reduction=declared)


READ = {
    "counts of an array": lambda m, x, y: F.cross_entropy(
        m(x), y, weight=torch.tensor(1.0 / (1 + np.bincount(y.numpy(), minlength=3))).float()
    ),
    "the largest of a list": lambda m, x, y: F.cross_entropy(m(x), y) / max(x[:, 0].tolist()),
}


@pytest.mark.parametrize("name", READ)
def test_data_that_come_back_are_refused(name):
    """On the first batch, or as soon as a second one shows that they are data."""
    with pytest.raises(ERRORS):
        engine_loop(stepped(READ[name]), steps=12, checks=1.0)


def in_a_mapping(rows):
    """A batch as tokenizers make it: a mapping that is no dict."""
    return UserDict(x=torch.stack([r[0] for r in rows]), y=[(torch.stack([r[1] for r in rows]),)])


def test_ignored_targets_are_found_in_the_batch():
    model, optimizer, _ = build()
    x, y, _ = dataset().tensors
    y = y.clone()
    y[7] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=12, collate_fn=in_a_mapping)
    _, model, optimizer, loader = start((model, optimizer, loader), plan=plan(), checks=1.0)
    held = [7 in plan().batch_indices(step) for step in range(6)]
    assert 0 < sum(held) < 6
    for step, batch in enumerate(loader):
        F.cross_entropy(model(batch["x"]), batch["y"][0][0]).backward()
        if held[step]:
            break
        optimizer.step()
    with pytest.raises(ERRORS, match="ignored targets"):
        optimizer.step()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("position", [0, 1, None])
def test_every_loss_of_one_backward_is_looked_at(position, run):
    def loop(model, x, y, step):
        losses = [F.cross_entropy(out := model(x), y), out.square().mean()]
        if position is not None:
            losses[position] = out.std(0).mean()
        torch.autograd.backward(losses)

    if position is None:
        run(loop)
        return
    with pytest.raises(ValueError, match="The loss mixes the examples"):
        run(loop)


# ---------------------------------------------------------------------- right code

TEACHER = nn.Linear(6, 3)
#: What is each row's own, or public.
RIGHT = {
    "in place": on(lambda x: x.sub_(0.5).div_(2.0)),
    "noise": on(lambda x: x + 0.1 * torch.randn_like(x)),
    "dropped": on(lambda x: F.dropout(x, 0.3)),
    "its own mean": on(lambda x: x - x.mean(1, keepdim=True)),
    "noise of a generator": on(
        lambda x: x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    ),
    "flipped at random": on(lambda x: torch.where(torch.rand(len(x), 1) < 0.5, x, x.flip(1))),
    "public numbers": on(lambda x: (x - torch.arange(6.0)) / torch.arange(1.0, 7.0)),
    "a copy": on(lambda x: x.to(torch.float64).to("cpu").float().contiguous()),
    "lists for the log": of(lambda o, x, y: (len(y.tolist()) and each(o, y)).mean()),
    "numbers from NumPy": of(
        lambda o, x, y: (each(o, y) * torch.from_numpy(np.ones(3))[y]).mean() * np.float32(0.5)
    ),
    "a teacher": of(lambda o, x, y: (o - TEACHER(x).detach()).square().sum(1).mean()),
    "written after a count": of(
        lambda o, x, y: (
            (each(o, y) * torch.ones(len(y)).mul_(2 * len(y)).div_(len(y))).sum() / len(y)
        )
    ),
    "as many classes as rows": of(
        lambda o, x, y: F.mse_loss(F.pad(o, (0, 9)), F.one_hot(y, 12).float()) / 12
    ),
    "a class that is absent": of(lambda o, x, y: F.cross_entropy(o, y, ignore_index=-5)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_each_rows_own_passes(name):
    engine_loop(stepped(RIGHT[name]), checks=1.0)
    recorded_loop(stepped(RIGHT[name]))


def test_a_number_of_examples_is_told_from_an_equal_constant():
    """Declared a sum: over a constant it is one, over the number of examples it is not."""
    sizes = [len(plan().batch_indices(step)) for step in range(6)]
    constant = next(n for n in sizes if n != sizes[0])

    def over(number):
        return lambda model, x, y, step: (
            F.cross_entropy(model(x), y, reduction="sum") / number(x)
        ).backward()

    engine_loop(over(lambda x: constant), reduction="sum")
    with pytest.raises(ERRORS, match="'sum', but the loss is a mean"):
        engine_loop(over(len), reduction="sum")
    engine_loop(over(len))


@pytest.mark.parametrize("seed", [1, *slow(2)])
def test_a_table_of_as_many_numbers_as_rows_is_a_table(seed):
    """Its 1 / n is read as a count by no twin, and refutes none."""

    def weighted(model, x, y, step):
        model.zero_grad()
        (torch.tensor([0.25, 0.5, 0.75, 1.0])[y] * each(model(x), y)).mean().backward()

    engine_loop(weighted, steps=20, checks=1.0, expected_batch_size=4, seed=seed)


# ---------------------------------------------------------------------- later, or by chance (66)


def grown(step):
    """A weight that grows from zero."""
    return max(0.0, 0.1 * (step - 3))


def by_chance(model, x, y, step):
    if torch.rand(1) < 0.3:
        x = 0.5 * (x + x.flip(0))
    F.cross_entropy(model(x), y).backward()


LATER = {
    "another loss": lambda m, x, y, step: (
        F.cross_entropy(o := m(x), y) + (o.std(0).sum() if step > 3 else 0.0)
    ).backward(),
    "a weight that grows": lambda m, x, y, step: (
        F.cross_entropy(o := m(x), y) + grown(step) * (o - o.mean(0)).square().mean()
    ).backward(),
    "by chance": by_chance,
}


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_is_refused_when_it_comes(name):
    torch.manual_seed(1)
    with pytest.raises(ERRORS, match="The loss mixes the examples|What the model gets for one"):
        engine_loop(LATER[name], steps=12, checks=1.0)


def turning(engine, model, optimizer, loader):
    """The same functions on the same shapes; after step 20 a tensor holds another number."""
    mixing = nn.Parameter(torch.zeros(()), requires_grad=False)
    for step, (x, _, _) in enumerate(loader):
        out = model(x)
        (out - mixing * out.detach().mean(0)).square().mean().backward()
        optimizer.step()
        mixing.fill_(float(step >= 20))
    return engine


def test_a_failed_check_of_known_code_is_on_record():
    """Found at the steps that are drawn, and by nobody where none is."""
    engine, *parts = private(num_steps=60, checks=1 / 4)
    with pytest.raises(ExactnessError, match="A spot check failed: The loss mixes") as found:
        turning(engine, *parts)
    step = len(engine.ledger)  # the step itself was not recorded
    assert 20 < step <= 28
    assert engine.ledger.failed_check["step"] == step
    assert engine.ledger.failed_check["last_passed"] == engine.ledger.last_check < step
    with pytest.raises(Exception, match="not vouched for since step"):
        engine.get_epsilon(delta=1e-5)
    assert engine.get_epsilon(delta=1e-5, accept_unverified=True) > 0
    assert "e" in found.value.relative_error
    assert len(turning(*private(num_steps=60, checks=0)).ledger) == 60


def test_after_a_refused_loss_the_step_begins_again():
    engine, model, optimizer, loader = private(checks=1.0)
    for step, (x, y, _) in enumerate(loader):
        if step == 2:
            F.mse_loss(model(x), torch.zeros(len(x), 3)).sqrt().backward()
            with pytest.raises(ExactnessError, match="The loss mixes the examples"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="No forward was recorded"):
                optimizer.step()
        once(model, optimizer, x, y)
    assert len(engine.ledger) == 6
    assert_by_hand(model, plan())


# ---------------------------------------------------------------------- second losses (63, 64)


def actor_critic():
    """Two parts that share nothing."""
    return Model(lambda m, x: (m.actor(x), m.critic(x)[:, 0]), actor=linear(), critic=linear(1))


SECOND = {
    "normalised": lambda v, t: (v - v.mean()).square().mean(),
    "a sum": lambda v, t: F.mse_loss(v, t, reduction="sum"),
    "advantages": lambda v, t: (((t - v.detach()) - (t - v.detach()).mean()) * v).mean(),
    "right": F.mse_loss,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", SECOND)
def test_a_second_backward_over_another_part_is_looked_at(name, run):
    def loop(model, x, y, step):
        policy, value = model(x)
        F.cross_entropy(policy, y).backward()
        SECOND[name](value, y.float()).backward()

    if name == "right":
        run(loop, actor_critic())
        return
    with pytest.raises(ValueError, match=REFUSED):
        run(loop, actor_critic())


def balanced(self, x):
    """Keeps a statistic of the batch on the model."""
    shares = self.gate(x).softmax(1)
    self.balance = shares.detach().mean(0).square().sum()
    return self.head(x) * shares.sum(1, keepdim=True)


def test_a_statistic_that_the_model_keeps_is_refused_later():
    def loop(model, x, y, step):
        (F.cross_entropy(model(x), y) * model.balance).backward()

    with pytest.raises(ERRORS, match="What one example|mixes the examples"):
        engine_loop(loop, Model(balanced, gate=linear(4), head=linear()))


# ---------------------------------------------------------------------- beside the arguments

SEEN = {}


class Standardised(nn.Module):
    """Reads a mean that the loop may set in many places."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.mean, self.held = linear(5), nn.Linear(5, 3), None, {}
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x):
        mean = self.held.get("mean", SEEN.get("mean", self.mean))
        return self.second(torch.tanh(self.first(x - (self.shift if mean is None else mean))))


def write_parameter(model, x):
    with torch.no_grad():
        model.first.bias.add_(x.mean(), alpha=0.1)


#: Name -> what the loop does with model and batch before the forward.
BESIDE = {
    "attribute": lambda m, x: setattr(m, "mean", x.mean(0)),
    "buffer": lambda m, x: setattr(m, "shift", x.median(0).values),
    "written buffer": lambda m, x: m.shift.copy_(x.mean(0)),
    "written part": lambda m, x: m.shift[:3].add_(x.mean(0)[:3]),
    "written view": lambda m, x: m.shift.view(2, 3)[0].copy_(x.mean(0)[:3]),
    "dict": lambda m, x: m.held.update(mean=x.mean(0)),
    "elsewhere": lambda m, x: SEEN.update(mean=x.mean(0)),
    "parameter": write_parameter,
}
#: What is prepared row by row, public, or only logged.
HARMLESS = {
    "fixed": lambda m, x: setattr(m, "mean", torch.full((6,), 0.5) * 2),
    "written rows": lambda m, x: x.mul_(2),
    "logged": lambda m, x: SEEN.update(of_the_batch=(x.mean(), x.std().item())),
}


def run_beside(prepare, mode):
    SEEN.clear()

    def loop(model, x, y, step):
        prepare(model, x)
        F.cross_entropy(model(x), y).backward()

    engine_loop(loop, randomise(Standardised()), mode=mode)


@pytest.mark.parametrize(
    ("name", "mode"), [*((n, "auto") for n in BESIDE), ("attribute", "functorch"), ("dict", "loop")]
)
def test_what_is_made_of_the_batch_is_an_argument_of_the_model(name, mode):
    """A spot check of one example alone would see the same statistic of the batch."""
    errors = ValueError, UnsupportedLayerError
    with pytest.raises(errors, match="What the model gets for one example"):
        run_beside(BESIDE[name], mode)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_loop_prepares_row_by_row_or_only_logs_passes(name):
    run_beside(HARMLESS[name], "auto")


# ---------------------------------------------------------------------- the record itself


def test_a_weight_that_backward_is_given_belongs_to_the_loss():

    def weighted(weight):
        return recorded_loop(
            lambda m, x, y, step: F.cross_entropy(m(x), y).backward(torch.tensor(weight))
        )

    torch.testing.assert_close(weighted(3.0).norms(), 3 * weighted(1.0).norms())


def test_the_only_batch_of_a_loader_is_looked_at():
    _, model, optimizer, loader = private()
    x, y, _ = next(iter(loader))
    assert not torch.overrides._get_current_function_mode_stack()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    with pytest.raises(ValueError, match="'mean', but the loss is a sum"):
        optimizer.step()
    once(model, optimizer, x, y)


def test_twins_change_no_tensor_of_the_loop():
    centre, kept, norm = torch.zeros(3), [], nn.BatchNorm1d(6)

    def loop(model, x, y, step):
        out = model(x)
        centre.add_(out.detach()[0] * 0)
        (F.cross_entropy(out, y) + (out - centre).square().mean()).backward()

    def beside(model, x, y, step):
        F.cross_entropy(model(x), y).backward()
        norm(x)
        kept.append(x.mean(0))
        y.zero_()

    engine_loop(loop, checks=1.0)
    assert not centre.any()
    engine_loop(beside, steps=1)
    torch.testing.assert_close(norm.running_mean, 0.1 * kept.pop())


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


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def a_branch(o, x, y):
    return F.cross_entropy(o, y) * (2 if (y == 0).sum() > 3 else 1)


NOTES = {
    "changes from batch to batch after data were read": of(
        lambda o, x, y: F.cross_entropy(o, y) * math.sqrt(o.square().mean().item())
    ),
    "decides by data of the batch": of(a_branch),
    "went through NumPy": on(lambda x: torch.from_numpy(x.numpy() - x.numpy().mean(0))),
    "could not be followed through the loop": of(lambda o, x, y: F.cross_entropy(Own.apply(o), y)),
}


@pytest.mark.parametrize("words", NOTES)
def test_what_a_twin_can_not_follow_is_noted_once(words):
    engine = engine_loop(stepped(NOTES[words]), steps=12, checks=1.0)
    assert engine.get_epsilon(delta=1e-5) > 0
    assert engine.ledger.to_json().count(words) == 1


# ---------------------------------------------------------------------- lists of rows


def zipped(items):
    return tuple(zip(*items, strict=True))


FORMS = {
    "tuples": (zipped, lambda batch: (batch[0], batch[1])),
    "items": (list, lambda batch: zipped([item[:2] for item in batch])),
}


def of_lists(form, prepare):
    """Train on batches that are lists of rows, which the loop prepares and stacks."""
    collate, fields = FORMS[form]
    model, optimizer, _ = build()
    loader = DataLoader(dataset(), batch_size=12, collate_fn=collate)
    parts = model, optimizer, loader
    engine, model, optimizer, loader = start(parts, plan=plan(num_steps=4), checks=1.0)
    for batch in loader:
        rows, labels = fields(batch)
        once(model, optimizer, torch.stack(list(prepare(rows))), torch.stack(list(labels)))
    assert len(engine.ledger) == 4


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_rows_are_rows_that_may_not_meet(form):
    """As the collate functions of detection and segmentation yield them."""
    of_lists(form, lambda rows: [row.clamp(-2, 2) / 2 for row in rows])
    with pytest.raises(ValueError, match="What the model gets for one example"):
        of_lists(form, lambda rows: [row - torch.stack(list(rows)).mean(0) for row in rows])


# ---------------------------------------------------------------------- checkpoints


def test_a_loss_in_a_checkpoint_is_followed():
    """A checkpoint counts what its functions save, and those of the twins are none of its own."""

    def loss_in(criterion):
        return stepped(lambda m, x, y: checkpoint(criterion, m(x), y, use_reentrant=False))

    assert "could not" not in engine_loop(loss_in(F.cross_entropy)).ledger.to_json()
    recorded_loop(loss_in(F.cross_entropy))
    with pytest.raises(ValueError, match="mixes the examples|What one example weighs"):
        engine_loop(loss_in(lambda o, y: F.cross_entropy(o - o.mean(0), y)))


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

# SPDX-License-Identifier: Apache-2.0
"""Loops that call the private model more than once per step, or beside another model."""

import contextlib
import copy
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import AccountingError, ExactnessError, UnsupportedLayerError
from dualdp.plan.clipping import factors_for
from dualdp_torch.per_sample.checks import identity
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.loop import plan, start
from tests.dualdp_torch.training.runs import Open, end_of, fit, sgd

BOUND, LATENT = 0.5, 4
ITEMS = TensorDataset(data(30, 6), ids(3, 30), data(30, 6, seed=3))


class Generator(nn.Module):
    """A small generator with the batch norm of the DCGAN tutorial."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(LATENT, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(True), nn.Linear(5, 6)
        )

    def forward(self, z):
        return torch.tanh(self.main(z))


class Discriminator(nn.Module):
    """A small discriminator; its convolution counts as a layer with positions."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Linear(12, 1)

    def forward(self, x):
        return torch.sigmoid(self.head(F.leaky_relu(self.conv(x[:, None]), 0.2).flatten(1)))


def classifier(dropout=0.0):
    """A classifier of six numbers."""
    return randomise(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3))
    )


def given(model=None, items=ITEMS, mode="auto", checks=1.0, **changes):
    """Parts and options of a few steps over 30 rows."""
    changes = {"num_examples": 30, "expected_batch_size": 6, "num_steps": 3, **changes}
    options = {"plan": plan(**changes), "grad_sample_mode": mode, "checks": checks}
    return {"parts": sgd(model or classifier(), DataLoader(items, batch_size=6)), **options}


def private(*arguments, **options):
    return start(**given(*arguments, **options))


def opened(*arguments, **options):
    return Open(**given(*arguments, **options))


def assert_released(engine, model, losses_of, batch, among=False):
    """The clipped sum is that of the gradients of each example's own loss, in float64.

    With `among` the whole batch is computed for each, for the sake of its random numbers.
    """
    exact, totals, norms = copy.deepcopy(model).double(), {}, []
    batch = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in batch]
    for row in range(len(batch[0])):
        own = batch if among else [t[row : row + 1] if torch.is_tensor(t) else t for t in batch]
        exact.zero_grad()
        torch.manual_seed(5)
        losses_of(exact, *own)[row if among else 0].backward()
        grads = {name: p.grad.clone() for name, p in exact.named_parameters()}
        norm = sum(g.square().sum() for g in grads.values()).sqrt()
        factor = factors_for("flat", norm[None], BOUND, xp=torch)[0]
        norms.append(norm)
        totals = {name: totals.get(name, 0) + factor * g for name, g in grads.items()}
    stages = engine.stages()
    torch.testing.assert_close(
        stages.unprotected_norms.double(), torch.stack(norms), rtol=1e-4, atol=1e-6
    )
    for name, total in stages.unprotected_sum.items():
        torch.testing.assert_close(total.double(), totals[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("mode", "checks"),
    [("auto", 1.0), ("auto", 0.0), ("two_pass", 1.0), ("materialize", 0.0)]
    + [("vmap", 1.0), ("loop", 1.0)],
)
def test_the_dcgan_tutorial(mode, checks):
    torch.manual_seed(0)
    netG, netD = Generator(), randomise(Discriminator())
    engine, netD, optimizerD, dataloader = private(netD, mode=mode, checks=checks)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
    criterion = nn.BCELoss()

    def losses(model, real, fake):
        return -model(real).view(-1).log() - (1 - model(fake).view(-1)).log()

    for real, *_ in dataloader:
        netD.zero_grad()
        label = torch.full((len(real),), 1.0)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        assert output.mean().item() > 0
        fake = netG(torch.randn(len(real), LATENT))
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        before = copy.deepcopy(netD)
        optimizerD.step()
        assert_released(engine, before, losses, (real, fake.detach()))
        netG.zero_grad()
        label.fill_(1.0)
        plain = criterion(copy.deepcopy(netD)(fake).view(-1), label)
        expected = torch.autograd.grad(plain, netG.parameters(), retain_graph=True)
        with engine.pause():
            errG = criterion(netD(fake).view(-1), label)
            errG.backward()
        torch.testing.assert_close(tuple(p.grad for p in netG.parameters()), expected)
        optimizerG.step()
    assert engine.ledger.last_check == (2 if checks else None)


# ---------------------------------------------------------------------- losses of two forwards


def divergence(p, q):
    """Symmetric Kullback-Leibler divergence of two rows of logits, (n,), as in R-Drop."""
    p, q = F.log_softmax(p, -1), F.log_softmax(q, -1)
    both = F.kl_div(p, q, log_target=True, reduction="none")
    both = both + F.kl_div(q, p, log_target=True, reduction="none")
    return both.sum(-1) / 2


def r_drop(model, x, y, *_):
    first, second = model(x), model(x)
    losses = F.cross_entropy(first, y, reduction="none")
    losses = losses + F.cross_entropy(second, y, reduction="none")
    return losses + 4 * divergence(first, second)


def siamese(model, x, y, other, *_):
    """Contrastive loss of two inputs of each example."""
    distance = F.pairwise_distance(model(x), model(other))
    same = (y > 0).to(distance.dtype)
    return same * distance.square() + (1 - same) * F.relu(2.0 - distance).square()


class Power(nn.Module):
    """A model without a rule."""

    def __init__(self):
        super().__init__()
        self.layer, self.power = nn.Linear(6, 3), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.layer(x.abs().pow(self.power))


class Placed(nn.Module):
    """Words with their positions, which all examples may share."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, words, places):
        return self.head(torch.tanh(self.words(words) + self.places(places))).mean(1)


class Tied(nn.Module):
    """Two uses of one parameter, as table and as head, and tensors made from parameters."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, words):
        return F.linear(torch.tanh(self.mix(self.table(words))), self.table.weight)


class Halves(nn.Module):
    """A part of one weight in each forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x, upper):
        return F.linear(x, self.weight[:3] if upper else self.weight[3:])


def words(model, words, others, places, step):
    """Positions that all examples share in the first forward, in every second step."""
    first = torch.arange(5)[None] if step % 2 else places
    return (model(words, first) - 2 * model(others, places)).square().sum(1)


def next_words(model, *batch):
    """Next words of two texts, by a tied table."""
    return sum(
        F.cross_entropy(model(w)[:, :-1].transpose(1, 2), w[:, 1:], reduction="none").mean(1)
        for w in batch[:2]
    )


def halves(model, x, y, other, step):
    return model(x, True).square().sum(1) + model(other, False).square().sum(1)


TEXTS = TensorDataset(ids(7, 30, 5), ids(7, 30, 5, seed=2), ids(5, 30, 5, seed=3))


@pytest.mark.parametrize(
    ("losses_of", "model", "items", "mode"),
    [
        (r_drop, classifier(0.5), ITEMS, "auto"),
        (r_drop, classifier(0.5), ITEMS, "two_pass"),
        (siamese, classifier(), ITEMS, "auto"),
        (siamese, Power(), ITEMS, "auto"),
        (words, Placed(), TEXTS, "auto"),
        (words, Placed(), TEXTS, "materialize"),
        (words, Placed(), TEXTS, "vmap"),
        (next_words, Tied(), TEXTS, "auto"),
        (halves, Halves(), ITEMS, "auto"),
    ],
)
def test_the_whole_gradient_of_an_example_is_clipped_once(losses_of, model, items, mode):
    """With uses that each forward has of its own: masks, positions, parts of one weight."""
    engine, model, optimizer, loader = private(randomise(copy.deepcopy(model)), items, mode)
    for step, batch in enumerate(loader):
        batch = (*batch, step)
        torch.manual_seed(5)
        losses_of(model, *batch).mean().backward()
        before = copy.deepcopy(model)
        optimizer.step()
        assert_released(engine, before, losses_of, batch, among=losses_of is r_drop)
    assert engine.ledger.last_check == 2


@pytest.mark.parametrize("method", ["auto", "two_pass", "vmap", "loop"])
@pytest.mark.parametrize("separately", [False, True])
def test_a_record_of_two_forwards(method, separately):
    model, x, other, y = classifier(), data(5, 6), data(5, 6, seed=4), ids(3, 5)
    with dpt.record_per_sample(model, loss_reduction="sum", method=method) as record:
        one = F.cross_entropy(model(x), y, reduction="sum")
        if separately:
            one.backward()
        two = model(other).square().sum()
        (two if separately else one + two).backward()

    def losses(model, x, other, y):
        return F.cross_entropy(model(x), y, reduction="none") + model(other).square().sum(1)

    expected = dpt.per_sample_grads(losses, model, x, other, y, method="loop")
    torch.testing.assert_close(record.grads(), expected)


@pytest.mark.parametrize("what", ["looks", "model", "optimizer"])
def test_what_is_not_stepped_on_changes_nothing(what):
    """Forwards without a loss; and gradients before `zero_grad`, of either."""
    ends = []
    for is_there in (False, True):
        engine, model, optimizer, loader = private()
        for x, y, other in loader:
            loss = F.cross_entropy(model(x), y)
            if is_there and what == "looks":
                model(x).argmax(1)
                model(data(len(x), 6, seed=9)).argmax(1)  # of other examples
            elif is_there:
                model(other).square().mean().backward()
                {"model": model, "optimizer": optimizer}[what].zero_grad()
            loss.backward()
            optimizer.step()
        assert engine.ledger.last_check == 2
        ends.append(end_of(model))
    torch.testing.assert_close(*ends)


def test_a_second_forward_that_begins_later_is_checked(monkeypatch):
    """On the next batch: a first forward is not kept to be run again before the second is met."""
    checked, right = [], identity.check
    engine, *parts = private(checks=1e-9, num_steps=6)

    def run(*arguments, **options):
        checked.append(engine.ledger.position)
        return right(*arguments, **options)

    def loss(model, x, y, other):
        later = engine.ledger.position > 1
        return F.cross_entropy(model(x), y) + (model(other).square().mean() if later else 0)

    monkeypatch.setattr(identity, "check", run)
    fit(*parts, loss)
    assert checked == [0, 3]


# ---------------------------------------------------------------------- refused


def mismatch(model, x, y, other):
    return model(x).square().mean() + model(other.roll(1, 0)).square().mean()


def written_into_a_buffer(model, x, y, other):
    fake = torch.randn(len(x), 6)
    fake[:] = x.mean(0)
    return model(x).square().mean() + model(fake).square().mean()


def normalised_by_a_generator(model, x, y, other, generator=Generator()):  # noqa: B008
    with torch.no_grad():
        fake = generator(other[:, :LATENT])
    return model(x).square().mean() + model(fake).square().mean()


def one_in_the_other(model, x, y, other):
    return model(torch.cat([model(x), other[:, 3:]], 1)).square().mean()


@pytest.mark.parametrize(
    "loss", [mismatch, written_into_a_buffer, normalised_by_a_generator, one_in_the_other]
)
def test_forwards_of_rows_that_are_no_examples_are_refused(loss):
    engine, *parts = private(sampler="shuffle", num_steps=4)
    with pytest.raises((ValueError, ExactnessError), match="example"):
        fit(*parts, loss)
    assert len(engine.ledger) <= 1


def generated(run):
    return Generator()(torch.randn(len(run.x), LATENT))


def other_rows(run):
    run.loss()
    run.model(data(3, 6))


def after_the_step(run):
    run.step()
    run.model(generated(run)).mean().backward()


@pytest.mark.parametrize(
    ("loop", "match"),
    [
        (
            lambda run: (run.loss(), run.model(data(3, 6))),
            r"called on \d+ examples, then on 3, for",
        ),
        (lambda run: run.model(generated(run)), r"shape \(6, 5\) outside of it.*pause"),
        (after_the_step, r"after its optimizer.step.*engine.pause"),
        (lambda run: run.model(nn.Linear(6, 6)(run.x)), "trained without clipping and noise"),
    ],
    ids=["other rows", "a generator", "a generator after the step", "an encoder"],
)
def test_forwards_that_no_noise_would_reach_are_refused(loop, match):
    run = opened()
    with pytest.raises((RuntimeError, UnsupportedLayerError), match=match):
        loop(run)
    with torch.no_grad():
        run.model(data(3, 6))


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, prompt):
        return self.layer(torch.tanh(x + prompt))


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize(
    "prompt",
    [
        nn.Parameter(torch.zeros(1, 6)),
        torch.zeros(1, 6).requires_grad_(),
        nn.Parameter(torch.zeros(1, 6)).tanh(),
    ],
)
def test_a_trained_input_that_all_examples_share_is_refused(prompt, mode):
    """It would get the sum of all gradients, of which no part is clipped."""
    run = opened(randomise(Prompted()), mode=mode)
    with pytest.raises(UnsupportedLayerError, match="trained without clipping and noise"):
        run.model(run.x, prompt)
    run.model(run.x, prompt.detach())


def test_gradients_of_inputs_are_refused_where_no_graph_is_made():
    run = opened(mode="vmap")
    with pytest.raises(UnsupportedLayerError, match="input of the model requires a gradient"):
        run.model(run.x.requires_grad_())


def test_a_gradient_penalty_is_refused():
    run = opened()
    run.x.requires_grad_()
    for differentiate in (partial(torch.autograd.grad, inputs=run.x), torch.autograd.backward):
        with pytest.raises(UnsupportedLayerError, match=r"create_graph=True.*clipped_grad_sum"):
            differentiate(run.model(run.x).sum(), create_graph=True)
        run.model.zero_grad()


def signs(model, x, y):
    """An adversarial example of each row, as FGSM makes it."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return (x + 0.1 * grad.sign()).detach()


@pytest.mark.parametrize(("mode", "is_paused"), [("auto", False), ("two_pass", True)])
def test_adversarial_training_with_signs_of_gradients(mode, is_paused):
    run = opened(mode=mode)
    with run.engine.pause() if is_paused else contextlib.nullcontext():
        seen = signs(run.model, run.x, run.y)
    F.cross_entropy(run.model(seen), run.y).backward()
    before = copy.deepcopy(run.model)
    run.optimizer.step()

    def losses(model, x, y):
        return F.cross_entropy(model(signs(model, x, y)), y, reduction="none")

    assert_released(run.engine, before, losses, (run.x, run.y))


# ---------------------------------------------------------------------- pause


def test_a_paused_backward_does_not_reach_the_release():
    """Whatever it leaves in `p.grad`, with and without `zero_grad`, before and after a backward."""
    ends = []
    for paused in ((), (0, 1), (2,), (1, 2)):  # places of each step
        run = opened()

        def other(place, paused=paused, run=run):
            if place in paused:
                with run.engine.pause():
                    run.model(data(4, 6)).square().mean().backward()
                assert run.model[0].weight.grad is not None

        other(0)
        loss = run.loss()
        other(1)
        loss.backward()
        other(2)
        run.optimizer.step()
        mean = run.engine.stages().noisy_mean["0.weight"]
        assert torch.equal(run.model[0].weight.grad, mean)
        ends.append(end_of(run.model))
    assert all(torch.equal(ends[0], end) for end in ends)


def test_a_part_of_a_step_under_pause_is_refused():
    run = opened()
    with run.engine.pause():
        loss = run.loss()
    with pytest.raises(UnsupportedLayerError, match="reached the loss outside the recorded"):
        loss.backward()
    loss = run.loss()
    with run.engine.pause():
        loss.backward()
    with pytest.raises(RuntimeError, match="No backward was recorded"):
        run.optimizer.step()
    run.step()


class Pauses(nn.Module):
    engine = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if self.engine is not None:
            self.engine.pause().__enter__()
        return self.layer(x)


def test_pause_inside_a_forward_or_without_a_run_is_refused():
    run = opened(Pauses())
    Pauses.engine = run.engine
    with pytest.raises(RuntimeError, match="inside a recorded forward"):
        run.model(run.x)
    Pauses.engine = None
    with pytest.raises(AccountingError, match="not attached"), dpt.PrivacyEngine().pause():
        pass


class Fails(nn.Module):
    fails: ClassVar[list[int]] = []

    def forward(self, x):
        x = x * 1
        if self.fails and x.requires_grad:
            x.register_hook(lambda grad: self.fails.clear() or 1 / 0)
        return x


def test_a_backward_that_fails_after_another_is_no_half_step():
    run = opened(randomise(nn.Sequential(nn.Linear(6, 5), Fails(), nn.Linear(5, 3))))
    (other,) = run.more
    run.loss().backward()
    Fails.fails.append(1)
    loss = run.model(other).square().mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with pytest.raises(RuntimeError, match="No backward was recorded"):
        run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"failed after other forwards.*zero_grad"):
        run.model(other)
    run.optimizer.zero_grad()
    siamese(run.model, run.x, run.y, other).mean().backward()
    run.optimizer.step()
    assert len(run.engine.ledger) == 1

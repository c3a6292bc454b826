# SPDX-License-Identifier: Apache-2.0
"""Loops that call the private model more than once per step, or beside another model."""

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
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.per_sample.checks import identity
from tests.dualdp_torch.checks import assert_exact, data, ids, randomise
from tests.dualdp_torch.loop import plan, start

BOUND, LATENT = 0.5, 4


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


def private(model, items=None, mode="auto", checks=1.0, **changes):
    """Engine, model, optimizer and loader of a few steps over 30 rows."""
    items = items or TensorDataset(data(30, 6), ids(3, 30), data(30, 6, seed=3))
    changes = {"num_examples": 30, "expected_batch_size": 6, "num_steps": 3, **changes}
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(items, batch_size=6)
    return start(parts, plan=plan(**changes), grad_sample_mode=mode, checks=checks)


def assert_released(engine, model, losses, n, among=False):
    """The clipped sum is that of the gradients of each example's own loss, in float64.

    `losses(model, rows)` gives the total losses of these rows; with `among` the whole batch is
    computed for each of them, for the sake of its random numbers.
    """
    exact, totals, norms = copy.deepcopy(model).double(), {}, []
    for row in range(n):
        rows = slice(None) if among else slice(row, row + 1)
        exact.zero_grad()
        losses(exact, rows)[row if among else 0].backward()
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


@pytest.mark.parametrize("checks", [0.0, 1.0])
@pytest.mark.parametrize("mode", METHODS)
def test_the_dcgan_tutorial(mode, checks):
    torch.manual_seed(0)
    netG, netD = Generator(), randomise(Discriminator())
    engine, netD, optimizerD, dataloader = private(netD, mode=mode, checks=checks)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    for batch in dataloader:
        netD.zero_grad()
        real = batch[0]
        size = real.size(0)
        label = torch.full((size,), 1.0)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        assert output.mean().item() > 0
        fake = netG(torch.randn(size, LATENT))
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        before = copy.deepcopy(netD)
        optimizerD.step()

        def losses(model, rows, x=real, z=fake):
            right = model(x.double()[rows]).view(-1)
            wrong = model(z.detach().double()[rows]).view(-1)
            return -right.log() - (1 - wrong).log()

        assert_released(engine, before, losses, size)
        netG.zero_grad()
        label.fill_(1.0)
        plain = criterion(copy.deepcopy(netD)(fake).view(-1), label)
        expected = torch.autograd.grad(plain, netG.parameters(), retain_graph=True)
        with engine.pause():
            errG = criterion(netD(fake).view(-1), label)
            errG.backward()
        for p, grad in zip(netG.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)
        optimizerG.step()
    assert engine.ledger.last_check == (2 if checks else None)


# ---------------------------------------------------------------------- losses of two forwards


def classifier(dropout=0.0):
    """A classifier of six numbers."""
    return randomise(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3))
    )


def divergence(p, q):
    """Symmetric Kullback-Leibler divergence of two rows of logits, (n,), as in R-Drop."""
    p, q = F.log_softmax(p, -1), F.log_softmax(q, -1)
    both = F.kl_div(p, q, log_target=True, reduction="none")
    both = both + F.kl_div(q, p, log_target=True, reduction="none")
    return both.sum(-1) / 2


def r_drop(model, x, y, other):
    first, second = model(x), model(x)
    losses = F.cross_entropy(first, y, reduction="none")
    losses = losses + F.cross_entropy(second, y, reduction="none")
    return losses + 4 * divergence(first, second)


def siamese(model, x, y, other):
    """Contrastive loss of two inputs of each example."""
    distance = F.pairwise_distance(model(x), model(other))
    same = (y > 0).to(distance.dtype)
    return same * distance.square() + (1 - same) * F.relu(2.0 - distance).square()


def drawn_between(model, x, y, other):
    """Consistency of two noisy inputs; the loop draws between the two forwards."""
    first = model(x + 0.1 * torch.randn(x.shape).to(x))
    second = model(x + 0.1 * torch.randn(x.shape).to(x))
    return (first - second).square().sum(1) + F.cross_entropy(second, y, reduction="none")


def sequences(model, x, y, other):
    """Inputs of two lengths."""
    return model(x[:, None].expand(-1, 4, -1)).square().mean((1, 2)) + siamese(model, x, y, other)


LOOPS = [r_drop, siamese, drawn_between, sequences]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["auto", "two_pass"])
@pytest.mark.parametrize("losses_of", LOOPS)
def test_the_whole_gradient_of_an_example_is_clipped_once(losses_of, mode, dropout):
    engine, model, optimizer, loader = private(classifier(dropout), mode=mode)
    for batch in loader:
        torch.manual_seed(5)
        losses_of(model, *batch).mean().backward()
        before = copy.deepcopy(model)
        optimizer.step()

        def losses(model, rows, batch=batch):
            torch.manual_seed(5)
            return losses_of(model, *(t.double() if t.is_floating_point() else t for t in batch))

        assert_released(engine, before, losses, len(batch[0]), among=True)
    assert engine.ledger.last_check == 2


@pytest.mark.parametrize("mode", ["vmap", "auto"])
def test_losses_of_two_forwards_without_a_rule(mode):
    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.power = nn.Linear(6, 3), nn.Parameter(torch.ones(6))

        def forward(self, x):
            return self.layer(x.abs().pow(self.power))

    engine, model, optimizer, loader = private(randomise(Power()), mode=mode)
    for batch in loader:
        siamese(model, *batch).mean().backward()
        before = copy.deepcopy(model)
        optimizer.step()

        def losses(model, rows, batch=batch):
            x, y, other = (t.double() if t.is_floating_point() else t for t in batch)
            return siamese(model, x[rows], y[rows], other[rows])

        assert_released(engine, before, losses, len(batch[0]))


@pytest.mark.parametrize("method", METHODS)
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
    for name, grad in record.grads().items():
        torch.testing.assert_close(grad, expected[name])


class Placed(nn.Module):
    """Words with their positions, which all examples may share."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, words, places):
        return self.head(torch.tanh(self.words(words) + self.places(places))).mean(1)


@pytest.mark.parametrize("mode", METHODS)
@pytest.mark.parametrize("shared", ["both", "first", "second", "even steps", "odd steps"])
def test_positions_that_only_some_forwards_share(shared, mode):
    items = TensorDataset(ids(7, 30, 5), ids(7, 30, 5, seed=2), ids(5, 30, 5, seed=3))
    engine, model, optimizer, loader = private(randomise(Placed()), items, mode)

    def losses_of(model, step, words, others, places):
        same = torch.arange(5)[None]
        steps = {"even steps": (step % 2 == 0,) * 2, "odd steps": (step % 2 == 1,) * 2}
        are_same = steps.get(shared, (shared != "second", shared != "first"))
        first, second = (same if is_same else places for is_same in are_same)
        return (model(words, first) - 2 * model(others, second)).square().sum(1)

    for step, batch in enumerate(loader):
        losses_of(model, step, *batch).mean().backward()
        before = copy.deepcopy(model)
        optimizer.step()

        def losses(model, rows, step=step, batch=batch):
            return losses_of(model, step, *(tensor[rows] for tensor in batch))

        assert_released(engine, before, losses, len(batch[0]))


def test_a_tied_table_in_two_forwards():
    """Four uses of one parameter, as table and as head, and tensors made from parameters."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, words):
            return F.linear(torch.tanh(self.mix(self.table(words))), self.table.weight)

    items = TensorDataset(ids(7, 30, 5), ids(7, 30, 5, seed=2))
    engine, model, optimizer, loader = private(randomise(Tied()), items)

    def losses_of(model, words, others):
        return sum(
            F.cross_entropy(model(w)[:, :-1].transpose(1, 2), w[:, 1:], reduction="none").mean(1)
            for w in (words, others)
        )

    for words, others in loader:
        losses_of(model, words, others).mean().backward()
        before = copy.deepcopy(model)
        optimizer.step()

        def losses(model, rows, words=words, others=others):
            return losses_of(model, words[rows], others[rows])

        assert_released(engine, before, losses, len(words))


def test_tensors_made_from_parameters_are_those_of_their_own_forward():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 6))

        def forward(self, x, upper):
            return F.linear(x, self.weight[:3] if upper else self.weight[3:])

    model, x, other = randomise(Halves()), data(5, 6), data(5, 6, seed=4)
    with dpt.record_per_sample(model, loss_reduction="sum") as record:
        (model(x, True).square().sum() + model(other, False).square().sum()).backward()

    def losses(model, x, other):
        return model(x, True).square().sum(1) + model(other, False).square().sum(1)

    expected = dpt.per_sample_grads(losses, model, x, other, method="loop")["weight"]
    torch.testing.assert_close(record.grads()["weight"], expected)


def test_a_forward_without_a_loss_changes_nothing():
    ends = []
    for looks in (False, True):
        engine, model, optimizer, loader = private(classifier())
        for x, y, _ in loader:
            loss = F.cross_entropy(model(x), y)
            if looks:
                model(x).argmax(1)
                model(data(len(x), 6, seed=9)).argmax(1)  # of other examples
            loss.backward()
            optimizer.step()
        ends.append(model[0].weight)
    assert torch.equal(*ends)


def test_gradients_set_to_zero_are_dropped():
    """As in plain torch, what was accumulated before `zero_grad` counts for nothing."""
    for owner in ("model", "optimizer"):
        ends = []
        for twice in (False, True):
            engine, model, optimizer, loader = private(classifier())
            for x, y, other in loader:
                kept = model(x)
                if twice:
                    model(other).square().mean().backward()
                    {"model": model, "optimizer": optimizer}[owner].zero_grad()
                F.cross_entropy(kept, y).backward()
                optimizer.step()
            assert engine.ledger.last_check == 2
            ends.append(model[0].weight)
        torch.testing.assert_close(*ends)


def test_a_second_forward_that_begins_later_is_checked_on_the_next_batch(monkeypatch):
    """The first forward of such a batch is not kept to be run again, before the second is met."""
    checked = []
    right = identity.check

    def run(*arguments, **options):
        checked.append(step)
        return right(*arguments, **options)

    monkeypatch.setattr(identity, "check", run)
    _, model, optimizer, loader = private(classifier(), checks=1e-9, num_steps=6)
    for step, (x, y, other) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        if step > 1:
            loss = loss + model(other).square().mean()
        loss.backward()
        optimizer.step()
    assert checked == [0, 3]


# ---------------------------------------------------------------------- refused


def mismatch(model, x, y, other):
    return model(x).square().mean() + model(other.roll(1, 0)).square().mean()


def from_the_batch(model, x, y, other):
    fake = torch.randn(len(x), 6) + x.mean(0)
    return model(x).square().mean() + model(fake).square().mean()


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
    "loop",
    [mismatch, from_the_batch, written_into_a_buffer, normalised_by_a_generator, one_in_the_other],
)
def test_forwards_whose_rows_are_not_one_example_each_are_refused(loop):
    engine, model, optimizer, loader = private(classifier(), sampler="shuffle", num_steps=4)

    def train():
        for batch in loader:
            loop(model, *batch).backward()
            optimizer.step()

    with pytest.raises((ValueError, ExactnessError), match="example"):
        train()
    assert len(engine.ledger) <= 1


def test_another_number_of_rows_is_refused_by_both():
    _, model, _, loader = private(classifier())
    for x, _, _ in loader:
        model(x)
        with pytest.raises(RuntimeError, match=r"called on \d+ examples, then on 3, for one batch"):
            model(data(3, 6))
        with torch.no_grad():
            model(data(3, 6))
        return


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_step_of_the_generator_without_pause_is_refused(place):
    netG, netD = Generator(), randomise(Discriminator())
    _, netD, optimizer, loader = private(netD)
    for x, _, _ in loader:
        fake = netG(torch.randn(len(x), LATENT))
        if place == "before":
            with pytest.raises(UnsupportedLayerError, match=r"shape \(6, 5\) outside of it.*pause"):
                netD(fake)
            return
        F.softplus(netD(x)).mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"after its optimizer.step.*engine.pause"):
            netD(fake).mean().backward()
        return


def test_an_encoder_that_no_noise_reaches_is_refused():
    encoder = nn.Linear(6, 6)
    _, model, _, loader = private(classifier())
    for x, _, _ in loader:
        with pytest.raises(UnsupportedLayerError, match="trained without clipping and noise"):
            model(encoder(x))
        model(encoder(x).detach())
        return


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, prompt):
        return self.layer(torch.tanh(x + prompt))


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_trained_input_that_all_examples_share_is_refused(is_leaf, kind, mode):
    """It would get the sum of all gradients, of which no part is clipped."""
    prompt = kind(torch.zeros(1, 6))
    _, model, _, loader = private(randomise(Prompted()), mode=mode)
    for x, _, _ in loader:
        with pytest.raises(UnsupportedLayerError, match="trained without clipping and noise"):
            model(x, prompt if is_leaf else prompt.tanh())
        model(x, prompt.detach())
        return


def test_gradients_of_inputs_are_refused_where_no_graph_is_made():
    _, model, _, loader = private(classifier(), mode="vmap")
    for x, _, _ in loader:
        with pytest.raises(UnsupportedLayerError, match="input of the model requires a gradient"):
            model(x.requires_grad_())
        return


def test_a_backward_after_the_step_is_refused():
    _, model, optimizer, loader = private(classifier())
    for x, y, _ in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="gradients were used by optimizer.step"):
            loss.backward()
        return


def test_a_gradient_penalty_is_refused():
    _, model, _, loader = private(classifier())
    for x, _, _ in loader:
        x.requires_grad_()
        for differentiate in (partial(torch.autograd.grad, inputs=x), torch.autograd.backward):
            with pytest.raises(UnsupportedLayerError, match=r"create_graph=True.*clipped_grad_sum"):
                differentiate(model(x).sum(), create_graph=True)
            model.zero_grad()
        return


def test_a_gradient_penalty_by_the_functional_form():
    def losses(model, x):
        x = x.detach().requires_grad_()
        grads = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return (grads.norm(dim=1) - 1).square()

    assert_exact(classifier(), data(5, 6), loss_fn=losses, methods=("loop",))


# ---------------------------------------------------------------------- adversarial examples


def attacked(engine, model, x, y, how):
    """An adversarial example of each row, as FGSM makes it."""
    x = x.clone().requires_grad_()
    if how == "paused":
        with engine.pause():
            grad = torch.autograd.grad(F.cross_entropy(model(x), y), x)[0]
    elif how == "recorded":
        grad = torch.autograd.grad(F.cross_entropy(model(x), y), x)[0]
    else:
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()
        grad = x.grad
    return (x + 0.1 * grad.sign()).detach()


@pytest.mark.parametrize(
    ("mode", "how"),
    [("auto", "paused"), ("two_pass", "paused"), ("vmap", "paused")]
    + [("auto", "recorded"), ("auto", "accumulated")],
)
def test_adversarial_training_with_signs_of_gradients(mode, how):
    engine, model, optimizer, loader = private(classifier(), mode=mode)
    for x, y, _ in loader:
        F.cross_entropy(model(attacked(engine, model, x, y, how)), y).backward()
        before = copy.deepcopy(model)
        optimizer.step()

        def losses(model, rows, x=x, y=y):
            x, y = x.double()[rows].requires_grad_(), y[rows]
            grad = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)[0]
            return F.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y, reduction="none")

        assert_released(engine, before, losses, len(x))


# ---------------------------------------------------------------------- pause


def test_a_paused_backward_does_not_reach_the_release():
    """Whatever it leaves in `p.grad`, with and without `zero_grad`, before and after a backward."""
    ends = []
    for paused in (False, True):
        engine, model, optimizer, loader = private(classifier())
        for step, (x, y, _) in enumerate(loader):

            def other(engine=engine, model=model):
                with engine.pause():
                    model(data(4, 6)).square().mean().backward()
                assert model[0].weight.grad is not None

            if paused and step == 0:
                other()
            loss = F.cross_entropy(model(x), y)
            if paused and step == 1:
                other()
            loss.backward()
            if paused:
                other()
            optimizer.step()
            assert torch.equal(model[0].weight.grad, engine.stages().noisy_mean["0.weight"])
        ends.append(model[0].weight)
    assert torch.equal(*ends)


def test_a_part_of_a_step_under_pause_is_refused():
    engine, model, optimizer, loader = private(classifier(), num_steps=1)
    for x, y, _ in loader:
        with engine.pause():
            loss = F.cross_entropy(model(x), y)
        with pytest.raises(UnsupportedLayerError, match="reached the loss outside the recorded"):
            loss.backward()
        loss = F.cross_entropy(model(x), y)
        with engine.pause():
            loss.backward()
        with pytest.raises(RuntimeError, match="No backward was recorded"):
            optimizer.step()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_pause_inside_a_forward_is_refused():
    class Pauses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.engine = nn.Linear(6, 3), None

        def forward(self, x):
            if self.engine is not None:
                self.engine[0].pause().__enter__()
            return self.layer(x)

    engine, model, _, loader = private(Pauses())
    for x, _, _ in loader:
        model.engine = (engine,)
        with pytest.raises(RuntimeError, match="inside a recorded forward"):
            model(x)
        return


def test_pause_needs_an_engine_that_is_attached():
    with pytest.raises(AccountingError, match="not attached"), dpt.PrivacyEngine().pause():
        pass


# ---------------------------------------------------------------------- interrupted


class Interrupting:
    """Presses Ctrl-C once, at the given call."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self):
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt


PLACES = ("forward", "backward", "optimizer", "data")


@pytest.mark.parametrize("place", PLACES)
def test_a_loop_of_two_forwards_goes_on_after_an_interrupt(place):
    press = {name: Interrupting(4 if name == place else -1) for name in PLACES}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            h = torch.tanh(self.first(x))
            if torch.is_grad_enabled():
                h.register_hook(lambda grad: press["backward"]())
                press["forward"]()
            return self.second(h)

    class Rows(TensorDataset):
        def __getitem__(self, k):
            press["data"]()
            return super().__getitem__(k)

    model = randomise(Net())
    items = Rows(data(30, 6), ids(3, 30), data(30, 6, seed=3))
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(items, batch_size=6)),
        plan=plan(num_examples=30, expected_batch_size=6, num_steps=8),
        checks=0.0,
    )
    optimizer.register_step_pre_hook(lambda *_: press["optimizer"]())

    def loop():
        for batch in loader:
            optimizer.zero_grad()
            siamese(model, *batch).mean().backward()
            before = copy.deepcopy(model)
            optimizer.step()

            def losses(model, rows, batch=batch):
                x, y, other = (t.double() if t.is_floating_point() else t for t in batch)
                return siamese(model, x[rows], y[rows], other[rows])

            press_again = press["backward"].calls, press["forward"].calls
            assert_released(engine, before, losses, len(batch[0]))
            press["backward"].calls, press["forward"].calls = press_again

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert torch.is_grad_enabled()
    assert not torch.overrides._get_current_function_mode_stack()
    loop()
    assert len(engine.ledger) == 8
    engine.detach()
    model(data(3, 6)).sum().backward()
    assert model.first.weight.grad is not None


def test_a_backward_that_fails_after_another_one_is_not_half_a_step():
    class Fails(nn.Module):
        fails: ClassVar[list[int]] = []

        def forward(self, x):
            x = x * 1
            if self.fails and x.requires_grad:
                x.register_hook(lambda grad: self.fails.clear() or 1 / 0)
            return x

    model = randomise(nn.Sequential(nn.Linear(6, 5), Fails(), nn.Linear(5, 3)))
    engine, model, optimizer, loader = private(model, num_steps=1)
    for x, y, other in loader:
        F.cross_entropy(model(x), y).backward()
        model[1].fails.append(1)
        loss = model(other).square().mean()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        with pytest.raises(RuntimeError, match="No backward was recorded"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"failed after other forwards.*zero_grad"):
            model(other)
        optimizer.zero_grad()
        siamese(model, x, y, other).mean().backward()
        optimizer.step()
    assert len(engine.ledger) == 1

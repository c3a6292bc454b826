# SPDX-License-Identifier: Apache-2.0
"""Programs whose loop is the matter: metrics, schedules, checkpoints, optimizers, phases."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.user import conftest
from tests.user.parts import ROWS, adam, labels, loader_of, mlp, sgd, table, train

PROGRAMS, program = conftest.programs()


class Bar:
    """What tqdm does for a loop."""

    def __init__(self, iterable):
        self.iterable, self.text = iterable, ""

    def __iter__(self):
        yield from self.iterable

    def set_postfix(self, **numbers):
        self.text = ", ".join(f"{k}={v:.3f}" for k, v in numbers.items())


@program("(out, y)", "(out, y) * (1 + out.detach().abs().max())")
def running_means_on_a_bar(private):
    model, running = mlp(6, 12, 3), 0.0
    model, optimizer, loader = private(model, sgd(model), loader_of(*table()))  # dp
    for _epoch in range(5):
        bar = Bar(loader)
        for x, y in bar:
            out = model(x)
            loss = F.cross_entropy(out, y)
            running = 0.9 * running + 0.1 * loss.item()
            acc = (out.argmax(1) == y).float().mean().item()
            bar.set_postfix(loss=running, acc=acc, best=out.max().item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("(out, y)", "(out, y, weight=out.detach().mean(0).exp())")
def a_dictionary_for_a_dashboard(private):
    model, log = mlp(6, 12, 2), []
    model, optimizer, loader = private(model, sgd(model), loader_of(table()[0], labels(2)))  # dp
    for step, (x, y) in enumerate(loader.remaining()):
        out = model(x)
        loss = 0.5 * F.cross_entropy(out, y)
        hits = (out.argmax(1) == y).float()
        log.append({"step": step, "loss": loss.item(), "acc": hits.mean().item(), "n": len(x)})
        log[-1] |= {"by_class": [hits[y == c].mean().item() for c in range(2)]}
        log[-1] |= {"histogram": out.detach().numpy().tolist()}
        assert not torch.isnan(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program("loss = criterion(", "loss = model(x).var(0).sum() + criterion(")
def early_stopping(private):
    model, best, patience, kept = mlp(6, 12, 3), float("inf"), 0, None
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()
    held_out = loader_of(*table())
    model, optimizer, loader = private(model, optimizer, loader_of(*table()))  # dp
    for _epoch in range(5):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val_loss = sum(criterion(model(x), y).item() for x, y in held_out) / len(held_out)
        if val_loss < best:
            best, patience, kept = val_loss, 0, copy.deepcopy(model.state_dict())
        else:
            patience += 1
        if patience >= 10:
            break
    model.load_state_dict(kept)
    print(best)


@program("model(x), y)", "model(x)[torch.randperm(len(x))], y)")
def k_folds(private):
    data, scores = TensorDataset(*table()), []
    for fold in range(2):
        inside = [k for k in range(ROWS) if k % 2 != fold]
        model = mlp(6, 12, 3)
        loader = DataLoader(Subset(data, inside), batch_size=4, shuffle=True)
        model, optimizer, loader = private(model, sgd(model), loader)  # dp
        train(model, optimizer, loader, lambda model, x, y: F.cross_entropy(model(x), y))
        x, y = data[[k for k in range(ROWS) if k % 2 == fold]]
        model.eval()
        scores.append((model(x).argmax(1) == y).float().mean().item())


@program(
    "recon + beta * kl",
    "recon + beta * kl * (recon.item() / kl.item())",
    "other examples enter the loss by it",
    is_noted=True,
)
def annealed_term_beside_logged_numbers(private):
    model, log = mlp(6, 8, 12), []
    model, optimizer, loader = private(model, sgd(model), loader_of(table()[0]))  # dp
    for step, (x,) in enumerate(loader.remaining()):
        mean, log_var = model(x).chunk(2, 1)
        recon = F.mse_loss(mean + torch.randn_like(mean) * (0.5 * log_var).exp(), x)
        kl = 0.5 * (mean.square() + log_var.exp() - log_var - 1).mean()
        beta = min(1.0, step / 20)
        log.append((recon.item(), kl.item(), beta))
        loss = recon + beta * kl
        if step > 15:
            loss = loss + 0.01 * mean.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("(model(x), y)", "(model(x).sub(model(x).mean(0)), y)")
def schedulers_of_every_kind(private):
    model = mlp(6, 12, 3)
    optimizer = sgd(model, momentum=0.9, nesterov=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=25)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    model, optimizer, loader = private(model, optimizer, loader_of(*table()))  # dp
    for _epoch in range(5):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        plateau.step(total)


class Both(torch.optim.Optimizer):
    def __init__(self, *optimizers):
        super().__init__([g for one in optimizers for g in one.param_groups], {})
        self.optimizers = optimizers

    def step(self):
        for one in self.optimizers:
            one.step()


@program("(model, both,", "(model, [muon, adam],", "holds all parameters and steps each")
def two_optimizers(private):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-3)
    both = Both(muon, adam)  # dp
    model, both, loader = private(model, both, loader_of(*table()))  # dp
    for x, y in loader.remaining():
        both.zero_grad()
        F.cross_entropy(model(x), y).backward()
        both.step()


@program("F.mse_loss(model(x), y)", "F.mse_loss(model(x), y[:, None])", "n, 1|example|row")
def average_of_the_weights(private):
    model = nn.Sequential(mlp(6, 12, 1), nn.Flatten(0))
    optimizer = sgd(model)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    loader = loader_of(table()[0], torch.randn(ROWS))
    model, optimizer, loader = private(model, optimizer, loader)  # dp
    for _epoch in range(5):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
        with torch.no_grad():
            print(averaged(torch.randn(3, 6)).mean().item())


@program(
    "loss.backward(", "torch.autograd.grad(loss, [*model.parameters()]", "p.grad after the step"
)
def gradient_norms_in_the_log(private):
    model, log = mlp(6, 12, 3), []
    model, optimizer, loader = private(model, adam(model, lr=1e-2), loader_of(*table()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            sizes = {name: p.detach().norm().item() for name, p in model.named_parameters()}
            log.append((norm.item(), sizes, optimizer.param_groups[0]["lr"]))

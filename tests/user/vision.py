# SPDX-License-Identifier: Apache-2.0
"""Programs on images: classification, generation, detection, teachers, losses of papers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import dualdp.torch as dpt
from tests.user import conftest
from tests.user.parts import ROWS, adam, adamw, images, labels, loader_of, mlp, sgd, train

PROGRAMS, program = conftest.programs()


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6 * 9, classes)

    def forward(self, x):
        x = torch.tanh(self.conv1(x))
        return self.head(torch.tanh(self.norm(self.conv2(x))).flatten(1))


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum() * (100.0 / target.size(0)) for k in topk]


@program("F.cross_entropy(output", "F.cross_entropy(output - output.mean(0)", "example")
def classifier_with_meters(private):
    model = ConvNet()
    optimizer = sgd(model, momentum=0.9)
    model, optimizer, loader = private(model, optimizer, loader_of(images(), labels()))  # dp
    losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    for _epoch in range(5):
        model.train()
        for data, target in loader:
            output = model(data)
            loss = F.cross_entropy(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 3))
            losses.update(loss.item(), data.size(0))
            top1.update(acc1.item(), data.size(0))
            top5.update(acc5.item(), data.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("model = dpt.fix(model)  # dp", "", "BatchNorm.*fix")
def imagenet_main_loop(private):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    model = dpt.fix(model)  # dp
    criterion = nn.CrossEntropyLoss()
    optimizer = sgd(model, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    val_loader, best_acc1, saved = loader_of(images(), labels()), 0, None
    model, optimizer, loader = private(model, optimizer, loader_of(images(), labels()))  # dp
    for epoch in range(5):
        model.train()
        for i, (x, target) in enumerate(loader):
            output = model(x)
            loss = criterion(output, target)
            meter = (i, loss.item(), *accuracy(output, target, topk=(1, 2)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            acc1 = max(accuracy(model(x), y)[0].item() for x, y in val_loader)
        scheduler.step()
        if acc1 > best_acc1:
            state = {"epoch": epoch, "state_dict": model.state_dict(), "meter": meter}
            best_acc1, saved = acc1, copy.deepcopy({**state, "optimizer": optimizer.state_dict()})
    model.load_state_dict(saved["state_dict"])


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.fc3, self.fc4 = nn.Linear(4, 20), nn.Linear(20, 64)

    def forward(self, x):
        h = torch.tanh(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(torch.tanh(self.fc3(z)))), mu, logvar


@program("mu.pow(2)", "mu.mean(0).pow(2)")
def vae(private):
    def loss_of(model, data):
        recon, mu, logvar = model(data)
        bce = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    model, loader = VAE(), loader_of(images().sigmoid())
    train(*private(model, adam(model), loader, loss_reduction="sum"), loss_of)  # dp


@program("with private.pause():  # dp", "with torch.enable_grad():", "pause")
def dcgan(private):
    net_g, net_d = mlp(6, 16, 64), nn.Sequential(nn.Flatten(), mlp(64, 16, 1))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    net_d, optimizer_d, loader = private(net_d, optimizer_d, loader_of(images()))  # dp
    criterion, history = nn.BCEWithLogitsLoss(), []
    for _epoch in range(5):
        for (real,) in loader:
            net_d.zero_grad()
            label = torch.full((real.size(0),), 1.0)
            err_real = criterion(net_d(real).view(-1), label)
            err_real.backward()
            fake = net_g(torch.randn(real.size(0), 6))
            label.fill_(0.0)
            err_fake = criterion(net_d(fake.detach()).view(-1), label)
            err_fake.backward()
            optimizer_d.step()
            net_g.zero_grad()
            label.fill_(1.0)
            with private.pause():  # dp
                err_g = criterion(net_d(fake).view(-1), label)
                err_g.backward()
            optimizer_g.step()
            history.append((err_g.item(), (err_real + err_fake).item()))


def penalty(critic, real, made):
    """WGAN-GP's, which differentiates twice through the model."""
    between = (0.5 * real.flatten(1) + 0.5 * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@program("(critic(fake))", "(critic(fake)) + penalty(critic, real, fake)", "clipped_grad_sum|loop")
def wgan_with_clipped_weights(private):
    generator, critic = mlp(6, 16, 64), nn.Sequential(nn.Flatten(), mlp(64, 16, 1))
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
    optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    critic, optimizer_c, loader = private(critic, optimizer_c, loader_of(images()))  # dp
    for step, (real,) in enumerate(loader.remaining()):
        optimizer_c.zero_grad()
        fake = generator(torch.randn(real.shape[0], 6)).detach()
        loss = -torch.mean(critic(real)) + torch.mean(critic(fake))
        loss.backward()
        optimizer_c.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        if step % 5 == 0:
            optimizer_g.zero_grad()
            with private.pause():  # dp
                (-torch.mean(critic(generator(torch.randn(8, 6))))).backward()
            optimizer_g.step()


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = ConvNet(classes=5)

    def forward(self, a, b):
        return self.net(a), self.net(b)


@program("clamp(1.0 -", "clamp(distance.max() -")
def siamese(private):
    def loss_of(model, first, second, same):
        distance = F.pairwise_distance(*model(first, second))
        apart = torch.clamp(1.0 - distance, min=0.0)
        return torch.mean(same * distance.pow(2) + (1 - same) * apart.pow(2))

    model = Siamese()
    loader = loader_of(images(), images(), labels(2).float())
    train(*private(model, adam(model), loader), loss_of)  # dp


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.net = nn.Embedding(100, 8), mlp(64 + 8, 32, 64)

    def forward(self, x, t):
        return self.net(torch.cat([x.flatten(1), self.time(t)], 1)).view_as(x)


@program("(noisy, t), noise)", "(noisy, t), noise.roll(1, 0) * noisy)")
def diffusion_randint(private):
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def loss_of(model, x):
        t = torch.randint(0, 100, (x.shape[0],), device=x.device).long()
        noise = torch.randn_like(x)
        a = alpha_bar[t][:, None, None, None]
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(model(noisy, t), noise)

    model = Denoiser()
    train(*private(model, adamw(model), loader_of(images())), loss_of)  # dp


@program("1, generator=generator)", "1, generator=generator) * x.std()")
def flow_matching_with_a_generator(private):
    model, generator = mlp(65, 32, 64), torch.Generator().manual_seed(0)
    model, optimizer, loader = private(model, adam(model), loader_of(images().flatten(1)))  # dp
    for step, (x,) in enumerate(loader.remaining()):
        t = torch.rand(len(x), 1, generator=generator)
        start = torch.randn(len(x), 64, generator=generator)
        moved = torch.cat([(1 - t) * start + t * x, t], 1)
        loss = ((model(moved) - (x - start)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print({"step": step, "loss": loss.item()})


@program("(model(low), high)", "(model(low), high) / high.std()")
def super_resolution(private):
    def loss_of(model, low, high):
        loss = F.mse_loss(model(low), high)
        print(f"PSNR: {-10 * torch.log10(loss):.4f} dB")
        return loss

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    train(*private(model, adam(model), loader_of(images(size=4), images())), loss_of)  # dp


def dice(logits, target):
    probs = logits.softmax(1)[:, 1]
    overlap = (probs * target).sum((1, 2))
    return 1 - (2 * overlap + 1) / (probs.sum((1, 2)) + target.sum((1, 2)) + 1)


@program("(logits, mask.double())", "(logits.roll(1, 0), mask.double())")
def segmentation(private):
    def loss_of(model, image, mask):
        logits = model(image)
        overlap = ((logits.argmax(1) == 1) & (mask == 1)).sum().item()
        print("recall", overlap / max(mask.sum().item(), 1))
        return F.cross_entropy(logits, mask) + dice(logits, mask.double()).mean()

    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 2, 1))
    masks = (images()[:, 0] > 0).long()
    train(*private(model, sgd(model), loader_of(images(), masks)), loss_of)  # dp


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten())
        self.classes, self.boxes = nn.Linear(384, 3 * 4), nn.Linear(384, 3 * 4)

    def forward(self, x):
        h = self.body(x)
        return {"logits": self.classes(h).view(-1, 3, 4), "boxes": self.boxes(h).view(-1, 3, 4)}


@program("(1, 2)) / real.sum(1)", "(1, 2)) / real.sum()", "row|example|reduction")
def detection_on_padded_boxes(private):
    def loss_of(model, image, box_targets, class_targets, real):
        out = model(image)
        box = F.smooth_l1_loss(out["boxes"], box_targets, reduction="none") * real[..., None]
        ce = F.cross_entropy(out["logits"].transpose(1, 2), class_targets, reduction="none")
        return (box.sum((1, 2)) / real.sum(1) + (ce * real).sum(1) / real.sum(1)).mean()

    model, boxes, classes = Detector(), torch.rand(ROWS, 3, 4), torch.randint(4, (ROWS, 3))
    present = torch.arange(3) < torch.arange(ROWS)[:, None] % 3 + 1
    loader = loader_of(images(), boxes, classes, present)
    train(*private(model, sgd(model), loader), loss_of)  # dp


@program("(1 - lam) * x[:, 1:]", "(1 - lam) * x[:, 1:].flip(0)")
def mixup_of_an_examples_views(private):
    def loss_of(model, x, y):
        lam = torch.rand(len(x), 1, 1, 1)
        mixed = lam * x[:, :1] + (1 - lam) * x[:, 1:]
        return F.cross_entropy(model(mixed), y, label_smoothing=0.1)

    model = ConvNet()
    train(*private(model, sgd(model), loader_of(images(2), labels())), loss_of)  # dp


@program("(alpha *", "(torch.bincount(y, minlength=4)[y] / len(y) * alpha *")
def focal_loss(private):
    def loss_of(model, x, y):
        ce = F.cross_entropy(model(x), y, reduction="none")
        alpha = torch.tensor([0.25, 0.5, 0.75, 1.0])[y]
        return (alpha * (1 - torch.exp(-ce)) ** 2 * ce).mean()

    model = ConvNet()
    train(*private(model, sgd(model), loader_of(images(), labels())), loss_of)  # dp


@program('reduction="none").mean()  # dp', 'reduction="mean")', "weight")
def class_weights(private):
    model, weights = ConvNet(), torch.tensor([1.0, 2.0, 0.5, 1.0])

    def loss_of(model, x, y):
        return F.cross_entropy(model(x), y, weight=weights, reduction="none").mean()  # dp

    train(*private(model, sgd(model), loader_of(images(), labels())), loss_of)  # dp


def distillation(out, teacher, y, temperature=2.0):
    soft = F.kl_div(
        F.log_softmax(out / temperature, 1),
        F.softmax(teacher / temperature, 1),
        reduction="batchmean",
    )
    return 0.5 * F.cross_entropy(out, y) + 0.5 * temperature**2 * soft


@program("(model(x), targets,", "(model(x), targets - targets.mean(0),")
def distillation_from_a_frozen_teacher(private):
    teacher, student = ConvNet().eval(), ConvNet()

    def loss_of(model, x, y):
        with torch.no_grad():
            targets = teacher(x)
        return distillation(model(x), targets, y)

    train(*private(student, sgd(student), loader_of(images(), labels())), loss_of)  # dp


@program("(view).softmax(1)", "(view).sub(teacher(view).mean(0)).softmax(1)")
def self_distillation_from_an_ema_teacher(private):
    student = ConvNet()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = sgd(student)
    model, optimizer, loader = private(student, optimizer, loader_of(images()))  # dp
    for (x,) in loader.remaining():
        view = x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            target = teacher(view).softmax(1)
        loss = -(target * model(x).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast.detach(), alpha=0.01)

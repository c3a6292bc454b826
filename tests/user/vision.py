# SPDX-License-Identifier: Apache-2.0
"""Programs on images: classification, generation, detection, teachers, losses of papers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp.torch as dpt
from tests.user import conftest

ROWS = 48
PROGRAMS, program = conftest.programs()


def images(channels=1, size=8):
    return torch.randn(ROWS, channels, size, size)


def labels(classes=4):
    return torch.arange(ROWS) % classes


def loader_of(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=8, shuffle=True, **options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


def mlp(*sizes):
    pairs = list(zip(sizes, sizes[1:], strict=False))
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


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


@program(
    "loss = F.cross_entropy(output, target)",
    "loss = F.cross_entropy(output - output.mean(0), target)",
    "example",
)
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


@program("mu.pow(2)", "mu.mean(0).pow(2)", "example|row")
def vae(private):
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = loader_of(images().sigmoid())
    model, optimizer, loader = private(model, optimizer, loader, loss_reduction="sum")  # dp
    for _epoch in range(5):
        train_loss = 0
        for (data,) in loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + kld
            loss.backward()
            train_loss += loss.item()
            optimizer.step()


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


@program("-torch.mean(critic(real)) +", "-torch.mean(critic(real)).square() +", "row|example")
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


@program(
    "torch.clamp(1.0 - distance, min=0.0)",
    "torch.clamp(distance.max() - distance, min=0.0)",
    "row|example",
)
def siamese(private):
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = loader_of(images(), images(), labels(2).float())
    model, optimizer, loader = private(model, optimizer, loader)  # dp
    for _epoch in range(5):
        for first, second, same in loader:
            optimizer.zero_grad()
            one, two = model(first, second)
            distance = F.pairwise_distance(one, two)
            loss = torch.mean(
                same * distance.pow(2) + (1 - same) * torch.clamp(1.0 - distance, min=0.0).pow(2)
            )
            loss.backward()
            optimizer.step()


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.net = nn.Embedding(100, 8), mlp(64 + 8, 32, 64)

    def forward(self, x, t):
        return self.net(torch.cat([x.flatten(1), self.time(t)], 1)).view_as(x)


@program(
    "F.mse_loss(model(noisy, t), noise)",
    "F.mse_loss(model(noisy, t), noise.roll(1, 0) * noisy)",
    "row|example",
)
def diffusion_randint(private):
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = private(model, optimizer, loader_of(images()))  # dp
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    for _epoch in range(5):
        for (x,) in loader:
            t = torch.randint(0, 100, (x.shape[0],), device=x.device).long()
            noise = torch.randn_like(x)
            a = alpha_bar[t][:, None, None, None]
            noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(65, 32, 64)

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


@program(
    "t = torch.rand(len(x), 1, generator=generator)",
    "t = torch.rand(len(x), 1, generator=generator) * x.std()",
    "row|example",
)
def flow_matching_with_a_generator(private):
    model, generator = Flow(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = private(model, optimizer, loader_of(images().flatten(1)))  # dp
    for step, (x,) in enumerate(loader.remaining()):
        t = torch.rand(len(x), 1, generator=generator)
        start = torch.randn(len(x), 64, generator=generator)
        loss = ((model((1 - t) * start + t * x, t) - (x - start)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print({"step": step, "loss": loss.item()})


@program("F.mse_loss(model(low), high)", "F.mse_loss(model(low), high) / high.std()", "row|example")
def super_resolution(private):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = private(model, optimizer, loader_of(images(size=4), images()))  # dp
    for _epoch in range(5):
        epoch_loss = 0
        for low, high in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(low), high)
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
        psnr = -10 * torch.log10(torch.tensor(epoch_loss / len(loader)))
        print(f"avg. PSNR: {psnr:.4f} dB")


def dice(logits, target):
    probs = logits.softmax(1)[:, 1]
    overlap = (probs * target).sum((1, 2))
    return 1 - (2 * overlap + 1) / (probs.sum((1, 2)) + target.sum((1, 2)) + 1)


@program(
    "dice(logits, mask.double()).mean()",
    "dice(logits.transpose(0, 2), mask.transpose(0, 1).double()).mean()",
    "row|example|reduction",
)
def segmentation(private):
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 2, 1))
    optimizer = sgd(model)
    masks = (images()[:, 0] > 0).long()
    model, optimizer, loader = private(model, optimizer, loader_of(images(), masks))  # dp
    for _epoch in range(5):
        for image, mask in loader:
            logits = model(image)
            loss = F.cross_entropy(logits, mask) + dice(logits, mask.double()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            iou = ((logits.argmax(1) == 1) & (mask == 1)).sum().item() / max(mask.sum().item(), 1)
    print(iou)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten())
        self.classes, self.boxes = nn.Linear(384, 3 * 4), nn.Linear(384, 3 * 4)

    def forward(self, x):
        h = self.body(x)
        return {"logits": self.classes(h).view(-1, 3, 4), "boxes": self.boxes(h).view(-1, 3, 4)}


@program("box.sum((1, 2)) / real.sum(1)", "box.sum((1, 2)) / real.sum()", "row|example|reduction")
def detection_on_padded_boxes(private):
    model, boxes, classes = Detector(), torch.rand(ROWS, 3, 4), torch.randint(4, (ROWS, 3))
    optimizer = sgd(model)
    present = torch.arange(3) < torch.arange(ROWS)[:, None] % 3 + 1
    loader = loader_of(images(), boxes, classes, present)
    model, optimizer, loader = private(model, optimizer, loader)  # dp
    for _epoch in range(5):
        for image, box_targets, class_targets, real in loader:
            out = model(image)
            box = F.smooth_l1_loss(out["boxes"], box_targets, reduction="none") * real[..., None]
            ce = F.cross_entropy(out["logits"].transpose(1, 2), class_targets, reduction="none")
            loss = (box.sum((1, 2)) / real.sum(1) + (ce * real).sum(1) / real.sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program(
    "mixed = lam * x[:, :1] + (1 - lam) * x[:, 1:]",
    "mixed = lam * x[:, :1] + (1 - lam) * x[:, 1:].flip(0)",
    "row|example",
)
def mixup_of_an_examples_views(private):
    model = ConvNet()
    optimizer = sgd(model)
    model, optimizer, loader = private(model, optimizer, loader_of(images(2), labels()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            lam = torch.rand(len(x), 1, 1, 1)
            mixed = lam * x[:, :1] + (1 - lam) * x[:, 1:]
            loss = F.cross_entropy(model(mixed), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program(
    "alpha = torch.tensor([0.25, 0.5, 0.75, 1.0])[y]",
    "alpha = torch.bincount(y, minlength=4)[y] / len(y)",
    "row|example",
)
def focal_loss(private):
    model = ConvNet()
    optimizer = sgd(model)
    model, optimizer, loader = private(model, optimizer, loader_of(images(), labels()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            ce = F.cross_entropy(model(x), y, reduction="none")
            alpha = torch.tensor([0.25, 0.5, 0.75, 1.0])[y]
            loss = (alpha * (1 - torch.exp(-ce)) ** 2 * ce).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program('reduction="none").mean()  # dp', 'reduction="mean")', "weight")
def class_weights(private):
    model, weights = ConvNet(), torch.tensor([1.0, 2.0, 0.5, 1.0])
    optimizer = sgd(model)
    model, optimizer, loader = private(model, optimizer, loader_of(images(), labels()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, weight=weights, reduction="none").mean()  # dp
            loss.backward()
            optimizer.step()


def distillation(out, teacher, y, temperature=2.0):
    soft = F.kl_div(
        F.log_softmax(out / temperature, 1),
        F.softmax(teacher / temperature, 1),
        reduction="batchmean",
    )
    return 0.5 * F.cross_entropy(out, y) + 0.5 * temperature**2 * soft


@program(
    "distillation(model(x), targets, y)",
    "distillation(model(x), targets - targets.mean(0), y)",
    "row|example",
)
def distillation_from_a_frozen_teacher(private):
    teacher, student = ConvNet().eval(), ConvNet()
    optimizer = sgd(student)
    model, optimizer, loader = private(student, optimizer, loader_of(images(), labels()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            with torch.no_grad():
                targets = teacher(x)
            loss = distillation(model(x), targets, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program(
    "target = teacher(view).softmax(1)",
    "target = (teacher(view) - teacher(view).mean(0)).softmax(1)",
    "row|example",
)
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


@program(
    "F.cross_entropy(model(adversarial), y)",
    "F.cross_entropy(model(adversarial), y.flip(0))",
    "row|example",
)
def adversarial_training(private):
    model = ConvNet()
    optimizer = sgd(model)
    model, optimizer, loader = private(model, optimizer, loader_of(images(), labels()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            x.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
            adversarial = (x + 0.03 * slope.sign()).detach()
            loss = F.cross_entropy(model(adversarial), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 by the recipe of De et al. 2022: a wide residual network, large batches, 16 views.

    python examples/cifar10_recipe.py PATH      PATH/cifar-10-batches-bin, the binary version

The network is WRN-16-4 with weight standardisation and GroupNorm in the place of batch norm; each
step draws 4,096 images in expectation and averages the gradients of 16 random views of each before
the clip; what is evaluated is the average of the parameters. With a deeper network, WRN-40-4, the
paper reports 81.4 % at epsilon 8 and delta 1e-5. Views are made by 8 processes; the private steps
want a GPU (2,600 of them, each of 65,536 rows).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dualdp.torch as dpt

TOY = "--toy" in sys.argv
TARGET_EPSILON, TARGET_DELTA, MAX_GRAD_NORM, LEARNING_RATE, DECAY = 8.0, 1e-5, 1.0, 4.0, 0.9999
#                                                      images of a step, at once
WIDTHS, BLOCKS, VIEWS, EPOCHS, BATCH_SIZE, AT_ONCE = (
    ((16, 16, 16, 16), 1, 2, 1, 10, 5) if TOY else ((16, 64, 128, 256), 2, 16, 200, 4096, 128)
)


class StandardisedConv2d(nn.Conv2d):
    """Convolution by its weights less their mean, over their norm, for each output channel."""

    def forward(self, x):
        """(n, i, h, w) -> (n, o, h', w')."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        size = centred.square().sum((1, 2, 3), keepdim=True)
        return self._conv_forward(x, centred * torch.rsqrt(size + 1e-4), self.bias)


def normed(channels):
    """GroupNorm of 16 groups, and ReLU."""
    return nn.Sequential(nn.GroupNorm(16, channels), nn.ReLU())


class Block(nn.Module):
    """Two convolutions, each after a norm, and a shortcut around them."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.first = normed(channels)
        self.body = nn.Sequential(
            *(StandardisedConv2d(channels, width, 3, stride, padding=1), normed(width)),
            StandardisedConv2d(width, width, 3, padding=1),
        )
        self.shortcut = None
        if stride != 1 or channels != width:
            self.shortcut = StandardisedConv2d(channels, width, 1, stride)

    def forward(self, x):
        """(n, i, h, w) -> (n, o, h / stride, w / stride)."""
        y = self.first(x)
        return self.body(y) + (x if self.shortcut is None else self.shortcut(y))


def wide_resnet():
    """Zagoruyko & Komodakis 2016: 6 blocks + 4 layers, 4 times as wide as a ResNet."""
    layers = [StandardisedConv2d(3, WIDTHS[0], 3, padding=1)]
    for i, width in enumerate(WIDTHS[1:]):
        for j in range(BLOCKS):
            before = width if j else WIDTHS[i]
            layers.append(Block(before, width, stride=2 if i and not j else 1))
    head = (normed(WIDTHS[-1]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10))
    return nn.Sequential(*layers, *head)


def view(example, generator):
    """One view: the image, mirrored or not, and moved by at most four pixels."""
    image, label = example
    down, right = torch.randint(9, (2,), generator=generator).tolist()
    is_mirrored = torch.randint(2, (), generator=generator)
    padded = nn.functional.pad(image, (4, 4, 4, 4), mode="reflect")
    moved = padded[:, down : down + 32, right : right + 32]
    return moved.flip(-1) if is_mirrored else moved, label


def read(folder, names):
    """Images (n, 3, 32, 32) in [-1, 1] and labels (n,) of files of CIFAR-10's binary version."""
    missing = [str(folder / name) for name in names if not (folder / name).is_file()]
    if missing:
        sys.exit(f"{missing[0]} is missing. Expected PATH/cifar-10-batches-bin, unpacked.")
    rows = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
    rows = rows.reshape(-1, 1 + 3 * 32 * 32)
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32))
    return images / 127.5 - 1, torch.from_numpy(rows[:, 0].astype(np.int64))


def cifar10():
    """Training and test data of the folder on the command line; noise if it is a toy."""
    if TOY:
        images, labels = torch.rand(24, 3, 32, 32) * 2 - 1, torch.randint(10, (24,))
        return (images[:20], labels[:20]), (images[20:], labels[20:])
    folder = Path(sys.argv[1] if len(sys.argv) == 2 else "PATH") / "cifar-10-batches-bin"
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return read(folder, train), read(folder, ["test_batch.bin"])


def main():
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = cifar10()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = wide_resnet().to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images, labels),
            batch_size=BATCH_SIZE,
            num_workers=0 if TOY else 8,
        ),
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
        max_grad_norm=MAX_GRAD_NORM,
        max_physical_batch_size=AT_ONCE,
        views=VIEWS,
        augment=view,
    )
    for epoch in range(EPOCHS):
        for x, y in loader:  # VIEWS rows of each image; the last physical batch of a step updates
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            if engine.is_between_steps:
                average.update_parameters(model)  # of released weights: costs no privacy
        with torch.no_grad():
            rows = test_images.to(device).split(500)
            found = torch.cat([average(x).argmax(1) for x in rows]).cpu()
        accuracy = (found == test_labels).float().mean()
        epsilon = engine.get_epsilon(delta=TARGET_DELTA)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.1%} at epsilon {epsilon:.2f}", flush=True)


if __name__ == "__main__":
    main()

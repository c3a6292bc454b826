# SPDX-License-Identifier: Apache-2.0
"""The recipe of De et al. 2022 on handwritten digits: several views of each image, and an average.

A network whose layers mix no examples (weight standardisation, GroupNorm), a large batch, random
views of each image whose gradients are averaged before the clip, and for evaluation the average of
the parameters over the steps. None of it costs any epsilon.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import dualdp.torch as dpt

EPOCHS, VIEWS = (1, 2) if "--toy" in sys.argv else (20, 4)
TARGET_EPSILON, TARGET_DELTA = 4.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 256, 1.0, 2.0


class StandardisedConv2d(nn.Conv2d):
    """Convolution by its weights less their mean, over their norm, for each output channel."""

    def forward(self, x):
        """(n, i, h, w) -> (n, o, h, w)."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        size = centred.square().sum((1, 2, 3), keepdim=True)
        return self._conv_forward(x, centred * torch.rsqrt(size + 1e-4), self.bias)


def view(example, generator):
    """One view: the image, mixed with up to one half of itself, moved by at most one pixel."""
    image, label = example
    down, right = torch.randint(3, (2,), generator=generator).tolist()
    moved = nn.functional.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
    return image.lerp(moved, torch.rand((), generator=generator) / 2), label


def main():
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (images.reshape(-1, 1, 8, 8) / 16).float()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]

    torch.manual_seed(0)
    model = nn.Sequential(
        *(StandardisedConv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.AvgPool2d(2), StandardisedConv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32)),
        *(nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)),
    )
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=dpt.with_ema(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images[train], labels[train]), batch_size=BATCH_SIZE
        ),
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
        views=VIEWS,
        augment=view,
    )
    for inputs, targets in loader.remaining():  # VIEWS rows for each image
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for name, trained in (("last parameters", model), ("their average", engine.ema())):
        with torch.no_grad():
            accuracy = (trained(images[test]).argmax(1) == labels[test]).float().mean()
        epsilon = engine.get_epsilon(delta=TARGET_DELTA)
        print(f"{name}: accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()

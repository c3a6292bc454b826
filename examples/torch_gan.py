# SPDX-License-Identifier: Apache-2.0
"""A GAN on handwritten digits: the discriminator is private, so the generator is, too.

Only the discriminator sees the data. It is called twice per step, on real and on generated images,
and an example's whole gradient is clipped once. The generator learns from the discriminator alone.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import dualdp.torch as dpt

EPOCHS = 1 if "--toy" in sys.argv else 25
BATCH_SIZE, LATENT, DELTA = 64, 16, 1e-4


def build_generator():
    return nn.Sequential(
        nn.Linear(LATENT, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
    )


def build_discriminator():
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def distance(netG, images):
    """Distance of the generator's mean image from that of the data, relative to the latter."""
    with torch.no_grad():
        made = netG(torch.randn(500, LATENT))
    return (images.mean(0) - made.mean(0)).norm() / images.mean(0).norm()


def main():
    torch.manual_seed(0)
    images = torch.as_tensor(load_digits().data / 16.0).float()
    netG, netD = build_generator(), build_discriminator()
    before = distance(netG, images)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

    engine = dpt.PrivacyEngine()
    netD, optimizerD, loader = engine.make_private(
        module=netD,
        optimizer=torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images), batch_size=BATCH_SIZE
        ),
        noise_multiplier=1.5,
        max_grad_norm=1.0,
    )
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(EPOCHS):
        for (real,) in loader:
            n = len(real)
            optimizerD.zero_grad()
            errD_real = criterion(netD(real)[:, 0], torch.ones(n))
            errD_real.backward()
            fake = netG(torch.randn(n, LATENT))
            errD_fake = criterion(netD(fake.detach())[:, 0], torch.zeros(n))
            errD_fake.backward()
            optimizerD.step()

            optimizerG.zero_grad()
            with engine.pause():
                errG = criterion(netD(fake)[:, 0], torch.ones(n))
                errG.backward()
            optimizerG.step()

    after = distance(netG, images)
    print(f"mean image of the generator: {before:.0%} from that of the data, now {after:.0%}")
    print(f"epsilon {engine.get_epsilon(delta=DELTA):.2f}, delta {DELTA}")


if __name__ == "__main__":
    main()

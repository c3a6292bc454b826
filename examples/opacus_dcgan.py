# SPDX-License-Identifier: Apache-2.0
"""Opacus' DCGAN example, on handwritten digits: two forwards of the discriminator in each step.

The generator's step goes through the discriminator under `pause()`. The accuracy is that of the
mean of the generated images: 1 less its distance from that of held-out ones, relative to it.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Opacus: from opacus import PrivacyEngine
from dualdp.torch import PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 10
BATCH_SIZE, RATE, BETA, SIGMA, BOUND, DELTA = 70, 1e-3, 0.5, 1.0, 1.0, 1e-4
LATENT, WIDTH = 16, 16
REAL_LABEL, FAKE_LABEL = 1.0, 0.0


def build_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 2 * WIDTH, 2, 1, 0, bias=False),
        nn.GroupNorm(4, 2 * WIDTH),
        nn.ReLU(True),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
        nn.GroupNorm(4, WIDTH),
        nn.ReLU(True),
        nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def build_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
        nn.GroupNorm(4, 2 * WIDTH),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * WIDTH, 1, 2, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def main(seed=0):
    torch.manual_seed(seed)
    images = (torch.as_tensor(load_digits().data) / 8 - 1).float().view(-1, 1, 8, 8)
    dataloader = DataLoader(TensorDataset(images[:1400]), batch_size=BATCH_SIZE, shuffle=True)
    netG, netD = build_generator(), build_discriminator()
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=RATE, betas=(BETA, 0.999))
    privacy_engine = PrivacyEngine(secure_mode=False)
    netD, optimizerD, dataloader = privacy_engine.make_private(
        module=netD,
        optimizer=optimizerD,
        data_loader=dataloader,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
    )
    optimizerG = torch.optim.Adam(netG.parameters(), lr=RATE, betas=(BETA, 0.999))
    for epoch in range(EPOCHS):
        for (real_data,) in dataloader:
            optimizerD.zero_grad(set_to_none=True)
            batch_size = real_data.size(0)
            label_true = torch.full((batch_size,), REAL_LABEL)
            output = netD(real_data)
            errD_real = criterion(output, label_true)

            fake = netG(torch.randn(batch_size, LATENT, 1, 1))
            label_fake = torch.full((batch_size,), FAKE_LABEL)
            output = netD(fake.detach())
            errD_fake = criterion(output, label_fake)
            errD = errD_real + errD_fake
            errD.backward()
            optimizerD.step()
            optimizerD.zero_grad(set_to_none=True)

            optimizerG.zero_grad()
            label_g = torch.full((batch_size,), REAL_LABEL)
            # Opacus: output_g = netD(fake)
            # Opacus: errG = criterion(output_g, label_g)
            # Opacus: errG.backward()
            with privacy_engine.pause():  # dualdp
                output_g = netD(fake)  # dualdp
                errG = criterion(output_g, label_g)  # dualdp
                errG.backward()  # dualdp
            optimizerG.step()
        epsilon = privacy_engine.accountant.get_epsilon(delta=DELTA)
        print(f"epoch {epoch}: D {errD.item():.3f}, G {errG.item():.3f}, epsilon {epsilon:.2f}")

    with torch.no_grad():
        fake = netG(torch.randn(1000, LATENT, 1, 1)).mean(0)
    real = images[1400:].mean(0)
    accuracy = 1 - (real - fake).norm() / (real + 1).norm()
    print(f"accuracy {accuracy:.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Opacus' tutorial of distributed training: two processes, and PyTorch's own wrapper."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import multiprocessing as mp
from torch import nn

# Opacus: from opacus import PrivacyEngine
# Opacus: from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch.nn.parallel import DistributedDataParallel as DPDDP  # dualdp
from torch.utils.data import DataLoader, TensorDataset

from dualdp.torch import PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 10
WORLD_SIZE, BATCH_SIZE, RATE, SIGMA, BOUND, DELTA = 2, 70, 0.5, 1.0, 1.0, 1e-4


def setup(rank, world_size, folder):
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def test(model, data, labels):
    model.eval()
    with torch.no_grad():
        return float((model(data).argmax(1) == labels).float().mean())


def launch(rank, world_size, folder, seed):
    setup(rank, world_size, folder)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (images / 16).float()
    train_loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=BATCH_SIZE)

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DPDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    criterion = nn.CrossEntropyLoss()
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
    )
    for _ in range(EPOCHS):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    accuracy, epsilon = test(model, images[1400:], labels[1400:]), privacy_engine.get_epsilon(DELTA)
    if rank == 0:
        print(f"accuracy {accuracy:.3f}, epsilon {epsilon:.3f}")
    dist.destroy_process_group()


def main(seed=0):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(launch, args=(WORLD_SIZE, folder, seed), nprocs=WORLD_SIZE, join=True)


if __name__ == "__main__":
    main()

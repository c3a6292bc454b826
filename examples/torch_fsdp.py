# SPDX-License-Identifier: Apache-2.0
"""A network in pieces (FSDP2), trained privately by several processes.

    torchrun --nproc-per-node 8 examples/torch_fsdp.py

Each process holds its rows of every parameter, of the optimizer's state and of the noise. Started
without torchrun, the file starts itself with two processes. On GPUs it computes in bfloat16.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import dualdp
import dualdp.torch as dpt

TOY = "--toy" in sys.argv
NUM_STEPS, BATCH_SIZE, PHYSICAL = (10, 128, 32) if TOY else (200, 256, 64)
TARGET_EPSILON, TARGET_DELTA, MAX_GRAD_NORM = 8.0, 1e-4, 1.0
WIDTH, BLOCKS = 64, 2


class Block(nn.Module):
    """Two layers and a shortcut."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)),
            *(nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        )

    def forward(self, x):
        """(n, WIDTH) -> the same."""
        return x + self.body(x)


def train(device, folder):
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (images / 16).float()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    kept, test = order[:1500], order[1500:]
    data = torch.utils.data.TensorDataset(images[kept], labels[kept])

    torch.manual_seed(0)  # the same weights in every process, before they are cut
    blocks = [Block() for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 10)).to(device)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device.type == "cuda" else None)
    for block in blocks:
        fully_shard(block, mp_policy=low)
    fully_shard(model, mp_policy=low)

    plan = dualdp.PrivacyPlan.calibrate(
        num_examples=len(data),
        expected_batch_size=BATCH_SIZE,
        num_steps=NUM_STEPS,
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        delta=TARGET_DELTA,
        physical_batch_size=PHYSICAL,  # of each process
    )
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=4e-3),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE),
        plan=plan,
    )
    for inputs, targets in loader.remaining():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()

    with torch.no_grad():
        found = model(images[test].to(device)).argmax(1).cpu()
    dpt.save_sharded_checkpoint(folder / "run", model=model, optimizer=optimizer, engine=engine)
    if dist.get_rank() == 0:  # for whoever has one process, or JAX
        dpt.consolidate_checkpoint(folder / "run", folder / "one_file")
        held = sum(p.to_local().numel() for p in model.parameters())
        total = sum(p.numel() for p in model.parameters())
        print(f"{dist.get_world_size()} processes; this one holds {held:,} of {total:,} numbers")
        accuracy = (found == labels[test]).float().mean()
        print(f"accuracy {accuracy:.1%} at epsilon {engine.get_epsilon():.2f}, {TARGET_DELTA=}")


def main():
    if not dist.is_torchelastic_launched():
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run([*torchrun, "--nproc-per-node=2", *sys.argv], check=False)  # noqa: S603
        raise SystemExit(done.returncode)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    train(device, Path(folders[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

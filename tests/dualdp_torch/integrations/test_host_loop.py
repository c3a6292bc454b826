# SPDX-License-Identifier: Apache-2.0
"""Lightning and the Trainer in several processes, which their own launchers start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import hosts
from tests.dualdp_torch.loop import start

ROOT = Path(__file__).parents[3]
#: What starts two processes of a program; Lightning's own script starts the second one itself.
LAUNCHERS = {
    "lightning": [sys.executable, "-W", "ignore"],
    "trainer": [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"],
}


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def assert_ends_alike(host, folder):
    """Two processes end where one ends, with its epsilon and its sizes."""
    command = [*LAUNCHERS[host], *(["--nproc-per-node", "2"] if host == "trainer" else [])]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.hosts", host, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for k, (expected, epsilon, releases, sizes) in enumerate(hosts.runs(host, str(folder), 1)):
        assert releases == 12 + 4 * k  # of which the resumed run took four again
        for found, spent, count, theirs in (rank[k] for rank in ranks):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
            assert (spent, count) == (epsilon, releases)
            assert theirs == (*sizes[:2], sizes[2] // 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_processes_of_lightning_end_where_one_ends(tmp_path):
    pytest.importorskip("lightning")
    assert_ends_alike("lightning", tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_processes_of_trainer_end_where_one_ends(tmp_path):
    pytest.importorskip("transformers")
    assert_ends_alike("trainer", tmp_path)


def parts():
    return start(noise_multiplier=1.0, max_grad_norm=1.0, checks=1.0)[1:]


def test_what_a_loop_sends_for_its_log_is_sent_once():
    """A check that sent it again would meet other processes elsewhere."""
    sent = []

    def send(tensor):
        if torch.overrides.has_torch_function((tensor,)):
            return torch.overrides.handle_torch_function(send, (tensor,), tensor)
        return sent.append(float(tensor))

    send.__module__ = dist.all_reduce.__module__
    model, optimizer, loader = parts()
    for x, y, _ in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        mean = loss.detach().clone()
        send(mean)
        mean.copy_(mean / 2)  # as Lightning logs
        loss.backward()
        optimizer.step()
    assert len(sent) == len(loader) == 5


def test_losses_over_several_processes_are_refused(alone):
    model, optimizer, loader = parts()
    x, y, _ = next(iter(loader))
    out = model(x)
    total = nn.functional.cross_entropy(out.detach(), y).clone()
    dist.all_reduce(total)
    (nn.functional.cross_entropy(out, y) / total).backward()
    with pytest.raises(ValueError, match="first in all_reduce"):
        optimizer.step()

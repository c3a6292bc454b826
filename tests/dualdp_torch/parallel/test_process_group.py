# SPDX-License-Identifier: Apache-2.0
"""Several processes end where one ends: same parameters, same noise, same epsilon."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dualdp_torch.training import step as private_step
from tests.distributed import group_checks, models, runs
from tests.distributed.spawn import together
from tests.dualdp_torch.loop import first_batch, plan, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ranks"),  # which share what the ranks found
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # of JAX, for every fork
]
CHECKS = "group_checks"


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in runs.SOME for name in runs.named("ddp", size)]
)
def test_ranks_end_where_one_ends(size, name, assert_ends_alike):
    """known_failures 14: every clipping, schedule and unit, with DDP and without, empty shares."""
    assert_ends_alike("ddp", size, name)


def assert_passed(name, passed):
    assert [rank.get(name, "not reached") for rank in passed] == ["passed", "passed"]


@pytest.mark.parametrize("name", group_checks.DIFFERENT)
def test_what_differs_between_ranks_is_named(name, passed):
    """Found on all ranks before the first step."""
    assert_passed(name, passed)


def test_ranks_at_different_places_are_told(passed):
    assert_passed("processes_at_different_places_stop", passed)


@pytest.mark.parametrize(
    "name", [n for n in group_checks.CHECKS if n not in group_checks.DIFFERENT]
)
def test_both_ranks_agree_that(name, passed):
    """known_failures 20: what one rank finds stops both, and what they share is the same."""
    assert_passed(name, passed)


def test_loops_have_the_same_length_on_all_ranks(tmp_path):
    """BatchMemoryManager, from a DistributedSampler whose batch size is that of one rank."""
    expected, _ = group_checks.managed()
    ranks = together(group_checks.managed, 2, tmp_path)
    assert len({count for _, count in ranks}) == 1
    for found, _ in ranks:
        assert models.distance(found, expected) <= 1e-10


def test_a_group_that_comes_after_the_set_up_is_refused(monkeypatch):
    """Each process would train and account a model of its own on the same data."""
    engine, model, optimizer, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    monkeypatch.setattr(private_step, "Group", lambda: SimpleNamespace(size=2))
    with pytest.raises(RuntimeError, match="initialised after make_private.*Call init_process_gr"):
        optimizer.step()
    assert len(engine.ledger) == 0


def test_the_documented_script_runs_under_torchrun(tmp_path):
    """And prints what it prints alone, which `tests/docs/test_docs.py` sees to."""
    page = (Path(__file__).parents[3] / "docs/distributed.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(re.search(r"^```python\n(.*?)^```", page, re.M | re.S).group(1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, script], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == re.search(r"# (epsilon = .*)\n", page).group(1) + "\n"

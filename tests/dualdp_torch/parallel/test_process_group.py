# SPDX-License-Identifier: Apache-2.0
"""Several processes end where one ends: same parameters, same noise, same epsilon."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dualdp_torch.training import step as private_step
from tests.distributed import parallel, planted, refusals
from tests.distributed.spawn import together
from tests.dualdp_torch.loop import plan, start

# JAX, which other tests bring into this process, warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def distance(found, expected):
    """Largest difference relative to the largest number of each parameter."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - p).abs().max() / p.abs().max()) for name, p in expected.items())


def releases(text):
    """Releases of a ledger's text, in order."""
    records = map(json.loads, text.splitlines())
    return [record["r"] for record in records if "r" in record]


def assert_ends_alike(name, ranks):
    """All ranks ended where one process ends, and have its epsilon and its record."""
    parameters, epsilon, ledger = parallel.whole(name)
    limit = TOLERANCE[next(iter(parameters.values())).dtype]
    for rank in ranks:
        ended, spent, text = rank[name]
        assert distance(ended, parameters) <= limit
        assert spent == epsilon
        # Headers have an id of their own, on which the hashes depend.
        assert releases(text) == releases(ranks[0][name][2]) == releases(ledger)


@pytest.mark.slow
def test_two_ranks_end_where_one_ends(tmp_path):
    """known_failures 14, in short: with DDP and without, physical batches, empty shares."""
    names = ["mlp", "mlp small batches", "mlp empty shares"]
    ranks = together(parallel.runs, 2, tmp_path, *names)
    for name in names:
        assert_ends_alike(name, ranks)


@pytest.mark.slow
def test_faults_of_a_group_are_stopped_on_all_ranks(tmp_path):
    """In the reduction, and on one rank: caught after they began, and missed without checks."""
    ranks = together(planted.everything, 2, tmp_path)
    for name in planted.FAULTS:
        for checked, unchecked in (rank[name] for rank in ranks):
            stopped, said, failed, _ = checked
            assert stopped is not None, name
            assert planted.BEGINS <= stopped < planted.STEPS
            assert "A spot check failed" in said
            assert failed["step"] == stopped
            assert failed["last_passed"] is None or failed["last_passed"] < stopped
            assert unchecked == (None, None, None, planted.STEPS)
        assert ranks[0][name][0][:3] == ranks[1][name][0][:3]


def test_a_group_that_comes_after_the_set_up_is_refused(monkeypatch):
    """Each process would train and account a model of its own on the same data."""
    engine, model, optimizer, loader = start(plan=plan())
    x, y, _ = next(iter(loader))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    monkeypatch.setattr(private_step, "Group", lambda: SimpleNamespace(size=2))
    with pytest.raises(RuntimeError, match="initialised after make_private.*Call init_process_gr"):
        optimizer.step()
    assert len(engine.ledger) == 0


#: Number of ranks -> what they run: everything by two, some by one and by four.
SOME = {
    1: ["mlp small batches", "cnn", "gpt"],
    2: list(parallel.RUNS),
    4: ["mlp small batches", "mlp empty shares", "mlp adaptive", "cnn", "gpt"],
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SOME)
def test_ranks_end_where_one_ends(size, tmp_path):
    """Every model, clipping, method, schedule and kind of physical batch."""
    ranks = together(parallel.runs, size, tmp_path, *SOME[size], timeout=170)
    for name in SOME[size]:
        assert_ends_alike(name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_steps_of_one_with_kinks(size, tmp_path):
    """A ReLU model, each step from the parameters that one process had before it."""
    alone = parallel.relu_steps()
    torch.save(alone, tmp_path / "alone.pt")
    for steps in together(parallel.relu_steps, size, tmp_path, tmp_path / "alone.pt"):
        for found, expected in zip(steps, alone, strict=True):
            assert distance(found, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_loops_have_the_same_length_on_all_ranks(size, tmp_path):
    """BatchMemoryManager, from a DistributedSampler whose batch size is that of one rank."""
    expected, _ = parallel.managed()
    ranks = together(parallel.managed, size, tmp_path)
    assert len({count for _, count in ranks}) == 1
    for found, _ in ranks:
        assert distance(found, expected) <= 1e-10


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What two ranks say to everything they can disagree on."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "taken.ledger").write_text("something")
    return together(refusals.everything, 2, folder)


DISAGREE = {
    "noise_multiplier": r"plan\['noise_multiplier'\] is 0.4 on rank 0 and 0.5 on rank 1",
    "seed": r"plan\['seed'\] is 5 on rank 0 and 6 on rank 1",
    "num_examples": r"plan\['num_examples'\] is 40 on rank 0 and 39 on rank 1",
    "loss_reduction": r"settings\['loss_reduction'\] is 'mean' on rank 0 and 'sum' on rank 1",
    "mode": r"settings\['grad_sample_mode'\] is 'auto' on rank 0 and 'materialize' on rank 1",
    "architecture": r"model\['0.bias'\]\[0\]\[0\] is 17 on rank 0 and 3 on rank 1",
    "dtype": r"model\['0.bias'\]\[1\] is 'torch.float32' on rank 0 and 'torch.float64' on rank 1",
    "weights": r"start of parameters\['0.bias'\] is one on rank 0 and another .* the same seed",
    "learning rate": r"optimizer\['groups'\]\[0\]\['lr'\] is '0.2' on rank 0 and '0.3' on rank 1",
    "optimizer": r"optimizer\['class'\] is 'SGD' on rank 0 and 'Adam' on rank 1",
    "shorter data": r"settings\['steps in a pass'\] is 4 on rank 0 and 3 on rank 1",
    "data": r"data\['examples'\] is one on rank 0 and another on rank 1",
    "other data": r"data\['rows'\]\[0\] is one on rank 0 and another on rank 1.* Row i must be",
    "other split": r"data\['rows'\]\[\d+\] is one on rank 0 and another on rank 1.* Row i must be",
    "users": r"users is one on rank 0 and another on rank 1.* Give all of them the same users=",
    "learning rate later": r"parameters before step 1\['0.bias'\] is one .* Give all the same",
    "sums": r"the sum over the processes differs from what each .* \(parameter '0.bias'\)",
    "a failed check": r"ExactnessError: A spot check failed: planted. 1 on record.",
    "hook": r"DistributedDataParallel came with a communication hook",
    "steps out of place": r"Rank 0 is at save_checkpoint after 1 steps and rank 1 at step 1\.",
    "budget": r"AccountingError: step=\d+ would exceed target_epsilon=8.0",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DISAGREE)
def test_what_differs_between_ranks_is_named(case, answers):
    """Found on all ranks, before the first step or at the next one, and named."""
    for answer in answers:
        assert re.search(DISAGREE[case], answer["refusals"][case])


FAILS = {
    "ledger": (0, r"^FileExistsError: .*taken.ledger exists"),
    "a failed loop": (1, r"^ZeroDivisionError: division by zero"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILS)
def test_what_fails_on_one_rank_stops_all(case, answers):
    failing, text = FAILS[case]
    own, other = (answers[rank]["refusals"][case] for rank in (failing, 1 - failing))
    assert re.search(text, own)
    assert re.search(rf"^RuntimeError: Rank {failing} stopped at .*{text[1:]}", other)


@pytest.mark.slow
def test_ranks_at_different_places_are_told(answers):
    for answer in answers:
        said = answer["refusals"]["steps out of place"]
        assert "rank 1 at step 1. Expected every process to do the same" in said


@pytest.mark.slow
def test_a_sampler_of_other_processes_is_refused(answers):
    assert re.search(
        "DistributedSampler of rank 1 of 3 in process 1 of 2. Expected that of the process group",
        answers[1]["refusals"]["sampler"],
    )


@pytest.mark.slow
def test_ranks_without_a_seed_share_batches_and_noise(answers):
    """Rank 0 draws, and its word has the bits: shares of one batch, one noise on both."""
    (rows, releases), (others, same) = (answer["refusals"]["drawn"] for answer in answers)
    for one, other in zip(rows, others, strict=True):
        assert not set(one) & set(other)
    assert torch.equal(releases, same)
    noise = releases.diff(dim=0).flatten()
    assert noise.abs().min() > 0


@pytest.mark.slow
def test_the_wrapper_is_as_it_was_after_detach(answers):
    for rank, answer in enumerate(answers):
        found = answer["wrapper"]
        assert found["flags"]
        assert found["unused"] is True
        assert found["names"][0] == "0.weight"  # as in the model, without "module."
        assert found["buffers"] == [rank, rank]
        assert found["gap"] < 1e-15

# SPDX-License-Identifier: Apache-2.0
"""What several ranks release is what one device releases; what would go wrong is noticed."""

import contextlib

import pytest
import torch

from tests.distributed import mutants
from tests.distributed.spawn import together

# JAX, which other tests bring into this process, warns of every fork.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("noise of ranks"),  # which share what the ranks released
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]

#: Mutant -> what must notice it.
NOTICED = {
    "a rank adds no noise": "ranks",
    "each rank adds its own noise": "variance",
    "the same noise is added by each rank": "variance",
    "noise x 0.97": "variance",
    "noise x 1.05": "variance",
    "the same share on all ranks": "release",
    "the whole batch on all ranks": "release",
    "one rank counts": "release",
    "empty shares are skipped": "error",
}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """What each rank released under each mutant."""
    return together(mutants.everything, request.param, tmp_path_factory.mktemp("mutants"))


def faults(name, ranks):
    """What is wrong with the releases of all ranks, against those of one device."""
    found = [rank[name] for rank in ranks]
    if any(isinstance(steps, str) for steps in found):
        return {"error"}
    changes, wrong = mutants.MUTANTS[name][1], set()
    with mutants.known_bits() if name == "none, secure" else contextlib.nullcontext():
        alone = mutants.releases(**changes)
    size = changes.get("expected_batch_size", 10)
    noise = []
    for step, (release, total) in enumerate(alone):
        theirs = [steps[step][0] for steps in found]
        if any(not torch.equal(theirs[0], other) for other in theirs):
            wrong.add("ranks")
        if max(float((other - release).abs().max()) for other in theirs) > 1e-12:
            wrong.add("release")
        if total is not None:
            noise.append(theirs[0] * size - total)
    if noise and "max_grad_norm" not in changes:
        variance = float(torch.cat(noise).square().mean())
        declared = (0.4 * 0.5) ** 2
        # 38,418 normals: the standard error of the variance is 0.7 %.
        if abs(variance / declared - 1) > 0.035:
            wrong.add("variance")
    return wrong


@pytest.mark.parametrize("name", [name for name in mutants.MUTANTS if name not in NOTICED])
def test_noise_of_ranks_is_that_of_one_device(name, ranks):
    """Once in the sum, with the declared variance, the same numbers for any number of ranks."""
    assert faults(name, ranks) == set()


@pytest.mark.parametrize("name", NOTICED)
def test_ranks_that_work_together_wrongly_are_noticed(name, ranks):
    """known_failures 14 and 20, planted."""
    assert NOTICED[name] in faults(name, ranks)


def test_the_ledger_is_written_before_any_rank_draws_noise(ranks):
    for rank in ranks:
        assert rank["recorded before noise"] == [True] * mutants.STEPS


def test_sums_that_are_one_tensor_are_reduced_once(ranks):
    """As autograd gives them for a + b, where both are parameters."""
    for rank in ranks:
        before, *totals = rank["one tensor twice"]
        assert before.tolist() == [1, 1, 1]
        assert all(total.tolist() == 3 * [len(ranks)] for total in totals)

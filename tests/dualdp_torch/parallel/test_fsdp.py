# SPDX-License-Identifier: Apache-2.0
"""FSDP2 models: the same runs on several processes as on one device, and what they refuse."""

import pytest

from tests.distributed import runs, sharded_checks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sharded ranks"),  # which share what the ranks found
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # of JAX, for every fork
]
CHECKS = "sharded_checks"


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in runs.SOME for name in runs.named("fsdp", size)]
)
def test_sharded_runs_end_where_one_device_ends(size, name, assert_ends_alike):
    assert_ends_alike("fsdp", size, name)


@pytest.mark.parametrize("name", sharded_checks.CHECKS)
def test_both_ranks_of_a_sharded_run_agree_that(name, passed):
    assert [rank.get(name, "not reached") for rank in passed] == ["passed", "passed"]

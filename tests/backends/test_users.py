# SPDX-License-Identifier: Apache-2.0
"""A run on users is one run: on either stack, and on both after a change in the middle."""

import jax
import numpy as np
import pytest

from tests.backends.runs import FACES, START, Run, X, Y, make_plan

USERS = 25
RNG = np.random.default_rng(3)
OWNERS = RNG.permutation([*range(USERS), *range(15), *([4] * 8), *([7] * 12)])
PLAN = make_plan(
    num_examples=USERS, unit="user", rows_per_unit=3, expected_batch_size=8, num_steps=6, delta=1e-3
)
DATA = {"x": X.astype(float), "y": Y.astype(float), "start": START.astype(float)}


def test_both_stacks_end_alike():
    with jax.enable_x64(True):
        ours, theirs = (Run(stack, plan=PLAN, users=OWNERS, **DATA) for stack in FACES)
        paths = [*ours.train()], [*theirs.train()]
    assert ours.engine.get_epsilon() == theirs.engine.get_epsilon() == PLAN.epsilon()
    np.testing.assert_allclose(*paths, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_that_changes_stacks_keeps_its_users(first, second, tmp_path):
    with jax.enable_x64(True):
        expected = [*Run(first, plan=PLAN, users=OWNERS, **DATA).train()]
        run = Run(first, plan=PLAN, users=OWNERS, **DATA)
        for _ in zip(range(3), run.train(), strict=False):
            pass
        run.save(tmp_path / "run")
        with pytest.raises(ValueError, match="users is missing"):
            Run(second, load=tmp_path / "run", **DATA)
        again = Run(second, load=tmp_path / "run", users=OWNERS, **DATA)
        path = [*again.train()]
    assert again.engine.get_epsilon() == PLAN.epsilon()
    np.testing.assert_allclose(path, expected[3:], rtol=1e-9, atol=1e-9)

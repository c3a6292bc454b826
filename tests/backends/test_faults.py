# SPDX-License-Identifier: Apache-2.0
"""When something breaks: nothing is released that is not accounted, and nothing is lost."""

import errno
import os

import numpy as np
import pytest

from dualdp import UnsupportedLayerError
from dualdp.ledger import chain
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.verify import verify
from dualdp.randomness import fold_in, key_of, normal, seeded_bits
from tests.backends.runs import RATE, START, Run, X, Y, make_plan, stacks


def releases(path):
    """Number of releases on record."""
    return sum("r" in record for record in Ledger.read(path))


@stacks
@pytest.mark.parametrize("done", [0, 1])
def test_a_full_disk_releases_nothing(stack, done, tmp_path, monkeypatch):
    """Where the release can't be recorded no noise is drawn, also of the first, with its file."""
    path, right = tmp_path / "run.ledger", os.pwrite
    plan = make_plan(accountant="pld")
    run = Run(stack, plan=plan, ledger=path)
    path_of_weights = run.train()
    for _ in range(done):
        next(path_of_weights)
    before, spent = run.weights, run.engine.get_epsilon(1e-5)

    def half(file, data, offset):
        right(file, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(chain.os, "pwrite", half)
        with pytest.raises(OSError, match="No space left on device"):
            next(path_of_weights)
    np.testing.assert_array_equal(run.weights, before)
    assert len(run.engine.ledger.entries) == done
    assert run.engine.get_epsilon(1e-5) == spent
    run.engine.detach()  # the error's traceback holds the run
    if done:
        assert releases(path) == 1
        assert verify(path).epsilon == pytest.approx(spent)
    else:
        next(Run(stack, plan=plan, ledger=path).train())
        assert releases(path) == 1


@stacks
@pytest.mark.parametrize(("where", "value"), [("x", np.nan), ("y", -np.inf), ("x", 3e38)])
def test_broken_data_neither_spread_nor_escape_the_account(stack, value, where):
    """One broken example in four: the others train, every release is finite and accounted."""
    data = {"x": X.copy(), "y": Y.copy()}
    data[where][::4] = value
    run = Run(stack, plan=make_plan(), **data)
    path = [*run.train()]
    assert np.isfinite(path).all()
    assert len(run.engine.accountant) == len(run.engine.ledger.entries) == len(path) == 8


@stacks
def test_broken_weights_release_noise_only_and_are_accounted(stack):
    """No example has a finite gradient; the step is noise, and costs what every step costs."""
    run = Run(stack, plan=make_plan())
    path = run.train()
    next(path)
    run.weights = before = np.array([np.nan, 1, 1, 1, 1], np.float32)
    next(path)
    assert len(run.engine.accountant) == 2
    plan = run.engine.plan
    noise = normal(fold_in(key_of(seeded_bits(plan.seed, "noise", 1)), 0), 5)
    noise = noise * plan.noise_stddev(1) / plan.expected_batch_size_at(1)
    np.testing.assert_allclose(run.weights[1:], (before - RATE * noise)[1:], rtol=1e-5)


@stacks
def test_a_model_that_starts_broken_releases_nothing_unaccounted(stack):
    run = Run(stack, plan=make_plan(), start=START * np.float32(np.nan))
    before = run.weights
    try:
        next(run.train())
    except UnsupportedLayerError:
        np.testing.assert_array_equal(run.weights, before)
    else:
        assert len(run.engine.accountant) == 1

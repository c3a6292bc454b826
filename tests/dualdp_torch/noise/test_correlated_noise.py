# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: C^-1 z of independent normals z, of a segment's steps in order."""

import copy
import pickle

import numpy as np
import pytest
import torch

import dualdp_torch as dpt
from dualdp.plan.correlated import strategies
from dualdp_torch.noise import noise
from dualdp_torch.noise.noise import NoiseSource
from tests.closeness import lower_toeplitz
from tests.dualdp_torch.forks import in_both

from .releases import flat, released
from .releases import plan as independent

STRATEGIES = {
    "window": strategies.window([1.0, -0.5, 0.25, -0.125]),
    "band": strategies.band([2.0, 0.8, 0.3]),
    "blt": strategies.blt(decays=[0.9, 0.3], scales=[0.2, 0.4]),
    "square_root": strategies.square_root(),
}
each = pytest.mark.parametrize("name", STRATEGIES)
STEPS = 8
SUMS = {"a": torch.zeros(30, 7), "b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros(4)}


def plan(name="window", **changes):
    """A plan that counts every pass by itself, which any strategy may have."""
    sizes = {"num_steps": STEPS, "num_examples": 50 * STEPS, "accountant": "pld"}
    sizes["sampler"] = "fixed_order"
    return independent(**{"correlation": STRATEGIES.get(name), **sizes, **changes})


def in_order(run, sums=SUMS, steps=range(STEPS), source=None, **more):
    """(steps, numbers) noise of some steps in order, of one source."""
    source = source or NoiseSource(run)
    return np.stack([flat(released(sums, run, step, source, **more)) for step in steps])


def expected(name, start=0, **changes):
    """(steps, numbers) C^-1 z in float64 of a segment, of the z that independent noise has."""
    free = plan(None, **changes)
    normals = in_order(free) / free.draw_stddev(0, 0.7)
    inverse = lower_toeplitz(STRATEGIES[name].inverse(STEPS - start))
    return plan(name, **changes).draw_stddev(0, 0.7) * inverse @ normals[start:]


def close(found, wanted):
    return np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "fast") for name in STRATEGIES), ("blt", "portable")]
)
def test_noise_is_the_inverse_of_the_strategy_times_normals(name, mode):
    assert close(in_order(plan(name, noise=mode)), expected(name, noise=mode))


@each
def test_a_segment_begins_the_strategy_anew(name):
    """After a resume at step 3 the noise of steps 3, 4, ... holds that of no step before."""
    run, source = plan(name), NoiseSource(plan(name))
    in_order(run, steps=range(5), source=source)
    again = in_order(run, steps=range(3, STEPS), source=source, segment=1, start=3)
    assert close(again, expected(name, start=3))


@pytest.mark.parametrize("steps", [range(STEPS), (0, 1, 3, 4, 7)], ids=["all", "some failed"])
@each
def test_the_covariance_over_the_steps_is_that_of_the_strategy(name, steps):
    """Of fresh bits, within 5 standard errors, also where releases on record failed.

    Normals that were never used then stand in the noise of the next steps, of fresh bits too.
    """
    run, size, steps = plan(name, seed=None), 100_000, list(steps)
    found = in_order(run, {"w": torch.zeros(size)}, steps)
    root = run.draw_stddev(0, 0.7) * lower_toeplitz(STRATEGIES[name].inverse(STEPS))[steps]
    wanted = root @ root.T
    errors = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / size)
    assert (np.abs(found @ found.T / size - wanted) < 5 * errors).all()
    other = in_order(run, {"w": torch.zeros(size)}, steps)
    apart = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)) / size)
    assert (np.abs(found @ other.T / size) < 6 * apart).all()
    for step, variance in zip(steps, np.diag(wanted), strict=True):
        assert run.noise_stddev(step) == pytest.approx(np.sqrt(variance))


def test_one_weight_is_independent_noise_bit_for_bit():
    whole = in_order(plan(None))
    for strategy in (strategies.identity(), strategies.window([1.0])):
        np.testing.assert_array_equal(in_order(plan(correlation=strategy)), whole)


@each
def test_any_order_of_the_steps_of_a_seed_gives_the_same_noise(name):
    """In inference mode and out of it, and whatever is written into what was released."""
    run, wanted = plan(name), in_order(plan(name))
    for step in (3, 0, 1, 1, 5, 4, 7, 6, 7):
        np.testing.assert_array_equal(flat(dpt.noisy_mean(SUMS, run, step)), wanted[step])
    source = NoiseSource(run)
    for step in (0, 1, 3, 4, 5, 7):
        with torch.inference_mode(step % 3 == 0):
            mean = released(SUMS, run, step, source)
            np.testing.assert_array_equal(flat(mean), wanted[step])
            for value in mean.values():
                value.zero_()


@pytest.mark.parametrize(
    "other",
    [
        {**SUMS, "c": torch.zeros(5)},
        {"a": SUMS["a"]},
        {name: total.half() for name, total in SUMS.items()},
    ],
)
def test_other_sums_between_the_steps_are_refused(other):
    run = plan("band", seed=None)
    source = NoiseSource(run)
    released(SUMS, run, 0, source)
    with pytest.raises(ValueError, match="The sums have other names, shapes, dtypes or devices"):
        released(other, run, 1, source)
    released(SUMS, run, 1, source)


@each
def test_an_interrupted_step_leaves_no_half_of_the_rows(name, monkeypatch):
    wanted, run = in_order(plan(name)), plan(name)
    source, draw, calls = NoiseSource(run), noise.normals_between, []
    in_order(run, steps=range(3), source=source)

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == 2:  # the first group has advanced
            raise KeyboardInterrupt
        return draw(*args, **options)

    monkeypatch.setattr(noise, "normals_between", failing)
    with pytest.raises(KeyboardInterrupt):
        released(SUMS, run, 3, source)
    np.testing.assert_array_equal(in_order(run, steps=(4, 5), source=source), wanted[4:6])


@each
def test_normals_are_in_no_pickle_and_no_repr(name):
    run = plan(name)
    source = NoiseSource(run)
    released(SUMS, run, 4, source)
    secret = source.held.kept[0][0]
    assert secret.abs().min() > 0
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="A noise source can't be copied"):
            take(source)
    assert "tensor" not in repr(source)
    assert secret[:4].numpy().tobytes() not in pickle.dumps(run)


@pytest.mark.parametrize("name", ["window", "blt"])
def test_a_fork_keeps_no_normals_of_its_parent(name):
    run = plan(name, seed=None)
    source, sums = NoiseSource(run), {"w": torch.zeros(1000)}
    first = flat(released(sums, run, 0, source))
    theirs, mine = in_both(  # the ledger of the child begins a segment
        lambda: flat(released(sums, run, 1, source, segment=1, start=1)),
        lambda: flat(released(sums, run, 1, source)),
    )
    assert abs(np.corrcoef(first, mine)[0, 1]) > 0.15
    for other in (first, mine):
        assert abs(np.corrcoef(other, theirs)[0, 1]) < 0.15


def test_another_bound_than_the_plans_is_refused():
    run = plan("band")
    assert flat(dpt.noisy_mean(SUMS, run, 1, max_grad_norm=0.7)).any()
    with pytest.raises(ValueError, match=r"max_grad_norm=0.8 with correlated noise, which holds"):
        dpt.noisy_mean(SUMS, run, 1, max_grad_norm=0.8)

# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: C^-1 z of independent normals z, of a segment's steps in order."""

import pickle

import numpy as np
import pytest
import torch

import dualdp_torch as dpt
from dualdp.plan.correlated import filters, strategies
from dualdp_torch.noise import noise
from dualdp_torch.noise.noise import NoiseSource, Piece
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
modes = pytest.mark.parametrize("mode", ["fast", "portable"])
STEPS = 8
SUMS = {"a": torch.zeros(30, 7), "b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros(4)}


def plan(name="window", **changes):
    """A plan that counts every pass by itself, which any strategy may have."""
    sizes = {"num_steps": STEPS, "num_examples": 50 * STEPS, "accountant": "pld"}
    sizes["sampler"] = "fixed_order"
    return independent(**{"correlation": STRATEGIES.get(name), **sizes, **changes})


def in_order(run, sums=SUMS, steps=range(STEPS), **more):
    """(steps, numbers) noise of some steps in order, of one source."""
    source = NoiseSource(run)
    return np.stack([flat(released(sums, run, step, source, **more)) for step in steps])


def normals(sums=SUMS, **changes):
    """(steps, numbers) independent normals with standard deviation 1, of a plan with a seed."""
    free = plan(None, **changes)
    return in_order(free, sums) / free.draw_stddev(0, 0.7)


def expected(name, sums=SUMS, start=0, **changes):
    """(steps, numbers) C^-1 z in float64 of a segment, of the z that independent noise has."""
    inverse = filters.matrix(STRATEGIES[name].inverse(STEPS - start))
    return plan(name, **changes).draw_stddev(0, 0.7) * inverse @ normals(sums, **changes)[start:]


def close(found, wanted):
    return np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


@each
@modes
def test_noise_is_the_inverse_of_the_strategy_times_independent_normals(name, mode):
    assert close(in_order(plan(name, noise=mode)), expected(name, noise=mode))


@each
def test_a_segment_begins_the_strategy_anew(name):
    """After a resume at step 3 the noise of steps 3, 4, ... holds that of no step before."""
    run, source = plan(name), NoiseSource(plan(name))
    for step in range(5):
        released(SUMS, run, step, source)
    again = [
        flat(released(SUMS, run, step, source, segment=1, start=3)) for step in range(3, STEPS)
    ]
    assert close(np.stack(again), expected(name, start=3))


def covariance_is_right(name, seed=3):
    """True if each entry over the steps is within 5 standard errors, of 10^5 numbers."""
    run, size = plan(name, seed=seed), 100_000
    found = in_order(run, {"w": torch.zeros(size)})
    root = run.draw_stddev(0, 0.7) * filters.matrix(STRATEGIES[name].inverse(STEPS))
    wanted = root @ root.T
    errors = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / size)
    return bool((np.abs(found @ found.T / size - wanted) < 5 * errors).all())


@each
@pytest.mark.parametrize("seed", [3, None])
def test_the_covariance_over_the_steps_is_that_of_the_strategy(name, seed):
    assert covariance_is_right(name, seed)
    run = plan(name)
    for step in range(STEPS):
        root = STRATEGIES[name].inverse(STEPS)[: step + 1]
        stddev = run.draw_stddev(step, 0.7) * np.linalg.norm(root)
        assert run.noise_stddev(step) == pytest.approx(stddev)


@modes
def test_one_weight_is_independent_noise_bit_for_bit(mode):
    whole = in_order(plan(None, noise=mode))
    for strategy in (strategies.identity(), strategies.window([1.0])):
        one = plan(None, noise=mode, correlation=strategy)
        np.testing.assert_array_equal(in_order(one), whole)


@each
@modes
def test_any_order_of_the_steps_of_a_seed_gives_the_same_noise(name, mode):
    wanted = in_order(plan(name, noise=mode))
    run = plan(name, noise=mode)
    for step in (3, 0, 1, 1, 5, 4, 7, 6, 7):
        np.testing.assert_array_equal(flat(dpt.noisy_mean(SUMS, run, step)), wanted[step])


@each
def test_a_release_that_failed_on_record_leaves_the_others_right(name):
    """Its normals were never used: those of fresh bits stand in the noise of the next steps."""
    run, size = plan(name, seed=None), 100_000
    steps = (0, 1, 3, 4, 7)
    found = in_order(run, {"w": torch.zeros(size)}, steps)
    root = run.draw_stddev(0, 0.7) * filters.matrix(STRATEGIES[name].inverse(STEPS))[list(steps)]
    wanted = root @ root.T
    errors = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / size)
    assert (np.abs(found @ found.T / size - wanted) < 5 * errors).all()
    seeded = in_order(plan(name), steps=steps)
    np.testing.assert_array_equal(seeded, in_order(plan(name))[list(steps)])


@each
@modes
def test_correlated_noise_of_pieces_is_that_of_the_whole(name, mode):
    """Each process keeps the rows of its own pieces, and draws no others."""
    sums = {"table": torch.randn(70, 21), "one": torch.randn(1, 4), "d": torch.randn(64).double()}
    run = plan(name, noise=mode)
    source = NoiseSource(run)
    whole = [released(sums, run, step, source) for step in range(4)]
    for rank in range(3):
        own, mine, places = NoiseSource(run), {}, {}
        for key, total in sums.items():
            rows = -(-len(total) // 3)
            first = min(rank * rows, len(total))
            mine[key] = total[first : first + rows].clone()
            places[key] = Piece(first * total[:1].numel(), total.numel())
        for step in range(4):
            found = released(mine, run, step, own, pieces=places)
            for key, mean in whole[step].items():
                begin = places[key].start // max(1, mean[:1].numel())
                assert torch.equal(found[key], mean[begin : begin + len(found[key])])
        held = sum(len(row) for rows in own.held.kept for row in rows)
        assert held <= STEPS * sum(total.numel() for total in mine.values())


@pytest.mark.parametrize("name", ["window", "band", "blt"])
def test_correlated_noise_does_not_depend_on_threads(name, monkeypatch):
    monkeypatch.setattr(noise, "FEW", 0)
    sums, before, found = {"w": torch.zeros(3 << 16)}, torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(released(sums, plan(name), 3)["w"])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@each
def test_other_sums_between_the_steps_are_refused(name):
    run = plan(name, seed=None)
    source = NoiseSource(run)
    released(SUMS, run, 0, source)
    for other in (
        {**SUMS, "c": torch.zeros(5)},
        {"a": SUMS["a"]},
        {k: t.half() for k, t in SUMS.items()},
    ):
        with pytest.raises(
            ValueError, match="The sums have other names, shapes, dtypes or devices"
        ):
            released(other, run, 1, source)
    released(SUMS, run, 1, source)


@each
def test_an_interrupted_step_leaves_no_half_of_the_rows(name, monkeypatch):
    wanted, run = in_order(plan(name)), plan(name)
    source, draw, calls = NoiseSource(run), noise.normals_between, []
    for step in range(3):
        released(SUMS, run, step, source)

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == 2:  # the first group has advanced
            raise KeyboardInterrupt
        return draw(*args, **options)

    monkeypatch.setattr(noise, "normals_between", failing)
    with pytest.raises(KeyboardInterrupt):
        released(SUMS, run, 3, source)
    for step in (4, 5):
        np.testing.assert_array_equal(flat(released(SUMS, run, step, source)), wanted[step])


@each
def test_steps_in_inference_mode_and_out_of_it_go_together(name):
    wanted, run = in_order(plan(name)), plan(name)
    source = NoiseSource(run)
    for step in range(STEPS):
        with torch.inference_mode(step % 3 == 0):
            found = flat(released(SUMS, run, step, source))
        np.testing.assert_array_equal(found, wanted[step])


@each
def test_released_numbers_do_not_share_memory_with_the_rows(name):
    run, wanted = plan(name), in_order(plan(name))
    source = NoiseSource(run)
    for step in range(STEPS):
        mean = released(SUMS, run, step, source)
        np.testing.assert_array_equal(flat(mean), wanted[step])
        for value in mean.values():
            value.zero_()


@each
def test_normals_are_in_no_pickle_and_no_repr(name):
    run = plan(name)
    source = NoiseSource(run)
    released(SUMS, run, 4, source)
    secret = source.held.kept[0][0]
    assert secret.abs().min() > 0
    with pytest.raises(TypeError, match="A noise source can't be copied"):
        pickle.dumps(source)
    assert "tensor" not in repr(source)
    assert secret[:4].numpy().tobytes() not in pickle.dumps(run)


@each
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


@each
def test_another_bound_than_the_plans_is_refused(name):
    run = plan(name)
    assert flat(dpt.noisy_mean(SUMS, run, 1, max_grad_norm=0.7)).any()
    with pytest.raises(ValueError, match=r"max_grad_norm=0.8 with correlated noise, which holds"):
        dpt.noisy_mean(SUMS, run, 1, max_grad_norm=0.8)

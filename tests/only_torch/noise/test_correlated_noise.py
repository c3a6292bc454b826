# SPDX-License-Identifier: Apache-2.0
"""Correlated noise: C^-1 z of independent normals z, in any order of the steps, kept by nobody."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch

import dualdp_torch as dpt
from dualdp import AccountingError, PrivacyPlan
from dualdp.plan.correlated import filters, strategies
from dualdp.plan.correlated import noise as core_noise
from dualdp_torch.noise import generators, noise, recursion
from dualdp_torch.noise.noise import Piece, noised_mean

from .test_noise import plan as independent

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


def alone(mean):
    """The noise in a sum of zeros, one float64 array."""
    return 50 * torch.cat([value.flatten().double() for value in mean.values()]).numpy()


def in_order(run, sums=SUMS, steps=STEPS, **more):
    """(steps, numbers) noise of the first steps."""
    return np.stack([alone(noised_mean(sums, run, step, **more)) for step in range(steps)])


def normals(branches, sums=SUMS, **changes):
    """(steps, numbers) independent normals with standard deviation 1, one branch for each step."""
    free = plan(None, **changes)
    drawn = [alone(noised_mean(sums, free, t, branch=b)) for t, b in enumerate(branches)]
    return np.stack(drawn) / free.draw_stddev(0, 0.7)


def expected(name, branches=STEPS * [0], sums=SUMS, **changes):
    """(steps, numbers) C^-1 z in float64, of the z that independent noise has."""
    inverse = filters.matrix(STRATEGIES[name].inverse(len(branches)))
    scale = plan(name, **changes).draw_stddev(0, 0.7)
    return scale * inverse @ normals(branches, sums, **changes)


@each
@modes
def test_noise_is_the_inverse_of_the_strategy_times_independent_normals(name, mode):
    found, wanted = in_order(plan(name, noise=mode)), expected(name, noise=mode)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def covariance_is_right(name):
    """True if each entry over the steps is within 5 standard errors, of 10^5 numbers."""
    run, size = plan(name), 100_000
    found = in_order(run, {"w": torch.zeros(size)})
    root = run.draw_stddev(0, 0.7) * filters.matrix(STRATEGIES[name].inverse(STEPS))
    wanted = root @ root.T
    errors = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / size)
    return bool((np.abs(found @ found.T / size - wanted) < 5 * errors).all())


@each
def test_the_covariance_over_the_steps_is_that_of_the_strategy(name):
    assert covariance_is_right(name)
    run = plan(name)
    for step in range(STEPS):
        root = STRATEGIES[name].inverse(STEPS)[: step + 1]
        stddev = run.draw_stddev(step, 0.7) * np.linalg.norm(root)
        assert run.noise_stddev(step) == pytest.approx(stddev)


def reused(terms):
    """Window that takes the release's own z for the one before."""
    return [term._replace(step=terms[0].step) if j == 1 else term for j, term in enumerate(terms)]


def shifted(terms):
    """Window whose earlier steps are one too early."""
    return [terms[0]] + [term._replace(step=max(term.step - 1, 0)) for term in terms[1:]]


@pytest.mark.parametrize("fault", [reused, shifted, lambda terms: terms[:3]])
def test_faults_of_a_window_are_seen(fault, monkeypatch):
    true = noise.window_terms
    monkeypatch.setattr(noise, "window_terms", lambda *given: fault(true(*given)))
    assert not covariance_is_right("window")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_noise_is_the_inverse_of_the_strategy_times_independent_normals("window", "fast")


@pytest.mark.parametrize("name", ["band", "blt"])
@pytest.mark.parametrize("fault", ["a row dropped", "rows of the step before", "z for the noise"])
def test_faults_of_a_recursion_are_seen(name, fault, monkeypatch):
    true = recursion.Rows.advance

    def wrong(self, how, path, drawn):
        before = {part: [row.clone() for row in rows] for part, rows in self._rows.items()}
        z = [one.clone() for one in drawn]
        found = true(self, how, path, drawn)
        for part, rows in self._rows.items():
            if fault == "a row dropped":
                rows[-1] = torch.zeros_like(rows[-1])
            elif fault == "z for the noise":
                rows[0] = z[part]
            elif part in before:
                self._rows[part] = before[part]
        return found

    monkeypatch.setattr(recursion.Rows, "advance", wrong)
    assert not covariance_is_right(name)


#: Five numbers of step 2 as they were before there was correlated noise.
BEFORE = {
    "fast": [-0.47078332, 0.10241088, -0.75564808, 0.42701787, -0.07881599],
    "portable": [-0.04007923, 0.45403576, 0.09562080, 0.50120801, -0.28353044],
}


@modes
def test_one_weight_is_independent_noise_bit_for_bit(mode):
    whole = in_order(plan(None, noise=mode), branch=1)
    for strategy in (strategies.identity(), strategies.window([1.0])):
        one = plan(None, noise=mode, correlation=strategy)
        np.testing.assert_array_equal(in_order(one, branch=1), whole)
    np.testing.assert_allclose(50 * noised_mean(SUMS, one, 2)["a"][0, :5], BEFORE[mode], rtol=1e-5)


@each
@modes
def test_any_order_of_the_steps_gives_the_same_noise(name, mode):
    """As a resumed run asks for them: what is not kept is drawn again, to the same bits."""
    wanted = in_order(plan(name, noise=mode))
    run = plan(name, noise=mode)
    for step in (3, 0, 1, 1, 5, 4, 7, 6, 7):
        np.testing.assert_array_equal(alone(dpt.noisy_mean(SUMS, run, step)), wanted[step])


@each
def test_another_branch_has_old_normals_before_and_new_ones_after(name):
    """A restart at step 3 and one of it at step 5: the path says whose z are in the noise."""
    run = plan(name)
    for path, branches in (
        (((0, 0),), [0, 0, 0, 0, 0, 0]),
        (((0, 0), (3, 1)), [0, 0, 0, 1, 1, 1]),
        (((0, 0), (3, 1), (5, 4)), [0, 0, 0, 1, 1, 4]),
        (((0, 0), (4, 6)), [0, 0, 0, 0, 6, 6]),
        (((0, 2),), [2, 2, 2, 2, 2, 2]),
    ):
        wanted = expected(name, branches)
        noised_mean(SUMS, run, 2, branch=9)  # rows that lead to step 3 of another branch
        for step in (3, 4, 5):
            upto = tuple(stretch for stretch in path if stretch[0] <= step)
            found = alone(noised_mean(SUMS, run, step, branch=upto))
            limit = 1e-6 * np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted[step], rtol=0, atol=limit)


@each
@modes
def test_correlated_noise_of_pieces_is_that_of_the_whole(name, mode):
    """Each process has a plan and rows of its own, or starts in the middle."""
    sums = {"table": torch.randn(70, 21), "one": torch.randn(1, 4), "d": torch.randn(64).double()}
    whole_plan = plan(name, noise=mode)
    whole = [noised_mean(sums, whole_plan, step) for step in range(4)]
    for rank in range(3):
        run, mine, places = plan(name, noise=mode), {}, {}
        for key, total in sums.items():
            rows = -(-len(total) // 3)
            first = min(rank * rows, len(total))
            mine[key] = total[first : first + rows].clone()
            places[key] = Piece(first * total[:1].numel(), total.numel())
        for step in (2, 3):
            found = noised_mean(mine, run, step, pieces=places)
            for key, mean in whole[step].items():
                begin = places[key].start // max(1, mean[:1].numel())
                assert torch.equal(found[key], mean[begin : begin + len(found[key])])


@pytest.mark.parametrize("name", ["window", "band", "blt"])
def test_correlated_noise_does_not_depend_on_threads(name, monkeypatch):
    monkeypatch.setattr(generators, "_FEW", 0)
    sums, before, found = {"w": torch.zeros(3 << 16)}, torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(noised_mean(sums, plan(name), 3)["w"])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@each
def test_other_sums_between_the_steps_change_nothing(name):
    """Another model of the same plan, low precision, other names: rows are not mixed up."""
    run, wanted = plan(name), in_order(plan(name))
    low = {"a": torch.zeros(30, 7, dtype=torch.bfloat16), "c": torch.zeros(4, dtype=torch.bfloat16)}
    single = in_order(plan(name), {key: total.float() for key, total in low.items()})
    for step in range(STEPS):
        np.testing.assert_array_equal(alone(noised_mean(SUMS, run, step)), wanted[step])
        if step in (3, 4):
            found = noised_mean(low, run, step)
            assert found["a"].dtype == torch.float32
            np.testing.assert_array_equal(alone(found), single[step])


@pytest.mark.parametrize("name", ["band", "blt"])
def test_an_interrupted_step_leaves_no_half_of_the_rows(name, monkeypatch):
    wanted, run, draw = in_order(plan(name)), plan(name), generators.Normals.add_at
    in_order(run, steps=3)
    calls = []

    def failing(self, start, total):
        calls.append(start)
        if len(calls) == 2:  # the first group has advanced
            raise KeyboardInterrupt
        return draw(self, start, total)

    monkeypatch.setattr(generators.Normals, "add_at", failing)
    with pytest.raises(KeyboardInterrupt):
        noised_mean(SUMS, run, 3)
    for step in (3, 4):
        np.testing.assert_array_equal(alone(noised_mean(SUMS, run, step)), wanted[step])


@each
def test_steps_in_inference_mode_and_out_of_it_go_together(name):
    wanted, run = in_order(plan(name)), plan(name)
    for step in range(STEPS):
        with torch.inference_mode(step % 3 == 0):
            found = alone(noised_mean(SUMS, run, step))
        np.testing.assert_array_equal(found, wanted[step])


@pytest.mark.parametrize("name", ["band", "blt"])
def test_released_numbers_do_not_share_memory_with_the_rows(name):
    run, wanted = plan(name), in_order(plan(name))
    for step in range(STEPS):
        mean = noised_mean(SUMS, run, step)
        np.testing.assert_array_equal(alone(mean), wanted[step])
        for value in mean.values():
            value.zero_()


@pytest.mark.parametrize("name", ["band", "blt"])
def test_rows_are_in_no_pickle_and_no_repr(name):
    run = plan(name)
    noised_mean(SUMS, run, 4)
    _, rows = recursion._kept[id(run)]
    secret = rows._rows[0][0]
    assert secret.abs().min() > 0
    assert "tensor" not in repr(rows)
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="rows of correlated noise can't be copied"):
            take(rows)
    assert secret[:4].numpy().tobytes() not in pickle.dumps(run)
    assert rows.__class__.__name__ not in repr(run) + repr(vars(run))


@pytest.mark.parametrize("name", ["band", "blt"])
def test_rows_are_freed_with_the_plan_and_after_its_last_step(name):
    run = plan(name)
    noised_mean(SUMS, run, 4)
    place = id(run)
    assert place in recursion._kept
    noised_mean(SUMS, run, STEPS - 1)
    assert place not in recursion._kept
    noised_mean(SUMS, run, 4)
    del run
    assert place not in recursion._kept


def test_a_window_and_its_terms_are_kept_nowhere():
    run = plan("window")
    noised_mean(SUMS, run, 4)
    assert id(run) not in recursion._kept


def test_too_many_normals_to_draw_again_are_refused(monkeypatch):
    monkeypatch.setattr(core_noise, "_MOST_DRAWS", 4 * 219)
    wanted, run = in_order(plan("band")), plan("band")
    noised_mean(SUMS, run, 4)
    recursion._kept[id(run)][1].path = ((0, 7),)
    with pytest.raises(AccountingError, match="draw 5 times 219 normals again would take days"):
        noised_mean(SUMS, run, 5)
    recursion._kept[id(run)][1].path = ((0, 0),)  # a refusal leaves the rows as they were
    for step in range(5, STEPS):
        np.testing.assert_array_equal(alone(noised_mean(SUMS, run, step)), wanted[step])


def test_long_redrawing_says_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr(recursion, "_SECONDS", -1.0)
    with caplog.at_level(logging.WARNING, "dualdp"):
        noised_mean(SUMS, plan("band"), 2)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"Correlated noise is drawn again: step {t} of 2." for t in (1, 2)]


@each
def test_another_bound_than_the_plans_is_refused(name):
    run = plan(name)
    assert alone(noised_mean(SUMS, run, 1, max_grad_norm=0.7)).any()
    with pytest.raises(ValueError, match=r"max_grad_norm=0.8 with correlated noise, which holds"):
        dpt.noisy_mean(SUMS, run, 1, max_grad_norm=0.8)


@pytest.mark.parametrize("kind", ["window", "band"])
def test_an_error_in_mid_draw_shows_no_noise(kind, monkeypatch):
    """Tools that print local variables of a traceback would show a key or the noise of a step."""
    kinds = {"window": strategies.bisr(bands=3), "band": strategies.band((1.0, 0.5))}
    chosen = PrivacyPlan(
        **{"num_examples": 60, "expected_batch_size": 10, "num_steps": 6, "noise_multiplier": 1.0},
        **{"max_grad_norm": 1.0, "delta": 1e-5, "seed": 1, "sampler": "fixed_order"},
        correlation=kinds[kind],
    )
    sums = {"w": torch.zeros(5), "v": torch.zeros(4, dtype=torch.float64)}
    noised_mean(sums, chosen, 0)
    draw, calls = generators.Normals.add_at, []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return draw(*arguments)

    monkeypatch.setattr(generators.Normals, "add_at", fails)
    with pytest.raises(MemoryError) as caught:
        noised_mean(sums, chosen, 1)
    frame, seen = caught.value.__traceback__, []
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if "dualdp_torch/noise" in name and frame.tb_frame.f_code.co_name != "noised_mean":
            seen += [value for value in frame.tb_frame.f_locals.values() if torch.is_tensor(value)]
        frame = frame.tb_next
    assert seen == []

# SPDX-License-Identifier: Apache-2.0
"""Sparse noisy gradients of tables of embeddings on both stacks: map, cost, survivors, rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import AccountingError, PrivacyPlan, schedules, sparse
from dualdp.plan.clipping import MARGIN
from tests.conftest import BACKENDS

stacks = pytest.mark.parametrize("stack", BACKENDS)
ROWS, WIDTH, NUM = 40, 3, 30
SHARE, MOST, C = 0.3, 2, 0.7
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, ROWS // 2, (NUM, 4))  # of the lower half of the table only
TARGETS = RNG.normal(size=(NUM, 2))
# In the order of JAX's leaves; the table is the first.
PARAMS = {"embed": RNG.normal(size=(ROWS, WIDTH)), "out": RNG.normal(size=(WIDTH, 2))}
SETTINGS = {"table": "embed", "map_share": SHARE}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def plan(noise_multiplier=0.8, **changes):
    arguments = {
        "num_examples": NUM, "expected_batch_size": 10, "num_steps": 3, "delta": 1e-5,
        "max_grad_norm": C, "noise": "portable", "seed": 1, "accountant": "rdp",
    }  # fmt: skip
    return PrivacyPlan(noise_multiplier=noise_multiplier, **{**arguments, **changes})


def loss(params, words, targets):
    return ((params["embed"][words].mean(0) @ params["out"] - targets) ** 2).sum()


@functools.cache
def sums(factor=1.0, only=None):
    """Clipped sum of the loss with multiplied targets, of one example only or of all."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    mask = jnp.ones(NUM, bool) if only is None else jnp.arange(NUM) == only
    batch = jnp.asarray(WORDS), jnp.asarray(factor * TARGETS)
    grads = dpj.clipped_grad_sum(loss, params, *batch, max_grad_norm=C, mask=mask).grads
    return {name: np.asarray(grad) for name, grad in grads.items()}


def contribution_map(stack, ids, num_rows=ROWS, *, mask=None, **options):
    """NumPy in, NumPy out."""
    if stack == "torch":
        mask = None if mask is None else torch.tensor(mask)
        found = dpt.contribution_map(torch.tensor(ids), num_rows, mask=mask, **options)
        return found.numpy()
    mask = None if mask is None else jnp.asarray(mask)
    return np.asarray(dpj.contribution_map(jnp.asarray(ids), num_rows, mask=mask, **options))


def release(stack, grads, counts, threshold, run=None, step=0, **settings):
    """(grads, rows, noisy map) as NumPy arrays."""
    settings = {**SETTINGS, "threshold": threshold, **settings}
    if stack == "torch":
        grads = {name: torch.tensor(grad) for name, grad in grads.items()}
        found = dpt.sparse_noisy_mean(grads, torch.tensor(counts), run or plan(), step, **settings)
    else:
        grads = jax.tree.map(jnp.asarray, grads)
        found = dpj.sparse_noisy_mean(grads, jnp.asarray(counts), run or plan(), step, **settings)
    means = {name: np.asarray(grad) for name, grad in found.grads.items()}
    return means, np.asarray(found.rows), np.asarray(found.noisy_map)


def counts_of(words=WORDS):
    return contribution_map("torch", words, max_rows=MOST)


@pytest.mark.slow
@stacks
def test_the_map_is_that_of_a_loop(stack):
    """Words that come twice count once; padding and masked examples count nothing."""
    words = WORDS.copy()
    words[0] = 3
    mask = np.arange(NUM) % 4 != 1
    expected = np.zeros(ROWS)
    for row, is_real in zip(words, mask, strict=True):
        touched = sorted(set(row) - {7, 2})
        if is_real and touched:
            expected[touched] += 1 / (1 + MARGIN["float32"]) / math.sqrt(max(len(touched), MOST))
    options = {"max_rows": MOST, "mask": mask, "padding_idx": (7 - ROWS, 2)}
    found = contribution_map(stack, words, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.dtype == np.float32
    assert found[7] == found[2] == 0
    whole = contribution_map(stack, words)
    for dtype in ("int8", "int32"):
        parts = [contribution_map(stack, part.astype(dtype)) for part in np.split(words, [16])]
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)
    assert not contribution_map(stack, words[:0]).any()
    pairs = contribution_map(stack, words, rows_per_unit=2)
    np.testing.assert_allclose(pairs, contribution_map(stack, words.reshape(-1, 8)), rtol=1e-5)
    np.testing.assert_allclose(contribution_map(stack, words[:, 0], 300)[:ROWS],
                               np.bincount(words[:, 0], minlength=ROWS) / (1 + MARGIN["float32"]),
                               rtol=1e-5)  # fmt: skip


@stacks
@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_every_contribution_to_the_map_is_bounded(stack, most):
    for row in WORDS:
        found = contribution_map(stack, row[None], max_rows=most).astype(np.float64)
        assert np.linalg.norm(found) <= 1
        assert set(found.nonzero()[0]) == set(row)


@stacks
def test_one_example_moves_both_sums_by_at_most_the_plans_bound(stack):
    """Of replaced and of single examples with a large gradient, through the release itself."""
    silent, scales = plan(0.0), sparse.joint_scales(SHARE, C)
    for row in range(4):
        words = WORDS[row : row + 1]
        grads, rows, noisy_map = release(stack, sums(100.0, row), counts_of(words), 0.01, silent)
        total = sum((scales.gradient * 10 * g) ** 2 for grad in grads.values() for g in grad.flat)
        total += ((scales.map * noisy_map) ** 2).sum()
        assert 0.7 * C < math.sqrt(total) <= C
        assert rows.tolist() == sorted(set(words[0]))


@pytest.mark.parametrize("noise", ["portable", "fast", "secure"])
def test_gradient_and_map_are_one_gaussian_of_the_plan(noise):
    """Standard deviations on JAX, measured: 1 / s^2 = 1 / s1^2 + 1 / s2^2."""
    run = plan(noise=noise, seed=None if noise == "secure" else 1)
    zeros = {"embed": np.zeros((2000, 4)), "out": np.zeros(2000)}
    grads, _, noisy_map = release("jax", zeros, np.zeros(2000), -math.inf, run)
    multipliers = [10 * np.concatenate([g.ravel() for g in grads.values()]).std() / C]
    multipliers.append(noisy_map.std())
    expected = 0.8 / math.sqrt(1 - SHARE), 0.8 / math.sqrt(SHARE)
    np.testing.assert_allclose(multipliers, expected, rtol=0.05)
    assert sum(s**-2 for s in expected) == pytest.approx(0.8**-2)


@pytest.mark.slow
def test_without_a_threshold_it_is_the_dense_run():
    """On JAX: the numbers of `noisy_mean` of a plan with the gradient's own noise multiplier."""
    grads, dense = sums(), plan(0.8 / math.sqrt(1 - SHARE))
    for step in range(3):
        expected = dpj.noisy_mean(jax.tree.map(jnp.asarray, grads), dense, step)
        found, rows, _ = release("jax", grads, counts_of(), -math.inf, step=step)
        assert rows.tolist() == list(range(ROWS))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12)


@stacks
def test_rows_below_the_threshold_carry_no_trace_of_the_data(stack):
    """The same words with other targets: the same survivors, and zeros elsewhere."""
    counts = counts_of()
    found, rows, noisy_map = release(stack, sums(), counts, 1.0)
    other, others, same_map = release(stack, sums(-3.0), counts, 1.0)
    assert 3 < len(rows) < ROWS - 3
    np.testing.assert_array_equal(rows, (noisy_map >= 1).nonzero()[0])
    np.testing.assert_array_equal(rows, others)
    np.testing.assert_array_equal(noisy_map, same_map)
    rest = np.setdiff1d(np.arange(ROWS), rows)
    np.testing.assert_array_equal(found["embed"][rest], 0)
    np.testing.assert_array_equal(other["embed"][rest], 0)
    assert found["embed"][rows].all()
    dense, *_ = release(stack, sums(), counts, -math.inf)
    np.testing.assert_array_equal(dense["embed"][rows], found["embed"][rows])
    np.testing.assert_array_equal(dense["out"], found["out"])


@pytest.mark.parametrize("threshold", [-math.inf, 1.0, 2.5])
def test_both_stacks_have_the_same_survivors_and_rows(threshold):
    maps = [contribution_map(stack, WORDS, max_rows=MOST) for stack in BACKENDS]
    np.testing.assert_allclose(*maps, rtol=1e-6)
    for step in range(2):
        ours, theirs = (
            release(stack, sums(), counts, threshold, step=step)
            for stack, counts in zip(BACKENDS, maps, strict=True)
        )
        np.testing.assert_array_equal(ours[1], theirs[1])
        for name, grad in ours[0].items():
            np.testing.assert_allclose(grad, theirs[0][name], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-6)


@stacks
def test_two_tables_have_one_map(stack):
    """Rows numbered through; each table keeps its own survivors."""
    run, tags = plan(0.0), RNG.integers(0, 6, (NUM, 1))
    ids = np.concatenate([WORDS, ROWS + tags], 1)
    counts = contribution_map(stack, ids, ROWS + 6)
    for row in range(3):
        alone = contribution_map(stack, ids[row : row + 1], ROWS + 6).astype(np.float64)
        assert 0.99 < np.linalg.norm(alone) <= 1
    grads = {"tags": RNG.normal(size=(6, 2)), "words": RNG.normal(size=(ROWS, 3))}
    tables = ("words", "tags")
    found, rows, noisy_map = release(stack, grads, counts, 1.5, run, table=tables)
    np.testing.assert_allclose(noisy_map, counts, rtol=1e-6)
    kept = counts >= 1.5
    assert 0 < kept[:ROWS].sum() < ROWS
    assert 0 < kept[ROWS:].sum() < 6
    np.testing.assert_array_equal(rows, kept.nonzero()[0])
    for name, mine in (("words", kept[:ROWS]), ("tags", kept[ROWS:])):
        np.testing.assert_allclose(10 * found[name], np.where(mine[:, None], grads[name], 0))


def test_a_jitted_step_is_the_eager_one():
    """Step and schedules as data; the key in no program; ids that are no rows not counted."""
    run = plan(max_grad_norm=schedules.Table((0.7, 0.5, 0.9)))

    @jax.jit
    def step(grads, words, number):
        counts = dpj.contribution_map(words, ROWS, max_rows=MOST, mask=None)
        return dpj.sparse_noisy_mean(grads, counts, run, number, threshold=1.0, **SETTINGS)

    grads = jax.tree.map(jnp.asarray, sums())
    for number in range(3):
        found = step(grads, jnp.asarray(WORDS), number)
        expected = release("jax", grads, counts_of(), 1.0, run, number)
        np.testing.assert_array_equal(found.rows, expected[1])
        np.testing.assert_allclose(found.noisy_map, expected[2], rtol=1e-6)
        for name, grad in expected[0].items():
            np.testing.assert_allclose(found.grads[name], grad, rtol=1e-12, atol=1e-12)
    text = step.lower(grads, jnp.asarray(WORDS), 1).as_text()
    assert all(str(word) not in text for word in run.step_key("noise", 1))
    wrong = jnp.array([[-1, 3], [ROWS, 3]])
    counts = jax.jit(lambda ids: dpj.contribution_map(ids, ROWS, mask=None))(wrong)
    assert jnp.nonzero(counts)[0].tolist() == [3]


def test_a_step_that_is_not_on_record_gives_nan_in_the_table_too():
    run, grads = plan(seed=None), {"embed": jnp.ones((ROWS, WIDTH))}
    counts, settings = jnp.zeros(ROWS), {**SETTINGS, "threshold": 3.0}
    step = jax.jit(lambda number: dpj.sparse_noisy_mean(grads, counts, run, number, **settings))
    assert np.isnan(step(0).grads["embed"]).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"table": "words"}, ValueError, r"table='words' is not in grads. Expected one of .'emb"),
        ({"table": ("embed", "embed")}, ValueError, "table='embed' comes twice"),
        ({"table": ()}, ValueError, "table names no table"),
        ({"table": 3}, TypeError, "table=3. Expected a name"),
        ({"table": "scale"}, ValueError, "is a scalar and has no rows"),
        ({"map_share": 1.0}, ValueError, "map_share=1.0 is out of range"),
        ({"threshold": math.nan}, ValueError, "threshold=nan is not a number"),
        ({"counts": np.zeros(3)}, ValueError, r"is float64 \(3,\), but the tables have 40 rows"),
        ({"counts": np.zeros(ROWS, int)}, ValueError, r"is int64 \(40,\), but the tables"),
        ({"counts": None}, ValueError, "contributions is None, but the tables have 40 rows"),
        ({"step": 3}, AccountingError, "step=3 is past the plan's num_steps=3"),
        ({"grads": None}, TypeError, "grads is None. Expected the clipped sum"),
    ],
)
def test_wrong_calls_are_refused(changes, error, message):
    """On JAX; before the noise of a step is claimed."""
    run = plan(seed=None)
    given = {"grads": {**sums(), "scale": np.ones(())}, "counts": counts_of(), "step": 0}
    given |= {**SETTINGS, "threshold": 1.0, **changes}
    arrays = given.pop("grads"), given.pop("counts")
    with pytest.raises(error, match=message):
        dpj.sparse_noisy_mean(*arrays, run, given.pop("step"), **given)
    dpj.noisy_mean(sums(), run, 0)  # the one that a secret key gives


def test_ids_on_a_mesh_with_explicit_axes_are_refused():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(ValueError, match="ids lie on a mesh with explicit axes. Expected a mesh"):
        dpj.contribution_map(jax.device_put(WORDS, spread), ROWS, mask=None)


@pytest.mark.parametrize(
    ("words", "options", "error", "message"),
    [
        (np.ones((2, 3)), {}, TypeError, r"ids is float64 \(2, 3\). Expected an array of integers"),
        (np.ones(3, bool), {}, TypeError, "ids is bool"),
        ([1], {}, TypeError, "ids is a list"),
        (np.array([[1, ROWS]]), {}, ValueError, "ids lie in 1 to 40. Expected rows .* 0 to 39"),
        (np.array([[2**32 + 1]]), {}, ValueError, "ids lie in 4294967297"),
        (np.array([[-1]]), {}, ValueError, "ids lie in -1 to -1"),
        (np.array(1), {}, ValueError, r"ids has shape \(\) and mask is None"),
        (np.ones((2, 3), int), {"mask": np.ones(3, bool)}, ValueError, r"mask is bool \(3,\)"),
        (np.ones((2, 3), int), {"mask": np.ones(2)}, ValueError, "mask is float64"),
        (np.ones((2, 3), int), {"max_rows": 0}, ValueError, "max_rows=0 is out of range"),
        (np.ones((3, 3), int), {"rows_per_unit": 2}, ValueError, "with rows_per_unit=2. Exp"),
        (np.ones((2, 3), int), {"padding_idx": ROWS}, ValueError, "padding_idx=40 is no row"),
        (np.ones((2, 3), int), {"padding_idx": "a"}, TypeError, "padding_idx='a'"),
    ],
)
def test_wrong_maps_are_refused(words, options, error, message):
    with pytest.raises(error, match=message):
        dpj.contribution_map(words, ROWS, **{"mask": None, **options})

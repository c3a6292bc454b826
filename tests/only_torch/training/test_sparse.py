# SPDX-License-Identifier: Apache-2.0
"""Sparse noisy gradients of an embedding: joint cost, equality with the dense run, support."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import dualdp.torch as dpt
from dualdp import PrivacyPlan, accountants, sparse
from tests.only_torch.checks import data, ids

ROWS, WIDTH, NUM = 40, 3, 30
SHARE, MOST, C = 0.3, 2, 0.7
TABLE = "0.weight"


class First(nn.Module):
    def forward(self, x):
        return x.mean(1)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), First(), nn.Linear(WIDTH, 2)).double()


def plan(noise_multiplier=0.8, **changes):
    arguments = {
        "num_examples": NUM, "expected_batch_size": 10, "num_steps": 3, "delta": 1e-5,
        "max_grad_norm": C, "noise": "portable", "seed": 1, "accountant": "rdp",
    }  # fmt: skip
    return PrivacyPlan(noise_multiplier=noise_multiplier, **{**arguments, **changes})


def batch(num=NUM):
    """Words of the lower half of the table only, and targets."""
    return ids(ROWS // 2, num, 4), data(num, 2).double()


def losses(module, words, targets):
    return ((module(words) - targets) ** 2).sum(1)


def sums(words, targets):
    grads = dpt.clipped_grad_sum(losses, model(), words, targets, max_grad_norm=C).grads
    return grads, dpt.contribution_map(words, ROWS, max_rows=MOST, mask=None)


def mean(words, targets, threshold, run=None, step=0, **changes):
    settings = {"table": TABLE, "map_share": SHARE, **changes}
    found = sums(words, targets)
    return dpt.sparse_noisy_mean(*found, run or plan(), step, threshold=threshold, **settings)


def test_gradient_and_map_are_one_gaussian_of_the_plan():
    """1 / s^2 = 1 / s1^2 + 1 / s2^2, by noise that is measured and by an accountant's sum."""
    run = plan(num_steps=200, noise="fast")
    zeros = {name: torch.zeros_like(p) for name, p in model().named_parameters()}
    grads, maps = [], []
    for step in range(200):
        found = dpt.sparse_noisy_mean(
            zeros, torch.zeros(ROWS), run, step,
            table=TABLE, threshold=-math.inf, map_share=SHARE,
        )  # fmt: skip
        grads.append(10 * torch.cat([g.flatten() for g in found.grads.values()]))
        maps.append(found.noisy_map)
    stddevs = [float(torch.cat(parts).std()) for parts in (grads, maps)]
    multipliers = stddevs[0] / C, stddevs[1]
    expected = 0.8 / math.sqrt(1 - SHARE), 0.8 / math.sqrt(SHARE)
    np.testing.assert_allclose(multipliers, expected, rtol=0.03)
    assert sum(s**-2 for s in expected) == pytest.approx(0.8**-2)
    together, apart = (accountants.create("rdp") for _ in range(2))
    together.step(noise_multiplier=0.8, sample_rate=1.0)
    for multiplier in expected:
        apart.step(noise_multiplier=multiplier, sample_rate=1.0)
    assert apart.get_epsilon(delta=1e-5) == pytest.approx(together.get_epsilon(delta=1e-5))


def test_one_example_moves_both_sums_by_the_plans_bound():
    """Of one example alone with a large gradient, measured on what gets the noise."""
    words, targets = batch(8)
    silent = plan(noise_multiplier=0.0)
    scales = sparse.joint_scales(SHARE, C)
    for row in range(8):
        grads, found = sums(words[row : row + 1], 100 * targets[row : row + 1])
        total = sum(float((scales.gradient * g).norm() ** 2) for g in grads.values())
        total += float((scales.map * found).norm() ** 2)
        assert 0.7 * C < math.sqrt(total) <= C
        settings = {"table": TABLE, "map_share": SHARE}
        out = dpt.sparse_noisy_mean(grads, found, silent, 0, threshold=0.01, **settings)
        torch.testing.assert_close(out.noisy_map, found.double(), rtol=1e-5, atol=1e-6)
        assert out.rows.tolist() == sorted(set(words[row].tolist()))
        for name, value in out.grads.items():
            torch.testing.assert_close(10 * value, grads[name])


def test_without_a_threshold_it_is_the_dense_run():
    """The same numbers as `noisy_mean` of a plan with the gradient's own noise multiplier."""
    words, targets = batch()
    dense = plan(0.8 / math.sqrt(1 - SHARE))
    for step in range(3):
        expected = dpt.noisy_mean(sums(words, targets)[0], dense, step)
        found = mean(words, targets, -math.inf, step=step)
        assert found.rows.tolist() == list(range(ROWS))
        for name, value in expected.items():
            torch.testing.assert_close(found.grads[name], value, rtol=1e-12, atol=1e-12)


def test_rows_below_the_threshold_carry_no_trace_of_the_data():
    """Survivors follow from the noisy map alone; other rows are exactly zero."""
    words, targets = batch()
    found, other = mean(words, targets, 1.0), mean(words, -3 * targets, 1.0)
    assert torch.equal(found.rows, (found.noisy_map >= 1).nonzero()[:, 0])
    assert 3 < len(found.rows) < ROWS - 3
    assert torch.equal(found.rows, other.rows)  # other gradients, the same words
    assert torch.equal(found.noisy_map, other.noisy_map)
    rest = torch.ones(ROWS, dtype=torch.bool)
    rest[found.rows] = False
    assert not found.grads[TABLE][rest].any()
    assert found.grads[TABLE][found.rows].all()
    assert not torch.equal(found.grads[TABLE], other.grads[TABLE])
    # Rows that no example touches survive by noise, as often as the noise says, and hold noise.
    untouched = [row for row in found.rows.tolist() if row >= ROWS // 2]
    assert untouched
    torch.testing.assert_close(found.grads[TABLE][untouched], other.grads[TABLE][untouched])
    dense = mean(words, targets, -math.inf)
    assert torch.equal(dense.grads[TABLE][found.rows], found.grads[TABLE][found.rows])
    assert all(torch.equal(dense.grads[n], found.grads[n]) for n in dense.grads if n != TABLE)


def test_a_loop_of_ones_own_records_and_trains():
    """With the loader, mask and ledger of an engine."""
    module, engine = model(), dpt.PrivacyEngine()
    words, targets = batch()
    data_set = torch.utils.data.TensorDataset(words, targets)
    loader = engine.make_loader(data_loader=torch.utils.data.DataLoader(data_set), plan=plan())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module[0].weight.detach().clone()
    for drawn in loader.remaining():
        engine.record()
        grads, counts = None, torch.zeros(ROWS)
        for chunk in drawn.chunks:
            part = dpt.clipped_grad_sum(
                losses, module, *chunk.args, max_grad_norm=C, mask=chunk.mask
            ).grads
            grads = part if grads is None else {n: grads[n] + g for n, g in part.items()}
            counts += dpt.contribution_map(chunk.args[0], ROWS, max_rows=MOST, mask=chunk.mask)
        found = dpt.sparse_noisy_mean(
            grads, counts, engine.plan, drawn.step,
            table=TABLE, threshold=1.5, map_share=SHARE,
        )  # fmt: skip
        for name, p in module.named_parameters():
            p.grad = found.grads[name]
        optimizer.step()
    assert engine.get_epsilon(1e-5) == pytest.approx(plan().epsilon())
    assert not torch.equal(module[0].weight, before)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"table": "1.weight"}, ValueError, r"table='1.weight' is not in grads"),
        ({"map_share": 1.0}, ValueError, "map_share=1.0 is out of range"),
        ({"threshold": "1"}, TypeError, "threshold='1' is a str"),
        ({"contributions": torch.zeros(3)}, ValueError, r"is torch.float32 \(3,\), but"),
        ({"contributions": None}, ValueError, "contributions is None, but the"),
    ],
)
def test_wrong_calls_are_refused(changes, error, message):
    grads, counts = sums(*batch())
    given = {"contributions": counts, "threshold": 1.0, "table": TABLE, "map_share": SHARE}
    given |= changes
    with pytest.raises(error, match=message):
        dpt.sparse_noisy_mean(grads, given.pop("contributions"), plan(), 0, **given)


@pytest.mark.parametrize(
    ("words", "options", "error", "message"),
    [
        (torch.rand(2, 3), {}, TypeError, r"ids is torch.float32 \(2, 3\). Exp"),
        ([1], {}, TypeError, "ids is a list"),
        (torch.tensor([[1, ROWS]]), {}, ValueError, "ids lie in 1 to 40. Expected rows .* 0 to 39"),
        (torch.tensor([[-1]]), {}, ValueError, "ids lie in -1 to -1"),
        (torch.tensor(1), {}, ValueError, r"ids has shape \(\) and mask is N"),
        (torch.ones(2, 3).long(), {"mask": torch.ones(3).bool()}, ValueError, "mask is torch.bool"),
        (torch.ones(2, 3).long(), {"mask": torch.ones(2)}, ValueError, "mask is torch.float32"),
        (torch.ones(2, 3).long(), {"max_rows": 0}, ValueError, "max_rows=0 is out of range"),
        (torch.ones(3, 3).long(), {"rows_per_unit": 2}, ValueError, "with rows_per_unit=2. Exp"),
    ],
)
def test_wrong_maps_are_refused(words, options, error, message):
    with pytest.raises(error, match=message):
        dpt.contribution_map(words, ROWS, **{"mask": None, **options})

# SPDX-License-Identifier: Apache-2.0
"""Units of several rows: a unit's gradient is that of its own loss, and is clipped once."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests import reference
from tests.closeness import assert_grads_close, assert_sum_close, factors_of, whole_norms
from tests.dualdp_torch.checks import METHODS, Ways, data, ids, randomise
from tests.dualdp_torch.per_sample.loops import CAPTURED, Model

loss_fn = reference.loss_fn
X = data(12, 6).double()


def mlp():
    return randomise(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double())


def clipped(model, x, loss=loss_fn, **options):
    options = {"max_grad_norm": 1.0, "rows_per_unit": 2, **options}
    return dpt.clipped_grad_sum(loss, model, x, **options)


def weights_of(units, k):
    """(units k,) weights of both signs; every unit but the last has rows of padding."""
    weights = data(units * k, seed=5).double()
    for unit in range(units - 1):
        weights[unit * k + 1 + unit : (unit + 1) * k] = 0
    return weights


def truth_of(model, loss_fn, k, weights, *batch):
    """Name -> (units, *shape): plain autograd of each unit's own loss, one unit at a time."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {name: [] for name in named}
    for start in range(0, len(batch[0]), k):
        rows = torch.arange(start, start + k)
        if weights is not None:  # padding is left out, not weighted by 0
            rows = rows[weights[rows] != 0]
        losses = loss_fn(model, *(t[rows] for t in batch))
        loss = losses.mean() if weights is None else (losses * weights[rows]).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (name, p), grad in zip(named.items(), grads, strict=True):
            found[name].append(np.zeros(p.shape) if grad is None else grad.numpy())
    return {name: np.stack(grads) for name, grads in found.items()}


def held_to_plain_autograd(model, k, weights, *batch, methods=CAPTURED, loss=loss_fn):
    """Gradients, norms and clipped sums are those of the units' own losses."""
    truth = truth_of(model, loss, k, weights, *batch)
    whole = whole_norms(truth)
    bound = float(np.median(whole))
    factors = factors_of(whole, bound, "float64")
    expected = {name: np.tensordot(factors, grad, axes=1) for name, grad in truth.items()}
    for method in methods:
        options = {"rows_per_unit": k, "row_weights": weights, "method": method}
        grads = dpt.per_sample_grads(loss, model, *batch, **options)
        assert_grads_close({name: g.numpy() for name, g in grads.items()}, truth, "float64")
        norms = dpt.per_sample_norms(loss, model, *batch, **options)
        found = dpt.clipped_grad_sum(loss, model, *batch, max_grad_norm=bound, **options)
        sums = {name: g.numpy() for name, g in found.grads.items()}
        assert_sum_close(sums, expected, truth, "float64")
        for ours in (norms, found.norms):
            np.testing.assert_allclose(ours, whole, rtol=1e-10)


# ---------------------------------------------------------------------- where rows lie


def packed(self, x, lengths):
    """A recurrent layer over packed sequences of unequal lengths, in the order of the lengths."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=6)
    return self.head(out)


def time_first(self, x):  # (n, 6, 4)
    """Layers that see the rows on axis 1, and then folded behind the positions."""
    hidden = self.norm(self.first(x.transpose(0, 1)).tanh())  # (6, n, 5)
    out = self.second(hidden.reshape(-1, 5))  # (6 n, 3)
    return out.view(6, len(x), 3).transpose(0, 1)


#: Layouts that the grid has not: model, shape of a row.
LAYOUTS = {
    "time first": (
        lambda: Model(
            time_first, first=nn.Linear(4, 5), second=nn.Linear(5, 3), norm=nn.LayerNorm(5)
        ),
        (6, 4),
    ),
    "packed": (
        lambda: Model(packed, rnn=nn.GRU(4, 5, batch_first=True), head=nn.Linear(5, 3)),
        (6, 4),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_lie_anywhere_in_the_model(monkeypatch, name):
    build, shape = LAYOUTS[name]
    model, ways = randomise(build().double()), Ways(monkeypatch)
    batch = (data(12, *shape).double(), *([ids(5, 12) + 1] if name == "packed" else []))
    loss = lambda m, x, *more: loss_fn(lambda x: m(x, *more), x)  # noqa: E731
    for k in (3, 2):
        held_to_plain_autograd(model, k, weights_of(12 // k, k), *batch, loss=loss)
    assert set(ways.taken) == {"Captured"}  # no other method is used where rules can be


# ---------------------------------------------------------------------- losses


def preferences(model, x):
    """Loss of each pair: rows 2 u and 2 u + 1 are a chosen and a rejected answer."""
    chosen, rejected = model(x).sum(1).view(-1, 2).unbind(1)
    return F.softplus(rejected - chosen)


def of_halves(model, x):
    """Every second row is paired with one of another unit."""
    halves = model(x).sum(1).chunk(2)
    return F.softplus(halves[1] - halves[0])


def test_a_loss_may_couple_the_rows_of_a_unit():
    held_to_plain_autograd(mlp(), 2, None, X, methods=METHODS, loss=preferences)


MIXING = {
    "pairs of two units": of_halves,
    "a mean over all rows": lambda m, x: m(x - x.mean(0)).square().sum(1),
    "units inside": lambda m, x: m(x).square().sum(1).view(2, -1).mean(0),
    "rows by rank": lambda m, x: m(x).square().sum(1).sort().values,
}


@pytest.mark.parametrize("name", MIXING)
def test_losses_that_mix_rows_of_two_units_are_refused(name):
    for method in METHODS:
        with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
            clipped(mlp(), X[:8], MIXING[name], method=method)


# ---------------------------------------------------------------------- sums


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("method", METHODS)
def test_a_unit_moves_the_sum_by_no_more_than_twice_the_bound(method, clipping):
    """All of its rows replaced, also by huge ones and by nan; all other units are masked or not."""
    if (method, clipping) == ("two_pass", "per_layer"):
        return  # refused, as for examples
    model, x, bound = mlp(), data(20, 6).double(), 0.3
    mask = torch.tensor([True, True, False, True, True])
    options = {"rows_per_unit": 4, "row_weights": weights_of(5, 4) * 50, "mask": mask}
    options |= {"max_grad_norm": bound, "clipping": clipping, "method": method}

    def total(at=None, value=None):
        other = x.clone()
        if at is not None:
            other[at : at + 4] = value
        found = clipped(model, other, **options)
        assert found.norms[2] == found.losses[2] == 0
        return torch.cat([g.flatten() for g in found.grads.values()])

    before, distances = total(), []
    for value in (data(4, 6, seed=9).double() * 1e6, float("nan"), x[4:8] * -3):
        distances.append(float((total(4, value) - before).norm()))
        assert torch.equal(total(8, value), before)  # of the masked unit
    assert bound * 0.5 < max(distances) <= 2 * bound * (1 + 1e-10)


def test_chunks_hold_whole_units():
    model, x, sizes = mlp(), data(40, 6).double(), []
    counted = lambda m, x: sizes.append(len(x)) or loss_fn(m, x)  # noqa: E731
    options = {"max_grad_norm": 0.5, "rows_per_unit": 4}
    whole = clipped(model, x, counted, **options)
    for limit in ({"physical_batch_size": 3}, {"max_memory": 3000}):
        sizes.clear()
        found = clipped(model, x, counted, **options, **limit)
        assert max(sizes) < 40
        assert all(size % 4 == 0 for size in sizes)
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [None, 2])
def test_auxiliary_outputs_hold_rows_or_units(method, size):
    def with_aux(model, x):
        out = model(x)
        return out.sum(1), {"rows": out, "units": out.view(-1, 2, 3).sum(1)}

    options = {"method": method, "has_aux": True, "physical_batch_size": size}
    model = mlp()
    found, out = clipped(model, X, with_aux, **options), model(X)
    torch.testing.assert_close(found.aux, {"rows": out, "units": out.view(6, 2, 3).sum(1)})
    torch.testing.assert_close(found.losses, out.sum(1).view(6, 2).mean(1))


@pytest.mark.parametrize("method", METHODS)
def test_padding_may_hold_anything(method):
    """Rows of weight 0 are as if they were not there, also in units without any other row."""
    model, x, weights = mlp(), X.clone(), weights_of(4, 3)
    weights[6:9] = 0
    truth = truth_of(model, loss_fn, 3, weights, x)
    x[weights == 0] = torch.tensor(float("nan")).double()
    x[7] = float("-inf")
    options = {"max_grad_norm": 1e9, "rows_per_unit": 3, "row_weights": weights}
    found = clipped(model, x, method=method, **options)
    assert found.norms[2] == 0
    for name, g in truth.items():
        np.testing.assert_allclose(found.grads[name], g.sum(0), rtol=1e-9, atol=1e-12)


def test_no_units_call_nothing():
    found = clipped(mlp(), X[:0], lambda m, x: pytest.fail("called"), row_weights=torch.zeros(0))
    assert found.norms.shape == (0,)
    assert not any(g.any() for g in found.grads.values())


# ---------------------------------------------------------------------- refusals

INTEGERS = torch.ones(8, dtype=torch.int64)
REFUSED = [
    ({"rows_per_unit": 3}, ValueError, "holds 8 rows, which split a unit of 3"),
    ({"rows_per_unit": 0}, ValueError, "rows_per_unit=0 is out of range"),
    ({"rows_per_unit": 2.5}, TypeError, "rows_per_unit=2.5 is a float"),
    ({"row_weights": torch.ones(4, 2)}, ValueError, r"\(4, 2\). Expected \(8,\): one weight per"),
    ({"row_weights": [1.0] * 8}, TypeError, "row_weights is a list. Expected .8,.: one weight"),
    ({"row_weights": INTEGERS}, TypeError, "row_weights is torch.int64"),
    ({"row_weights": torch.full((8,), torch.nan)}, ValueError, "holds a weight that is not finite"),
    ({"rows_per_unit": None, "row_weights": torch.ones(8)}, ValueError, "without rows_per_unit"),
]


@pytest.mark.parametrize(("options", "error", "match"), REFUSED)
def test_wrong_units_and_weights_are_refused(options, error, match):
    options = {"rows_per_unit": 2, **options}
    for call in (dpt.per_sample_grads, dpt.per_sample_norms, clipped):
        batch = (mlp(), X[:8]) if call is clipped else (loss_fn, mlp(), X[:8])
        with pytest.raises(error, match=match):
            call(*batch, **options)


LOSSES = {
    "number": (lambda m, x: m(x).sum(), None, ValueError, r"\(\) for \d rows in units of 2"),
    "matrix": (lambda m, x: m(x), None, ValueError, r"one loss per row, or \(\d,\), one per unit"),
    "weighted units": (
        preferences,
        torch.ones(8),
        ValueError,
        "since row_weights weight the losses of rows",
    ),
    "integers": (lambda m, x: m(x).argmax(1), None, TypeError, "returned torch.int64"),
    "list": (lambda m, x: m(x).sum(1).tolist(), None, TypeError, "returned a list"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_neither_rows_nor_units_are_refused(name):
    loss, weights, error, match = LOSSES[name]
    for method in METHODS:
        with pytest.raises(error, match=match):
            clipped(mlp(), X[:8], loss, row_weights=weights, method=method)

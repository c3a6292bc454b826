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

loss_fn = reference.loss_fn


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
        if weights is None:
            loss = losses.sum() / len(losses)
        else:
            loss = (losses * weights[rows]).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (name, p), grad in zip(named.items(), grads, strict=True):
            found[name].append(np.zeros(p.shape) if grad is None else grad.numpy())
    return {name: np.stack(grads) for name, grads in found.items()}


def held_to_plain_autograd(model, k, weights, *batch, methods=METHODS, loss_fn=loss_fn):
    """Gradients, norms and sums of both clippings are those of the units' own losses."""
    truth = truth_of(model, loss_fn, k, weights, *batch)
    whole = whole_norms(truth)
    bound = float(np.median(whole))
    factors = factors_of(whole, bound, "float64")
    clipped = {name: np.tensordot(factors, grad, axes=1) for name, grad in truth.items()}
    options = {"rows_per_unit": k, "row_weights": weights}
    for method in methods:
        options["method"] = method
        grads = dpt.per_sample_grads(loss_fn, model, *batch, **options)
        assert_grads_close({name: g.numpy() for name, g in grads.items()}, truth, "float64")
        norms = dpt.per_sample_norms(loss_fn, model, *batch, **options)
        np.testing.assert_allclose(norms, whole, rtol=1e-10)
        found = dpt.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=bound, **options)
        sums = {name: g.numpy() for name, g in found.grads.items()}
        assert_sum_close(sums, clipped, truth, "float64")
        np.testing.assert_allclose(found.norms, whole, rtol=1e-10)


class Packed(nn.Module):
    """Recurrent layer over packed sequences of unequal lengths, in the order of the lengths."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=6)
        return self.head(out)


class Parts(nn.Module):
    """Parameters that broadcast over the rows, in three ways, and a slope per channel."""

    def __init__(self):
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(4))
        self.slope, self.shift = nn.PReLU(3), nn.Parameter(torch.zeros(3, 1))

    def forward(self, x):  # (n, 2, 4)
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) * self.scale
        return self.slope(x) + self.shift


class TimeFirst(nn.Module):
    """Layers that see the rows on axis 1, and then folded behind the positions."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 5), nn.Linear(5, 3), nn.LayerNorm(5)

    def forward(self, x):  # (n, 6, 4)
        hidden = self.norm(self.first(x.transpose(0, 1)).tanh())  # (6, n, 5)
        out = self.second(hidden.reshape(-1, 5))  # (6 n, 3)
        return out.view(6, len(x), 3).transpose(0, 1)


def attention():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


#: Layouts that rules meet: model, shape of a row, and whether lengths come with it.
LAYOUTS = {
    "time first": (TimeFirst, (6, 4), False),
    "broadcast": (Parts, (2, 4), False),
    "attention": (attention, (6, 4), False),
    "time first attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False),
        (6, 4),
        False,
    ),
    "packed": (Packed, (6, 4), True),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 2), nn.InstanceNorm1d(4, affine=True)),
        (4, 7),
        False,
    ),
    "transposed": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), (4, 5), False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_lie_anywhere_in_the_model(monkeypatch, name):
    build, shape, has_lengths = LAYOUTS[name]
    model = randomise(build().double())
    if name == "time first attention":
        of_rows = lambda m, x: loss_fn(lambda x: m(x.transpose(0, 1)).transpose(0, 1), x)  # noqa: E731
    else:
        of_rows = lambda m, x, *more: loss_fn(lambda x: m(x, *more), x)  # noqa: E731
    batch = (data(12, *shape).double(), *([ids(5, 12) + 1] if has_lengths else []))
    ways = Ways(monkeypatch)
    for k in (3, 2):
        weights = weights_of(12 // k, k)
        methods = ("book_keeping", "two_pass", "materialize")
        held_to_plain_autograd(model, k, weights, *batch, methods=methods, loss_fn=of_rows)
    assert set(ways.taken) == {"Captured"}  # no other method is used where rules can be


class Sorted(nn.Module):
    """Moves rows by data, on axis 1, and back; batches that are in order show nothing of it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0, 0].argsort()
        out = self.first(x.transpose(0, 1)[:, order])
        return out[:, order.argsort()].transpose(0, 1)


def test_rows_that_move_by_data_are_found():
    model, x = randomise(Sorted().double()), data(12, 5, 4).double()
    x[:, 0, 0] = torch.arange(12)
    held_to_plain_autograd(model, 3, None, x, methods=("auto",))
    x[:, 0, 0] = torch.arange(12) * 5 % 12
    held_to_plain_autograd(model, 3, None, x, methods=("auto",))


def preferences(model, x):
    """Loss of each pair: rows 2 u and 2 u + 1 are a chosen and a rejected answer."""
    chosen, rejected = model(x).sum(1).view(-1, 2).unbind(1)
    return F.softplus(rejected - chosen)


def mlp():
    return randomise(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double())


def test_a_loss_may_couple_the_rows_of_a_unit():
    model, x = mlp(), data(8, 6).double()
    held_to_plain_autograd(model, 2, None, x, loss_fn=preferences)


def mixing(model, x):
    """Every second row is paired with one of another unit."""
    halves = model(x).sum(1).chunk(2)
    return F.softplus(halves[1] - halves[0])


MIXING = {
    "pairs of two units": mixing,
    "a mean over all rows": lambda m, x: m(x - x.mean(0)).square().sum(1),
    "units inside": lambda m, x: m(x).square().sum(1).view(2, -1).mean(0),
    "rows by rank": lambda m, x: m(x).square().sum(1).sort().values,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MIXING)
def test_losses_that_mix_rows_of_two_units_are_refused(name, method):
    model, x = mlp(), data(8, 6).double()
    with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
        dpt.clipped_grad_sum(
            MIXING[name], model, x, max_grad_norm=1.0, method=method, rows_per_unit=2
        )


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("method", METHODS)
def test_a_unit_moves_the_sum_by_no_more_than_twice_the_bound(method, clipping):
    """All of its rows replaced, also by huge ones and by nan; all other units are masked or not."""
    if (method, clipping) == ("two_pass", "per_layer"):
        pytest.skip("refused, as for examples")
    model, k, bound = mlp(), 4, 0.3
    x = data(20, 6).double()
    mask = torch.tensor([True, True, False, True, True])
    options = {"max_grad_norm": bound, "clipping": clipping, "method": method, "mask": mask}

    def total(x, weights):
        found = dpt.clipped_grad_sum(
            loss_fn, model, x, rows_per_unit=k, row_weights=weights, **options
        )
        return torch.cat([g.flatten() for g in found.grads.values()]), found

    weights = weights_of(5, k) * 50
    before, found = total(x, weights)
    assert found.norms[2] == found.losses[2] == 0
    distances = []
    for value in (data(k, 6, seed=9).double() * 1e6, float("nan"), x[4:8] * -3):
        other = x.clone()
        other[4:8] = value
        distances.append(float((total(other, weights)[0] - before).norm()))
        other = x.clone()
        other[8:12] = value  # of the masked unit
        assert torch.equal(total(other, weights)[0], before)
    assert max(distances) <= 2 * bound * (1 + 1e-10)
    assert max(distances) > bound * 0.5


def test_chunks_hold_whole_units():
    model, x, sizes = mlp(), data(40, 6).double(), []

    def counted(model, x):
        sizes.append(len(x))
        return loss_fn(model, x)

    options = {"max_grad_norm": 0.5, "rows_per_unit": 4}
    whole = dpt.clipped_grad_sum(counted, model, x, **options)
    for limit in ({"physical_batch_size": 3}, {"max_memory": 3000}):
        sizes.clear()
        found = dpt.clipped_grad_sum(counted, model, x, **options, **limit)
        assert max(sizes) < 40
        assert all(size % 4 == 0 for size in sizes)
        torch.testing.assert_close(found.norms, whole.norms)
        torch.testing.assert_close(found.grads, whole.grads)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [None, 2])
def test_auxiliary_outputs_hold_rows_or_units(method, size):
    def with_aux(model, x):
        out = model(x)
        return out.sum(1), {"rows": out, "units": out.view(-1, 2, 3).sum(1)}

    model, x = mlp(), data(10, 6).double()
    found = dpt.clipped_grad_sum(
        with_aux,
        model,
        x,
        max_grad_norm=1.0,
        method=method,
        has_aux=True,
        rows_per_unit=2,
        physical_batch_size=size,
    )
    torch.testing.assert_close(found.aux["rows"], model(x))
    torch.testing.assert_close(found.aux["units"], model(x).view(5, 2, 3).sum(1))
    torch.testing.assert_close(found.losses, model(x).sum(1).view(5, 2).mean(1))


@pytest.mark.parametrize("method", METHODS)
def test_padding_may_hold_anything(method):
    """Rows of weight 0 are as if they were not there, also in units without any other row."""
    model, x, weights = mlp(), data(12, 6).double(), weights_of(4, 3)
    weights[6:9] = 0
    truth = truth_of(model, loss_fn, 3, weights, x)
    x[weights == 0] = torch.tensor(float("nan")).double()
    x[7] = float("-inf")
    found = dpt.clipped_grad_sum(
        loss_fn,
        model,
        x,
        max_grad_norm=1e9,
        method=method,
        rows_per_unit=3,
        row_weights=weights,
    )
    assert found.norms[2] == 0
    for name, g in truth.items():
        np.testing.assert_allclose(found.grads[name], g.sum(0), rtol=1e-9, atol=1e-12)


def test_no_units_call_nothing():
    found = dpt.clipped_grad_sum(
        lambda m, x: pytest.fail("called"),
        mlp(),
        data(0, 6).double(),
        max_grad_norm=1.0,
        rows_per_unit=4,
        row_weights=torch.zeros(0),
    )
    assert found.norms.shape == (0,)
    assert not any(g.any() for g in found.grads.values())


ROWS = data(8, 6).double()
REFUSED = [
    ({"rows_per_unit": 3}, ValueError, "holds 8 rows, which split a unit of 3"),
    ({"rows_per_unit": 0}, ValueError, "rows_per_unit=0 is out of range"),
    ({"rows_per_unit": 2.5}, TypeError, "rows_per_unit=2.5 is a float"),
    (
        {"row_weights": torch.ones(4, 2)},
        ValueError,
        r"shape \(4, 2\). Expected \(8,\): one weight per",
    ),
    ({"row_weights": [1.0] * 8}, TypeError, "row_weights is a list. Expected .8,.: one weight"),
    ({"row_weights": torch.ones(8, dtype=torch.int64)}, TypeError, "row_weights is torch.int64"),
    ({"row_weights": torch.full((8,), torch.nan)}, ValueError, "holds a weight that is not finite"),
    ({"rows_per_unit": None, "row_weights": torch.ones(8)}, ValueError, "without rows_per_unit"),
]


@pytest.mark.parametrize(("options", "error", "match"), REFUSED)
def test_wrong_units_and_weights_are_refused(options, error, match):
    options = {"rows_per_unit": 2, **options}
    for call in (dpt.per_sample_grads, dpt.per_sample_norms, dpt.clipped_grad_sum):
        bound = {"max_grad_norm": 1.0} if call is dpt.clipped_grad_sum else {}
        with pytest.raises(error, match=match):
            call(loss_fn, mlp(), ROWS, **options, **bound)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("loss", "weights", "error", "match"),
    [
        (lambda m, x: m(x).sum(), None, ValueError, r"shape \(\) for \d rows in units of 2"),
        (lambda m, x: m(x), None, ValueError, r"one loss per row, or \(\d,\), one per unit"),
        (preferences, torch.ones(8), ValueError, "since row_weights weight the losses of rows"),
        (lambda m, x: m(x).argmax(1), None, TypeError, "returned torch.int64"),
        (lambda m, x: m(x).sum(1).tolist(), None, TypeError, "returned a list"),
    ],
    ids=["number", "matrix", "unit losses with weights", "integers", "list"],
)
def test_losses_of_neither_rows_nor_units_are_refused(method, loss, weights, error, match):
    with pytest.raises(error, match=match):
        dpt.per_sample_norms(loss, mlp(), ROWS, rows_per_unit=2, row_weights=weights, method=method)

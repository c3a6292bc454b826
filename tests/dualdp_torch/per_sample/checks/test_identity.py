# SPDX-License-Identifier: Apache-2.0
"""The random identity: when a batch is compared with its definition, with what, to which end."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
import dualdp_torch.per_sample.numbers
from dualdp import ExactnessError
from dualdp_torch.per_sample import clip, gradients
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.rules import RULES
from tests.dualdp_torch.checks import Ways, data
from tests.dualdp_torch.per_sample.loops import (
    BY_METHOD,
    CAPTURED,
    Everything,
    Model,
    linear,
    rule_with,
    scaled_rows,
    squares,
)

CALLS = {
    "grads": dpt.per_sample_grads,
    "norms": dpt.per_sample_norms,
    "sum": partial(dpt.clipped_grad_sum, max_grad_norm=0.1),
}
CLIPPING = ("flat", "per_layer", "automatic")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def clipped(x, model=None, **options):
    options = {"max_grad_norm": 0.1, **options}
    return dpt.clipped_grad_sum(squares, model or net(), x, **options)


@pytest.fixture
def checks(monkeypatch):
    """What is compared: (reference, numbers, verdict) of every check."""
    seen, real = [], identity.check

    def watched(reference, numbers, *arguments, **options):
        compared = real(reference, numbers, *arguments, **options)
        seen.append((reference, numbers, compared))
        return compared

    monkeypatch.setattr(identity, "check", watched)
    return seen


@pytest.fixture
def plant(monkeypatch):
    """Plant a fault in the rule of a linear layer."""
    return lambda *fault: monkeypatch.setitem(RULES, F.linear, rule_with(*fault))


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_new_is_checked_and_the_next_call_is_not(call, checks):
    model, x = net(), data(4, 6)
    for check, expected in (("first", 1), ("first", 1), ("always", 2)):
        call(squares, model, x, check=check)
        assert len(checks) == expected
    call(squares, model, data(9, 6))  # n is no part of the shapes
    assert len(checks) == 2
    call(squares, model, data(4, 2, 6))  # shapes
    call(lambda m, x: m(x).sum(1), model, x)  # loss
    call(squares, model, x, method="book_keeping")
    call(squares, model.eval(), x)  # training flags
    with torch.autocast("cpu", torch.bfloat16):
        call(squares, model, x)
    model[0].weight.requires_grad_(False)
    call(squares, model, x)
    call(squares, model.double(), x.double())
    assert len(checks) == 9
    assert all(compared for *_, compared in checks)


def test_clipping_is_part_of_what_is_known(checks):
    model = net()
    for clipping in (*CLIPPING, "flat"):
        clipped(data(4, 6), model, clipping=clipping)
    assert len(checks) == 3


def test_the_loop_is_the_definition_and_off_is_off(checks):
    """Of the loop, and of one example, only what a forward leaves behind is compared."""
    model, x = net(), data(4, 6)
    for call in CALLS.values():
        call(squares, model, x, method="loop")
        call(squares, model, data(1, 6))
        call(squares, model, x, check="off")
    assert [numbers.is_definition for _, numbers, _ in checks] == [True] * 6


def test_no_examples_and_padding_do_not_use_up_the_first_call(checks):
    model, x = net(), data(4, 6)
    clipped(x[:0], model)
    clipped(x, model, mask=torch.zeros(4, dtype=torch.bool))
    assert not checks
    clipped(x * torch.nan, model)
    clipped(x, model, mask=torch.tensor([False, False, True, False]))
    assert [compared for *_, compared in checks] == [False, True]


def test_chunks_are_checked_once_and_not_where_all_is_padding(checks):
    x = data(6, 6)
    clipped(x, mask=torch.arange(6) > 1, physical_batch_size=2)
    assert len(checks) == 1
    assert torch.equal(checks[0][0].batch.tensors()[0], x[2:4])


def test_rows_that_contribute_nothing_are_left_out_by_position(checks):
    """nan and padding beside good rows: zero times nan would be nan."""
    x = data(8, 6)
    x[2], x[5] = torch.nan, torch.inf
    for _ in range(4):
        clipped(x, mask=torch.arange(8) != 5, check="always")
    assert [compared for *_, compared in checks] == [True] * 4


@pytest.mark.parametrize("method", BY_METHOD)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_checks_change_nothing(call, method):
    """Results, generators, buffers, gradients: bit for bit what they are without checks."""
    x, found = data(8, 6), []
    models = [Everything(counts=method != "vmap") for _ in range(2)]  # vmap writes no buffer
    models[1].load_state_dict(models[0].state_dict())
    for check, model in zip(("off", "always"), models, strict=True):
        model.seed(5)
        model.second.weight.grad = torch.ones(3, 8)
        results = [call(squares, model, x, method=method, check=check) for _ in range(2)]
        assert torch.equal(model.second.weight.grad, torch.ones(3, 8))
        assert model.first.weight.grad is None
        found.append((results, model.drawn(), model.calls))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("method", CAPTURED)
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_in_one_row_of_eight_is_found_by_the_sum(name, method, plant):
    """Row 0 alone is wrong: two examples are looked at, and the sum over all."""
    plant(scaled_rows(2, 0), "grads", "bias")
    call, model, x = CALLS[name], net(), data(8, 6)

    def often():  # two norms are looked at, and no sum
        for _ in range(60 if name == "norms" else 6):
            call(squares, model, x, method=method, check="always")

    with pytest.raises(ExactnessError) as found:
        often()
    assert "0.bias" in found.value.parameters or not found.value.parameters
    call(squares, model, x, method=method, check="off")  # which misses it


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_auto_goes_on_by_vmap_where_a_rule_is_wrong(call, plant, monkeypatch, caplog):
    """On the first batch of a kind, which is tried; the choice is kept."""
    plant(scaled_rows(2, 0), "grads", "bias")
    model, x, ways = net(), data(8, 6), Ways(monkeypatch)
    found = [call(squares, model, x) for _ in range(2)]
    assert ways.taken[-2:] == ["by_vmap"] * 2
    assert ways.taken.count("Captured") <= 3
    assert "Sequential goes through vmap: A spot check failed" in caplog.text
    torch.testing.assert_close(found, [call(squares, model, x, method="loop")] * 2)


def test_auto_goes_on_by_the_loop_where_vmap_cannot(monkeypatch):
    def reads(self, x):
        return self.layer(x) if float(x.detach().sum()) > 1e9 else x @ self.layer.weight.T.sin()

    model, x, ways = Model(reads, layer=linear()), data(8, 6), Ways(monkeypatch)
    model.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: g / g.norm()) and out)
    found = dpt.per_sample_norms(squares, model, x)
    assert ways.taken[-1] == "by_loop"
    torch.testing.assert_close(found, dpt.per_sample_norms(squares, model, x, method="loop"))


def test_a_fault_in_the_sum_alone_is_found(monkeypatch):
    """Norms and single contributions are right; the product over the batch leaves out one row."""
    real = gradients.Captured.sums

    def sums(self, factors, rows, reduce=None):
        if rows is None:
            factors = {k: f.masked_fill(torch.arange(8) == 3, 0) for k, f in factors.items()}
        return real(self, factors, rows, reduce)

    monkeypatch.setattr(gradients.Captured, "sums", sums)
    with pytest.raises(ExactnessError, match="clipped_grad_sum .* differs from plain"):
        clipped(data(8, 6), method="book_keeping")


@pytest.mark.parametrize("clipping", CLIPPING)
def test_a_fault_of_twice_the_tolerance_is_found_and_less_is_not(clipping, monkeypatch):
    real = clip.factors_for

    def factors(share):
        return lambda kind, norms, bound, *, xp: (
            real(kind, norms, bound, xp=xp) * (1 + share * 1e-3 if norms.dim() else 1)
        )

    for share in (0.4, 2.5):
        monkeypatch.setattr(clip, "factors_for", factors(share))
        if share < 1:
            clipped(data(8, 6), max_grad_norm=1e-3, clipping=clipping)
            continue
        with pytest.raises(ExactnessError, match="by 1e-03 of the clipping bound"):
            clipped(data(8, 6), max_grad_norm=1e-3, clipping=clipping)


def test_a_failure_says_nothing_of_the_data_and_what_to_do(monkeypatch):
    right = clip.norms_of
    twice = lambda *a: tuple(x * 2 if torch.is_tensor(x) else x for x in right(*a))  # noqa: E731
    monkeypatch.setattr(dualdp_torch.per_sample.numbers, "norms_of", twice)
    with pytest.raises(ExactnessError) as caught:
        dpt.per_sample_norms(squares, net(), data(8, 6) * 1.2345)
    error = caught.value
    assert 'Use method="loop"' in str(error)
    assert 0.4 < error.unprotected_details["error"] < 0.6
    assert not re.search(r"\d\.\d", str(error))
    assert error.__cause__ is None


@pytest.mark.parametrize("clipping", CLIPPING)
def test_one_halved_row_of_1024_is_refused_on_the_first_batch(clipping, plant):
    plant(scaled_rows(0.5, 700))
    x = F.normalize(data(1024, 6), dim=1)  # norms alike, so that no row is a suspect
    with pytest.raises(ExactnessError, match="over the batch differs"):
        clipped(x, max_grad_norm=1e-3, method="materialize", clipping=clipping)
    with pytest.raises(ExactnessError, match="over the batch differs"):  # by the signed sum alone
        dpt.per_sample_grads(squares, net(), x, method="materialize")


@pytest.mark.parametrize("seed", [0, 3])
def test_one_halved_row_of_64_is_refused_under_bfloat16(seed, plant):
    plant(scaled_rows(0.5, seed))
    x = F.normalize(data(64, 6, seed=seed), dim=1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ExactnessError):
        clipped(x, net(seed), max_grad_norm=1e-3, method="materialize")


@pytest.mark.parametrize("row", [0, 7, 15])
def test_a_short_gram_norm_in_one_row_of_16_is_refused(row, plant):
    plant(scaled_rows(0.8, row), "sq_norms")
    with pytest.raises(ExactnessError, match="of one example differs"):
        clipped(data(16, 3, 40), nn.Linear(40, 30), method="book_keeping")


FAULTS = {
    "swapped rows": (lambda g: g[[0, 2, 1, *range(3, 16)]], "weight", {}),
    "a lost bias": (torch.zeros_like, "bias", {}),
    "a row of a unit": (scaled_rows(0.5, 5), "weight", {"rows_per_unit": 2}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_few_rows_are_refused(name, plant):
    """A row of the identity is a unit of K rows."""
    fault, slot, options = FAULTS[name]
    plant(fault, "grads", slot)
    with pytest.raises(ExactnessError):
        clipped(data(16, 6), max_grad_norm=0.01, method="materialize", **options)


# ---------------------------------------------------------------------- no false alarm


@pytest.mark.parametrize("method", BY_METHOD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_that_the_loss_amplifies_is_no_fault(method, dtype):
    """Differences of numbers that are nearly equal."""

    def ill(self, x):
        h = self.layer(x)
        return (1e4 * (h + 1e3) - 1e7).tanh() * h

    model = Model(ill, layer=linear(40)).to(dtype)
    for _ in range(3):
        clipped(data(64, 6).to(dtype), model, method=method, check="always")


# ---------------------------------------------------------------------- hooks (67)


def hooked(hook, on_layer):
    """Three layers, with a hook on a gradient in between: of an activation, or of a layer."""

    def run(self, x):
        h = self.second(self.first(x).tanh())
        h = h if on_layer else h.tanh()
        if h.requires_grad:
            h.register_hook(hook)
        return self.third(h.sin())

    return Model(run, first=linear(5), second=nn.Linear(5, 4), third=nn.Linear(4, 3))


def of_each_alone(model, x):
    """Name -> (n, *shape): plain autograd, one example at a time."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    each = [torch.autograd.grad(squares(model, row).sum(), parameters) for row in x.split(1)]
    return {name: torch.stack(grads) for name, *grads in zip(names, *each, strict=True)}


HOOKS = {
    "norm": lambda g: g / g.norm(),
    "largest": lambda g: g / (1 + g.abs().max()),
    "of a row": lambda g: g / g.norm(dim=1, keepdim=True),
    "reversed": lambda g: -g,
}


@pytest.mark.parametrize("method", BY_METHOD)
@pytest.mark.parametrize("on_layer", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_backward_that_a_hook_changes_is_that_of_each_alone(hook, on_layer, method, monkeypatch):
    """`g / |g|` of a batch is not that of its examples: found by trial, or refused."""
    model, x, ways = hooked(HOOKS[hook], on_layer), data(8, 6), Ways(monkeypatch)
    try:
        found = dpt.per_sample_grads(squares, model, x, method=method)
    except ExactnessError:
        assert method in CAPTURED
        assert not on_layer
        return
    torch.testing.assert_close(found, of_each_alone(model, x), rtol=1e-4, atol=1e-5)
    if hook == "reversed" and method == "auto" and not on_layer:  # of single rows: costs nothing
        assert set(ways.taken) == {"Captured"}

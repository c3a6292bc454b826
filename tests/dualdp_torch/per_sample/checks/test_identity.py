# SPDX-License-Identifier: Apache-2.0
"""The random identity: when a batch is compared with its definition, with what, to which end."""

import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
import dualdp_torch.per_sample.numbers
from dualdp import ExactnessError
from dualdp_torch.per_sample import gradients
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.rules import RULES
from dualdp_torch.rules.together import sq_norms_of
from tests.dualdp_torch.checks import Ways, data, ids
from tests.dualdp_torch.loop import plan, start

CALLS = {
    "grads": dpt.per_sample_grads,
    "norms": dpt.per_sample_norms,
    "sum": lambda *a, **k: dpt.clipped_grad_sum(*a, max_grad_norm=0.1, **k),
}
CAPTURED = ("auto", "book_keeping", "two_pass", "materialize")


def squares(model, x):
    return model(x).flatten(1).square().sum(1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


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
def bias_is_off(monkeypatch):
    """A fault in the rule of a linear layer's bias: one example in eight has it twice."""

    def grads(acts, grads_out, **options):
        right = RULES_RIGHT.grads["bias"](acts, grads_out, **options).clone()
        right[::8] *= 2
        return right

    wrong = replace(
        RULES_RIGHT,
        grads={**RULES_RIGHT.grads, "bias": grads},
        sums={name: f for name, f in RULES_RIGHT.sums.items() if name != "bias"},
    )
    monkeypatch.setitem(RULES, F.linear, wrong)


RULES_RIGHT = RULES[F.linear]


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize("call", CALLS)
def test_the_first_call_is_checked_and_the_next_is_not(call, checks):
    model, x = net(), data(4, 6)
    for expected in (1, 1):
        CALLS[call](squares, model, x)
        assert len(checks) == expected
    CALLS[call](squares, model, x, check="always")
    assert len(checks) == 2
    CALLS[call](squares, model, data(9, 6))  # n is no part of the shapes
    assert len(checks) == 2


@pytest.mark.parametrize("call", CALLS)
def test_what_is_new_is_checked(call, checks):
    model, x = net(), data(4, 6)
    CALLS[call](squares, model, x)
    CALLS[call](squares, model, data(4, 2, 6))  # shapes
    CALLS[call](lambda m, x: m(x).sum(1), model, x)  # loss
    CALLS[call](squares, model, x, method="book_keeping")
    CALLS[call](squares, model.eval(), x)  # training flags
    with torch.autocast("cpu", torch.bfloat16):
        CALLS[call](squares, model, x)
    model[0].weight.requires_grad_(False)
    CALLS[call](squares, model, x)
    CALLS[call](squares, model.double(), x.double())
    assert len(checks) == 8
    assert all(compared for *_, compared in checks)


def test_clipping_is_part_of_what_is_known(checks):
    model, x = net(), data(4, 6)
    for clipping in ("flat", "per_layer", "automatic", "flat"):
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=0.1, clipping=clipping)
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
    options = {"max_grad_norm": 0.1}
    dpt.clipped_grad_sum(squares, model, x[:0], **options)
    dpt.clipped_grad_sum(squares, model, x, mask=torch.zeros(4, dtype=torch.bool), **options)
    assert not checks
    dpt.clipped_grad_sum(squares, model, x * torch.nan, **options)
    assert [compared for *_, compared in checks] == [False]
    mask = torch.tensor([False, False, True, False])
    dpt.clipped_grad_sum(squares, model, x, mask=mask, **options)
    assert [compared for *_, compared in checks] == [False, True]


def test_chunks_are_checked_once_and_not_where_all_is_padding(checks):
    model, x = net(), data(6, 6)
    mask = torch.tensor([False, False, True, True, True, True])
    dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0, mask=mask, physical_batch_size=2)
    assert len(checks) == 1
    assert torch.equal(checks[0][0].batch.tensors()[0], x[2:4])


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="check='sometimes' is unknown. Expected one of always"):
        dpt.per_sample_norms(squares, net(), data(4, 6), check="sometimes")


# ---------------------------------------------------------------------- nothing changes


class Everything(nn.Module):
    """Dropout, draws from every generator, and a buffer that counts."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x):
        if self.counts:
            self.calls += 1
        h = F.dropout(self.layer(x).tanh(), 0.5)
        h = h + torch.rand(h.shape, generator=self.own)
        scales = [random.random() for _ in h], np.random.rand(len(h))  # noqa: NPY002
        return self.head(h * torch.tensor(np.array(scales), dtype=h.dtype).sum(0)[:, None])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("call", CALLS)
def test_checks_change_nothing(call, method):
    """Results, generators, buffers, gradients: bit for bit what they are without checks."""
    x, found = data(8, 6), []
    torch.manual_seed(0)
    models = [Everything(counts=method != "vmap") for _ in range(2)]  # vmap writes no buffer
    models[1].load_state_dict(models[0].state_dict())
    for check, model in zip(("off", "always"), models, strict=True):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
        model.own.manual_seed(5)
        model.head.weight.grad = torch.ones(3, 8)
        results = [CALLS[call](squares, model, x, method=method, check=check) for _ in range(2)]
        drawn = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        own = torch.rand(3, generator=model.own)
        assert torch.equal(model.head.weight.grad, torch.ones(3, 8))
        assert model.layer.weight.grad is None
        found.append((results, drawn, own, model.calls))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# ---------------------------------------------------------------------- faults


@pytest.mark.usefixtures("bias_is_off")
@pytest.mark.parametrize("method", CAPTURED[1:])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_in_one_row_of_eight_is_found_by_the_sum(call, method):
    """Row 0 alone is wrong: two examples are looked at, and the sum over all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x = data(8, 6)
    found = []
    for _ in range(60 if call == "norms" else 6):  # two norms are looked at, and no sum
        try:
            CALLS[call](squares, model, x, method=method, check="always")
        except ExactnessError as error:
            found.append(error)
    assert found
    assert all("0.bias" in e.parameters or not e.parameters for e in found)
    CALLS[call](squares, model, x, method=method, check="off")  # which misses it


@pytest.mark.usefixtures("bias_is_off")
@pytest.mark.parametrize("call", CALLS)
def test_auto_goes_on_by_vmap_where_a_rule_is_wrong(call, monkeypatch, caplog):
    """On the first batch of a kind, which is tried; the choice is kept."""
    model, x, ways = net(), data(8, 6), Ways(monkeypatch)
    found = [CALLS[call](squares, model, x) for _ in range(2)]
    assert ways.taken[-2:] == ["by_vmap"] * 2
    assert ways.taken.count("Captured") <= 3
    assert "Sequential goes through vmap: A spot check failed" in caplog.text
    expected = CALLS[call](squares, model, x, method="loop")
    torch.testing.assert_close(found, [expected] * 2)


def test_auto_goes_on_by_the_loop_where_vmap_cannot(monkeypatch):
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if float(x.detach().sum()) > 1e9 else x @ self.weight.T.sin()

    model, x, ways = Reads(6, 3), data(8, 6), Ways(monkeypatch)
    model.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: g / g.norm()) and out)
    found = dpt.per_sample_norms(squares, model, x)
    assert ways.taken[-1] == "by_loop"
    torch.testing.assert_close(found, dpt.per_sample_norms(squares, model, x, method="loop"))


def test_a_fault_in_the_sum_alone_is_found(monkeypatch):
    """Norms and single contributions are right; the product over the batch leaves out one row."""
    real = gradients.Captured.sums

    def sums(self, factors, rows, reduce=None):
        if rows is None:
            left_out = torch.arange(8) == 3
            factors = {name: f.masked_fill(left_out, 0) for name, f in factors.items()}
        return real(self, factors, rows, reduce)

    monkeypatch.setattr(gradients.Captured, "sums", sums)
    with pytest.raises(ExactnessError, match="clipped_grad_sum .* differs from plain"):
        dpt.clipped_grad_sum(squares, net(), data(8, 6), max_grad_norm=0.1, method="book_keeping")
    dpt.clipped_grad_sum(squares, net(), data(8, 6), max_grad_norm=0.1, check="off")


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("share", [0.4, 2.5])
def test_a_fault_of_twice_the_tolerance_is_found_and_less_is_not(clipping, share, monkeypatch):
    real = dualdp_torch.per_sample.clip.factors_for

    def factors(clipping, norms, bound, *, xp):
        return real(clipping, norms, bound, xp=xp) * (1 + share * 1e-3 if norms.dim() else 1)

    monkeypatch.setattr(dualdp_torch.per_sample.clip, "factors_for", factors)
    call = lambda: dpt.clipped_grad_sum(  # noqa: E731
        squares, net(), data(8, 6), max_grad_norm=1e-3, clipping=clipping
    )
    if share < 1:
        call()
        return
    with pytest.raises(ExactnessError, match="by 1e-03 of the clipping bound"):
        call()


def test_a_failure_says_nothing_of_the_data_and_what_to_do(monkeypatch):
    right = dualdp_torch.per_sample.clip.norms_of
    twice = lambda *a: tuple(x * 2 if torch.is_tensor(x) else x for x in right(*a))  # noqa: E731
    monkeypatch.setattr(dualdp_torch.per_sample.numbers, "norms_of", twice)
    with pytest.raises(ExactnessError) as caught:
        dpt.per_sample_norms(squares, net(), data(8, 6) * 1.2345)
    error = caught.value
    assert 'Use method="loop"' in str(error)
    assert 0.4 < error.unprotected_details["error"] < 0.6
    assert not re.search(r"\d\.\d", str(error))
    assert error.__cause__ is None


def rule_with(fault, kind="grads", slot="weight"):
    """The rule of a linear layer with a fault in the gradients, or the norms, of one slot."""
    table = getattr(RULES_RIGHT, kind)

    def wrong(acts, grads_out, **options):
        return fault(table[slot](acts, grads_out, **options))

    rest = {"sums": {}} if kind == "grads" else {}
    return replace(RULES_RIGHT, pair=None, **rest, **{kind: {**table, slot: wrong}})


def halved(row):
    def fault(grads):
        grads = grads.clone()
        grads[row] /= 2
        return grads

    return fault


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_one_halved_row_of_1024_is_refused_on_the_first_batch(clipping, monkeypatch):
    monkeypatch.setitem(RULES, F.linear, rule_with(halved(700)))
    x = F.normalize(data(1024, 6), dim=1)  # norms alike, so that no row is a suspect
    with pytest.raises(ExactnessError, match="over the batch differs"):
        dpt.clipped_grad_sum(
            squares, net(), x, max_grad_norm=1e-3, method="materialize", clipping=clipping
        )


@pytest.mark.parametrize("seed", range(5))
def test_one_halved_row_of_64_is_refused_under_bfloat16(seed, monkeypatch):
    monkeypatch.setitem(RULES, F.linear, rule_with(halved(seed)))
    x = F.normalize(data(64, 6, seed=seed), dim=1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ExactnessError):
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1e-3, method="materialize")


@pytest.mark.parametrize("row", [0, 7, 15])
def test_a_short_gram_norm_in_one_row_of_16_is_refused(row, monkeypatch):
    def short(described):
        squares, error = sq_norms_of(described, 16)
        return squares.clone().index_fill_(0, torch.tensor([row]), float(squares[row] * 0.8)), error

    monkeypatch.setitem(RULES, F.linear, rule_with(short, "sq_norms"))
    model = nn.Linear(40, 30)
    loss = lambda m, x: m(x).square().sum((1, 2))  # noqa: E731
    with pytest.raises(ExactnessError, match="of one example differs"):
        dpt.clipped_grad_sum(loss, model, data(16, 3, 40), max_grad_norm=0.1, method="book_keeping")


def test_two_swapped_rows_and_a_lost_bias_are_refused(monkeypatch):
    swap = torch.tensor([0, 2, 1, *range(3, 16)])
    for fault, slot in ((lambda g: g[swap], "weight"), (torch.zeros_like, "bias")):
        with monkeypatch.context() as patch:
            patch.setitem(RULES, F.linear, rule_with(fault, slot=slot))
            with pytest.raises(ExactnessError):
                dpt.clipped_grad_sum(
                    squares, net(), data(16, 6), max_grad_norm=0.1, method="book_keeping"
                )


def test_a_fault_of_units_is_found_by_the_unit(monkeypatch):
    """A row of the identity is a unit of K rows."""
    monkeypatch.setitem(RULES, F.linear, rule_with(halved(5)))
    call = partial(dpt.clipped_grad_sum, squares, net(), data(16, 6), max_grad_norm=0.01)
    with pytest.raises(ExactnessError):
        call(rows_per_unit=2, method="materialize")


def test_rows_that_contribute_nothing_are_left_out_by_position(checks):
    """nan and padding beside good rows: zero times nan would be nan."""
    x = data(8, 6)
    x[2], x[5] = torch.nan, torch.inf
    mask = torch.arange(8) != 5
    for _ in range(4):
        dpt.clipped_grad_sum(squares, net(), x, max_grad_norm=0.1, mask=mask, check="always")
    assert [compared for *_, compared in checks] == [True] * 4


# ---------------------------------------------------------------------- no false alarm


class Ill(nn.Module):
    """A loss that amplifies rounding: differences of numbers that are nearly equal."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 40)

    def forward(self, x):
        h = self.layer(x)
        return (1e4 * (h + 1e3) - 1e7).tanh() * h


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_that_the_loss_amplifies_is_no_fault(method, dtype):
    torch.manual_seed(0)
    model, x = Ill().to(dtype), data(64, 6).to(dtype)
    for _ in range(3):
        dpt.clipped_grad_sum(squares, model, x, max_grad_norm=0.1, method=method, check="always")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("call", CALLS)
def test_low_precision_is_compared_as_such(call, method):
    model, tokens = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7)), ids(7, 8, 5)
    model = model.bfloat16()
    loss = lambda m, i: m(i).float().flatten(1).square().sum(1)  # noqa: E731
    for _ in range(3):
        CALLS[call](loss, model, tokens, method=method, check="always")


class Hooked(nn.Module):
    """Three layers, with a hook on a gradient in between: of an activation, or of a layer."""

    def __init__(self, hook, on_layer=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)])
        self.hook, self.on_layer = hook, on_layer

    def forward(self, x):
        h = self.layers[1](self.layers[0](x).tanh())
        h = h if self.on_layer else h.tanh()
        if h.requires_grad:
            h.register_hook(self.hook)
        return self.layers[2](h.sin())


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("on_layer", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_backward_that_a_hook_changes_is_that_of_each_alone(hook, on_layer, method):
    """`g / |g|` of a batch is not that of its examples: found by trial, or refused."""
    model, x = Hooked(HOOKS[hook], on_layer), data(8, 6)
    try:
        found = dpt.per_sample_grads(squares, model, x, method=method)
    except ExactnessError:
        assert method in CAPTURED[1:]
        assert not on_layer
        return
    torch.testing.assert_close(found, of_each_alone(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["auto", "ghost", "ew", "functorch"])
@pytest.mark.parametrize("on_layer", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_right_in_an_engine_or_refused(hook, on_layer, mode):
    model, x = Hooked(HOOKS[hook], on_layer), data(8, 6)
    expected = of_each_alone(model, x)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in expected.values()]).norm(dim=0)
    bound = float(norms.median())
    factors = (bound / norms).clamp(max=1)
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(x), 8)),
        plan=plan(
            **{"num_examples": 8, "expected_batch_size": 8, "sampler": "shuffle", "num_steps": 1},
            **{"max_grad_norm": bound, "noise_multiplier": 1e-6},
        ),
        grad_sample_mode=mode,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for (rows,) in loader:
        squares(model, rows).mean().backward()
        try:
            optimizer.step()
        except ExactnessError:
            assert mode in ("ghost", "ew")
            assert not on_layer
            return
    for name, p in model.named_parameters():
        step = torch.einsum("n,n...->...", factors, expected[name]) / 8
        torch.testing.assert_close(before[name] - p.detach(), step, rtol=1e-3, atol=1e-4 * bound)


def test_a_hook_of_single_rows_costs_no_captured_gradient(monkeypatch):
    model, x = Hooked(lambda g: -g / 2), data(8, 6)
    ways = Ways(monkeypatch)
    found = dpt.per_sample_grads(squares, model, x, check="off")
    assert ways.taken == ["Captured"]
    torch.testing.assert_close(found, of_each_alone(model, x), rtol=1e-4, atol=1e-5)

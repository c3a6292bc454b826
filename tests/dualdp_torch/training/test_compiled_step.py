# SPDX-License-Identifier: Apache-2.0
"""`engine.compile`: compiled graphs in the place of the recorded forward and backward."""

import collections

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp._validate import AccountingError, UnsupportedLayerError
from dualdp.exactness import ExactnessError
from dualdp.plan.schedules import AdaptiveNorm
from dualdp_torch.per_sample import compiled as compiled_sums
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import build, dataset, plan, start
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about torch's own functions


def loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def compiled(engine, loss_fn=loss, **options):
    return engine.compile(loss_fn, backend="eager", **options)


def double(kind=torch.optim.SGD):
    model, _, loader = build()
    return model.double(), kind(model.parameters(), lr=0.1), loader


def run(parts=None, **options):
    """Engine, model, optimizer and loader of a small plan."""
    return start(parts, plan=plan(), **options)


def train_compiled(step, optimizer, loader):
    """The user's loop with a compiled step; the losses of every batch."""
    losses = []
    for x, y, _ in loader:
        optimizer.zero_grad()
        losses.append(step(x, y))
        optimizer.step()
    return losses


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def in_float64(model, x, y):
    return F.cross_entropy(model(x.double()), y, reduction="none")


RUNS = {
    "poisson": {},
    "per_layer": {"clipping": "per_layer"},
    "parts": {"physical_batch_size": 5},
    "automatic": {"clipping": "automatic"},
    "adaptive": {"max_grad_norm": AdaptiveNorm(0.5, quantile=0.5, learning_rate=1.0)},
    "empty draws": {"expected_batch_size": 1},
    "fixed size": {"sampler": "fixed_size", "neighboring_relation": "replace", "accountant": "pld"},
}


@pytest.mark.parametrize("kind", first(1, [torch.optim.SGD, torch.optim.AdamW, dpt.AdamBC]))
@pytest.mark.parametrize("name", RUNS)
def test_a_compiled_run_ends_where_the_recorded_one_ends(name, kind):
    ends = []
    for is_compiled in (True, False):
        chosen = plan(**RUNS[name])
        engine, model, optimizer, loader = start(double(kind), plan=chosen, checks=1.0)
        if is_compiled:
            step = compiled(engine, in_float64)
            train_compiled(step, optimizer, loader)
            assert len(step.sums.programs) == 1
            assert not step.sums.reasons
        else:
            for x, y, _ in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x.double()), y).backward()
                optimizer.step()
        ends.append((values(model), engine.get_epsilon(), engine.ledger.max_grad_norm))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-11, atol=1e-12)
    assert ends[0][1:] == ends[1][1:]


def test_a_run_may_change_between_the_two_ways_and_stages_are_there():
    first_way, second_way = [], []
    for ways, is_compiled in ((first_way, False), (second_way, True)):
        engine, model, optimizer, loader = start(plan=plan())
        step = compiled(engine)
        for index, (x, y, _) in enumerate(loader):
            if is_compiled and index % 2:
                step(x, y)
            else:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ways.append(engine.stages())
    for recorded, found in zip(first_way, second_way, strict=True):
        torch.testing.assert_close(recorded.unprotected_norms, found.unprotected_norms)
        torch.testing.assert_close(recorded.noisy_mean, found.noisy_mean)


def test_losses_are_those_of_the_examples_and_evaluation_is_left_alone():
    engine, model, optimizer, loader = run()
    step = compiled(engine)
    before = dict(vars(model)), list(model._forward_pre_hooks), list(model._forward_hooks)
    for x, y, _ in loader:
        optimizer.zero_grad()
        losses = step(x, y)
        with torch.no_grad():
            torch.testing.assert_close(losses, loss(model, x, y))
        assert before == (dict(vars(model)), [*model._forward_pre_hooks], [*model._forward_hooks])
        with torch.no_grad():
            model(x)
        optimizer.step()
        break


def test_what_has_no_graph_runs_eagerly_by_name():
    model = randomise(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=12)
    engine, model, optimizer, loader = run((model, optimizer, loader))
    step = compiled(engine)
    train_compiled(step, optimizer, loader)
    assert "random" in step.sums.reasons[0]
    assert engine.get_epsilon(delta=1e-5) > 0


# Checks.


class Doubled(compiled_sums.Program):
    """A compiler's fault from its third batch on: the first parameter's sum is twice too large."""

    calls = 0

    def __call__(self, request, inputs):
        found = super().__call__(request, inputs)
        Doubled.calls += 1
        if Doubled.calls > 2:
            found[0] = found[0] * 2
        return found


@pytest.mark.parametrize("checks", [1.0, 0])
def test_a_fault_that_begins_later_is_stopped_by_a_check_alone(checks, monkeypatch):
    monkeypatch.setattr(compiled_sums, "Program", Doubled)
    Doubled.calls = 0
    engine, model, optimizer, loader = run(checks=checks)
    step = compiled(engine)
    if not checks:
        train_compiled(step, optimizer, loader)
        return
    with pytest.raises(ExactnessError, match="Nothing was released for this batch"):
        train_compiled(step, optimizer, loader)
    with pytest.raises(AccountingError, match="not vouched for"):
        engine.get_epsilon(delta=1e-5)


def test_the_first_batch_of_a_graph_is_checked(monkeypatch):
    monkeypatch.setattr(compiled_sums, "Program", Doubled)
    Doubled.calls = 3
    engine, _, optimizer, loader = run(checks=1e-6)
    with pytest.raises(ExactnessError, match="A spot check failed"):
        train_compiled(compiled(engine), optimizer, loader)
    assert engine.ledger.position == 0


def test_a_loss_that_mixes_examples_is_refused():
    def mixed(model, x, y):
        out = model(x)
        return F.cross_entropy(out - out.mean(0), y, reduction="none")

    engine, _, optimizer, loader = run()
    with pytest.raises(UnsupportedLayerError, match="other examples"):
        train_compiled(compiled(engine, mixed), optimizer, loader)


# Mistakes.


def test_tensors_that_the_loop_computed_are_refused_without_checks_too():
    engine, _, optimizer, loader = run(checks=0)
    step = compiled(engine)
    for x, y, _ in loader:
        with pytest.raises(ValueError, match="not what the loader yielded"):
            step(x - x.mean(0), y)
        with pytest.raises(ValueError, match="not what the loader yielded"):
            step(x.sub_(x.mean(0)), y)
        break


def test_one_batch_has_one_sum():
    engine, model, optimizer, loader = run()
    step = compiled(engine)
    batches = iter(loader)
    x, y, _ = next(batches)
    step(x, y)
    with pytest.raises(RuntimeError, match="another call of the model"):
        step(x, y)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="another call of the model"):
        optimizer.step()
    optimizer.zero_grad()
    step(x, y)  # the same batch again, after the failure
    optimizer.step()
    x, y, _ = next(batches)
    model(x)
    with pytest.raises(RuntimeError, match="another call of the model"):
        step(x, y)


def test_runs_without_a_compiled_step_are_refused_by_name():
    with pytest.raises(AccountingError, match="not attached"):
        dpt.PrivacyEngine().compile(loss)
    engine, *_ = run(grad_sample_mode="vmap")
    with pytest.raises(ValueError, match="grad_sample_mode='vmap' has no compiled graph"):
        compiled(engine)
    engine, *_ = run(views=2, augment=lambda example, generator: example)
    with pytest.raises(ValueError, match="several rows"):
        compiled(engine)
    engine, _, _, loader = run()
    with pytest.raises(RuntimeError, match="without a batch of the loader"):
        compiled(engine)(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    engine, _, _, loader = run()
    x, y, _ = next(iter(loader))
    with pytest.raises(RuntimeError, match="yielded after engine.compile"):
        compiled(engine)(x, y)


def test_parameters_that_change_after_set_up_are_refused():
    engine, model, _, loader = run()
    model[0].bias.requires_grad_(False)
    step = compiled(engine)
    for x, y, _ in loader:
        with pytest.raises(RuntimeError, match="frozen, unfrozen or replaced after set-up"):
            step(x, y)
        break


@pytest.mark.parametrize("change", ["insert", "swap"])
def test_parameters_that_are_renamed_after_set_up_are_refused(change):
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]
    model = randomise(nn.Sequential(*layers))
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]
    engine, model, _, loader = run(parts)
    if change == "swap":
        model[0], model[2] = model[2], model[0]
    if change == "insert":
        model.insert(2, nn.Identity())
    step = compiled(engine)
    for x, y, _ in loader:
        with pytest.raises(RuntimeError, match="renamed after set-up"):
            step(x, y)
        break


COMPUTED = {  # the loss and what the loop does before, from which another example's row is known
    "number": (lambda m, x, y, s: loss(m, x / s, y), lambda x, y: (x, y, float(x.abs().max()))),
    "list": (lambda m, x, y, s: loss(m, x, y), lambda x, y: (x, y, x.mean(0).tolist())),
    "data": (loss, lambda x, y: x.data.sub_(x.mean(0)) is None or (x, y)),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_the_loop_computes_from_a_batch_is_refused(kind):
    loss_fn, before = COMPUTED[kind]
    engine, _, optimizer, loader = run(checks=1e-6)
    step = compiled(engine, loss_fn)

    def first_step():
        x, y, _ = next(iter(loader))
        step(*before(x, y))
        optimizer.step()

    with pytest.raises(ValueError, match="not what the loader yielded|What the model gets"):
        first_step()
    assert not len(engine.ledger)


def test_constants_are_no_arguments():
    engine, _, _, loader = run()
    step = compiled(engine, lambda m, x, y, s: loss(m, x * s, y))
    for x, y, _ in loader:
        with pytest.raises(ValueError, match="0.25 is not what the loader yielded"):
            step(x, y, 0.25)
        break


def test_autocast_around_the_step_runs_eagerly_by_name():
    ends, reasons = [], []
    for is_compiled in (True, False):
        engine, model, optimizer, loader = run()
        step = compiled(engine)
        for x, y, _ in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if is_compiled:
                    step(x, y)
                else:
                    loss(model, x, y).mean().backward()
            optimizer.step()
        ends.append(values(model))
        reasons += step.sums.reasons
    assert reasons == ["autocast is on around the call"]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-3)


def test_hooks_that_change_inside_a_step_stay_changed():
    engine, model, optimizer, loader = run()
    step, calls = compiled(engine), []

    def once(module, args, outputs):
        calls.append(1)
        handle.remove()

    handle = model.register_forward_hook(once)
    for x, y, _ in loader:
        step(x, y)
        optimizer.step()
    assert handle.id not in model._forward_hooks
    assert len(calls) == 1


def test_mappings_that_are_no_dict_and_a_detached_engine():
    model, optimizer, _ = build()

    def collate(items):
        x, y, _ = zip(*items, strict=True)
        return collections.UserDict(x=torch.stack(x), y=torch.stack(y))

    parts = model, optimizer, torch.utils.data.DataLoader(dataset(), 12, collate_fn=collate)
    engine, _, optimizer, loader = run(parts)
    step = compiled(engine)
    for batch in loader:
        step(batch["x"], batch["y"])
        optimizer.step()
    engine, _, _, loader = run()
    step = compiled(engine)
    for x, y, _ in loader:
        engine.detach()
        with pytest.raises(RuntimeError, match="without a batch of the loader"):
            step(x, y)
        break

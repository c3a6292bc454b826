# SPDX-License-Identifier: Apache-2.0
"""`engine.compile`, and `torch.compile` of a model or of the loop's step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import AccountingError, ExactnessError, UnsupportedLayerError
from dualdp.plan.schedules import AdaptiveNorm
from dualdp_torch.per_sample import compiled as compiled_sums
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import build, plan, start
from tests.dualdp_torch.training.runs import Open, end_of, fit, sgd

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about torch's own functions


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def compiled(engine, loss_fn=losses):
    return engine.compile(loss_fn, backend="eager")


def train(step, optimizer, loader):
    """The user's loop with a compiled step."""
    for x, y, _ in loader:
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (torch.optim.SGD, {}),
        (dpt.AdamBC, {"clipping": "per_layer"}),
        (torch.optim.SGD, {"physical_batch_size": 5}),
        (dpt.AdamBC, {"max_grad_norm": AdaptiveNorm(0.5, quantile=0.5, learning_rate=1.0)}),
        (torch.optim.SGD, {"expected_batch_size": 1, "clipping": "automatic"}),
    ],
    ids=["poisson", "per_layer", "parts", "adaptive", "empty draws"],
)
def test_a_compiled_run_ends_where_the_recorded_one_ends(kind, changes):
    ends = []
    for is_compiled in (True, False):
        model, _, loader = build()
        parts = model.double(), kind(model.parameters(), lr=0.1), loader
        engine, model, optimizer, loader = start(parts, plan=plan(**changes), checks=1.0)
        if is_compiled:
            step = compiled(engine, lambda m, x, y: losses(m, x.double(), y))
            train(step, optimizer, loader)
            assert (len(step.sums.programs), len(step.sums.reasons)) == (1, 0)
        else:
            fit(model, optimizer, loader, lambda m, x, y, _: losses(m, x.double(), y).mean())
        ends.append((end_of(model), engine.get_epsilon(), engine.ledger.max_grad_norm))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-11, atol=1e-12)
    assert ends[0][1:] == ends[1][1:]


def test_a_run_may_change_between_the_two_ways():
    seen = []
    for every in (7, 2):  # of seven steps none is compiled
        engine, model, optimizer, loader = start(plan=plan())
        step, stages = compiled(engine), []
        for index, (x, y, _) in enumerate(loader, 1):
            step(x, y) if index % every == 0 else losses(model, x, y).mean().backward()
            optimizer.step()
            stages.append((engine.stages().unprotected_norms, engine.stages().noisy_mean))
        seen.append(stages)
    torch.testing.assert_close(*seen)


def test_losses_are_the_examples_and_the_model_is_left_alone():
    run = Open(make=compiled)
    model = run.model
    before = dict(vars(model)), list(model._forward_pre_hooks), list(model._forward_hooks)
    found = run.made(run.x, run.y)
    with torch.no_grad():
        torch.testing.assert_close(found, losses(model, run.x, run.y))
    assert before == (dict(vars(model)), [*model._forward_pre_hooks], [*model._forward_hooks])
    run.optimizer.step()


# ---------------------------------------------------------------------- checks


class Doubled(compiled_sums.Program):
    """A compiler's fault from some batch on: the first parameter's sum is twice too large."""

    right = 0  # calls that come before

    def __call__(self, request, inputs):
        found = super().__call__(request, inputs)
        Doubled.right -= 1
        if Doubled.right < 0:
            found[0] = found[0] * 2
        return found


@pytest.mark.parametrize(("checks", "right"), [(1.0, 2), (1e-6, 0), (0, 2)])
def test_a_fault_of_the_compiler_is_stopped_by_a_check_alone(checks, right, monkeypatch):
    """One that begins later, one of the first batch of a graph, and a run without checks."""
    monkeypatch.setattr(compiled_sums, "Program", Doubled)
    Doubled.right = right
    engine, _, optimizer, loader = start(plan=plan(), checks=checks)
    step = compiled(engine)
    if not checks:
        train(step, optimizer, loader)
        return
    with pytest.raises(ExactnessError, match="A spot check failed") as error:
        train(step, optimizer, loader)
    assert "Nothing was released for this batch" in str(error.value)
    assert (engine.ledger.position > 0) == bool(right)
    with pytest.raises(AccountingError, match="not vouched for"):
        engine.get_epsilon(delta=1e-5)


def test_a_loss_that_mixes_examples_is_refused():
    def mixed(model, x, y):
        out = model(x)
        return F.cross_entropy(out - out.mean(0), y, reduction="none")

    run = Open(make=lambda engine: compiled(engine, mixed))
    with pytest.raises(UnsupportedLayerError, match="other examples"):
        run.made(run.x, run.y)


# ---------------------------------------------------------------------- mistakes


def called(run):
    return run.made(run.x, run.y)


def beside_the_model(run):
    called(run)
    run.loss().backward()
    run.optimizer.step()


def swapped(run):
    run.model[0], run.model[2] = run.model[2], run.model[0]
    called(run)


@pytest.mark.parametrize(
    ("loop", "match"),
    [
        (lambda run: run.made(run.x - run.x.mean(0), run.y), "not what the loader yielded"),
        (lambda run: run.made(run.x.sub_(run.x.mean(0)), run.y), "not what the loader yielded"),
        (lambda run: (run.x.data.mul_(2), called(run)), "not what the loader yielded"),
        (lambda run: run.made(run.x, run.y, 0.25), "0.25 is not what the loader yielded"),
        (lambda run: run.made(run.x, run.x.mean(0).tolist()), "not what the loader yielded"),
        (lambda run: (called(run), called(run)), "another call of the model"),
        (beside_the_model, "another call of the model"),
        (lambda run: (run.loss(), called(run)), "another call of the model"),
        (
            lambda run: (run.model[0].bias.requires_grad_(False), called(run)),
            "frozen, unfrozen or replaced after set-up",
        ),
        (swapped, "renamed after set-up"),
        (lambda run: (run.engine.detach(), called(run)), "without a batch of the loader"),
    ],
)
def test_other_uses_of_a_compiled_step_are_refused(loop, match):
    """Without checks too."""
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]
    run = Open(sgd(randomise(nn.Sequential(*layers)), build()[2]), make=compiled, checks=0)
    with pytest.raises((ValueError, RuntimeError), match=match):
        loop(run)
    assert len(run.engine.ledger) == 0


def test_runs_without_a_compiled_step_are_refused_by_name():
    with pytest.raises(AccountingError, match="not attached"):
        dpt.PrivacyEngine().compile(losses)
    for options, match in (
        ({"grad_sample_mode": "vmap"}, "grad_sample_mode='vmap' has no compiled graph"),
        ({"views": 2, "augment": lambda example, generator: example}, "several rows"),
    ):
        engine, *_ = start(plan=plan(), **options)
        with pytest.raises(ValueError, match=match):
            compiled(engine)
    engine, *_ = start(plan=plan())
    with pytest.raises(RuntimeError, match="without a batch of the loader"):
        compiled(engine)(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    run = Open()
    with pytest.raises(RuntimeError, match="yielded after engine.compile"):
        compiled(run.engine)(run.x, run.y)


# ---------------------------------------------------------------------- torch.compile


def compile_eagerly(what):
    return torch.compile(what, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def trained(before=None, after=None, of_step=None, mode="auto", kind=torch.optim.SGD):
    """Parameters after three steps; the model is compiled before or after, or the whole step."""
    torch._dynamo.reset()
    model, _, loader = build()
    parts = before(model) if before else model, kind(model.parameters(), lr=0.1), loader
    options = {"plan": plan(num_steps=3), "grad_sample_mode": mode, "checks": 1.0}
    _, private, optimizer, loader = start(parts, **options)
    private = after(private) if after else private

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(private(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = of_step(step) if of_step else step
    for x, y, _ in loader:
        step(x, y)
    return end_of(model)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"before": compile_eagerly}, {}),
        ({"after": compile_eagerly}, {}),
        ({"after": in_place}, {}),
        ({"before": in_place}, {"mode": "loop"}),
        pytest.param({"of_step": compile_eagerly}, {"kind": dpt.AdamBC}, marks=pytest.mark.slow),
    ],
    ids=["before", "after", "in place after", "in place before", "step"],
)
def test_a_compiled_model_or_step_trains_as_the_eager_one(options, given):
    """known_failures 87."""
    assert torch.equal(trained(**options, **given), trained(**given))

# SPDX-License-Identifier: Apache-2.0
"""`compile_clipped_grad_sum`: one graph of the whole step is the eager call, or it is not used."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from benchmarks import workloads
from benchmarks.systems import Setting
from benchmarks.systems_torch import Problem, load
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import ExactnessError
from tests.dualdp_torch.checks import data, ids, randomise
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about torch's own functions
N, C = 6, 0.3


class Net(nn.Module):
    """Embedding with repeated ids, positions, normalisation, attention-free; a float and a flag."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.drop, self.scale = nn.Dropout(dropout), 1.0

    def forward(self, x):
        hidden = torch.tanh(self.inner(self.norm(self.table(x)))) * self.scale
        return self.drop(self.last(hidden.mean(1)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def words(n=N, seed=1):
    return ids(5, n, 7, seed=seed), ids(3, n, seed=seed)


def compiled(model, loss_fn=loss, backend="eager", **options):
    return dpt.compile_clipped_grad_sum(loss_fn, model, backend=backend, **options)


def assert_same(step, model, *batch, loss_fn=loss, atol=1e-6, eager=None, **options):
    """The compiled and the eager call return the same; the compiled result comes back.

    `eager` holds the options of the eager call that the compiled one was made with.
    """
    options = {"max_grad_norm": C, **options}
    found = step(*batch, **options)
    expected = dpt.clipped_grad_sum(loss_fn, model, *batch, **(eager or {}), **options)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=atol)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=atol)
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-5, atol=atol)
    return found


@pytest.mark.parametrize("clipping", first(1, ["flat", "per_layer", "automatic"]))
@pytest.mark.parametrize("dtype", first(1, [torch.float64, torch.float32]))
def test_the_graph_is_the_eager_call(clipping, dtype):
    model = randomise(Net()).to(dtype)
    step = compiled(model, clipping=clipping, check="always")
    atol = 1e-6 if dtype == torch.float32 else 1e-12
    mask = torch.tensor([True, False, True, True, False, True])
    for options in ({}, {"mask": mask}, {"mask": ~mask, "max_grad_norm": 1e-3}):
        assert_same(step, model, *words(), atol=atol, eager={"clipping": clipping}, **options)
    assert len(step.programs) == 1
    assert not step.reasons


@pytest.mark.slow
@pytest.mark.parametrize("method", ["book_keeping", "materialize"])
def test_every_method_has_a_graph(method):
    model = randomise(Images())
    step = compiled(model, backend="aot_eager", method=method)
    assert_same(step, model, data(N, 2, 5, 5), ids(3, N), eager={"method": method})
    assert len(step.programs) == 1
    assert not step.reasons


def test_frozen_and_unused_parameters():
    model = randomise(Net())
    model.norm.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    step = compiled(model)
    found = assert_same(step, model, *words())
    assert not found.grads["unused"].any()
    assert "norm.weight" not in found.grads
    assert not step.reasons


# Nothing that a graph was made for may change behind its back.


def replace_parameter(model):
    model.last.weight = nn.Parameter(model.last.weight.detach() * 2)


def replace_values(model):
    model.last.weight.data.mul_(2)


def freeze(model):
    model.last.weight.requires_grad_(False)


def change_number(model):
    model.scale = 3.0


def replace_layer(model):
    model.inner = nn.Sequential(randomise(nn.Linear(4, 6)), nn.Tanh())


def tie(model):
    model.last.weight = nn.Parameter(torch.ones(3, 6))
    model.other, model.inner = model.last, nn.Sequential(model.inner, nn.Linear(6, 6))


def add_hook(model):
    model.inner.register_forward_hook(lambda module, args, output: 3 * output)


CHANGES = [replace_parameter, add_hook, change_number, freeze, replace_values, replace_layer, tie]


@pytest.mark.parametrize("change", first(2, CHANGES), ids=lambda change: change.__name__)
def test_no_graph_is_stale_after_a_change_of_the_model(change):
    model = randomise(Net())
    step = compiled(model, check="off")
    before = assert_same(step, model, *words())
    change(model)
    after = assert_same(step, model, *words())
    assert not torch.equal(before.norms, after.norms)
    assert not step.reasons


@pytest.mark.slow
def test_no_graph_is_stale_after_a_change_of_type_mode_or_size():
    model = randomise(Net(dropout=0.5)).eval()
    step = compiled(model, check="off")
    assert_same(step, model, *words())
    assert_same(step, model, *words(seed=2))
    assert_same(step, model, *words(4))
    model.double()
    assert_same(step, model, *words(), atol=1e-12)
    assert len(step.programs) == 3
    assert not step.reasons
    model.train()
    torch.manual_seed(0)
    first = step(*words(), max_grad_norm=C)
    torch.manual_seed(0)
    again = dpt.clipped_grad_sum(loss, model, *words(), max_grad_norm=C)
    torch.testing.assert_close(first.norms, again.norms)
    assert "draws random numbers" in step.reasons[0]


@pytest.mark.slow
def test_no_graph_is_stale_after_a_change_of_what_the_loss_reads():
    model, weight = randomise(Net()), [1.0]

    def weighted(model, x, y):
        return weight[0] * loss(model, x, y)

    step = compiled(model, weighted, check="off")
    for value in (1.0, 0.1):
        weight[0] = value
        assert_same(step, model, *words(), loss_fn=weighted)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(step, model, *words(), loss_fn=weighted, atol=1e-2)
    assert len(step.programs) == 2
    assert step.reasons == ["autocast is on around the call"]


# What has no graph runs eagerly and is named.


class Writes(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x)


class Branches(Net):
    def forward(self, x):
        return super().forward(x) * (2.0 if float(self.norm.weight.sum()) > 0 else 1.0)


class Foreign(Net):
    def forward(self, x):
        return super().forward(x) + torch.cdist(self.table(x).mean(1), self.inner.weight)[:, :3]


class Keeps(Net):
    def forward(self, x):
        self.last_hidden = self.norm(self.table(x))
        return super().forward(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cell = nn.Embedding(5, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        return self.cell(self.table(x))[0][:, -1]


EAGER = {
    "dropout": (lambda: Net(dropout=0.5), "draws random numbers"),
    "a buffer": (Writes, "writes to a buffer"),
    "a branch on data": (Branches, ""),
    "a tensor that stays": (Keeps, "keeps a tensor beside the losses"),
    "a layer without a rule": (Foreign, "function without a rule"),
    "a recurrent layer": (Recurrent, "LSTM"),
}


@pytest.mark.parametrize("name", first(1, EAGER))
def test_what_has_no_graph_runs_eagerly_by_name(name, caplog):
    make, reason = EAGER[name]
    model = randomise(make())
    step = compiled(model)
    for _ in range(2):
        torch.manual_seed(1)
        found = step(*words(), max_grad_norm=C)
        torch.manual_seed(1)
        expected = dpt.clipped_grad_sum(loss, model, *words(), max_grad_norm=C)
        torch.testing.assert_close(found.norms, expected.norms)
    assert reason in step.reasons[0]
    assert len([r for r in caplog.records if r.name == "dualdp"]) == len(step.reasons) == 1
    assert f"The clipped sum of {type(model).__name__} runs eagerly: " in caplog.text


def test_one_example_and_none_run_eagerly():
    model = randomise(Net())
    step = compiled(model)
    assert_same(step, model, *words(1))
    assert not step(*words(0), max_grad_norm=C).grads["last.bias"].any()
    assert not step.programs


@pytest.mark.slow
def test_a_batch_with_a_broken_example_runs_eagerly():
    model = randomise(Images())
    step = compiled(model)
    x, y = data(N, 2, 5, 5), ids(3, N)
    assert_same(step, model, x, y)
    x[2] = torch.nan
    found = step(x, y, max_grad_norm=C)
    assert all(grad.isfinite().all() for grad in found.grads.values())
    mask = torch.arange(N) != 2
    assert_same(step, model, x, y, mask=mask)
    assert len(step.programs) == 1


@pytest.mark.slow
def test_norms_that_cancel_are_formed():
    """Two positions with opposite gradients: the Gram form has no digits left."""
    model = randomise(nn.Linear(40, 30))

    def opposite(model, x):
        out = model(x)
        return (out[:, 0] - out[:, 1]).sum(1) * 1e3

    x = data(N, 1, 40).expand(N, 2, 40).contiguous() + 1e-6 * data(N, 2, 40, seed=3)
    step = compiled(model, opposite, method="book_keeping", check="always")
    assert_same(step, model, x, loss_fn=opposite, eager={"method": "book_keeping"})


def test_losses_that_mix_examples_are_refused():
    with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
        compiled(randomise(Net()), lambda m, x, y: loss(m, x, y) * m(x).mean())(
            *words(), max_grad_norm=C
        )


def test_wrong_arguments_are_refused():
    model = randomise(Net())
    with pytest.raises(ValueError, match="method='two_pass'"):
        compiled(model, method="two_pass")
    with pytest.raises(ValueError, match="physical_batch_size"):
        compiled(model, physical_batch_size=1)
    with pytest.raises(TypeError, match="loss_fn=3 is not callable"):
        compiled(model, 3)
    with pytest.raises(ValueError, match="max_grad_norm"):
        compiled(model)(*words(), max_grad_norm=-1.0)
    with pytest.raises(ValueError, match=r"Expected \(6,\): one loss per example"):
        compiled(model, lambda m, x, y: loss(m, x, y).mean())(*words(), max_grad_norm=C)


# Fixed shapes, and operations that do not depend on data.


def test_batches_of_any_size_run_on_one_shape():
    model = randomise(Net())
    step = compiled(model, physical_batch_size=4)
    for n in (4, 6, 1, 9, 2):
        mask = torch.arange(n) % 3 != 1
        assert_same(step, model, *words(n), mask=mask)
        assert_same(step, model, *words(n))
    assert len(step.programs) == 1
    assert not step.reasons


# A graph that is wrong does not come through its first batch.


def wrong(change):
    """Backend whose outputs are changed."""

    def backend(graph, arguments):
        return lambda *given: change([out.clone() for out in graph(*given)])

    return backend


def doubled(outputs):
    return [outputs[0] * 2, *outputs[1:]]


def rolled(outputs):  # norms, losses, validity, factors, doubt at the end
    at = next(i for i, out in enumerate(outputs) if out.dim() == 1 and len(out) == N)
    return [*outputs[:at], outputs[at].roll(1), *outputs[at + 1 :]]


@pytest.mark.parametrize("fault", first(1, [doubled, rolled]), ids=lambda fault: fault.__name__)
def test_a_wrong_graph_is_caught(fault):
    model = randomise(Net())
    options = {"max_grad_norm": C}
    with pytest.raises(ExactnessError):
        compiled(model, backend=wrong(fault))(*words(), **options)
    compiled(model, backend=wrong(fault), check="off")(*words(), **options)  # nobody looked


def test_a_graph_may_write_to_the_same_outputs_every_time():
    def replayed(graph, arguments):
        outputs = []

        def run(*arguments):
            found = graph(*arguments)
            if not outputs:
                outputs.extend(map(torch.empty_like, found))
            return [kept.copy_(t) for kept, t in zip(outputs, found, strict=True)]

        return run

    model = Net()
    step = compiled(model, backend=replayed, physical_batch_size=4, check="always")
    assert_same(step, model, *words(10), eager={"physical_batch_size": 4})
    assert not step.reasons


def test_a_graph_that_does_not_compile_is_not_used(caplog):
    def backend(graph, arguments):
        raise RuntimeError("no compiler here")

    model = randomise(Net())
    step = compiled(model, backend=backend)
    assert_same(step, model, *words())
    assert "runs eagerly: RuntimeError: no compiler here" in caplog.text


@pytest.mark.parametrize("name", first(1, ["sum", "norms", "grads"]))
def test_calls_inside_compiled_code_run_eagerly(name):
    model = randomise(Net())
    calls = {
        "sum": lambda *b: dpt.clipped_grad_sum(loss, model, *b, max_grad_norm=C).norms,
        "norms": lambda *b: dpt.per_sample_norms(loss, model, *b),
        "grads": lambda *b: dpt.per_sample_grads(loss, model, *b)["last.bias"],
    }
    torch._dynamo.reset()
    found = torch.compile(calls[name], backend="eager")(*words())
    torch.testing.assert_close(found, calls[name](*words()), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on a CPU")
@pytest.mark.parametrize("name", ["mnist", "embed"])
def test_inductor(name):
    """Models of the speed table."""
    setting = Setting(workloads.create(name), N)
    problem = Problem(setting)
    x, y = load(setting, *setting.workload.batch(N))
    step = compiled(problem.model, problem.losses, "inductor")
    assert_same(step, problem.model, x, y, loss_fn=problem.losses, max_grad_norm=1.0)
    assert not step.reasons

# SPDX-License-Identifier: Apache-2.0
"""`compile_clipped_grad_sum`: one graph of the whole step is the eager call, or it is not used."""

import shutil

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from benchmarks import workloads
from benchmarks.systems import Setting
from benchmarks.systems_torch import Problem, load
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import ExactnessError
from tests.dualdp_torch.checks import ids, randomise
from tests.dualdp_torch.per_sample.loops import classified, slow

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


def words(n=N, seed=1):
    return ids(5, n, 7, seed=seed), ids(3, n, seed=seed)


def compiled(model, loss_fn=classified, backend="eager", **options):
    return dpt.compile_clipped_grad_sum(loss_fn, model, backend=backend, **options)


def assert_same(step, model, *batch, loss_fn=classified, atol=1e-6, eager=None, **options):
    """The compiled and the eager call return the same; the compiled result comes back.

    `eager` holds the options of the eager call that the compiled one was made with.
    """
    options = {"max_grad_norm": C, **options}
    found = step(*batch, **options)
    expected = dpt.clipped_grad_sum(loss_fn, model, *batch, **(eager or {}), **options)
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-5, atol=atol)
    return found


@pytest.mark.parametrize(
    ("clipping", "dtype"),
    [
        ("flat", torch.float64),
        pytest.param("per_layer", torch.float32, marks=pytest.mark.slow),
        pytest.param("automatic", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_graph_is_the_eager_call(clipping, dtype):
    """Also of frozen and unused parameters, and of masks."""
    model = randomise(Net()).to(dtype)
    model.norm.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3, dtype=dtype))
    step = compiled(model, clipping=clipping, check="always")
    atol = 1e-6 if dtype == torch.float32 else 1e-12
    mask = torch.tensor([True, False, True, True, False, True])
    for options in ({}, {"mask": mask}, {"mask": ~mask, "max_grad_norm": 1e-3}):
        found = assert_same(
            step, model, *words(), atol=atol, eager={"clipping": clipping}, **options
        )
        assert not found.grads["unused"].any()
        assert "norm.weight" not in found.grads
    assert len(step.programs) == 1
    assert not step.reasons


# ---------------------------------------------------------------------- nothing is stale


def tie(model):
    model.last.weight = nn.Parameter(torch.ones(3, 6))
    model.other, model.inner = model.last, nn.Sequential(model.inner, nn.Linear(6, 6))


def replace_layer(model):
    model.inner = nn.Sequential(randomise(nn.Linear(4, 6)), nn.Tanh())


def replace_parameter(model):
    model.last.weight = nn.Parameter(model.last.weight.detach() * 2)


CHANGES = {
    "parameter": replace_parameter,
    "hook": lambda m: m.inner.register_forward_hook(lambda module, args, out: 3 * out),
    "number": lambda m: setattr(m, "scale", 3.0),
    "frozen": lambda m: m.last.weight.requires_grad_(False),
    "values": lambda m: m.last.weight.data.mul_(2),
    "layer": replace_layer,
    "tied": tie,
}


@pytest.mark.parametrize(
    "change", ["hook", *slow("parameter", "number", "frozen", "values", "layer", "tied")]
)
def test_no_graph_is_stale_after_a_change_of_the_model(change):
    model = randomise(Net())
    step = compiled(model, check="off")
    before = assert_same(step, model, *words())
    CHANGES[change](model)
    after = assert_same(step, model, *words())
    assert not torch.equal(before.norms, after.norms)
    assert not step.reasons


@pytest.mark.slow
def test_no_graph_is_stale_after_a_change_of_type_mode_or_size():
    model = randomise(Net(dropout=0.5)).eval()
    step = compiled(model, check="off")
    for batch in (words(), words(seed=2), words(4)):
        assert_same(step, model, *batch)
    assert_same(step, model.double(), *words(), atol=1e-12)
    assert len(step.programs) == 3
    assert not step.reasons
    model.train()
    torch.manual_seed(0)
    first = step(*words(), max_grad_norm=C)
    torch.manual_seed(0)
    again = dpt.clipped_grad_sum(classified, model, *words(), max_grad_norm=C)
    torch.testing.assert_close(first.norms, again.norms)
    assert "draws random numbers" in step.reasons[0]


# ---------------------------------------------------------------------- what has no graph


class Writes(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x)


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


EAGER = [
    (lambda: Net(dropout=0.5), "draws random numbers"),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            (Writes, "writes to a buffer"),
            (Keeps, "keeps a tensor beside the losses"),
            (Foreign, "function without a rule"),
            (Recurrent, "LSTM"),
        )
    ),
]


@pytest.mark.parametrize(("make", "reason"), EAGER)
def test_what_has_no_graph_runs_eagerly_by_name(make, reason, caplog):
    model = randomise(make())
    step = compiled(model)
    for _ in range(2):
        torch.manual_seed(1)
        found = step(*words(), max_grad_norm=C)
        torch.manual_seed(1)
        expected = dpt.clipped_grad_sum(classified, model, *words(), max_grad_norm=C)
        torch.testing.assert_close(found.norms, expected.norms)
    assert reason in step.reasons[0]
    assert len([r for r in caplog.records if r.name == "dualdp"]) == len(step.reasons) == 1
    assert f"The clipped sum of {type(model).__name__} runs eagerly: " in caplog.text


def test_a_graph_that_does_not_compile_is_not_used(caplog):
    def backend(graph, arguments):
        raise RuntimeError("no compiler here")

    model = randomise(Net())
    assert_same(compiled(model, backend=backend), model, *words())
    assert "runs eagerly: RuntimeError: no compiler here" in caplog.text


@pytest.mark.slow
def test_batches_of_any_size_run_on_one_shape():
    model = randomise(Net())
    step = compiled(model, physical_batch_size=4)
    for n in (4, 6, 1, 9, 2):
        assert_same(step, model, *words(n), mask=torch.arange(n) % 3 != 1)
        assert_same(step, model, *words(n))
    assert len(step.programs) == 1
    assert not step(*words(0), max_grad_norm=C).grads["last.bias"].any()
    assert not step.reasons


# ---------------------------------------------------------------------- what is refused


def test_losses_that_mix_examples_are_refused():
    mixed = lambda m, x, y: classified(m, x, y) * m(x).mean()  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
        compiled(randomise(Net()), mixed)(*words(), max_grad_norm=C)


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
        compiled(model, lambda m, x, y: classified(m, x, y).mean())(*words(), max_grad_norm=C)


def doubled(outputs):
    return [outputs[0] * 2, *outputs[1:]]


def rolled(outputs):  # norms, losses, validity, factors, doubt at the end
    at = next(i for i, out in enumerate(outputs) if out.dim() == 1 and len(out) == N)
    return [*outputs[:at], outputs[at].roll(1), *outputs[at + 1 :]]


@pytest.mark.parametrize("fault", [doubled, *slow(rolled)])
def test_a_wrong_graph_does_not_come_through_its_first_batch(fault):
    def backend(graph, arguments):
        return lambda *given: fault([out.clone() for out in graph(*given)])

    model = randomise(Net())
    with pytest.raises(ExactnessError):
        compiled(model, backend=backend)(*words(), max_grad_norm=C)
    compiled(model, backend=backend, check="off")(*words(), max_grad_norm=C)  # nobody looked


@pytest.mark.slow
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


def test_calls_inside_compiled_code_run_eagerly():
    model = randomise(Net())
    call = lambda *b: dpt.clipped_grad_sum(classified, model, *b, max_grad_norm=C).norms  # noqa: E731
    torch._dynamo.reset()
    found = torch.compile(call, backend="eager")(*words())
    torch.testing.assert_close(found, call(*words()), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on a CPU")
def test_inductor():
    """A model of the speed table."""
    setting = Setting(workloads.create("mnist"), N)
    problem = Problem(setting)
    x, y = load(setting, *setting.workload.batch(N))
    step = compiled(problem.model, problem.losses, "inductor")
    assert_same(step, problem.model, x, y, loss_fn=problem.losses, max_grad_norm=1.0)
    assert not step.reasons

# SPDX-License-Identifier: Apache-2.0
"""Whole PyTorch models: a private step is that of a float64 loop over rows, or is refused."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import dualdp_torch as dpt
from dualdp import ExactnessError, PrivacyPlan, UnsupportedLayerError
from tests import closeness
from tests.closeness import whole_norms
from tests.dualdp_torch.checks import Ways, truth_of
from tests.zoo.torch_models import MODELS, N

pytestmark = pytest.mark.filterwarnings("ignore")  # code from outside warns about itself
REFUSALS = (UnsupportedLayerError, ExactnessError, ValueError)
#: Largest distance of two clipped sums, in units of C, and of norms, relative.
TOLERANCE = {"float32": 2e-5, "float64": 1e-9}
#: Name -> reason.
REFUSED = {
    "reformer": "(?i)differentiates|autograd.Function|spot check|outside the recorded forward",
    "ibert": r"The buffer 'ibert.*\.x_m(in|ax)' changes in forward",
}
REFUSED_BY_ENGINE = {"derivative_by_the_input": "calls grad inside the forward"}
REFUSED_BY_ENGINE["reformer"] = REFUSED["reformer"]
#: Of which the functional calls capture no uses.
BY_VMAP = {
    *("mamba", "mixtral", "gptoss", "swin", "oft", "experts_by_index"),
    *("derivative_by_the_input", "state_space_by_fourier_transform"),
}


FAST = {"gpt2", "bert", "resnet", "lora", "experts_by_index", "outputs_made_from_each_other"}


def each(names):
    marked = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in sorted(names)]
    return pytest.mark.parametrize("name", marked)


def doubled(part):
    return part.double() if torch.is_tensor(part) and part.is_floating_point() else part


def exact(build):
    """The problem in float64, and its rows' gradients."""
    model, loss_fn, batch = build()
    model, batch = copy.deepcopy(model).double(), pytree.tree_map(doubled, batch)
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model, loss_fn, batch, truth_of(model, loss_fn, *batch)


def assert_exact(grads, norms, truth, bound):
    """Sum and norms are the truth's."""
    dtype = str(next(iter(grads.values())).dtype).removeprefix("torch.")
    expected, whole = closeness.clipped_sum(truth, bound, dtype), whole_norms(truth)
    assert grads.keys() == expected.keys()
    gaps = [np.linalg.norm(grads[name].double().numpy() - expected[name]) for name in grads]
    assert np.linalg.norm(gaps) <= TOLERANCE[dtype] * bound
    np.testing.assert_allclose(norms.double().numpy(), whole, rtol=TOLERANCE[dtype])


@each(MODELS.keys() - REFUSED)
def test_clipped_grad_sum_is_that_of_the_loop(name, monkeypatch):
    """In both precisions, by captured uses, and the model stays as it is."""
    wide, loss_fn, wide_batch, truth = exact(MODELS[name])
    bound = float(np.median(whole_norms(truth)))
    model, _, batch = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ways = Ways(monkeypatch)
    for one, rows in ((model, batch), (wide, wide_batch)):
        found = dpt.clipped_grad_sum(loss_fn, one, *rows, max_grad_norm=bound)
        assert_exact(found.grads, found.norms, truth, bound)
    assert ("by_vmap" in ways.taken) == (name in BY_VMAP)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@each(MODELS.keys() - {*REFUSED, *REFUSED_BY_ENGINE})
def test_steps_of_an_engine_are_those_of_the_loop(name):
    """Two steps of the user's own loop, each checked."""
    *_, truth = exact(MODELS[name])
    bound = float(np.median(whole_norms(truth)))
    model, loss_fn, batch = MODELS[name]()
    engine, (model, optimizer, loader) = private(model, batch, bound)
    for *rows, order in loader.remaining():
        loss_fn(model, *rows).mean().backward()
        optimizer.step()
        if len(engine.ledger) == 1:
            stages = engine.stages()
            norms = torch.empty(N).index_copy(0, order, stages.unprotected_norms)
            assert_exact(stages.unprotected_sum, norms, truth, bound)
    assert engine.ledger.failed_check is None
    assert engine.ledger.last_check == 1


def private(model, batch, bound):
    """An engine without noise, and what `make_private` returns: all rows in each of two steps."""
    plan = PrivacyPlan(
        num_examples=N, expected_batch_size=N, num_steps=2, noise_multiplier=0.0,
        max_grad_norm=bound, delta=1e-5, sampler="shuffle", seed=3,
    )  # fmt: skip
    rows = [pytree.tree_map(lambda part: part[k], (*batch, torch.arange(N))) for k in range(N)]  # noqa: B023
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = dpt.PrivacyEngine()
    return engine, engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=1e-3),
        data_loader=DataLoader(rows, batch_size=N),
        plan=plan,
        checks=1.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    list(zip(sorted(MODELS.keys() - REFUSED), itertools.cycle([*dpt.METHODS][1:]), strict=False)),
)
def test_no_method_is_wrong(name, method):
    """Right, or refused for whatever reason."""
    model, loss_fn, batch = MODELS[name]()
    try:
        found = dpt.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=1.0, method=method)
    except REFUSALS:
        return
    assert_exact(found.grads, found.norms, exact(MODELS[name])[-1], 1.0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused(name):
    model, loss_fn, batch = MODELS[name]()
    with pytest.raises(REFUSALS, match=REFUSED[name]):
        dpt.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=1.0)


@pytest.mark.parametrize("name", REFUSED_BY_ENGINE)
def test_a_model_is_refused_by_the_engine(name):
    model, loss_fn, batch = MODELS[name]()
    _, (model, optimizer, loader) = private(model, batch, 1.0)

    def first_step():
        *rows, _ = next(iter(loader))
        loss_fn(model, *rows).mean().backward()
        optimizer.step()

    with pytest.raises(REFUSALS, match=REFUSED_BY_ENGINE[name]):
        first_step()

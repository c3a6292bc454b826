# SPDX-License-Identifier: Apache-2.0
"""Ordinary PyTorch models: a private step is that of a plain float64 loop, or is refused."""

import importlib.util
from functools import partial

import pytest

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests.zoo import torch_check
from tests.zoo.entry import one_each
from tests.zoo.torch_packages import torchvision
from tests.zoo.torch_zoo import MAY_BE_REFUSED, PACKAGES, TORCH

pytestmark = pytest.mark.filterwarnings("ignore")  # code from outside warns about itself
REFUSALS = (UnsupportedLayerError, ExactnessError)


def call(problem, bound, method="auto"):
    """Clipped sum and norms of the functional call."""
    loss_fn, model = problem.loss_fn, problem.model
    options = {"max_grad_norm": bound, "method": method}
    return dpt.clipped_grad_sum(loss_fn, model, *problem.batch, **options)[:2]


def check_calls(entry):
    """Float32 and float64."""
    if entry.refusal is not None:
        with pytest.raises(REFUSALS, match=entry.refusal):
            call(entry.build(), 1.0)
        return
    problem, truth = entry.build(), torch_check.truth_of(entry)
    bound = float(truth.norms.median())
    for each in torch_check.precisions(problem):
        torch_check.assert_exact(each, truth, bound, *call(each, bound))


def check_engine(entry):
    """A step of the user's own loop."""
    if entry.engine_refusal is not None:
        with pytest.raises((*REFUSALS, ValueError), match=entry.engine_refusal):
            torch_check.engine_step(entry.build(), 1.0)
        return
    problem, truth = entry.build(), torch_check.truth_of(entry)
    bound = float(truth.norms.median())
    torch_check.assert_exact(problem, truth, bound, *torch_check.engine_step(problem, bound))


def entries(turn, attribute):
    """Parameters of a test: every second model and the refused ones, the others slow."""
    return [
        pytest.param(
            entry,
            id=entry.name,
            marks=[] if i % 2 == turn or getattr(entry, attribute) else pytest.mark.slow,
        )
        for i, entry in enumerate(TORCH)
    ]


@pytest.mark.parametrize("entry", entries(0, "refusal"))
def test_clipped_grad_sum_is_that_of_the_loop(entry):
    check_calls(entry)


@pytest.mark.parametrize("entry", entries(1, "engine_refusal"))
def test_a_step_of_the_engine_is_that_of_the_loop(entry):
    check_engine(entry)


def check_never_wrong(entry, step):
    """Right, or refused for whatever reason."""
    try:
        problem = entry.build()
        found = step(problem, 1.0)
    except REFUSALS:
        return
    except ValueError as error:
        if "The loss can't be computed for one example alone" not in str(error):
            raise
        return
    truth = torch_check.truth_of(entry)
    torch_check.assert_exact(entry.build(), truth, 1.0, *found)  # the step has changed the model


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "method"), one_each(TORCH, [*dpt.METHODS][1:]))
def test_no_method_is_wrong(entry, method):
    check_never_wrong(entry, partial(call, method=method))


@pytest.mark.parametrize(
    ("package", "entry"),
    [
        pytest.param(package, entry, id=f"{package}-{entry.name}", marks=pytest.mark.slow)
        for package, table in PACKAGES.items()
        for entry in table
    ],
)
def test_models_of_packages(package, entry):
    """Where the package is installed; it is no requirement of the tests."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if importlib.util.find_spec("torchvision"):
        torchvision()  # before anything else looks for it
    check_calls(entry)
    check_engine(entry)


@pytest.mark.parametrize("attribute", ["refusal", "engine_refusal"])
def test_at_most_one_model_in_ten_is_refused(attribute):
    others = [entry for entry in TORCH if entry.name not in MAY_BE_REFUSED]
    refused = [entry.name for entry in others if getattr(entry, attribute) is not None]
    assert len(refused) <= len(others) / 10, refused
